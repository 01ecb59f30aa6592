#!/bin/bash
# T5-base, 220M, on the 8 GPUs of a machine: ./train_t5_220m_distributed.sh CHECKPOINTS TENSORBOARD VOCAB DATA [FLAGS]
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
    --encoder-num-layers 12
    --decoder-num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --kv-channels 64
    --ffn-hidden-size 3072
    --encoder-seq-length 512
    --decoder-seq-length 128
    --max-position-embeddings 512
    --init-method-std 0.015
    --attention-backend auto
)
TRAINING_ARGS=(
    --micro-batch-size 64
    --global-batch-size 512
    --train-iters 1000000
    --lr 0.0001
    --lr-decay-iters 1000000
    --lr-decay-style linear
    --min-lr 0.00001
    --lr-warmup-fraction .01
    --weight-decay 1e-2
    --clip-grad 1.0
    --bf16
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
)
DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file "$VOCAB_FILE"
    --tokenizer-type BertWordPieceCase
    --vocab-extra-ids 100
    --split 99982,9,9
)
OUTPUT_ARGS=(
    --log-interval 100
    --save-interval 500
    --eval-interval 1000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --eval-iters 10
    --tensorboard-dir "$TENSORBOARD_PATH"
)
torchrun "${DISTRIBUTED_ARGS[@]}" -m megalith.dialects.megatron pretrain-t5 "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
