"""Megatron-LM flags that have no effect in Megalith, grouped by reason.

A reason completes the sentence "has no effect in Megalith: …". A flag that takes a value is written FLAG=TAKES
(flag_kinds.py).
"""

from __future__ import annotations

from megalith.dialects.megatron.flag_kinds import NoEffect

KERNELS = "kernels and fusions are chosen for the device; the formula is the same"
OVERLAP = "communication always overlaps with compute where possible; gradients are summed in fp32"

BY_REASON = {
    "every step's metrics are in metrics.jsonl, on the console and in the trackers": """
        --log-timers-to-tensorboard --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --logging-level=int
        --log-progress --straggler-minmax-count=int --tensorboard-log-interval=int --log-energy
        --log-memory-interval=int --profile-ranks=int+ --disable-straggler-on-startup --moe-per-layer-logging
        --app-tag-run-name=text --app-tag-run-version=text --config-logger-dir=text
        --disable-log-loss-scale-to-tensorboard --log-device-memory-used
        --log-world-size-to-tensorboard --memory-snapshot-path=text --moe-routing-trace-capture-hidden-states
        --moe-routing-trace-capture-logits --moe-routing-trace-dump-weights --moe-routing-trace-max-training-iters=int
        --no-barrier-with-level-1-timing --no-log-loss-scale-to-tensorboard --no-one-logger --nvtx-ranges
        --one-logger-async --one-logger-project=text --one-logger-run-name=text --otel-enabled --otel-service-name=text
        --otel-span-groups=text --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra
        --pytorch-profiler-collect-shapes --record-shapes --run-workload-inspector-server --straggler-ctrlr-port=int
        --tensorboard-queue-size=int --use-pytorch-profiler
    """,
    "there is one checkpoint format, which all ranks write in parallel and any layout loads": """
        --ckpt-format=torch|torch_dist|torch_dcp|fsdp_dtensor
        --dist-ckpt-strictness=assume_ok_unexpected|log_unexpected|log_all|raise_unexpected|raise_all|return_unexpected|return_all|ignore_all
        --use-persistent-ckpt-worker --auto-detect-ckpt-format --no-use-tokenizer-model-from-checkpoint-args
        --ckpt-fully-parallel-load --dist-ckpt-optim-fully-reshardable --ckpt-assume-constant-structure
        --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --async-strategy=nvrx|mcore --verify-integrity
        --async-ckpt-use-cpu-shm --ckpt-drop-redundant-extra-state --ckpt-fully-parallel-load-per-rank-objects
        --no-ckpt-load-validate-sharding-integrity --async-ckpt-cpu-priority=int --async-ckpt-io-priority=int
        --ckpt-convert-save=text --ckpt-convert-update-legacy-dist-opt-format
        --ckpt-fully-parallel-load-exchange-algo=broadcast|gather_rounds|gather_object
        --ckpt-fully-parallel-load-process-group=dp|ep_dp --ckpt-fully-parallel-save-process-group=dp|ep_dp
        --ckpt-pg-tensors-cache-create --ckpt-pg-tensors-cache-path=text --disable-ckpt-load-validate-sharding-integrity
        --disable-save-tokenizer-assets --disable-use-tokenizer-model-from-checkpoint-args --dist-ckpt-format=text
        --dist-ckpt-save-pre-mcore-014 --dist-ckpt-workers=int --distrib-optim-fully-reshardable-mem-efficient
        --no-save-tokenizer-assets --use-dist-ckpt
    """,
    KERNELS: """
        --use-mcore-models --no-gradient-accumulation-fusion --attention-backend=flash|fused|unfused|local|auto --no-masked-softmax-fusion
        --no-rope-fusion --cross-entropy-loss-fusion --cross-entropy-fusion-impl=native|te --use-flash-attn
        --use-fused-weighted-squared-relu --enable-experimental --no-bias-swiglu-fusion --moe-router-fusion
        --no-bias-dropout-fusion --no-persist-layer-norm --disable-bf16-reduced-precision-matmul
        --batch-invariant-backend=te_native|deepgemm|triton
        --disable-clone-scatter-output-in-embedding --disable-jit-fuser --flash-attention-version=int
        --fused-residual-rmsnorm --kitchen-attention-backend=sdpa|fa --mla-down-proj-fusion
        --moe-mlp-glu-interleave-size=int --moe-shared-expert-glu-interleave-size=int --moe-single-grouped-bias
        --moe-single-grouped-weight --moe-use-grouped-tensor --no-clone-scatter-output-in-embedding --onnx-safe=text
        --output-logit-dtype=bf16|fp32 --use-grouped-gemm-for-dense-mlp --use-grouped-gemm-for-shared-expert
        --use-kitchen-attention --muon-use-syrk
    """,
    "Megatron core does not read it": "--openai-gelu",
    "process groups and their backend follow from the device and the layout: NCCL on GPUs, gloo on CPUs": """
        --distributed-backend=nccl|gloo|nccl2 --use-tp-pp-dp-mapping --disable-gloo-process-groups
        --high-priority-stream-groups=text+ --create-all-gather-group --disable-flight-recorder-dump-on-timeout
        --disable-flight-recorder-extra-dump-on-exec --disable-flight-recorder-include-only-active
        --distributed-timeout-seconds-after-init=int --flight-recorder-dump-path=text
        --flight-recorder-include-stack-trace --flight-recorder-trace-buffer-size=int --high-priority-a2a-comm-stream
        --lazy-mpu-init --local-rank=int --nccl-communicator-config-path=text --no-flight-recorder-dump-on-timeout
        --no-flight-recorder-extra-dump-on-exec --no-flight-recorder-include-only-active
        --pipeline-model-parallel-comm-backend=nccl|ucc --sharp-enabled-group=dp|dp_replica
        --tp-comm-bootstrap-backend=nccl|mpi|gloo --use-ring-exchange-p2p --use-sharp
    """,
    "datasets are memory-mapped and need no index of samples; training reads token ids, not text": """
        --data-cache-path=text --tiktoken-pattern=v1|v2 --no-create-attention-mask-in-dataloader --no-mmap-bin-files
        --sft-tokenizer-prompt-format=text --chat-template=text
        --dataloader-defer-npy-index-mmap --dataloader-fast-cache-load --disable-msc
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --enable-msc --mrope-section=int+
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --num-dataset-builder-threads=int --object-storage-cache-path=text --tokenizer-hf-no-include-special-tokens
        --tokenizer-hf-no-use-fast --tokenizer-metadata=text --tokenizer-sentencepiece-legacy --use-gigatoken
        --validation-set-names=text+
    """,
    "attention scores and softmax are computed in fp32": """
        --attention-softmax-in-fp32 --apply-query-key-layer-scaling
    """,
    "it concerns inference, not training": """
        --inference-max-seq-length=int --max-tokens-to-oom=int --inference-dynamic-batching-buffer-size-gb=float
        --inference-logging-step-interval=int --inference-max-requests=int --inference-dynamic-batching-max-requests=int
        --inference-dynamic-batching-prefix-caching --inference-dynamic-batching-max-tokens=int
        --inference-dynamic-batching-num-cuda-graphs=int --enable-chunked-prefill --flash-decode
        --inference-dynamic-batching-unified-memory-level=int --inference-rng-tracker --use-legacy-static-engine
        --mamba-inference-conv-states-dtype=bf16|fp16|fp32 --mamba-inference-ssm-states-dtype=bf16|fp16|fp32
        --moe-pad-experts-for-cuda-graph-inference --inference-dynamic-batching-sampling-backend=torch|flashinfer
        --rl-inference-tensor-model-parallel-size=int --decode-only-cuda-graphs
        --inference-cuda-graph-scope=none|layer|block --inference-dynamic-batching-async-sched-mode=legacy|async
        --inference-dynamic-batching-cuda-graph-sizing-distribution=exponential|linear
        --inference-dynamic-batching-prefix-caching-coordinator-policy=longest_prefix|first_prefix_block|load_balanced
        --inference-dynamic-batching-prefix-caching-eviction-policy=ref_zero|lru --inference-fuse-tp-communication
        --inference-moe-token-dispatcher-type=nccl|nvls --inference-dynamic-batching-block-size=int
        --inference-grouped-gemm-backend=flashinfer|torch|vllm --rl-inference-expert-model-parallel-size=int
        --rl-inference-expert-tensor-model-parallel-size=int --rl-inference-logprobs-is-correction
        --rl-inference-model-unified-memory-level=int --rl-inference-pipeline-model-parallel-size=int
        --cache-mla-latents --inference-batch-times-seqlen-threshold=int --inference-coordinator-port=int
        --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens=int --inference-disable-ep-consensus
        --inference-disable-triton-nvls-kernels --inference-dynamic-batching
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count=int
        --inference-dynamic-batching-logprobs-mode=raw_logprobs|processed_logprobs
        --inference-dynamic-batching-mamba-memory-ratio=float --inference-dynamic-batching-paused-buffer-size-gb=float
        --inference-dynamic-batching-prefix-caching-mamba-gb=float
        --inference-dynamic-batching-prefix-caching-routing-alpha=float
        --inference-dynamic-batching-track-generated-token-events
        --inference-dynamic-batching-track-paused-request-events --inference-moe-disable-fused-quant-kernels
        --inference-shards=text --inference-text-gen-server-logging --inference-use-synchronous-zmq-collectives
        --inference-wandb-logging --mlp-chunks-for-prefill=int --mlp-chunks-for-training=int
        --nccl-all-reduce-for-prefill --no-inference-disable-ep-consensus --no-inference-dynamic-batching-prefix-caching
        --no-inference-text-gen-server-logging --no-inference-use-synchronous-zmq-collectives
        --no-inference-wandb-logging --no-rl-inference-logprobs-is-correction --num-speculative-tokens=int
        --rl-inference-parsers=text* --symmetric-ar-type=two_shot|one_shot|multimem_all_reduce
        --use-same-sampling-seed-across-dp-ranks
    """,
    OVERLAP: """
        --overlap-grad-reduce --overlap-param-gather --overlap-moe-expert-parallel-comm --ddp-num-buckets=int
        --ddp-average-in-collective --defer-embedding-wgrad-compute --overlap-p2p-communication-warmup-flush
        --wgrad-deferral-limit=int --ddp-pad-buckets-for-high-nccl-busbw --overlap-param-gather-with-optimizer-step
        --delay-wgrad-compute --tp-comm-overlap-cfg=text --ddp-bucket-size=int
        --ddp-param-name-patterns-for-fp32-local-accumulation=text+ --ddp-reduce-scatter-with-fp32-accumulation
        --disable-align-grad-reduce --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad
        --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --disable-tp-comm-split-ag --disable-tp-comm-split-rs
        --ep-overlap-early-attn-memory-release --no-align-grad-reduce --no-align-param-gather
        --no-gradient-reduce-div-fusion --no-overlap-p2p-communication --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad
        --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs --no-tp-comm-split-ag --no-tp-comm-split-rs
        --overlap-dispatch-backward-with-experts-wgrad --tp-comm-overlap-rs-dgrad
    """,
    "operations around the experts' matmuls are always fused": """
        --moe-permute-fusion
    """,
    "the router computes in fp32": """
        --moe-router-dtype=fp32|fp64
    """,
    "steps do not wait for garbage collection": """
        --manual-gc --manual-gc-interval=int --disable-manual-gc-eval --no-manual-gc-eval --train-sync-interval=int
    """,
    "there are no CUDA graphs: torch.compile is applied to each block": """
        --cuda-graph-impl=none|local|transformer_engine|full_iteration --te-rng-tracker --cuda-graph-modules=text+
        --enable-cuda-graph --cuda-graph-warmup-steps=int --cuda-graph-scope=text+ --delay-offload-until-cuda-graph
        --external-cuda-graph --optimizer-cuda-graph
    """,
    "it is read only with --perform-rl-step, which is refused": """
        --grpo-clamp-eps-lower=float --grpo-clamp-eps-upper=float --grpo-group-size=int --grpo-iterations=int
        --grpo-kl-beta=float --grpo-prompts-per-step=int --langrl-env-config=text --grpo-entropy-term-weight=float
        --rl-sequence-packing-algo=fifo|round-robin --rl-use-sequence-packing --rl-partial-rollouts
        --rl-generation-lag=float --rl-offload-optimizer-during-inference --refit-method=nccl|gloo|nvshmem
        --rl-consumption-granularity=R|G|B --rl-default-temperature=float --rl-default-top-p=float
        --rl-submission-granularity=R|G|B --no-rl-persist-cuda-graphs --no-rl-use-sequence-packing
        --rl-default-top-k=int --rl-importance-sampling-truncation-coef=float
        --rl-kv-cache-management-mode=persist|offload|recompute --rl-offload-inference-model-weights-when-idle
        --rl-persist-cuda-graphs --rl-skip-bos-token --rl-training-cuda-graphs --grpo-filter-groups-with-same-reward
        --no-rl-offload-inference-model-weights-when-idle --no-rl-partial-rollouts --no-rl-skip-bos-token
        --no-rl-training-cuda-graphs --no-rl-verify-model-weights-swap --rl-durable-rollout-bank
        --rl-max-inflight-requests=int --rl-profile --rl-profile-dir=text --rl-prompts-per-eval=int
        --rl-rollout-bank-dir=text --rl-rollout-bank-max-bytes=int --rl-sequence-packing-max-sequences-per-bin=int
        --rl-verify-model-weights-swap
    """,
    "every step is checked; one with NaN or Inf is skipped and counted, and its origin is reported": """
        --no-check-for-nan-in-loss-and-grad --test-mode --check-for-large-grads --check-for-spiky-loss
    """,
    "it belongs to vision or retrieval models, which are not supported": """
        --img-h=int --img-w=int --patch-dim=int --bert-embedder-type=megatron|huggingface --bert-load=text
        --biencoder-projection-dim=int --biencoder-shared-query-context-model --block-data-path=text
        --classes-fraction=float --data-per-class-fraction=float --dino-bottleneck-size=int
        --dino-freeze-last-layer=float --dino-head-hidden-size=int --dino-local-crops-number=int
        --dino-local-img-size=int --dino-norm-last-layer --dino-teacher-temp=float --dino-warmup-teacher-temp=float
        --dino-warmup-teacher-temp-epochs=int --embedding-path=text --evidence-data-path=text --head-lr-mult=float
        --ict-head-size=int --ict-load=text --indexer-batch-size=int --indexer-log-interval=int --iter-per-epoch=int
        --mask-factor=float --mask-type=random|row --num-channels=int --num-classes=int --output-bert-embeddings
        --query-in-block-prob=float --retriever-report-topk-accuracies=int+ --retriever-score-scaling
        --sample-rate=float --swin-backbone-type=tiny|base|h3 --titles-data-path=text --use-one-sent-docs
        --vision-backbone-type=vit|mit|swin --vision-pretraining-type=classify|inpaint|dino
    """,
    "weights are gathered in the compute dtype, scales are updated every step, and experts are padded where necessary": """
        --fp8-param-gather --fp8-interval=int --keep-fp8-transpose-cache --moe-router-padding-for-quantization
        --moe-router-padding-for-fp8 --reuse-grad-buf-for-mxfp8-param-ag
    """,
    "it is read only with --fp4-format, which is refused": """
        --fp4-param-gather --fp4-quantizer-factory=text --fp4-recipe=nvfp4|custom
    """,
    "Mamba-2 has one implementation, in fp32": """
        --disable-mamba-mem-eff-path --mamba-training-ssm-states-dtype=fp32|bf16
    """,
    "it is read only with sparse attention, whose flags are refused": """
        --dsa-indexer-head-dim=int --dsa-indexer-loss-coeff=float --dsa-indexer-n-heads=int --dsa-indexer-topk=int
        --disable-dsa-indexer-rotate-activation --disable-dsa-indexer-scoring-relu
        --dsa-indexer-k-norm-epsilon=float --dsa-indexer-k-norm-fp32 --dsa-indexer-rope-interleaved
        --dsa-indexer-skip-topk-offset=int --dsa-indexer-topk-freq=int --dsa-indexer-use-sparse-loss
        --dsa-kernel-backend=none|tilelang|cudnn --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute=int
        --gdp-num-householder=int --no-dsa-indexer-rotate-activation
        --no-dsa-indexer-scoring-relu
    """,
    "the launcher, the hang watch and restarts from the newest complete checkpoint are always on": """
        --rerun-mode=disabled|validate_results|report_stats
        --error-injection-type=correct_result|transient_error|persistent_error --adlr-autoresume
        --adlr-autoresume-interval=int --calc-ft-timeouts --enable-ft-package --fault-injector-delay-start-iteration=int
        --fault-injector-fault-delay=float --fault-injector-fault-types=text --fault-injector-num-ranks=int
        --fault-injector-offset-seconds=float --fault-injector-ranks=text --fault-injector-seed=int
        --ft-num-warmup-iters=int --inprocess-active-world-size=int --inprocess-barrier-timeout=float
        --inprocess-completion-timeout=float --inprocess-empty-cuda-cache --inprocess-granularity=node|rank
        --inprocess-hard-timeout=float --inprocess-heartbeat-interval=float --inprocess-heartbeat-timeout=float
        --inprocess-last-call-wait=float --inprocess-max-iterations=int --inprocess-monitor-process-interval=float
        --inprocess-monitor-thread-interval=float --inprocess-progress-watchdog-interval=float
        --inprocess-soft-timeout=float --inprocess-termination-grace-time=float --non-persistent-global-ckpt-dir=text
        --non-persistent-local-ckpt-algo=fully_parallel|atomic --non-persistent-local-ckpt-dir=text --replication
        --replication-factor=int --replication-jump=int --result-rejected-tracker-filename=text
    """,
    "code in a model's folder is never run": """
        --trust-remote-code
    """,
    "it only saves memory; use parallel.recompute_granularity or parallel.cpu_offloading_num_layers": """
        --empty-unused-memory-level=int --moe-layer-recompute --fine-grained-activation-offloading
        --offload-modules=text+ --expert-tensor-parallel-num-weight-shards=int --tensor-parallel-num-weight-shards=int
        --activation-offload-fraction=float --cpu-offloading-retain-pinned-cpu-buffers
        --delta-offload-bytes-across-pp-ranks=int --fine-grained-offloading-max-inflight-offloads=int
        --gtp-expert-remat-nccl-ub --gtp-remat-nccl-ub --gtp-remat-opt-in-modules=text+
        --gtp-remat-reduce-scatter-with-fp32-accumulation --min-offloaded-tensor-size=int --no-pin-cpu-grads
        --no-pin-cpu-params --use-torch-optimizer-for-cpu-offload
    """,
    "there is no random state: initial weights, dropout and data order depend only on the seed": """
        --no-load-rng --no-save-rng
    """,
    "it tunes dispatchers that Megalith does not have": """
        --moe-flex-dispatcher-backend=deepep|hybridep|ncclep --moe-hybridep-num-sms=int
        --moe-flex-dispatcher-num-sms=int --moe-combine-bwd-dtype=bf16|mxfp8 --moe-deepep-num-sms=int
        --moe-dispatch-fwd-dtype=bf16|mxfp8 --moe-enable-deepep --moe-hybridep-num-blocks-permute=int
        --moe-hybridep-num-blocks-unpermute=int --moe-hybridep-num-sms-preprocessing=int
        --moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-zero-copy --moe-paged-stash
        --moe-paged-stash-buffer-size-factor-cpu=float --moe-paged-stash-buffer-size-factor-cuda=float
        --moe-paged-stash-page-size=int --moe-permute-fusion-into-hybridep
    """,
    "gradients and weights are stored and summed in fp32, which is at least as accurate": """
        --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 --main-grads-dtype=fp32|bf16
        --main-params-dtype=fp32|fp16
    """,
    "it tunes Megatron's FSDP; Megalith shards with PyTorch's FSDP2": """
        --no-use-layer-wise-param-layout --megatron-fsdp-grad-comm-dtype=fp32|fp16|bf16|auto
        --megatron-fsdp-main-grads-dtype=fp32|bf16|fp16|auto --megatron-fsdp-main-params-dtype=fp32|bf16|fp16|auto
        --outer-dp-sharding-strategy=no_shard|optim --fsdp-double-buffer --init-model-with-meta-device --use-nccl-ub
        --fsdp-manual-registration --disable-strict-fsdp-dtensor-load --disable-symmetric-registration
        --enable-full-sharding-in-hsdp --fsdp-db-use-persist-buf-on-alloc-fail
        --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
        --megatron-fsdp-version=int --no-strict-fsdp-dtensor-load --suggested-communication-unit-size=int
        --torch-fsdp2-no-reshard-after-forward
    """,
    "the flags always determine the schedule; on a resume, differences from the checkpoint are logged": """
        --override-opt_param-scheduler --override-opt-param-scheduler
    """,
    "the list of flags is `megalith megatron flags`": """
        --help
    """,
    "TP's communication needs no extra buffers; parallel.tp_comm_overlap selects ping-pong instead": """
        --tp-comm-overlap
    """,
    "Megatron replaces it by --hidden-size / --mup-base-hidden-size": """
        --mup-width-mult=float
    """,
    "initial weights are the same on every device and in every layout": """
        --use-cpu-initialization --no-initialization
    """,
    "with --exit-signal-handler, SIGTERM, SIGUSR1, SIGINT and SIGHUP save and end the run": """
        --exit-signal=text --exit-signal-handler-for-dataloader --exit-signal-handler-for-training
    """,
    "it is read only with --logits-save-dir or --logits-load-dir, which are refused": """
        --logits-load-decode-threads=int --logits-load-ignore-errors --logits-load-kd-loss-alpha=float
        --logits-load-msc-prefetch-depth=int --logits-load-prefetch-factor=int --logits-save-dtype=fp16|bf16|fp32
        --logits-save-top-k=int --logits-save-top-p=float --logits-save-top-p-min-k=int
    """,
    "it is read only with --hybrid-context-parallel, which is refused": """
        --max-seqlen-per-dp-cp-rank=int
    """,
    "it is read only with --enable-mhc-connections, which is refused": """
        --mhc-init-gating-factor=float --mhc-num-residual-streams=int --mhc-recompute-layer-num=int
        --mhc-sinkhorn-iterations=int
    """,
}


def _row(reason: str, word: str) -> tuple[str, NoEffect]:
    flag, _, takes = word.partition("=")
    return flag, NoEffect(takes or "switch", reason)


NO_EFFECT: dict[str, NoEffect] = dict(
    _row(reason, word) for reason, flags in BY_REASON.items() for word in flags.split()
)
