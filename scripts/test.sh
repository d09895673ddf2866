#!/usr/bin/env bash
set -euo pipefail

help="usage: ./scripts/test.sh [pytest arguments]

Without arguments: lint, import rules, all tests but the long ones and beside them types, on two cores 7 to 16 minutes the
first time and half of that later. With arguments: only pytest with these arguments, for example tests/config, -m smoke
for the fastest tests, or -m long for those whose code a cheaper test or a table of dev has with other numbers, which take
longer than all others. Installs their packages into .venv."

case "${1:-}" in -h | --help) echo "$help" && exit ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev

checks=$(mktemp)
trap 'rm -f "$checks"; kill "${types:-}" 2>/dev/null || true' EXIT
if [ $# -eq 0 ]; then
    ruff check
    ruff format --check
    lint-imports --no-logo
    # Beside the first tests: it takes most of a minute, of one core.
    pyright --pythonpath "$python" >"$checks" 2>&1 &
    types=$!
fi
# Tests of one file share compiled programs, so they run in one process.
workers=$(nproc)
status=0
"$python" -m pytest -n "$((workers < 4 ? workers : 4))" --dist loadfile --no-loadscope-reorder \
    --durations=20 --durations-min=1 "$@" || status=$?
if [ $# -eq 0 ]; then
    wait "$types" || status=1
    cat "$checks"
fi
exit "$status"
