"""Megatron-LM's flags (core 0.20.0) that are refused, with the reason and the way out. The first strings are reasons
shared by several rows."""

from __future__ import annotations

from megalith.dialects.megatron.flag_kinds import Flag, Refused

# Reasons for refusing a flag, with the way out. They complete "is refused: …".
FP8_OTHER = "--fp8-recipe and --first-last-layers-bf16 determine which matmuls are in FP8; remove it"
FP4 = "FP4 matmuls are not supported; remove it to train in bf16"
HYBRID = "hybrid models support neither this nor multi-token prediction; remove it"
SPEC = "layers are built from the settings, not from a custom spec; remove it if it names the GPT layer"
FORMULA = "it changes the model's or the optimizer's formula, which is not supported; remove it"
INIT = "weights are initialized as N(0, --init-method-std); remove it, or load weights with --load and --finetune"
DECAY = "only matrices have weight decay; remove it"
BATCH_SCHEDULE = "only --step-batch-size-schedule changes the batch size; use it, or remove this flag"
DATA = "samples are those of Megatron's GPTDataset, without this option; remove it"
SFT = "it trains on conversations; this command trains on indexed datasets"
SFT_FILE = "this command trains on indexed datasets; remove it, and use megalith sft"
EVALUATION = "evaluations are --eval-iters global batches every --eval-interval steps; remove it"
PACKED = (
    "Megatron reads it for the packed conversations of --sft; this command trains on indexed datasets. Remove it, and set "
    "parallel.dynamic_context_parallel in a run file of megalith sft"
)
DISTILL = (
    "`megalith teacher-logits` writes a teacher's logits, and `megalith distill` trains on them; remove it"
)
FROZEN = "freezing is supported only by adapters (lora.rank in a run file); remove it"
RL = "this command pre-trains; remove it"
VISION_TRAINING = "vision models are not supported; remove it"
SPECIAL_TOKENS = "special tokens are the tokenizer's; remove it"
PADDED_DATA = (
    "Megatron leaves tokens of the dataset that are padding tokens out of the loss, which is not supported; remove it "
    "if the dataset has none"
)
YAML = "this command reads flags; `megalith train run.yaml` reads run files"
OLD_MODEL_PARALLEL = "Megatron has removed it; use --tensor-model-parallel-size"
OLD_BATCH = "Megatron has removed it; use --micro-batch-size"
OLD_WARMUP = "Megatron has removed it; use --lr-warmup-fraction"
OLD_CHECKPOINT = "Megatron has removed it; use --recompute-granularity full --recompute-method uniform"
CKPT_STATE = "a checkpoint is loaded as it was saved; choose the step with --ckpt-step"
ARTEFACT = "its output is not written; remove it, or ignore it with --ignore-unknown"
TEMPORARY_SAVES = (
    "all checkpoints are persistent; lower --save-interval, and use --async-save if saving takes long"
)
IN_PROCESS = "a failed job restarts from its newest complete checkpoint; use torchrun --max-restarts"
INJECTION = "faults are not injected; remove it"
DRY_RUN = "processes are real; remove it"


