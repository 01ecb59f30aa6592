#!/bin/bash
# Data parallelism: two replicas, each with the baseline's micro-batch.
cd "$(dirname "$0")"
GPUS_PER_NODE=2 EXPERIMENT=gpt2_large_dp2
source ./common.sh
train "${GPT2_LARGE[@]}" --micro-batch-size 32 --global-batch-size 64 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --log-interval 1 --eval-interval 50 "$@"
