"""What the connector says of engines whose KV it could not restore exactly: vLLM's own configurations, each
with one thing changed. A program for vLLM's own interpreter; test_refusals.py runs it.

Its arguments are the folder of a model, and one to write to. Answers with a line of JSON: by case, what is
said; nothing of an engine that is supported. And whether a worker side knows that vLLM schedules ahead, and
the namespaces of models that have a name, of backends, of plugins' classes and by environment variables.
"""

# mypy: disable-error-code="import-not-found"

import dataclasses
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.vllm.engine import DEFAULTS, set_environment, take_stdout

BLOCKS, BLOCK = 64, 16  # and tokens of each
_GONE = {"calculate_kv_scales"}  # vLLM 0.26 has it, 0.32 has not: a name that is not there refuses nobody
# A model in which every token sees all others.
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


# Of environment variables that decide what is computed, values that are not their defaults.
OTHERWISE = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": "1",
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": "1",
    "VLLM_DISABLED_KERNELS": "SomeKernel",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": "1",
    "VLLM_FLOAT32_MATMUL_PRECISION": "high",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int4"}',
    "VLLM_HUMMING_USE_F16_ACCUM": "1",
    "VLLM_MARLIN_INPUT_DTYPE": "int8",
    "VLLM_MEDIA_CONNECTOR": "other",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    "VLLM_MOE_USE_DEEP_GEMM": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    "VLLM_VIDEO_LOADER_BACKEND": "other",
}


def main() -> None:
    answers = take_stdout()
    model, folder = sys.argv[1], Path(sys.argv[2])
    set_environment(ranks=1)
    os.environ["HF_HOME"] = str(folder / "home")
    socket = folder / "socket"
    said = _of_layers(make_config(model)) | _of_engines(model) | _of_memory(make_config(model), socket)
    said |= _of_steps(model, socket) | _of_backends(make_config(model), socket)
    said |= _of_hosts(make_config(model, kv_transfer_config=make_transfer(str(socket))), socket)
    said |= _of_names(model, folder / "home" / "hub" / "models--some--model")
    said |= (
        _of_trainers(model) | _of_plugins(make_config(model), folder) | _of_environment(make_config(model))
    )
    (folder / "config.json").write_text(json.dumps(BERT))
    bert = make_config(str(folder), runner="pooling", load_format="dummy", max_model_len=128)
    said["bert"] = _said(bert, [full_attention()])
    answers.write(json.dumps(said) + "\n")
    answers.flush()


