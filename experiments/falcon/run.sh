#!/usr/bin/env bash
# The tables of docs/results/falcon.md, below a directory, and what a step costs.
#   experiments/falcon/run.sh DIR
set -euo pipefail
here=$(dirname "$0")
python "$here/falcon_study.py" "$1" --shares
python "$here/falcon_study.py" "$1"
python "$here/../../benchmarks/speed/falcon.py"
