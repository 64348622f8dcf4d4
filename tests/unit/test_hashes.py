"""Requests whose block hashes do not cover what they are computed from have no keys."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.alone import load

hashes = load("hashes")

IMAGE = [SimpleNamespace(identifier="renderer0-mm-1-image-0")]


def config(*, images: float | None = 4.0, prefixes: bool = True) -> Any:
    """`images`: GiB of the cache for what images were made into; None: the model takes none."""
    multimodal = None if images is None else SimpleNamespace(mm_processor_cache_gb=images)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
    )


@pytest.mark.parametrize(("images", "prefixes"), [(4.0, True), (4.0, False), (0, True)])
def test_vllm_hashes_images_if_it_has_a_cache_of_its_own(images: float, prefixes: bool) -> None:
    request = SimpleNamespace(mm_features=IMAGE)
    assert hashes.cover(request, config(images=images, prefixes=prefixes))


def test_images_that_vllm_only_numbers_are_not_covered() -> None:
    numbered = config(images=0, prefixes=False)
    assert not hashes.cover(SimpleNamespace(mm_features=IMAGE), numbered)
    assert hashes.cover(SimpleNamespace(mm_features=[]), numbered), "text is"
    assert hashes.cover(SimpleNamespace(mm_features=[]), config(images=None, prefixes=False))


def test_a_prompt_that_grows_is_not_covered() -> None:
    assert not hashes.cover(SimpleNamespace(mm_features=[], resumable=True), config())
    assert hashes.cover(SimpleNamespace(mm_features=[], resumable=False), config())
