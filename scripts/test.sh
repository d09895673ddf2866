#!/usr/bin/env bash
# Lint, types, floors and tests; with arguments only pytest with these arguments (./scripts/test.sh -m smoke).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if [ $# -eq 0 ]; then
    ruff check
    ruff format --check
    pyright --pythonpath "$python"
    lint-imports --no-logo
fi
# A file's tests share what they compiled, so they stay in one process.
workers=$(nproc)
exec "$python" -m pytest -n "$((workers < 4 ? workers : 4))" --dist loadfile --no-loadscope-reorder "$@"
