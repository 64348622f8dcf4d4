#!/usr/bin/env bash
# Make a virtual environment that holds LMCache, the peer our control bench is compared with.
#
#   tools/peer_lmcache.sh VENV_DIR        PYTHON=python3.11 chooses the interpreter
#
# Only what `lmcache server` and its client classes import on a machine without a GPU: no vLLM,
# no CUDA packages. Everything is pinned, so two runs measure the same peer. A second run on a
# complete environment does nothing; a change of this file installs again.
#
# torch may be a CPU build: pip takes one when it is told where it lies (PIP_FIND_LINKS).
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: tools/peer_lmcache.sh VENV_DIR" >&2
    exit 2
fi

venv=$1
python=${PYTHON:-python3}
stamp=$venv/.peer-lmcache
wanted=$(cksum <"${BASH_SOURCE[0]}")

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "peer lmcache: $venv is complete"
    exit 0
fi

pip_install() {
    # -qq: errors only. lmcache declares CUDA packages we leave out, so no conflict report either.
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
        --no-warn-conflicts "$@"
}

echo "peer lmcache: environment in $venv"
rm -f "$stamp"
"$python" -m venv "$venv"

echo "peer lmcache: torch"
pip_install torch==2.13.0 numpy==2.2.6

echo "peer lmcache: what the server imports"
# First block: imported by name. Second block: what those pull in.
pip_install -r /dev/stdin <<'PINS'
aiohttp==3.14.5
blake3==1.0.11
cachetools==8.0.0
cryptography==50.0.2
fastapi==0.141.1
httpx==0.28.1
msgspec==0.22.0
numba==0.68.1
numpy==2.2.6
nvtx==0.2.16
opentelemetry-api==1.40.0
opentelemetry-exporter-prometheus==0.61b0
opentelemetry-sdk==1.40.0
prometheus_client==0.24.1
psutil==7.2.2
py-cpuinfo==9.0.0
PyYAML==6.0.3
pyzmq==27.3.0
requests==2.34.2
setuptools==80.9.0
sortedcontainers==2.4.0
uvicorn==0.54.0

aiohappyeyeballs==2.7.1
aiosignal==1.4.0
annotated-doc==0.0.6
annotated-types==0.8.0
anyio==4.16.0
attrs==26.1.0
certifi==2026.10.18
cffi==2.1.1
charset-normalizer==3.5.2
click==8.5.1
frozenlist==1.8.0
h11==0.16.0
httpcore==1.0.9
idna==3.20
importlib_metadata==8.7.1
llvmlite==0.50.0
multidict==7.2.1
opentelemetry-semantic-conventions==0.61b0
propcache==0.5.4
pycparser==3.12
pydantic==2.14.3
pydantic_core==2.50.4
starlette==1.10.0
typing-inspection==0.4.5
typing_extensions==4.16.0
urllib3==2.8.0
yarl==1.25.1
zipp==4.1.2
PINS

echo "peer lmcache: lmcache"
pip_install --no-deps lmcache==0.5.6

echo "peer lmcache: checking that it imports"
LMCACHE_TRACK_USAGE=false LMCACHE_LOG_LEVEL=ERROR "$venv/bin/python" - <<'CHECK'
import lmcache.integration.vllm.vllm_multi_process_adapter
import lmcache.v1.multiprocess.http_server
import lmcache.v1.multiprocess.server
CHECK

echo "$wanted" >"$stamp"
echo "peer lmcache: done"
