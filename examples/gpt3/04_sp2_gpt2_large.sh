#!/bin/bash
# Sequence parallelism: tensor parallelism with norms, dropout and residuals split along the sequence.
cd "$(dirname "$0")"
GPUS_PER_NODE=2 EXPERIMENT=gpt2_large_sp2
source ./common.sh
train "${GPT2_LARGE[@]}" --micro-batch-size 64 --global-batch-size 64 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel --log-interval 1 --eval-interval 50 "$@"
