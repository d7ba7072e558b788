# groupwise in a container:
#   docker build -t groupwise .
#   docker run --init --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" groupwise train quickstart             # on the processor
#   docker run --init --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" --gpus all groupwise train gsm8k-0.5b  # on NVIDIA GPUs
# --init gives the container a first process that hands signals on and clears away what programs leave behind.
# Runs and downloaded models stay in the mounted folder. On x86-64 the default torch is the CUDA build, which also runs without a GPU.
# The CPU build saves several gigabytes: --build-arg TORCH_OPTIONS="...", with pip's options from the command that PyTorch's page
# "Start Locally" shows for CPU.
# Add extras by their names: --build-arg EXTRAS=quantized,wandb
FROM python:3.11-slim-bookworm

# The compiler is for the native kernels of processors, which are built at their first use.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/groupwise
COPY constraints.txt ./
ARG TORCH_OPTIONS=""
# The options are several words; constraints.txt has the version.
# hadolint ignore=SC2086,DL3013
RUN if [ -n "$TORCH_OPTIONS" ]; then \
        pip install --no-cache-dir $TORCH_OPTIONS "$(grep '^torch==' constraints.txt)"; \
    fi

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
ARG EXTRAS=""
RUN pip install --no-cache-dir --constraint constraints.txt ".${EXTRAS:+[$EXTRAS]}"

# Any user may run it: names and caches do not come from the image's list of users.
ENV HOME=/work USER=groupwise
WORKDIR /work
ENTRYPOINT ["groupwise"]
CMD ["--help"]
