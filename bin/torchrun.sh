#!/usr/bin/env bash
# On each of N nodes: NODES=N MASTER=host:29500 RUN_DIR=runs/x bin/torchrun.sh --config ... (options of `geocont fit`).
# RUN_DIR must be new, or give --resume=$RUN_DIR, and lie on a disk that all nodes share; with conf/trainer/multi_node.yaml.
# PROCESSES is the number for each node, by default that of its GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${RUN_DIR:?must be the run\'s directory}"
options=(--run.dir="$RUN_DIR")
if [[ " $* " == *" --resume"* ]]; then options=(); fi
# The first process makes the run's directory; the others join it.
exec .venv/bin/torchrun --nnodes="${NODES:-1}" --nproc-per-node="${PROCESSES:-gpu}" --rdzv-backend=c10d \
  --rdzv-endpoint="${MASTER:-localhost:29500}" --rdzv-id="$RUN_DIR" --no-python bash -c 'dir=$1; shift
  if [ "$RANK" != 0 ]; then
    export GEOCONT_RUN_DIR=$dir; until [ -s "$dir/manifest.json" ]; do sleep 1; done
  fi
  exec .venv/bin/geocont fit "$@"' rank "$RUN_DIR" "$@" "${options[@]}" --trainer.num_nodes="${NODES:-1}"
