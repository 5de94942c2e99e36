# Sourced by the other scripts: the repository's root, the preset that fits this machine, and one way to build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

jobs=${CAIRN_JOBS:-$(nproc)}

# CAIRN_PRESET, or cuda where a toolkit is found, else cpu.
default_preset() {
  if [ -n "${CAIRN_PRESET:-}" ]; then echo "$CAIRN_PRESET"; return; fi
  if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then echo cuda; else echo cpu; fi
}

step() { printf '\n== %s\n' "$*"; }

# build PRESET [TARGET...]
build() {
  local preset=$1 log
  shift
  step "build $preset"
  log=$(mktemp)
  cmake --preset "$preset" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
  grep 'Cairn backends' "$log" || true
  rm -f "$log"
  cmake --build "build/$preset" -j "$jobs" ${1:+--target "$@"}
}
