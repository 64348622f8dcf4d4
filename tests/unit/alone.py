"""Modules of the connector that know nothing of vLLM, without their package, which imports it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parents[2] / "src/kvcellar/vllm"


def load(name: str) -> ModuleType:
    alone = f"{name}_alone"
    spec = importlib.util.spec_from_file_location(alone, _PACKAGE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alone] = module
    spec.loader.exec_module(module)
    return module
