#!/usr/bin/env bash
# Checks every claim about GPUs on the machine that it runs on: tests/gpu/run.sh [--parts NAME... | left] [--folder FOLDER]
# It needs a Python with torch (PYTHON=...; default: python3) and nothing from a network: of what else is needed, the packages that are
# missing are installed from wheels/ (make gpu-wheels) into runs/gpu/site. Where there is no GPU everything runs dry, on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
why=$("$PYTHON" -c 'import torch' 2>&1) || { echo "run.sh: '$PYTHON' cannot import torch: ${why##*$'\n'}; choose another one with PYTHON=..." >&2; exit 2; }
missing=$("$PYTHON" -c '
from importlib.util import find_spec
print(*(name for name in ("click", "numpy", "psutil", "pytest") if find_spec(name) is None))')
if [ -n "$missing" ]; then
  site=$PWD/runs/gpu/site
  # shellcheck disable=SC2086
  why=$("$PYTHON" -m pip install -q --no-index --find-links "$PWD/wheels" --no-compile --upgrade --target "$site" $missing 2>&1) || {
    echo "run.sh: $PYTHON lacks: $missing; install it, or bring wheels/ for this Python (make gpu-wheels, where there is a network): ${why##*$'\n'}" >&2
    exit 2
  }
  export PYTHONPATH=$PYTHONPATH:$site
fi
exec "$PYTHON" -m tests.gpu "$@"
