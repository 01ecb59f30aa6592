"""Validation of a run's length and schedules."""

from __future__ import annotations

from megalith.config.optim import OptimConfig
from megalith.config.train import TrainConfig
from megalith.errors import ConfigError


def check_schedule(optim: OptimConfig, train: TrainConfig) -> tuple[float, int, int]:
    """Check the schedules and return their lengths.

    Returns:
        Warm-up, decay and final WSD decay, in the unit of the run's length (steps or samples). The decay defaults to
        the run's length.

    Raises:
        ConfigError: lengths in the other unit, a warm-up set twice or as long as the decay, a WSD decay that does not
            fit, or rates in the wrong order.
    """
    if (train.train_iters is None) == (train.train_samples is None):
        raise ConfigError(
            f"train.train_iters is {train.train_iters} and train.train_samples is {train.train_samples}; set "
            "exactly one: the run's length in steps or in sequences"
        )
    if train.global_batch_size is None:
        raise ConfigError(
            "train.global_batch_size is not set, but training needs it; set train.global_batch_size to the "
            "sequences per optimizer step"
        )
    if optim.lr is None:
        raise ConfigError(
            "optim.lr is not set, but training needs it; set optim.lr to the peak learning rate, for example 3e-4"
        )
    unit, total = train.length
    _refuse_other_unit(optim, unit)
    decay = getattr(optim, f"lr_decay_{unit}") or total
    warmup = getattr(optim, f"lr_warmup_{unit}")
    if optim.lr_warmup_fraction is not None:
        if warmup:
            raise ConfigError(
                f"optim.lr_warmup_fraction ({optim.lr_warmup_fraction}) and optim.lr_warmup_{unit} ({warmup}) "
                "are both set; keep one of them"
            )
        warmup = optim.lr_warmup_fraction * decay
    wsd_decay = getattr(optim, f"lr_wsd_decay_{unit}") or 0
    optim.check_requirements("optim")
    check_param_groups(optim)
    check_muon(optim)
    check_averages(optim)
    _check_lengths(optim, unit, warmup, decay, wsd_decay)
    _check_weight_decay(optim)
    return warmup, decay, wsd_decay


def check_loss_scale(optim: OptimConfig, precision: str) -> None:
    """Raise ConfigError if the initial dynamic loss scale is below its minimum."""
    if precision == "fp16" and optim.loss_scale is None and optim.min_loss_scale > optim.initial_loss_scale:
        raise ConfigError(
            f"optim.min_loss_scale ({optim.min_loss_scale}) is above optim.initial_loss_scale "
            f"({optim.initial_loss_scale}); lower optim.min_loss_scale"
        )


def check_param_groups(optim: OptimConfig) -> None:
    """Raise ConfigError for a group without settings, with two learning rates, or with a rate that cannot be scaled."""
    for group in optim.param_groups:
        name = f"optim.param_groups: the group {group.pattern!r}"
        if group.lr is not None and group.lr_mult is not None:
            raise ConfigError(f"{name} sets lr {group.lr} and lr_mult {group.lr_mult}; keep one of them")
        if group.lr is not None and not optim.lr:
            raise ConfigError(
                f"{name} scales the schedule of optim.lr to lr {group.lr}, but optim.lr is {optim.lr}; set optim.lr "
                "above 0"
            )
        if all(value is None for key, value in group if key != "pattern"):
            raise ConfigError(
                f"{name} changes nothing; set lr, lr_mult, weight_decay or optimizer, or remove it"
            )
        if group.optimizer is not None and optim.optimizer_cpu_offload:
            raise ConfigError(
                f"{name} sets optimizer {group.optimizer}, but optim.optimizer_cpu_offload supports only one "
                "optimizer; set optim.optimizer_cpu_offload to false, or leave optimizer out of the group"
            )


COEFFICIENT_STEPS = {"quintic": 5, "aol": 4}  # polynomials that belong together


