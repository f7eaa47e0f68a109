#!/usr/bin/env bash
# The tables of plans that know the connections, below a directory; each goes on where it stopped.
#   experiments/fn-aware/run.sh DIR [EMOJI]     EMOJI: a folder of real pictures with pairs.json and truth.parquet
set -euo pipefail
here=$(dirname "$0")
python "$here/fn_aware.py" "$1/shipped" --jobs 2
python "$here/fn_aware.py" "$1/full" --start full --jobs 2
python "$here/fn_aware.py" "$1/shipped" --side
python "$here/fn_aware.py" "$1/weak" --start weak
[ $# -lt 2 ] || python "$here/fn_aware.py" "$1/emoji" --emoji "$2"
