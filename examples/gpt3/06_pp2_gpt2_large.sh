#!/bin/bash
# Pipeline parallelism: half of the layers on each of two GPUs.
cd "$(dirname "$0")"
GPUS_PER_NODE=2 EXPERIMENT=gpt2_large_pp2
source ./common.sh
train "${GPT2_LARGE[@]}" --micro-batch-size 64 --global-batch-size 64 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --log-interval 1 --eval-interval 50 "$@"