def make_config(model: str, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - after the environment is set

    return EngineArgs(model=model, **DEFAULTS | options).create_engine_config()


def make_transfer(socket: str) -> Any:
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    return KVTransferConfig(
        kv_connector="KVCellarConnector",
        kv_connector_module_path="kvcellar.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"socket": socket},
    )


def _of_layers(config: Any) -> dict[str, str]:
    """Every kind of layer that vLLM has: a new one is refused until somebody has thought about it."""
    from vllm.v1 import kv_cache_interface as kinds  # noqa: PLC0415

    found = {}
    for name, kind in vars(kinds).items():
        if isinstance(kind, type) and issubclass(kind, kinds.KVCacheSpec):
            # Without what else it has: its kind is all that counts. One of many layers has these.
            layer: Any = object.__new__(kind)
            object.__setattr__(
                layer, "kv_cache_specs", {"a": full_attention(), "b": object.__new__(kinds.MambaSpec)}
            )
            found[name] = _said(config, [full_attention(), layer])
    found["sees later tokens"] = _said(config, [dataclasses.replace(full_attention(), non_causal=True)])
    return found


def _of_engines(model: str) -> dict[str, str]:
    """Set afterwards: for most of these vLLM itself wants more GPUs than there are."""
    from vllm.config import ECTransferConfig  # noqa: PLC0415

    found = {"supported": _said(make_config(model), [full_attention()])}
    for name, what, value in (
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("parallel_config", "distributed_executor_backend", "external_launcher"),
        ("cache_config", "calculate_kv_scales", True),
        ("aux_output_config", "enable_return_routed_experts", True),
    ):
        config = make_config(model)
        part = getattr(config, name)
        assert hasattr(part, what) != (what in _GONE), f"does vLLM have another name for {what} now?"
        object.__setattr__(part, what, value)
        found[what] = _said(config, [full_attention()])
    config = make_config(model)
    for role in ("ec_producer", "ec_consumer"):
        encoders = ECTransferConfig(ec_connector="ECExampleConnector", ec_role=role)
        object.__setattr__(config, "ec_transfer_config", encoders)
        found[role] = _said(config, [full_attention()])
    return found


def _of_names(model: str, cache: Path) -> dict[str, str]:
    """Of a model from the hub, here from its cache: a name stands for one commit, and later for another."""
    from vllm.config import ModelConfig  # noqa: PLC0415

    from kvcellar.vllm.weights import only_commit  # noqa: PLC0415 - imports vLLM, by its package

    found, config = {}, make_config(model)
    (cache / "refs").mkdir(parents=True)
    for case, commit in (("a commit", "1" * 40), ("another commit", "2" * 40)):
        (cache / "snapshots" / commit).mkdir(parents=True)
        shutil.copy(Path(model) / "config.json", cache / "snapshots" / commit)
        (cache / "refs" / "main").write_text(commit)
        named = ModelConfig(model="some/model", dtype="float32", skip_tokenizer_init=True)
        object.__setattr__(config, "model_config", named)
        found[case] = name_of(config)
        found[f"{case}, in a rank"] = name_of(pickle.loads(pickle.dumps(config)))
        # As vLLM 0.26 has it, which knows no commit by itself: once there are two, it might be either.
        object.__setattr__(config.model_config, "revision", None)
        only_commit.cache_clear()
        for how in ("tensorizer", "auto"):
            object.__setattr__(config.load_config, "load_format", how)
            found[f"{case}, untold, {how}"] = name_of(config)
    object.__setattr__(config.model_config, "revision", "some")
    found["a revision"] = name_of(config)
    return found


def _of_trainers(model: str) -> dict[str, str]:
    """Who may put weights in the place of those that vLLM drew or read."""
    from vllm.config import ModelConfig, WeightTransferConfig  # noqa: PLC0415

    named = ModelConfig(model="some/model", dtype="float32", skip_tokenizer_init=True)  # see _of_names
    assert named.revision == "main"
    found = {}
    for name, options, trained in (
        ("drawn", {"load_format": "dummy"}, False),
        ("drawn, then sent", {"load_format": "dummy"}, True),
        ("drawn, then set", {"load_format": "dummy", "worker_extension_cls": "some.Class"}, False),
        ("drawn, then sent, of a run", {"load_format": "dummy", "revision": "run 1"}, True),
        ("drawn, then sent, by name", {"load_format": "dummy"}, True),
        ("read, then sent", {}, True),
    ):
        config = make_config(model, **options)
        if trained:
            object.__setattr__(config, "weight_transfer_config", WeightTransferConfig())
        if name.endswith("by name"):
            object.__setattr__(config, "model_config", named)
        found[name] = _said(config, [full_attention()])
    return found


def _of_plugins(config: Any, folder: Path) -> dict[str, str]:
    """The namespace of a model by what is registered under its architecture's name."""
    from kvcellar.vllm import settings  # noqa: PLC0415
    from tests.vllm.otherwise import Otherwise  # noqa: PLC0415

    registry, arch = config.model_config.registry, config.model_config.architecture
    (folder / "plugin").mkdir()
    sys.path.insert(0, str(folder / "plugin"))
    before, found = registry.models[arch], {"vllm's class": name_of(config)}
    for name, target, text in (
        ("a plugin's class", "some_plugin:Model", "1 / 0"),  # if it were imported
        ("a plugin's class again", "some_plugin:Model", "1 / 0"),
        ("another class of it", "some_plugin:Other", "1 / 0"),
        ("a newer plugin's class", "some_plugin:Model", "2 / 0"),
        ("a plugin's class that is nowhere", "no_plugin.module:Model", ""),
        ("a class that is there", Otherwise, ""),
        ("a class that is there, by name", "tests.vllm.otherwise:Otherwise", ""),
    ):
        (folder / "plugin" / "some_plugin.py").write_text(text)
        settings._contents.cache_clear()
        registry.register_model(arch, target)
        found[name] = name_of(config)
    registry.models[arch] = before
    return found


def _of_environment(config: Any) -> dict[str, str]:
    """The namespace by variable that is set, and of one that decides nothing."""
    found = {}
    for name, value in (OTHERWISE | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}).items():
        os.environ[name] = value
        found[name] = name_of(config)
        del os.environ[name]
    os.environ["VLLM_HUMMING_INPUT_QUANT_CONFIG"] = "{"
    found["no value"] = name_of(config)
    del os.environ["VLLM_HUMMING_INPUT_QUANT_CONFIG"]
    return found | {"nothing set": name_of(config)}


def name_of(config: Any, layout: Any = None) -> str:
    """The id of its namespace, or why there is none. `layout`: of its only rank."""
    from kvcellar.errors import BadRequest  # noqa: PLC0415 - imports numpy
    from kvcellar.vllm.compat import derive_hash_seed  # noqa: PLC0415
    from kvcellar.vllm.identity import block_bytes, make_namespace  # noqa: PLC0415
    from kvcellar.vllm.metadata import TensorLayout  # noqa: PLC0415

    layers = make_layers([full_attention()])
    assert derive_hash_seed(config)
    try:
        stages = [layout or TensorLayout(block_bytes(layers))]
        return make_namespace(config, layers, stages, 0, "").id.hex()
    except BadRequest as error:
        return str(error)


def _of_memory(config: Any, socket: Path) -> dict[str, str]:
    """What a rank says of the memory that vLLM hands it."""
    import torch  # noqa: PLC0415

    found, blocks = {}, torch.zeros(BLOCKS, 2, BLOCK, 1, 16)
    padded = dataclasses.replace(full_attention(), page_size_padded=2 * full_attention().page_size_bytes)
    for name, layer, memory in (
        ("whole pages", full_attention(), blocks),
        ("padded pages", padded, blocks),
        ("two tensors", full_attention(), [blocks, blocks]),
    ):
        rank = _rank(config, layer, socket, name)
        rank.register_kv_caches({"layer 0": memory})
        found[name] = rank.tensor_layout().problem
        rank.close()
    return found


