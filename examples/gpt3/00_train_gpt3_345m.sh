#!/bin/bash
# The small GPT-3 of the notes, on one GPU without model parallelism.
cd "$(dirname "$0")"
GPUS_PER_NODE=1 EXPERIMENT=gpt3_345m_tp1_pp1
source ./common.sh
train --num-layers 12 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 1536 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --log-interval 5 --eval-interval 1000 "$@"
