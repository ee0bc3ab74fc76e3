#!/usr/bin/env bash
# On each of N nodes: NODES=N MASTER=host:29500 bin/torchrun.sh --run.dir=runs/x --config ... (options of `geocont fit`).
# The run's directory must be new, or give --resume=runs/x instead, and lie on a disk that all nodes share; with
# conf/trainer/multi_node.yaml. PROCESSES is the number for each node, by default that of its GPUs (or cores).
set -euo pipefail
cd "$(dirname "$0")/.."
needs() { echo "bin/torchrun.sh needs $1" >&2; exit 2; }
[[ " $*" = *" --run.dir"[=\ ]?* || " $*" = *" --resume"[=\ ]?* ]] || needs "--run.dir=DIR, a new one that all nodes see, or --resume=DIR"
[ -x .venv/bin/torchrun ] || needs "geocont in .venv: run bin/setup"
exec .venv/bin/torchrun --nnodes="${NODES:-1}" --nproc-per-node="${PROCESSES:-auto}" --rdzv-backend=c10d \
  --rdzv-endpoint="${MASTER:-localhost:29500}" --rdzv-id=geocont \
  --no-python .venv/bin/geocont fit "$@" --trainer.num_nodes="${NODES:-1}"
