#!/bin/bash
# Several nodes with Slurm, of which the first samples by vLLM: sbatch launch/slurm-vllm.sh MODEL RECIPE [SETTING=VALUE ...]
#   VLLM_PYTHON=/shared/vllm/bin/python sbatch --nodes 2 launch/slurm-vllm.sh Qwen/Qwen2.5-7B-Instruct gsm8k-7b-8gpu
# Run here with stand-ins for Slurm's commands and for vLLM, not on a cluster. VLLM_PYTHON is the interpreter of vLLM's environment, with
# groupwise in it (pip install --no-deps). All nodes need one folder that all see, and the model and the data fetched beforehand.
#SBATCH --job-name=groupwise
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=B:TERM@300
# With five minutes left Slurm sends TERM to this script, which hands it on: the processes finish the step and save it.

model=$1
shift
port=${VLLM_PORT:-8300}
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
sampler=${nodes[0]}
trainers=$(IFS=,; echo "${nodes[*]:1}")

srun --nodes 1 --ntasks 1 --nodelist "$sampler" \
    "${VLLM_PYTHON:?name the interpreter of vLLM\'s environment}" -m groupwise.engines.vllm "$model" \
    --host 0.0.0.0 --port "$port" --tensor-parallel "${VLLM_TENSOR_PARALLEL:-8}" &
server=$!
trap 'kill "$server" 2>/dev/null' EXIT
until curl --silent --fail --output /dev/null "http://$sampler:$port/groupwise"; do
    kill -0 "$server" 2>/dev/null || { echo "the server did not come up: see its lines above" >&2; exit 1; }
    sleep 2
done

srun --nodes $((${#nodes[@]} - 1)) --ntasks-per-node 1 --nodelist "$trainers" torchrun \
    --nnodes $((${#nodes[@]} - 1)) --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${nodes[1]}:29500" \
    -m groupwise train "$@" rollout.engine=vllm "rollout.vllm.url=http://$sampler:$port" \
    --run-folder "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume &
launched=$!
trap 'kill -TERM "$launched"' TERM
wait "$launched"
code=$?
if kill -0 "$launched" 2>/dev/null; then # a signal came, and the processes are saving
    wait "$launched"
    code=$?
fi
exit "$code"
