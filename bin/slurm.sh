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
exec srun --kill-on-bad-exit=1 .venv/bin/geocont fit "$@" "${options[@]}" --trainer.num_nodes="$SLURM_JOB_NUM_NODES"
