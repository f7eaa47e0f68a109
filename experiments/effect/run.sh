#!/usr/bin/env bash
# The tables of docs/results/effect.md, below a directory; --quick of effect.py shows the same in five minutes.
#   experiments/effect/run.sh DIR [EMOJI]     EMOJI: a folder of real pictures with pairs.json and truth.parquet
set -euo pipefail
here=$(dirname "$0")
python "$here/effect.py" "$1/scenes" --jobs 2
python "$here/effect.py" "$1/noise" --explore noise
[ $# -lt 2 ] || python "$here/effect.py" "$1/emoji" --emoji "$2"
