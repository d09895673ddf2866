# The image of scripts/slurm/train.sbatch and scripts/kubernetes/train.yaml; it needs no CUDA on the host but the driver.
#
#   docker build --tag megajax .                             # CUDA 13: driver 580 or newer
#   docker build --tag megajax --build-arg CUDA=cuda12 .     # older drivers
#   docker build --tag megajax --build-arg EXTRAS=remote,parquet,s3,wandb .   # other optional packages
#   docker run --rm --init --gpus all --shm-size 16g --volume "$PWD/runs:/megajax/runs" megajax \
#       python -m megajax.train configs/llama3_1b.yaml data.kind=synthetic
FROM python:3.12-slim-bookworm

ARG CUDA=cuda13
ARG EXTRAS=remote,parquet
ENV PYTHONUNBUFFERED=1
WORKDIR /megajax

# The packages first: a change of the code does not install them again.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir megajax && touch megajax/__init__.py && \
    pip install --no-cache-dir --constraint constraints.txt --editable ".[${CUDA},${EXTRAS}]"

COPY megajax megajax
COPY configs configs
COPY scripts scripts

CMD ["python", "-m", "megajax.train", "--help"]
