#!/usr/bin/env bash
set -euo pipefail

help="usage: ./scripts/quickstart.sh [section.key=value ...]

Trains a small Llama on the text of Python's standard library, prints a sample and draws the loss: about three
minutes on two CPU cores, including the first installation into .venv. Start it again to resume a stopped run.
Arguments override keys of configs/quickstart.yaml, for example run.steps=500."

for argument in "$@"; do
    case "$argument" in -h | --help) echo "$help" && exit ;; esac
done
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" train

# An invalid override is an error before the data are written.
config=$("$python" -m megajax.train configs/quickstart.yaml "$@" --print-config)
run=$("$python" -c 'import sys, yaml; print(yaml.safe_load(sys.stdin)["run"]["dir"])' <<<"$config")
data=runs/quickstart_data

"$python" scripts/prepare_text.py "$data"
"$python" -m megajax.train configs/quickstart.yaml "$@"
"$python" -m megajax.generate "$run" --prompt 'def '
baseline=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["unigram_entropy"])' "$data/summary.json")
"$python" -m megajax plot "$run" --baseline "$baseline"
