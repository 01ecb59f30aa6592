"""Optimizer, learning-rate schedule and loss scale."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NegativeFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megalith.config.base import Decides, RequiresSetting, Section

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class RequiresOptimizer(RequiresSetting):
    """Requirement on `optim.optimizer` that an optimizer in `optim.param_groups` can also satisfy."""

    def __init__(self, *names: str, **options: Any):
        super().__init__("optimizer", *names, **options)

    def is_met(self, section: Section, config: Section | None) -> bool:
        return any(
            super(RequiresOptimizer, self).is_met(section.model_copy(update={"optimizer": name}), config)
            for name in section.optimizers
        )


ADAM = RequiresOptimizer(unless=("sgd", "lion", "adafactor"))
LION = RequiresOptimizer("lion")
ADEMAMIX = RequiresOptimizer("ademamix")
ADAFACTOR = RequiresOptimizer("adafactor")
MUON = RequiresOptimizer("muon")
SOAP = RequiresOptimizer("soap")
ADAM_OR_MUON = RequiresOptimizer("adamw", "adam", "muon", "soap", strict=True)
MomentDtype = Literal["fp32", "bf16", "fp8"]
WSD = RequiresSetting("lr_decay_style", "WSD")
GROWS = RequiresSetting("weight_decay_incr_style", "linear", "cosine", strict=True)
OFFLOADED = RequiresSetting("optimizer_cpu_offload", True)
FP16 = RequiresSetting("train.precision", "fp16")
QK_CLIP = RequiresSetting("qk_clip", True)


REGEX = "re:"


class ParamGroup(Section):
    """Settings of the parameters with names that match a pattern."""

    pattern: str
    """Parameter names: a glob for the full name (`layers.*.mlp.*`), or `re:` and a regular expression that matches
    anywhere in the name."""

    lr: NonNegativeFloat | None = None
    """Peak learning rate. The schedule of optim.lr is scaled to it."""

    lr_mult: NonNegativeFloat | None = None
    """Factor on the learning rate, instead of lr."""

    weight_decay: NonNegativeFloat | None = None
    """Weight decay of all parameters that match, vectors included. Default: optim.weight_decay, of matrices only."""

    optimizer: str | None = None
    """Optimizer of these parameters. Default: optim.optimizer."""

    @field_validator("pattern")
    @classmethod
    def _check_regex(cls, value: str) -> str:
        try:
            re.compile(value.removeprefix(REGEX) if value.startswith(REGEX) else "")
        except re.error as error:
            raise PydanticCustomError(
                "regex", "not a regular expression: {reason}", {"reason": str(error)}
            ) from None
        return value


class OptimConfig(Section):
    """Optimizer, parameter groups; warm-up and decay; clipping; fp16 loss scale."""

    decides: ClassVar[Decides] = Decides.UPDATES

    optimizer: str = "adamw"
    """Optimizer: `adamw` (decoupled weight decay), `adam` (decay added to the gradient), `sgd`, `muon` (orthogonalized
    momentum for matrices in layers, AdamW for the rest), `soap` (Adam in the eigenbases of Shampoo for the same
    matrices), `lion`, `ademamix`, `adafactor`, `schedule_free_adamw`, or a
    name passed to `register_optimizer`."""

    lr: NonNegativeFloat | None = None
    """Peak learning rate. Required for training."""

    param_groups: list[ParamGroup] = []
    """Parameter groups [{pattern, lr or lr_mult, weight_decay, optimizer}, …]: settings by parameter name. The first
    pattern that matches a name applies. `pattern` is a glob for the full name, or `re:` and a regular expression that
    matches anywhere in it."""

    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""

    decoupled_lr: PositiveFloat | None = None
    """Peak learning rate of the word embedding and the output matrix. Default: lr."""

    decoupled_min_lr: Annotated[NonNegativeFloat | None, RequiresSetting("decoupled_lr")] = None
    """Learning rate of embedding and output matrix at the end of the decay. Default: min_lr."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the decay after the warm-up."""

    lr_decay_iters: PositiveInt | None = None
    """Iterations after which the learning rate is min_lr. Default: train_iters."""

    lr_decay_samples: PositiveInt | None = None
    """Samples after which the learning rate is min_lr, if training is counted in samples. Default: train_samples."""

    lr_warmup_iters: NonNegativeInt = 0
    """Iterations of linear warm-up."""

    lr_warmup_samples: NonNegativeInt = 0
    """Samples of linear warm-up, if training is counted in samples."""

    lr_warmup_fraction: Fraction | None = None
    """Warm-up as a fraction of the decay."""

    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""

    lr_rewarm_start: PositiveInt | None = None
    """Step (or sample, in runs counted in samples) at which a second warm-up starts: the learning rate rises from
    lr_warmup_init to the schedule's value. Usually the checkpoint's step, if a run continues with other settings.
    Default: never."""

    lr_rewarm_length: Annotated[PositiveInt, RequiresSetting("lr_rewarm_start")] = 100
    """Length of the second warm-up, in steps or samples."""

    schedule_unit: Literal["iters", "samples"] = "iters"
    """For runs whose length is in iterations: advance the schedules per iteration, or per sample as Megatron-LM does,
    with lengths multiplied by global_batch_size. Both are the same if the batch size is constant."""

    lr_wsd_decay_style: Annotated[Literal["exponential", "linear", "cosine", "minus_sqrt"], WSD] = (
        "exponential"
    )
    """WSD: shape of the final decay."""

    lr_wsd_decay_iters: Annotated[PositiveInt | None, WSD] = None
    """WSD: iterations of the final decay."""

    lr_wsd_decay_samples: Annotated[PositiveInt | None, WSD] = None
    """WSD: samples of the final decay, if training is counted in samples."""

    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices; biases and other 1-D parameters have none."""

    start_weight_decay: Annotated[NonNegativeFloat | None, GROWS] = None
    """Weight decay at the start, if it changes during the run."""

    end_weight_decay: Annotated[NonNegativeFloat | None, GROWS] = None
    """Weight decay at the end, if it changes during the run."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the change from start_weight_decay to end_weight_decay."""

    adam_beta1: Annotated[Decay, ADAM] = 0.9
    """Decay of the first moment."""

    adam_beta2: Annotated[Decay, ADAM] = 0.999
    """Decay of the second moment."""

    adam_eps: Annotated[PositiveFloat, ADAM] = 1e-8
    """Constant added to the square root of the second moment."""

    exp_avg_dtype: Annotated[MomentDtype, ADAM_OR_MUON] = "fp32"
    """Storage dtype of Adam's first moment: fp32, `bf16`, or `fp8`, an 8-bit dynamic float with an fp32 scale per block
    of up to 256 elements. Rounded stochastically, identically in every layout; fp32 in checkpoints. Muon's momentum
    has muon_state_dtype."""

    exp_avg_sq_dtype: Annotated[MomentDtype, ADAM_OR_MUON] = "fp32"
    """Storage dtype of Adam's second moment."""

    lion_beta1: Annotated[Decay, LION] = 0.95
    """Weight of Lion's momentum in the update."""

    lion_beta2: Annotated[Decay, LION] = 0.98
    """Decay of Lion's momentum."""

    ademamix_beta3: Annotated[Decay, ADEMAMIX] = 0.9999
    """Decay of AdEMAMix's slow average of the gradient."""

    ademamix_alpha: Annotated[NonNegativeFloat, ADEMAMIX] = 5.0
    """Weight of AdEMAMix's slow average; usually 4 to 10."""

    ademamix_warmup_iters: Annotated[PositiveInt | None, ADEMAMIX] = None
    """Steps over which ademamix_alpha and ademamix_beta3 grow to their values. The authors use the length of the run.
    Default: none."""

    adafactor_beta2_decay: Annotated[NegativeFloat, ADAFACTOR] = -0.8
    """Adafactor weights the new squared gradient by the step number to this power."""

    adafactor_clip_threshold: Annotated[PositiveFloat, ADAFACTOR] = 1.0
    """Maximum RMS of an Adafactor update. Larger updates are scaled down to it."""

    sgd_momentum: Annotated[Decay, RequiresOptimizer("sgd")] = 0.9
    """Momentum of SGD."""

    muon_momentum: Annotated[Decay, MUON] = 0.95
    """Momentum of Muon."""

    muon_momentum_warmup_iters: Annotated[NonNegativeInt, MUON] = 0
    """Steps over which Muon's momentum grows linearly from muon_momentum_start to muon_momentum. 0: none."""

    muon_momentum_start: Annotated[Decay, RequiresSetting("muon_momentum_warmup_iters", greater_than=0)] = (
        0.85
    )
    """Momentum of Muon at the start of its warm-up."""

    muon_nesterov: Annotated[bool, MUON] = True
    """Use Nesterov momentum in Muon."""

    muon_num_ns_steps: Annotated[PositiveInt, MUON] = 5
    """Number of Newton-Schulz steps."""

    muon_coefficient_type: Annotated[Literal["simple", "quintic", "polar_express", "aol"], MUON] = "simple"
    """Coefficients of the Newton-Schulz steps: those of Jordan et al. for all steps (`simple`), sets for 5 (`quintic`)
    or 4 (`aol`) steps, which repeat, or Polar Express, whose eighth step repeats."""

    muon_split_qkv: Annotated[bool, MUON] = True
    """Orthogonalize query, key and value separately. Off: as one matrix."""

    muon_split_gate_up: Annotated[bool, MUON] = True
    """Orthogonalize gate and up of a gated MLP separately. Off: as one matrix, as in Megatron-LM."""

    muon_split_heads: Annotated[bool, MUON] = False
    """Orthogonalize the projections to queries, keys and values per attention head."""

    muon_moment2_method: Annotated[Literal["none", "normuon", "adamuon"], MUON] = "none"
    """Second moment after orthogonalization: `normuon` normalizes each row by a running mean of its squares, `adamuon`
    each element, as Megatron-LM's adaptive_muon."""

    muon_beta2: Annotated[Decay, RequiresSetting("muon_moment2_method", "normuon", "adamuon")] = 0.95
    """Decay of the second moment of NorMuon and AdaMuon."""

    muon_state_dtype: Annotated[MomentDtype, MUON] = "fp32"
    """Storage dtype of Muon's momentum and of AdaMuon's second moment, as in exp_avg_dtype."""

    muon_scalar_optimizer: Annotated[str, MUON] = "adamw"
    """Optimizer of the parameters that are not matrices of layers: `adamw`, `lion` or another one."""

    muon_scale_mode: Annotated[Literal["spectral", "unit_rms_norm", "shape_scaling"], MUON] = "spectral"
    """Factor on the update of a matrix [rows, columns]: √max(rows, columns), √(rows / columns), or √max(1, rows /
    columns)."""

    muon_extra_scale_factor: Annotated[PositiveFloat, MUON] = 0.2
    """Additional factor on Muon's updates. 0.2 with `spectral` gives updates the size of AdamW's."""

    muon_fp32_matmul_prec: Annotated[Literal["medium", "highest"] | None, MUON] = None
    """Precision of Newton-Schulz: bf16 (`medium`) or fp32 (`highest`). Default: fp32 if train.precision is fp32,
    otherwise bf16."""

    soap_shampoo_beta: Annotated[Decay, SOAP] = 0.95
    """Decay of SOAP's averages of G·Gᵀ and Gᵀ·G, whose eigenvectors are its bases. The decays of Adam's moments are
    adam_beta1 and adam_beta2; the authors use 0.95 for both."""

    soap_precondition_frequency: Annotated[PositiveInt, SOAP] = 10
    """Steps between updates of SOAP's bases. Unused with soap_use_kl_shampoo, which updates them in every step."""

    soap_max_precond_dim: Annotated[PositiveInt | None, SOAP] = 10000
    """Largest dimension for which SOAP keeps a basis; longer dimensions are not rotated. Null: no limit."""

    soap_use_kl_shampoo: Annotated[bool, SOAP] = False
    """Use the averages of KL-Shampoo (Lin et al. 2025) and update the bases before each step, as Megatron-LM's soap
    does."""

    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay of a moving average of the weights, for example 0.999, which is evaluated and exported. 4 bytes per
    parameter, sharded like the optimizer state. Default: no average."""

    clip_grad: NonNegativeFloat = 1.0
    """Maximum norm of the gradient. 0: no clipping."""

    qk_clip: bool = False
    """Rescale the query and key weights of attention heads whose largest logit in a step is above qk_clip_threshold, as
    MuonClip does (Kimi K2). Recording the logits repeats one matmul of attention."""

    qk_clip_threshold: Annotated[PositiveFloat, QK_CLIP] = 100.0
    """Attention logit above which qk_clip rescales a head."""

    qk_clip_alpha: Annotated[float, Field(gt=0.0, lt=1.0), QK_CLIP] = 0.5
    """Power of qk_clip's factor that multiplies query weights; key weights get the power 1 − qk_clip_alpha."""

    loss_scale: PositiveFloat | None = None
    """Fixed loss scale for fp16. Default: dynamic."""

    initial_loss_scale: Annotated[PositiveFloat, FP16] = 2.0**16
    """Initial dynamic loss scale, as in PyTorch. Megatron-LM's 2^32 causes ten or more skipped steps."""

    min_loss_scale: Annotated[PositiveFloat, FP16] = 1.0
    """Minimum of the dynamic loss scale."""

    loss_scale_window: Annotated[PositiveInt, FP16] = 1000
    """Good steps after which the loss scale doubles."""

    hysteresis: Annotated[PositiveInt, FP16] = 2
    """Overflowing steps before the loss scale halves."""

    optimizer_cpu_offload: Annotated[bool, Decides.NOTHING] = False
    """Store optimizer state in host memory and update these parameters on the CPU."""

    optimizer_offload_fraction: Annotated[Fraction, Decides.NOTHING, OFFLOADED] = 1.0
    """Fraction of the optimizer state in host memory."""

    overlap_cpu_optimizer_d2h_h2d: Annotated[bool, Decides.NOTHING, OFFLOADED] = True
    """Overlap copies to and from the host with the CPU's updates. Off: uses less pinned memory."""

    @property
    def optimizers(self) -> list[str]:
        """Names of the optimizers in use."""
        names = [self.optimizer, *(group.optimizer for group in self.param_groups if group.optimizer)]
        return names + [self.muon_scalar_optimizer] * ("muon" in names)

    @property
    def reduces_moments(self) -> bool:
        """True if a moment of Adam is stored in less than fp32."""
        return (self.exp_avg_dtype, self.exp_avg_sq_dtype) != ("fp32", "fp32")
