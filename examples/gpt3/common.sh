# What the scripts of this folder share: sourced by each, after it has set GPUS_PER_NODE and its EXPERIMENT's name.
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NUM_NODES=${NUM_NODES:-1}
NODE_RANK=${NODE_RANK:-0}
RUNDIR=${RUNDIR:-./sandbox_run}
DSDIR=${DSDIR:-./owt-ds}
CHECKPOINT_PATH=$RUNDIR/ckpt
TENSORBOARD_PATH=$RUNDIR/tb

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
TRAINING_ARGS=(
    --seq-length 1024
    --max-position-embeddings 1024
    --attention-backend auto
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
DATA_ARGS=(
    --data-path $DSDIR/openwebtext-10k_text_document
    --vocab-file $DSDIR/gpt2-vocab.json
    --merge-file $DSDIR/gpt2-merges.txt
    --split 949,50,1
)
OUTPUT_ARGS=(
    --save-interval 10000
    --save $CHECKPOINT_PATH
    --load $CHECKPOINT_PATH
    --eval-iters 10
    --tensorboard-dir $TENSORBOARD_PATH
)
# W&B takes part where WANDB_ENTITY is set, after `wandb login`.
if [ -n "$WANDB_ENTITY" ]; then
    OUTPUT_ARGS+=(
        --wandb-entity $WANDB_ENTITY
        --wandb-project ${WANDB_PROJECT:-mlm-sandbox}
        --wandb-exp-name $(date +%y%m%d)_$EXPERIMENT
    )
fi
GPT2_LARGE=(--num-layers 36 --hidden-size 1280 --num-attention-heads 16)

# Trains with the flags given; words behind the script's name come last and so win: ./05_cp2.sh --train-iters 20
train() {
    torchrun "${DISTRIBUTED_ARGS[@]}" -m megalith.dialects.megatron \
        "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
}
