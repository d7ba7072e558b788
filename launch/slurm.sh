#!/bin/bash
# One or more nodes with Slurm: sbatch --nodes 2 --job-name first launch/slurm.sh RECIPE [SETTING=VALUE ...]
# Not run on a cluster; a test runs this text with a stand-in for srun (tests/distributed/test_slurm.py).
#
# The nodes need one folder that all see (the run's), the same environment (activate it before sbatch, or here), and the model and the
# data fetched beforehand, where there is a network: `hf download MODEL`, and `groupwise train RECIPE --dry-run`, which fetches no weights.
#
# The run's folder is runs/JOB-NAME: another sbatch of that name, or Slurm's own requeueing, carries it on from its newest checkpoint.
#SBATCH --job-name=groupwise
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before the time is up TERM goes to the processes themselves (not B:, to this script: srun would answer it by killing them).
# They finish the step, save it and end: let the time be longer than a step takes. `scancel --signal=TERM JOB` does the same at any time.
#SBATCH --signal=TERM@300

run_folder=${RUN_FOLDER:-runs/$SLURM_JOB_NAME}

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
# By it the processes know each other's messages; srun hands it to them through their environment, where nobody else can read it.
export GROUPWISE_SECRET=${GROUPWISE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
# Where the nodes have several networks, the one to use: NCCL moves tensors, and gloo what the processes tell each other, which fails where
# a node's own name leads to its loopback address. `ip -brief address` lists the names.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# Slurm starts the processes, one for each GPU. (srun of Slurm 22.05 and newer does not take --cpus-per-task over by itself.) One that fails
# ends the others by itself, with its error. srun gives them --wait seconds for that, as long as training.process_timeout_s: the first
# may be writing a checkpoint.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --gpu-bind=none --kill-on-bad-exit=0 --wait=1800 \
    bash -c 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
             exec python -m groupwise train "$@"' process \
    "$@" --run-folder "$run_folder" --resume
