#!/usr/bin/env bash
# The tables of docs/results/vacsr.md, below a directory.
#   experiments/vacsr/run.sh DIR [EMOJI]      EMOJI: a folder of real pictures with pairs.json and truth.parquet
set -euo pipefail
here=$(dirname "$0")
python "$here/vacsr.py" "$1" ${2:+--emoji "$2"}
