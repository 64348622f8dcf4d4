"""Random weights with which a model's tokens depend on all of its prompt.

vLLM's own dummy weights are so small that attention adds nothing to the residual stream: tokens then depend
on the last token alone, and KV full of garbage would go unseen. These are drawn so that activations stay near
1 and every head listens to some ten of a thousand tokens; by the names of the weights, so that two engines
have the same. What layers add is small beside the sum of all: differences in rounding then stay small too.

vLLM calls `install` in each of its processes, as a plugin, where `plugin_path` is on PYTHONPATH.
"""

import math
import zlib
from pathlib import Path
from typing import Any

_SHARP = 1.5  # queries and keys; attention scores spread by about its square


def plugin_path(folder: Path) -> Path:
    """A folder in which Python finds a distribution with `install` as its entry point."""
    about = folder / "kvcellar_bench_weights-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcellar-bench-weights\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkvcellar_bench_weights = bench.gpu.weights:install\n"
    )
    return folder


def install() -> None:
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: PLC0415

    DummyModelLoader.load_weights = lambda _loader, model, _config: draw(model)


def draw(model: Any) -> None:
    import torch  # noqa: PLC0415 - where vLLM is

    gemma = "Gemma" in type(model).__name__  # adds 1 to its norms, and scales its embedding
    layers = sum(name.endswith("o_proj.weight") for name, _ in model.named_parameters())
    generators: dict[Any, Any] = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            if weight.dim() < 2:
                weight.fill_(_level(name, layers, gemma=gemma))
                continue
            generator = generators.setdefault(weight.device, torch.Generator(weight.device))
            generator.manual_seed(zlib.crc32(name.encode()))
            weight.normal_(0.0, _spread(name, weight.shape[-1], layers, gemma=gemma), generator=generator)
    print("weights drawn by bench.gpu.weights", flush=True)


def _level(name: str, layers: int, *, gemma: bool) -> float:
    """Of norms, and of biases. Gemma has norms for queries and keys, and for what a layer adds."""
    if "norm" not in name:
        return 0.0
    if not gemma:
        return 1.0
    if "q_norm" in name or "k_norm" in name:
        return _SHARP - 1
    added = "post_attention_layernorm" in name or "post_feedforward_layernorm" in name
    return 1 / math.sqrt(2 * layers) - 1 if added else 0.0


def _spread(name: str, inputs: int, layers: int, *, gemma: bool) -> float:
    unit = 1 / math.sqrt(inputs)
    if "embed_tokens" in name:
        return unit if gemma else 1.0
    if any(part in name for part in ("qkv_proj", "q_proj", "kv_a_proj", "kv_b_proj")):
        return _SHARP * unit
    if "o_proj" in name:
        return 5 * unit / math.sqrt(2 * layers)  # a mean of values is smaller than its parts
    if "down_proj" in name:
        return unit / math.sqrt(2 * layers)
    return unit