class Attention:
    """A layer of vLLM's, as far as it says who computes it; and with what."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_attn_backend(self) -> Any:
        return self

    def get_name(self) -> str:
        if not self._name:
            raise NotImplementedError
        return self._name


def _of_backends(config: Any, socket: Path) -> dict[str, str]:
    """The namespace of a rank by what computes its layer, in memory of one shape, found early and later."""
    import torch  # noqa: PLC0415

    from kvcellar.identity import decode_namespace  # noqa: PLC0415

    found = {}
    for name, layers in (
        ("K beside V", {"layer 0": Attention("one")}),
        ("K beside V again", {"layer 0": Attention("one"), "layer 1": Attention("other")}),
        ("V beside K", {"layer 0": Attention("other")}),
        ("no name", {"layer 0": Attention("")}),
        ("no layer", {}),
    ):
        object.__setattr__(config.compilation_config, "static_forward_context", layers)
        rank = _rank(config, full_attention(), socket, name)
        rank.register_kv_caches({"layer 0": torch.zeros(BLOCKS, 2, BLOCK, 1, 16)})
        found[name] = name_of(config, rank.tensor_layout())
        found[f"{name}, early"] = rank._copier and decode_namespace(rank._namespace).id.hex()
        rank.close()
    return found


def _of_steps(model: str, socket: Path) -> dict[str, str]:
    """On CPUs vLLM does not schedule ahead, nor sleep, so this is set afterwards."""
    import torch  # noqa: PLC0415

    found = {}
    for name, part, what, value in (
        ("one step at a time", "scheduler_config", "async_scheduling", False),
        ("steps ahead", "scheduler_config", "async_scheduling", True),
        ("engines in step", "parallel_config", "data_parallel_size", 2),
        ("an engine that sleeps", "model_config", "enable_sleep_mode", True),
        ("memory that may go", "model_config", "enable_cumem_allocator", True),
    ):
        config = make_config(model)
        assert hasattr(getattr(config, part), what)
        object.__setattr__(getattr(config, part), what, value)
        rank = _rank(config, full_attention(), socket, name)
        rank.register_kv_caches({"layer 0": torch.zeros(BLOCKS, 2, BLOCK, 1, 16)})
        found[name] = _of_a_step(rank)
        rank.close()
    return found


def _of_hosts(config: Any, socket: Path) -> dict[str, str]:
    """What the scheduler side says when it hears of a rank that is here, and of one that is not."""
    from kvcellar.vllm.identity import block_bytes  # noqa: PLC0415
    from kvcellar.vllm.metadata import TensorLayout  # noqa: PLC0415
    from kvcellar.vllm.scheduler import SchedulerSide  # noqa: PLC0415

    found, layers = {}, make_layers([full_attention()])
    here = TensorLayout(block_bytes(layers))
    for name, other in (("one host", here), ("two hosts", dataclasses.replace(here, host="another"))):
        side = SchedulerSide(config, layers, _options(socket, name), "")
        side.set_layouts({(0, 0): here, (0, 1): other})
        found[name] = side._problem
        side.close()
    return found


def _of_a_step(rank: Any) -> str:
    """Of the first one, without a forward: did it find a mover, and did it wait for loads, and how?"""
    from kvcellar.vllm.metadata import CellarMetadata  # noqa: PLC0415

    copier, watched = rank._copier, Watched()
    rank._copier = watched
    rank.take(CellarMetadata(idle=True))
    rank.finished_loads()
    rank._copier = copier
    return f"{'ready' if copier is not None else 'not ready'}, {watched.waited}"


class Watched:
    """A copier that has nothing to do, and says how it was asked to wait."""

    waited = "does not wait"

    def add(self, loads: list[Any], stores: list[Any]) -> None:
        pass

    def wait_for_a_load(self, seconds: float, soon: float, *, ahead: bool) -> None:
        self.waited = "waits, ahead" if ahead else "waits"

    def take(self) -> None:
        pass


def _rank(config: Any, layer: Any, socket: Path, session: str) -> Any:
    from kvcellar.vllm.worker import WorkerSide  # noqa: PLC0415

    return WorkerSide(config, make_layers([layer]), _options(socket, session))


def _options(socket: Path, session: str) -> Any:
    from kvcellar.vllm.options import Options  # noqa: PLC0415

    return Options(socket, session, require=False, lookup_timeout=1.0, tenant="", staging_bytes=0)


def full_attention() -> Any:
    import torch  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415

    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)


def make_layers(layers: list[Any]) -> Any:
    """A group for each."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec  # noqa: PLC0415

    groups = [KVCacheGroupSpec([f"layer {number}"], layer) for number, layer in enumerate(layers)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def _said(config: Any, layers: list[Any]) -> str:
    from kvcellar.vllm.identity import Unsupported, check_supported  # noqa: PLC0415

    try:
        check_supported(config, make_layers(layers))
    except Unsupported as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
