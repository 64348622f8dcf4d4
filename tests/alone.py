"""Modules of the connector that know nothing of vLLM, without their package's __init__, which imports it."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = "kvcellar.vllm"


def load(name: str) -> ModuleType:
    if _PACKAGE not in sys.modules:
        package = ModuleType(_PACKAGE)
        package.__path__ = [str(Path(__file__).parents[1] / "src/kvcellar/vllm")]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{name}")
