#!/bin/bash
# A 7B Llama on 4 machines of 8 GPUs: tensor and pipeline parallelism, distributed optimizer, selective recomputation,
# torch_dist checkpoints. ./pretrain_llama.sh [FLAGS]
MASTER_ADDR=${MASTER_ADDR:-localhost}
DATA_PATH=${DATA_PATH:-/data/my_dataset_text_document}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-/checkpoints/llama-7b}

DISTRIBUTED_ARGS=(
    --nproc_per_node=${GPUS_PER_NODE:-8}
    --nnodes=${NUM_NODES:-4}
    --node_rank=${NODE_RANK:-0}
    --master_addr=$MASTER_ADDR
    --master_port=${MASTER_PORT:-29500}
)
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --ffn-hidden-size 11008
    --group-query-attention
    --num-query-groups 8
    --swiglu
    --normalization RMSNorm
    --use-rotary-position-embeddings
    --no-position-embedding
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --recompute-granularity selective
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1024
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --train-iters 100000
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
    --attention-softmax-in-fp32
    --accumulate-allreduce-grads-in-fp32
)
DATA_ARGS=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model ${TOKENIZER:-meta-llama/Llama-3.1-8B}
    --data-path $DATA_PATH
    --split 99,1,0
    --dataloader-type cyclic
)
OUTPUT_ARGS=(
    --save $CHECKPOINT_PATH
    --load $CHECKPOINT_PATH
    --save-interval 1000
    --ckpt-format torch_dist
    --log-interval 10
    --log-throughput
)
torchrun "${DISTRIBUTED_ARGS[@]}" -m megalith.dialects.megatron "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
