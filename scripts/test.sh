#!/usr/bin/env bash
set -euo pipefail

help="usage: ./scripts/test.sh [pytest arguments]

Without arguments: lint, types, import rules and all tests, on two cores 8 to 16 minutes the first time and about half
of that later. With arguments: only pytest with these arguments, for example -m smoke for the fastest tests, or
tests/config. Installs their packages into .venv."

case "${1:-}" in -h | --help) echo "$help" && exit ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" dev

if [ $# -eq 0 ]; then
    ruff check
    ruff format --check
    pyright --pythonpath "$python"
    lint-imports --no-logo
fi
# Tests of one file share compiled programs, so they run in one process.
workers=$(nproc)
exec "$python" -m pytest -n "$((workers < 4 ? workers : 4))" --dist loadfile --no-loadscope-reorder \
    --durations=20 --durations-min=1 "$@"
