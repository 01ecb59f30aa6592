"""Flags that scripts use but Megatron-LM's core 0.20.0 does not have: flags of other releases, of guides, and of
ModelOpt."""

from __future__ import annotations

from megalith.dialects.megatron.flag_kinds import Flag, NoEffect, Refused, Sets
from megalith.dialects.megatron.no_effect_flags import KERNELS, OVERLAP
from megalith.dialects.megatron.refused_flags import FORMULA, HYBRID, PACKED, SFT_FILE

# fmt: off
# Flags that core 0.20 refuses but scripts still use: of earlier releases, of a later one, and of guides.
DYNAMIC_ALONE = "it is read only with --dynamic-context-parallel, which is refused"
AS_NOW = "Megatron has removed it, and the run does not depend on it"
OLDER: dict[str, Flag] = {
    "--data-impl":                               NoEffect("mmap|infer", AS_NOW),
    "--DDP-impl":                                NoEffect("local|torch", AS_NOW),
    "--no-async-tensor-model-parallel-allreduce": NoEffect("switch", AS_NOW),
    "--no-contiguous-buffers-in-local-ddp":      NoEffect("switch", AS_NOW),
    "--no-scatter-gather-tensors-in-pipeline":   NoEffect("switch", AS_NOW),
    "--no-query-key-layer-scaling":              NoEffect("switch", AS_NOW),
    "--log-batch-size-to-tensorboard":           NoEffect("switch", AS_NOW),
    "--log-learning-rate-to-tensorboard":        NoEffect("switch", AS_NOW),
    "--use-legacy-models":                       NoEffect("switch", "Megatron has removed it: layers are as its core's"),
    "--legacy-tokenizer":                        NoEffect("switch", AS_NOW),
    "--moe-use-legacy-grouped-gemm":             NoEffect("switch", AS_NOW),
    "--no-moe-router-aux-loss-fusion":           NoEffect("switch", KERNELS),
    "--fp8-hybrid":                              Refused("switch", "Megatron has removed it; use --fp8-format hybrid"),
    "--fp8-e4m3":                                Refused("switch", "Megatron has removed it; use --fp8-format e4m3"),
    "--distribute-checkpointed-activations":     Refused(
        "switch", "Megatron has removed it; use --distribute-saved-activations"
    ),
    "--activations-checkpoint-method":           Refused(
        "text", "Megatron has removed it; use --recompute-granularity full and --recompute-method"
    ),
    "--checkpoint-num-layers":                   Refused(
        "int", "Megatron has removed it; use --recompute-num-layers"
    ),
    # Later releases rename --hybrid-context-parallel.
    "--dynamic-context-parallel":                Refused("switch", PACKED),
    "--min-dynamic-context-parallel-size":       NoEffect("int", DYNAMIC_ALONE),
    "--sequence-packing-scheduler":              Refused("dp_balanced|default_dynamic_cp", PACKED),
    "--delay-grad-reduce":                       NoEffect("switch", AS_NOW),
    "--overlap-p2p-communication":               NoEffect("switch", AS_NOW),
    # Guides use these for --optimizer-cpu-offload, --log-straggler and --ddp-bucket-size.
    "--cpu-offload-optimizer":                   Sets("switch", "optim.optimizer_cpu_offload"),
    "--enable-straggler-detection":              Sets("switch", "runtime.enable_straggler_detection"),
    "--dp-comm-overlap-bucket-size":             NoEffect("int", OVERLAP),
}

# ModelOpt's flags (megatron/post_training/arguments.py), which Megatron-LM accepts if ModelOpt is installed. It reads
# them only for a ModelOpt checkpoint or a teacher.
MODELOPT_ALONE = "Megatron-LM reads it only for a ModelOpt checkpoint"
MODELOPT_MODEL = "ModelOpt models are not supported; remove it: without one Megatron-LM does not read it either"
QUANTIZED = "only ModelOpt quantizes models; remove it, and quantize the result of export-hf"
TEACHER = "this command has no teacher; remove it, and use megalith distill"
MODELOPT: dict[str, Flag] = {
    "--enable-gpt-oss":                NoEffect("switch", f"{MODELOPT_ALONE}; YaRN is --position-embedding-type yarn"),
    "--export-force-local-attention":  NoEffect("switch", KERNELS),
    "--export-legacy-megatron":        NoEffect("switch", MODELOPT_ALONE),
    "--export-te-mcore-model":         NoEffect("switch", MODELOPT_ALONE),
    "--export-default-te-spec":        NoEffect("switch", KERNELS),
    "--export-model-type":             Refused("GPTModel|HybridModel|MambaModel", HYBRID, default="GPTModel"),
    "--export-kv-cache-quant":         Refused("text", QUANTIZED, default="none"),
    "--export-real-quant-cfg":         Refused("text", QUANTIZED, default="None"),
    "--export-quant-cfg":              Refused("text", QUANTIZED),
    "--export-kd-teacher-load":        Refused("text", TEACHER),
    "--export-kd-teacher-model-config": Refused("text", TEACHER),
    "--export-kd-teacher-ckpt-format": Refused("torch|torch_dist|torch_dcp", TEACHER),
    "--export-kd-cfg":                 Refused("text", TEACHER),
    "--finetune-hf-dataset":           Refused("text", SFT_FILE),
    "--finetune-data-split":           Refused("text", SFT_FILE, default="train"),
    "--finetune-data-files":           Refused("text+", SFT_FILE),
    "--qad-train-target":              Refused("base|mtp|both", MODELOPT_MODEL),
    "--freeze-base-for-mtp":           Refused("switch", MODELOPT_MODEL),
    "--export-qk-l2-norm":             Refused("switch", "it belongs to ModelOpt's models; use --qk-l2-norm"),
    "--export-moe-apply-probs-on-input": Refused("switch", FORMULA),
    "--export-offline-model":          Refused("switch", MODELOPT_MODEL),
    "--modelopt-enabled":              Refused("switch", MODELOPT_MODEL),
}
# fmt: on
