"""The optimizer, its learning-rate schedule and its loss scale."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megalith.config import small
from megalith.config.base import KEPT, Decides, Needs, Section, Shrinks

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
ADAM = Needs("optimizer", but="sgd")
MUON = Needs("optimizer", "muon")
ADAM_OR_MUON = Needs("optimizer", "adamw", "adam", "muon", strict=True)
MomentDtype = Literal["fp32", "bf16", "fp8"]
WSD = Needs("lr_decay_style", "WSD")
GROWS = Needs("weight_decay_incr_style", "linear", "cosine", strict=True)
OFFLOADED = Needs("optimizer_cpu_offload", True)
FP16 = Needs("train.precision", "fp16")


class OptimConfig(Section):
    """AdamW, Adam, SGD, Muon or one's own; warm-up and decay; clipping; the fp16 loss scale."""

    decides: ClassVar[Decides] = Decides.UPDATES

    optimizer: Annotated[str, KEPT] = "adamw"
    """`adamw` decays weights apart from the gradient; `adam` adds the decay to the gradient; `sgd`; `muon` makes the
    momentum of layers' matrices orthogonal, and is AdamW for the rest; or a name given to `register_optimizer`."""

    lr: Annotated[
        NonNegativeFloat | None,
        Shrinks(lambda value, _: min(value or small.HIGHEST_RATE, small.HIGHEST_RATE)),
    ] = None
    """Highest learning rate. Required for training."""

    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""

    decoupled_lr: PositiveFloat | None = None
    """Highest learning rate of the word embedding and the output matrix, where it is not lr."""

    decoupled_min_lr: Annotated[NonNegativeFloat | None, Needs("decoupled_lr")] = None
    """Learning rate of these two at the end of the decay. Absent: min_lr."""

    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"], Shrinks("constant")
    ] = "cosine"
    """Shape of the decay after the warm-up."""

    lr_decay_iters: PositiveInt | None = None
    """Iterations until min_lr. Absent: train_iters."""

    lr_decay_samples: PositiveInt | None = None
    """Samples until min_lr, when training is counted in samples. Absent: train_samples."""

    lr_warmup_iters: NonNegativeInt = 0
    """Iterations of linear warm-up."""

    lr_warmup_samples: NonNegativeInt = 0
    """Samples of linear warm-up, when training is counted in samples."""

    lr_warmup_fraction: Fraction | None = None
    """Warm-up as a fraction of the decay."""

    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""

    schedule_unit: Literal["iters", "samples"] = "iters"
    """What moves the schedules of a run counted in iterations: each iteration alike or, as in Megatron-LM, its samples,
    all lengths being iterations × global_batch_size. The same where the batch does not grow."""

    lr_wsd_decay_style: Annotated[Literal["exponential", "linear", "cosine", "minus_sqrt"], WSD] = (
        "exponential"
    )
    """WSD: shape of the last decay."""

    lr_wsd_decay_iters: Annotated[PositiveInt | None, WSD] = None
    """WSD: iterations of the last decay."""

    lr_wsd_decay_samples: Annotated[PositiveInt | None, WSD] = None
    """WSD: samples of the last decay, when training is counted in samples."""

    weight_decay: Annotated[NonNegativeFloat, KEPT] = 0.01
    """Decay of matrices; biases and other 1-D parameters have none."""

    start_weight_decay: Annotated[NonNegativeFloat | None, GROWS] = None
    """Weight decay at the start, when it changes over the run."""

    end_weight_decay: Annotated[NonNegativeFloat | None, GROWS] = None
    """Weight decay at the end, when it changes over the run."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the weight decay moves from start to end."""

    adam_beta1: Annotated[Decay, KEPT, ADAM] = 0.9
    """Decay of the first moment."""

    adam_beta2: Annotated[Decay, KEPT, ADAM] = 0.999
    """Decay of the second moment."""

    adam_eps: Annotated[PositiveFloat, KEPT, ADAM] = 1e-8
    """Added to the square root of the second moment."""

    exp_avg_dtype: Annotated[MomentDtype, KEPT, ADAM_OR_MUON] = "fp32"
    """What the first moment is kept in: `bf16`, or `fp8`, an 8-bit dynamic float in blocks of up to 256 elements, each
    with an fp32 scale. Rounded stochastically, alike in every layout; in fp32 in checkpoints. Not Muon's momentum."""

    exp_avg_sq_dtype: Annotated[MomentDtype, KEPT, ADAM_OR_MUON] = "fp32"
    """What the second moment is kept in."""

    sgd_momentum: Annotated[Decay, KEPT, Needs("optimizer", "sgd")] = 0.9
    """SGD's momentum."""

    muon_momentum: Annotated[Decay, MUON] = 0.95
    """Muon's momentum."""

    muon_nesterov: Annotated[bool, MUON] = True
    """Looks one step of the momentum ahead."""

    muon_num_ns_steps: Annotated[PositiveInt, MUON] = 5
    """Newton-Schulz steps."""

    muon_scale_mode: Annotated[Literal["spectral", "unit_rms_norm", "shape_scaling"], MUON] = "spectral"
    """What an update of a matrix [rows, columns] is multiplied by: √max(rows, columns), √(rows / columns), or
    √max(1, rows / columns)."""

    muon_extra_scale_factor: Annotated[PositiveFloat, MUON] = 0.2
    """And by this. 0.2 with `spectral` gives updates the size of AdamW's."""

    muon_fp32_matmul_prec: Annotated[Literal["medium", "highest"] | None, MUON] = None
    """Newton-Schulz in bf16 (`medium`) or fp32 (`highest`). Absent: fp32 where train.precision is, else bf16."""

    clip_grad: Annotated[NonNegativeFloat, KEPT] = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""

    loss_scale: PositiveFloat | None = None
    """A fixed loss scale for fp16. Absent: dynamic."""

    initial_loss_scale: Annotated[PositiveFloat, FP16] = 2.0**16
    """The dynamic loss scale's start, PyTorch's. Megatron-LM's is 2^32, which ten or more skipped steps bring down."""

    min_loss_scale: Annotated[PositiveFloat, FP16] = 1.0
    """The dynamic loss scale's floor."""

    loss_scale_window: Annotated[PositiveInt, FP16] = 1000
    """Good steps after which the loss scale doubles."""

    hysteresis: Annotated[PositiveInt, FP16] = 2
    """Overflowing steps before the loss scale halves."""

    optimizer_cpu_offload: Annotated[bool, Decides.NOTHING] = False
    """Keeps optimizer state in host memory; the CPU steps the parameters that it belongs to."""

    optimizer_offload_fraction: Annotated[Fraction, Decides.NOTHING, OFFLOADED] = 1.0
    """Share of the optimizer state that is kept in host memory."""

    overlap_cpu_optimizer_d2h_h2d: Annotated[bool, Decides.NOTHING, OFFLOADED] = True
    """Copies to and from the host go on while the CPU steps; false: one after the other, in less pinned memory."""

    @property
    def reduces_moments(self) -> bool:
        """Whether a moment of Adam's is kept in fewer bytes than fp32's."""
        return (self.exp_avg_dtype, self.exp_avg_sq_dtype) != ("fp32", "fp32")