# fmt: off
REFUSED: dict[str, Flag] = {
    "--mtp-hybrid-override-pattern":              Refused("text", HYBRID),
    "--heterogeneous-layers-config-encoded-json": Refused("text", SPEC),
    "--heterogeneous-layers-config-path":         Refused("text", SPEC),
    "--fp8-output-proj":                          Refused("switch", FP8_OTHER),
    "--fp8-quantizer-factory":                    Refused("text", FP8_OTHER),
    "--te-precision-config-file":                 Refused("text", FP8_OTHER),
    "--perform-rl-step":                          Refused("switch", RL),
    "--apply-wd-to-qk-layernorm":                 Refused("switch", DECAY),
    "--no-weight-decay-cond-type":                Refused("apply_wd_to_qk_layernorm", DECAY),
    "--moe-latent-size":                          Refused("int", FORMULA),
    "--moe-enable-routing-replay":                Refused("switch", FORMULA),
    "--mtp-use-repeated-layer":                   Refused("switch", FORMULA),
    "--enable-mhc-connections":                   Refused("switch", FORMULA),
    "--fp16-lm-cross-entropy":                    Refused("switch", FORMULA),
    "--fp32-residual-connection":                 Refused("switch", FORMULA),
    "--moe-expert-rank-capacity-factor":          Refused("float", FORMULA),
    "--moe-input-jitter-eps":                     Refused("float", FORMULA),
    "--moe-router-force-biased":                  Refused("float", FORMULA),
    "--moe-router-quantile-balancing-ema":        Refused("float", FORMULA, default=0.0),
    "--mtp-detach-heads":                         Refused("switch", FORMULA),
    "--mtp-hsm":                                  Refused("switch", FORMULA),
    "--mtp-standalone":                           Refused("switch", FORMULA),
    "--decrease-batch-size-if-needed":            Refused("switch", BATCH_SCHEDULE),
    "--phase-transition-iterations":              Refused("text", BATCH_SCHEDULE),
    "--error-injection-rate":                     Refused("int", INJECTION, default=0, harmless=True),
    "--fault-injector-fault-probabilities":       Refused("text", INJECTION, harmless=True),
    "--fault-injector-mtti-seconds":              Refused("float", INJECTION, harmless=True),
    "--gpu-sniff-test-interval":                  Refused("int", INJECTION, harmless=True),
    "--eval-global-batch-size":                   Refused("int", EVALUATION),
    "--eval-micro-batch-size":                    Refused("int", EVALUATION),
    "--full-validation":                          Refused("switch", EVALUATION),
    "--multiple-validation-sets":                 Refused("switch", EVALUATION),
    "--start-eval-at-iter":                       Refused("int", EVALUATION),
    "--dataloader-inter-document-masking":        Refused("switch", DATA),
    "--iterations-to-skip":                       Refused("int+", DATA),
    "--mid-level-dataset-surplus":                Refused("float", DATA, default=0.005),
    "--no-data-sharding":                         Refused("switch", DATA),
    "--per-dataset-sequences-path":               Refused("text", DATA),
    "--sft":                                      Refused("switch", SFT),
    "--checkpoint-activations":                   Refused("switch", OLD_CHECKPOINT),
    "--data-parallel-random-init":                Refused("switch", INIT),
    "--embedding-init-method-std":                Refused("float", INIT),
    "--init-method-xavier-uniform":               Refused("switch", INIT),
    "--moe-upcycling-granularity":                Refused("int", INIT, default=1),
    "--moe-use-upcycling":                        Refused("switch", INIT),
    "--record-memory-history":                    Refused("switch", ARTEFACT, harmless=True),
    "--ckpt-convert-format":                      Refused("torch|torch_dist", ARTEFACT, harmless=True),
    "--dump-param-to-param-group-map":            Refused("text", ARTEFACT, harmless=True),
    "--moe-routing-trace-path":                   Refused("text", ARTEFACT, harmless=True),
    "--save-activations-interval":                Refused("int", ARTEFACT, harmless=True),
    "--save-dgrads-interval":                     Refused("int", ARTEFACT, harmless=True),
    "--save-params-interval":                     Refused("int", ARTEFACT, harmless=True),
    "--save-tokens-per-expert-interval":          Refused("int", ARTEFACT, harmless=True),
    "--save-wgrads-interval":                     Refused("int", ARTEFACT, harmless=True),
    "--batch-size":                               Refused("int", OLD_BATCH),
    "--fake-process-group":                       Refused("switch", DRY_RUN, harmless=True),
    "--fp4-format":                               Refused("e2m1", FP4),
    "--freeze-all-layers":                        Refused("switch", FROZEN),
    "--hybrid-context-parallel":                  Refused("switch", PACKED),
    "--inprocess-restart":                        Refused("switch", IN_PROCESS, harmless=True),
    "--load-main-params-from-ckpt":               Refused("switch", CKPT_STATE),
    "--override-ckpt-iteration":                  Refused("int", CKPT_STATE),
    "--logits-load-dir":                          Refused("text", DISTILL),
    "--logits-save-dir":                          Refused("text", DISTILL),
    "--model-parallel-size":                      Refused("int", OLD_MODEL_PARALLEL),
    "--non-persistent-ckpt-type":                 Refused("global|local|in_memory", TEMPORARY_SAVES, harmless=True),
    "--non-persistent-save-interval":             Refused("int", TEMPORARY_SAVES, harmless=True),
    "--tiktoken-num-special-tokens":              Refused("int", SPECIAL_TOKENS, default=1000),
    "--null-tokenizer-eod-id":                    Refused("int", SPECIAL_TOKENS),
    "--allow-ambiguous-pad-tokens":               Refused("switch", PADDED_DATA),
    "--null-tokenizer-pad-id":                    Refused("int", PADDED_DATA, default=-1),
    "--tokenizer-special-tokens":                 Refused("text+", SPECIAL_TOKENS),
    "--vision-pretraining":                       Refused("switch", VISION_TRAINING),
    "--warmup":                                   Refused("int", OLD_WARMUP),
    "--yaml-cfg":                                 Refused("text", YAML),
}
# fmt: on
