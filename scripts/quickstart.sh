#!/usr/bin/env bash
# Trains a small Llama-style model on the Python standard library's own text; arguments are config overrides.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

data=runs/quickstart_data
run=runs/quickstart

"$python" scripts/prepare_text.py "$data"
"$python" -m megajax.train configs/quickstart.yaml "$@" run.dir="$run"
"$python" -m megajax.generate "$run" --prompt 'def '
baseline=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["unigram_entropy"])' "$data/summary.json")
"$python" scripts/plot_loss.py "$run" --baseline "$baseline" --output "$run/loss.png"
