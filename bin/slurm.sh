#!/usr/bin/env bash
# sbatch bin/slurm.sh --config conf/experiment/gpt2/hetero.yaml --config conf/trainer/multi_node.yaml: trains on two nodes.
# --nodes N and --gpus-per-node G before the script change that, with --ntasks-per-node G. Requeued, the job goes on.
#SBATCH --job-name=geocont --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 --cpus-per-task=8
#SBATCH --signal=TERM@120 --requeue --open-mode=append
set -euo pipefail
: "${SLURM_JOB_ID:?is not set: start this script with sbatch}"
cd "${SLURM_SUBMIT_DIR:-.}"
dir=${RUN_DIR:-runs/slurm-$SLURM_JOB_ID}  # on a disk that all nodes share
options=(--run.dir="$dir")
if [ -s "$dir/checkpoints/last.ckpt" ]; then set --; options=(--resume="$dir"); fi
# The first process makes the run's directory; the others join it.
exec srun --kill-on-bad-exit=1 bash -c 'dir=$1; shift
  if [ "$SLURM_PROCID" != 0 ]; then
    export GEOCONT_RUN_DIR=$dir; until [ -s "$dir/manifest.json" ]; do sleep 1; done
  fi
  exec .venv/bin/geocont fit "$@" --trainer.num_nodes="$SLURM_JOB_NUM_NODES"' rank "$dir" "$@" "${options[@]}"
