#!/bin/bash
# Several nodes with Slurm, of which the first samples by vLLM:
#   VLLM_PYTHON=/shared/vllm/bin/python sbatch --nodes 2 --job-name first launch/slurm-vllm.sh MODEL RECIPE [SETTING=VALUE ...]
# Not run on a cluster; a test runs this text with stand-ins for srun and vLLM (tests/distributed/test_slurm.py).
#
# VLLM_PYTHON is the interpreter of vLLM's environment, with groupwise in it (pip install --no-deps). What launch/slurm.sh says of folders,
# names and networks holds here too.
#SBATCH --job-name=groupwise
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before the time is up TERM goes to this script (B:), which hands it to the trainers alone: they need the server to finish
# their step, save it and end. `scancel --batch --signal=TERM JOB` does the same at any time.
#SBATCH --signal=B:TERM@300

model=$1
shift
run_folder=${RUN_FOLDER:-runs/$SLURM_JOB_NAME}
port=${VLLM_PORT:-8300}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
sampler=${nodes[0]}
trainers=$(IFS=,; echo "${nodes[*]:1}")

# Whoever knows it may replace the weights and sample: srun hands it to the server and the trainers through their environment, where
# nobody else can read it. On the network it is not encrypted.
export GROUPWISE_VLLM_SECRET=${GROUPWISE_VLLM_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}

# Step 0: the server, with all GPUs and CPUs of its node. It listens at the address that the node's name stands for, and is asked there; where
# that is not the one of the cluster's network, set VLLM_HOST (0.0.0.0: all of them, asked by the node's name). VLLM_TENSOR_PARALLEL GPUs
# sample; vLLM wants a number that divides the model's attention heads, and Qwen2.5-7B has 28. VLLM_OPTIONS are further options of the server,
# such as "--dtype float16".
host=${VLLM_HOST:-$sampler}
address=$([ "$host" = 0.0.0.0 ] && echo "$sampler" || echo "$host")
url=http://$address:$port
srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$sampler" --gpu-bind=none \
    --cpus-per-task=$((SLURM_CPUS_PER_TASK * SLURM_NTASKS_PER_NODE)) \
    "${VLLM_PYTHON:?name the interpreter of the environment of vLLM}" -m groupwise.engines.vllm "$model" \
    --host "$host" --port "$port" --tensor-parallel "${VLLM_TENSOR_PARALLEL:-4}" ${VLLM_OPTIONS:-} &
server=$!
trap 'kill "$server" 2>/dev/null' EXIT
tries=0
until curl --silent --fail --max-time 5 --output /dev/null --header @<(printf 'Authorization: Bearer %s' "$GROUPWISE_VLLM_SECRET") "$url/groupwise"; do
    kill -0 "$server" 2>/dev/null || { echo "the server did not come up: see its lines above" >&2; exit 1; }
    ((++tries < 1800)) || { echo "nobody samples at $url, asked for an hour or more: set VLLM_HOST to an address of $sampler that all nodes reach" >&2; exit 1; }
    sleep 2
done

# Step 1: the trainers, one process for each GPU of the other nodes.
export MASTER_ADDR=${nodes[1]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
# By it the processes know each other's messages; srun hands it to them through their environment, where nobody else can read it.
export GROUPWISE_SECRET=${GROUPWISE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
count=$((${#nodes[@]} - 1))
srun --nodes="$count" --ntasks=$((count * SLURM_NTASKS_PER_NODE)) --ntasks-per-node="$SLURM_NTASKS_PER_NODE" --nodelist="$trainers" \
    --cpus-per-task="$SLURM_CPUS_PER_TASK" --gpu-bind=none --kill-on-bad-exit=0 --wait=1800 \
    bash -c 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
             exec python -m groupwise train "$@"' process \
    "$@" rollout.engine=vllm "rollout.vllm.url=$url" --run-folder "$run_folder" --resume &
launched=$!
trap 'scancel --signal=TERM "$SLURM_JOB_ID.1"' TERM
wait "$launched"
code=$?
if kill -0 "$launched" 2>/dev/null; then # a signal came, and the processes are saving
    wait "$launched"
    code=$?
fi
exit "$code"