def check_muon(optim: OptimConfig) -> None:
    """Raise ConfigError if the number of Newton-Schulz steps does not fit the coefficients, or for contradictions."""
    if "muon" not in optim.optimizers:
        return
    kind, steps = optim.muon_coefficient_type, optim.muon_num_ns_steps
    each = COEFFICIENT_STEPS.get(kind, 1)
    if steps % each:
        raise ConfigError(
            f"optim.muon_num_ns_steps is {steps}, but optim.muon_coefficient_type {kind} has coefficients for {each} "
            f"steps; choose a multiple of {each}, or other coefficients"
        )
    if optim.muon_split_heads and not optim.muon_split_qkv:
        raise ConfigError(
            "optim.muon_split_heads is true and optim.muon_split_qkv is false, but heads can be split only after "
            "query, key and value are split; set optim.muon_split_qkv to true, or optim.muon_split_heads to false"
        )
    if optim.muon_scalar_optimizer == "muon":
        raise ConfigError(
            "optim.muon_scalar_optimizer is muon, which updates matrices only; choose adamw or lion"
        )


def check_averages(optim: OptimConfig) -> None:
    """Raise ConfigError if schedule-free AdamW has a decay of the learning rate, no beta1, or a second average."""
    if "schedule_free_adamw" not in optim.optimizers:
        return
    if optim.lr_decay_style != "constant":
        raise ConfigError(
            f"optim.lr_decay_style is {optim.lr_decay_style}, but schedule_free_adamw needs a constant rate after "
            "the warm-up; set optim.lr_decay_style to constant"
        )
    if optim.adam_beta1 == 0:
        raise ConfigError(
            "optim.adam_beta1 is 0, but schedule_free_adamw interpolates weights by it; set optim.adam_beta1 to 0.9 "
            "to 0.98"
        )
    if optim.ema_decay is not None:
        raise ConfigError(
            f"optim.ema_decay is {optim.ema_decay}, but schedule_free_adamw averages the weights itself; leave "
            "optim.ema_decay out"
        )


def check_qk_clip(optim: OptimConfig, records_logits: bool) -> None:
    """Raise ConfigError if the model does not record attention logits for qk_clip."""
    if optim.qk_clip and not records_logits:
        raise ConfigError(
            "optim.qk_clip is true, but the model does not record attention logits; build the model from a RunConfig "
            "with optim.qk_clip, since a ModelSpec's own model does not record them"
        )


def _refuse_other_unit(optim: OptimConfig, unit: str) -> None:
    other = "samples" if unit == "iters" else "iters"
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(optim, f"{name}_{other}")
        if value:
            raise ConfigError(
                f"optim.{name}_{other} is {value}, but the run's length is set by train.train_{unit}; set "
                f"optim.{name}_{unit} instead"
            )


def _check_lengths(optim: OptimConfig, unit: str, warmup: float, decay: int, wsd_decay: int) -> None:
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(optim, name) > optim.lr:
            raise ConfigError(
                f"optim.{name} ({getattr(optim, name)}) is above optim.lr ({optim.lr}); lower optim.{name}"
            )
    lowest = optim.min_lr if optim.decoupled_min_lr is None else optim.decoupled_min_lr
    if optim.decoupled_lr is not None and max(lowest, optim.lr_warmup_init) > optim.decoupled_lr:
        raise ConfigError(
            f"optim.decoupled_lr ({optim.decoupled_lr}) is below its minimum ({lowest}) or optim.lr_warmup_init "
            f"({optim.lr_warmup_init}); raise optim.decoupled_lr, or set optim.decoupled_min_lr"
        )
    if optim.lr_decay_style == "constant":
        return
    if warmup >= decay:
        raise ConfigError(
            f"the warm-up ({warmup:g} {unit}) must be shorter than the decay, which includes it ({decay} {unit}); "
            f"shorten the warm-up, or set optim.lr_decay_{unit} above it"
        )
    if optim.lr_decay_style == "WSD" and not 0 < wsd_decay <= decay - warmup:
        current = f"is {wsd_decay}" if wsd_decay else "is not set"
        raise ConfigError(
            f"optim.lr_wsd_decay_{unit} {current}; set the length of WSD's final decay to between 1 and "
            f"{decay - warmup:g} {unit}, which is the total ({decay}) without the warm-up ({warmup:g})"
        )


def _check_weight_decay(optim: OptimConfig) -> None:
    start, end = optim.start_weight_decay, optim.end_weight_decay
    if optim.weight_decay_incr_style != "constant" and (start is None or end is None or end < start):
        raise ConfigError(
            f"optim.weight_decay_incr_style is {optim.weight_decay_incr_style}, which grows from "
            f"optim.start_weight_decay ({start}) to optim.end_weight_decay ({end}); set both, with the end at or "
            "above the start"
        )
