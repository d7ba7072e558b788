#!/bin/bash
# Several nodes with Slurm: sbatch launch/slurm.sh RECIPE [SETTING=VALUE ...]
# Not run here. The nodes need one folder that all see (the run's folder, and checkpoints to carry on from), the same environment, and
# the model and the data fetched beforehand (`groupwise train RECIPE --dry-run`).
#SBATCH --job-name=groupwise
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=B:TERM@300
# With five minutes left Slurm sends TERM to this script, which hands it on: the processes finish the step and save it.

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head_node:29500" \
    -m groupwise train "$@" --run-folder "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume &
launched=$!
trap 'kill -TERM "$launched"' TERM
wait "$launched"
wait "$launched"
