"""Which namespaces vLLM's own settings of images and videos are in. A program for vLLM's own interpreter;
test_images.py runs it.

Its arguments are the folder of a model, and one to write to. Answers with a line of JSON: "fields", those of
vLLM's settings; "same", those of them that change no namespace; "named", ids by case; "odd", what is said of
a setting that has no text of its own; and "embeddings", by case, what an engine says at its start of those.
"""

# mypy: disable-error-code="import-not-found"

import dataclasses
import json
import logging
import queue
import sys
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

from tests.vllm.engine import set_environment, take_stdout
from tests.vllm.refusals import full_attention, make_config, make_layers, make_transfer, name_of

SCALES = "mm_encoder_fp8_scale_path"


def main() -> None:
    answers = take_stdout()
    model, folder = sys.argv[1], Path(sys.argv[2])
    set_environment(ranks=1)
    from vllm.config.multimodal import MultiModalConfig  # noqa: PLC0415 - after the environment is set

    config = make_config(model)
    names = [field.name for field in dataclasses.fields(MultiModalConfig)]
    plain = _namespace(config, MultiModalConfig())
    same = [name for name in names if name != SCALES and _changed(config, name, "other") == plain]
    named = {"plain": plain, "newer": _namespace(config, _newer()), "text": _namespace(config, None)}
    named |= {
        "evs": _of(config, video_pruning_rate=0.5, video_pruning_method="evs"),
        "vidcom2": _of(config, video_pruning_rate=0.5, video_pruning_method="vidcom2"),
        "fp8": _of(config, mm_encoder_attn_dtype="fp8"),
        "limits": _of(config, limit_per_prompt={"image": 1, "video": {"count": 2, "num_frames": 8}}),
        "limits turned": _of(config, limit_per_prompt={"video": {"num_frames": 8, "count": 2}, "image": 1}),
        # A set has an order of its own in every process.
        "set": _of(config, mm_processor_kwargs={"sizes": set(map(str, range(20)))}),
    } | _scales(config, folder)
    odd = _of(config, mm_processor_kwargs={"hook": object()})
    said = {case: _said_of_embeddings(model, folder, case) for case in ("images", "text", "sent embeddings")}
    found = {"fields": names, "same": same, "named": named, "odd": odd, "embeddings": said}
    answers.write(json.dumps(found) + "\n")
    answers.flush()


def _scales(config: Any, folder: Path) -> dict[str, str]:
    """By case."""
    from vllm.config.multimodal import MultiModalConfig  # noqa: PLC0415

    found, images = {}, {}
    for name, where, text in (
        ("scales", "one", "{}"),
        ("scales elsewhere", "two", "{}"),
        ("other scales", "three", "{ }"),
    ):
        (folder / where).write_text(text)
        images[name] = MultiModalConfig(mm_encoder_attn_dtype="fp8", **{SCALES: str(folder / where)})
        found[name] = _namespace(config, images[name])
    (folder / "one").unlink()
    found["scales gone since"] = _namespace(config, images["scales"])
    found["gone"] = _changed(config, SCALES, str(folder / "nowhere"))
    return found


def _said_of_embeddings(model: str, folder: Path, case: str) -> list[str]:
    """What vLLM makes of our role is its own; that the model has images is set afterwards."""
    from vllm.config import ECTransferConfig  # noqa: PLC0415
    from vllm.config.multimodal import MultiModalConfig  # noqa: PLC0415
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: PLC0415

    from kvcellar.vllm import KVCellarConnector, compat  # noqa: PLC0415

    config = make_config(model, kv_transfer_config=make_transfer(str(folder / "socket")))
    if case != "text":
        object.__setattr__(config.model_config, "multimodal_config", MultiModalConfig())
    if case == "sent embeddings":
        sent = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_consumer")
        object.__setattr__(config, "ec_transfer_config", sent)
    config._resolve_mm_embedding_inputs()
    said = queue.SimpleQueue[logging.LogRecord]()
    listener = QueueHandler(said)
    compat.log.addHandler(listener)
    KVCellarConnector(config, KVConnectorRole.SCHEDULER, make_layers([full_attention()])).shutdown()
    compat.log.removeHandler(listener)
    return [said.get().getMessage() for _ in range(said.qsize())]


def _newer() -> Any:
    """As of a vLLM that has a setting more."""
    from vllm.config.multimodal import MultiModalConfig  # noqa: PLC0415
    from vllm.config.utils import config as vllm_config  # noqa: PLC0415

    @vllm_config
    class Newer(MultiModalConfig):  # type: ignore[misc]
        new_setting: bool = True

    return Newer()


def _of(config: Any, **settings: Any) -> str:
    from vllm.config.multimodal import MultiModalConfig  # noqa: PLC0415

    return _namespace(config, MultiModalConfig(**settings))


def _changed(config: Any, name: str, value: Any) -> str:
    """Set afterwards: for many of these vLLM itself wants another model, or a GPU."""
    from vllm.config.multimodal import MultiModalConfig  # noqa: PLC0415

    images = MultiModalConfig()
    object.__setattr__(images, name, value)
    return _namespace(config, images)


def _namespace(config: Any, images: Any) -> str:
    """Its id, or why there is none."""
    object.__setattr__(config.model_config, "multimodal_config", images)
    return name_of(config)


if __name__ == "__main__":
    main()
