# Sourced by the other scripts: the repository's root, the preset that fits this machine, and one way to build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

jobs=${CAIRN_JOBS:-$(nproc)}

has_toolkit() { command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; }
has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# CAIRN_PRESET, or cuda where there are a GPU and a toolkit, else cpu.
default_preset() {
  if [ -n "${CAIRN_PRESET:-}" ]; then echo "$CAIRN_PRESET"; elif has_toolkit && has_gpu; then echo cuda; else echo cpu; fi
}

# Where there is a toolkit and no GPU, the CUDA backend is tested on simulated ones.
simulates_gpus() { has_toolkit && ! has_gpu; }

# Searches take it: each commit's tree searches elsewhere, and the same tree the same sequences again.
search_seed() { echo $((16#$(git rev-parse 'HEAD^{tree}' 2>/dev/null | cut -c1-15 || echo 1))); }

# one_in N: of the lines that come, one in N, drawn by the seed in RC_PARAMS, as searches are.
one_in() { shuf --random-source=<(yes "${RC_PARAMS:-}") | awk -v n="$1" 'NR % n == n - 1 || n == 1'; }

# Presets that compile alike share their objects.
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
fi

# The heading of what comes next, with the seconds since the first script began, and those that the step before took.
export CAIRN_SCRIPT_BEGAN=${CAIRN_SCRIPT_BEGAN:-$(date +%s)}
stage= stage_began=$(date +%s)
step() {
  local now
  now=$(date +%s)
  [ -z "$stage" ] || printf '\n-- %s: %d s\n' "$stage" $((now - stage_began))
  stage=$* stage_began=$now
  printf '\n== %s (%d s)\n' "$stage" $((now - CAIRN_SCRIPT_BEGAN))
}

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
