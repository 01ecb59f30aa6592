#!/bin/bash
# BERT-large, 340M, on the 8 GPUs of a machine: ./train_bert_340m_distributed.sh CHECKPOINTS TENSORBOARD VOCAB DATA [FLAGS]
# DATA is the prefix that `preprocess_data.py --split-sentences` has written: …_text_sentence.
CHECKPOINT_PATH=$1 TENSORBOARD_PATH=$2 VOCAB_FILE=$3 DATA_PATH=$4
shift 4

DISTRIBUTED_ARGS=(
    --nproc_per_node ${GPUS_PER_NODE:-8}
    --nnodes ${NUM_NODES:-1}
    --node_rank ${NODE_RANK:-0}
    --master_addr ${MASTER_ADDR:-localhost}
    --master_port ${MASTER_PORT:-6000}
)
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 512
    --max-position-embeddings 512
    --attention-backend auto
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 32
    --train-iters 1000000
    --weight-decay 1e-2
    --clip-grad 1.0
    --fp16
    --lr 0.0001
    --lr-decay-iters 990000
    --lr-decay-style linear
    --min-lr 1.0e-5
    --lr-warmup-fraction .01
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 1
)
DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file "$VOCAB_FILE"
    --split 949,50,1
)
OUTPUT_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --eval-iters 10
    --tensorboard-dir "$TENSORBOARD_PATH"
)
torchrun "${DISTRIBUTED_ARGS[@]}" -m megalith.dialects.megatron pretrain-bert "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
