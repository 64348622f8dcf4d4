"""Two LoRA adapters of one name share nothing: chunk keys cover an adapter's bytes. In vLLM's interpreter."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.vllm.harness import vllm_python

SCRIPT = """
import json, sys
from types import SimpleNamespace
from vllm.lora.request import LoRARequest
from kvcellar.vllm.adapters import Adapters, with_adapter
from kvcellar.vllm.tracked import Tracked

def keys(path):
    lora = LoRARequest("same-name", 1, path) if path else None
    request = SimpleNamespace(block_hashes=[bytes([n]) * 32 for n in range(4)], num_preemptions=0)
    tracked = Tracked(request, 2, Adapters().digest(lora))
    return [tracked.hashed_chunks(), [key.hex() for key in tracked.keys]]

print(json.dumps([keys(path) for path in json.loads(sys.argv[1])]))
"""


def adapter(folder: Path, weights: bytes) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


@pytest.mark.timeout(300)
def test_adapters_of_one_name_share_exactly_when_their_bytes_do(tmp_path: Path) -> None:
    paths = [
        "",
        adapter(tmp_path / "one", b"weights"),
        adapter(tmp_path / "copy", b"weights"),
        adapter(tmp_path / "other", b"Weights"),
        str(tmp_path / "not-here"),
    ]
    done = subprocess.run(
        [vllm_python(), "-c", SCRIPT, json.dumps(paths)], capture_output=True, check=True, timeout=240
    )
    plain, one, copy, other, gone = json.loads(done.stdout.splitlines()[-1])
    assert plain == [2, ["01" * 16, "03" * 16]]
    assert one == copy
    assert len({keys[1][0] for keys in (plain, one, other)}) == 3
    assert gone == [0, []]
