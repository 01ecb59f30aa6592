#!/bin/bash
# GPT-2 large on one GPU: what the others are compared with.
cd "$(dirname "$0")"
GPUS_PER_NODE=1 EXPERIMENT=gpt2_large_tp1_pp1
source ./common.sh
train "${GPT2_LARGE[@]}" --micro-batch-size 32 --global-batch-size 32 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --log-interval 1 --eval-interval 50 "$@"
