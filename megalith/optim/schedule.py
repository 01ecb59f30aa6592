"""Learning rate and weight decay as pure functions of the position in the run.

The learning rate climbs linearly from `lr_warmup_init` to `lr`, then follows a decay to `min_lr`, where it
stays. The weight decay is constant, or grows over the whole run. The formulas are those of Megatron's
OptimizerParamScheduler, and so is the unit: positions are in samples, an iteration counting as
`global_batch_size` of them. The position of an update is what was done *before* it, so the first update of a
warm-up from 0 has learning rate 0, as in Megatron.

Nothing is stored: a run is a config and a consumed-samples count, and a resumed run finds its place from
these. So an update that was skipped for a non-finite gradient moves the schedule on like any other (in
Megatron the scheduler, which holds a counter, waits for it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megalith.config import OptimConfig, TrainConfig
from megalith.errors import ConfigError


@dataclass(frozen=True)
class ParamSchedule:
    """The schedule of one run. Steps are in samples. Build it with `build_schedule`."""

    lr: float
    min_lr: float
    decay_style: str
    decay_steps: int
    warmup_steps: float
    warmup_init: float
    wsd_decay_style: str
    wsd_decay_steps: int
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_steps: int
    weight_decay_style: str
    samples_per_iteration: int | None  # None: the run is counted in samples
    decoupled: ParamSchedule | None = None  # of the word embedding and the output matrix, where it is another

    def learning_rate(self, iteration: int, consumed_samples: int) -> float:
        """Learning rate of the update that comes after `iteration` updates and `consumed_samples` samples."""
        steps = self._position(iteration, consumed_samples)
        if self.warmup_steps > 0 and steps <= self.warmup_steps:
            return self.warmup_init + (self.lr - self.warmup_init) * steps / self.warmup_steps
        if self.decay_style == "constant":
            return self.lr
        if steps > self.decay_steps:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_steps, 1) / max(steps, 1)))
        return self.min_lr + (self.lr - self.min_lr) * self._decay_coefficient(steps)

    def weight_decay(self, iteration: int, consumed_samples: int) -> float:
        """Weight decay of the update that comes after `iteration` updates and `consumed_samples` samples."""
        steps = self._position(iteration, consumed_samples)
        if self.weight_decay_style == "constant" or steps > self.weight_decay_steps:
            return self.end_weight_decay
        ratio = steps / self.weight_decay_steps
        if self.weight_decay_style == "cosine":
            ratio = _cosine(1.0 - ratio)
        return self.start_weight_decay + (self.end_weight_decay - self.start_weight_decay) * ratio

    def _position(self, iteration: int, consumed_samples: int) -> int:
        if self.samples_per_iteration is None:
            return consumed_samples
        return iteration * self.samples_per_iteration

    def _decay_coefficient(self, steps: int) -> float:
        """From 1 at the end of the warm-up to 0 at `decay_steps`."""
        if self.decay_style == "WSD":  # warm-up, stable, decay (Hu et al., MiniCPM)
            anneal_start = self.decay_steps - self.wsd_decay_steps
            if steps <= anneal_start:
                return 1.0
            ratio = (steps - anneal_start) / self.wsd_decay_steps
            return _DECAYS[self.wsd_decay_style](ratio)
        ratio = (steps - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return _DECAYS[self.decay_style](ratio)


def _cosine(ratio: float) -> float:
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


_DECAYS = {  # ratio 0 → 1, ratio 1 → 0
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": _cosine,
    "exponential": lambda ratio: 2.0 * 0.5**ratio - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}


def build_schedule(optim: OptimConfig, train: TrainConfig) -> ParamSchedule:
    """The schedule of a run counted in `train_iters` or in `train_samples`.

    Absent decay lengths are the whole run. Raises ConfigError for lengths in the other unit, a warm-up given
    twice or as long as the decay, a WSD decay that does not fit, and ends that are on the wrong side of each
    other.
    """
    if optim.lr is None:
        raise ConfigError("optim.lr is not set; training needs the highest learning rate, for example 3e-4")
    unit, total = _unit(train)
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
    _check_lengths(optim, unit, warmup, decay, wsd_decay)
    start_weight_decay, end_weight_decay = _weight_decay_ends(optim)

    scale = _iteration_samples(train) if unit == "iters" else 1
    schedule = ParamSchedule(
        lr=optim.lr,
        min_lr=optim.min_lr,
        decay_style=optim.lr_decay_style,
        decay_steps=decay * scale,
        warmup_steps=warmup * scale,
        warmup_init=optim.lr_warmup_init,
        wsd_decay_style=optim.lr_wsd_decay_style,
        wsd_decay_steps=wsd_decay * scale,
        start_weight_decay=start_weight_decay,
        end_weight_decay=end_weight_decay,
        weight_decay_steps=total * scale,
        weight_decay_style=optim.weight_decay_incr_style,
        samples_per_iteration=scale if unit == "iters" else None,
    )
    if optim.decoupled_lr is None:
        return schedule
    min_lr = optim.min_lr if optim.decoupled_min_lr is None else optim.decoupled_min_lr
    return replace(schedule, decoupled=replace(schedule, lr=optim.decoupled_lr, min_lr=min_lr))


def _unit(train: TrainConfig) -> tuple[str, int]:
    """(`iters` or `samples`, length of the run)."""
    if train.train_iters is not None and train.train_samples is not None:
        raise ConfigError(
            f"train.train_iters ({train.train_iters}) and train.train_samples ({train.train_samples}) "
            "are both set; keep one of them"
        )
    if train.train_iters is not None:
        return "iters", train.train_iters
    if train.train_samples is not None:
        return "samples", train.train_samples
    raise ConfigError("neither train.train_iters nor train.train_samples is set; training needs one of them")


def _iteration_samples(train: TrainConfig) -> int:
    if train.global_batch_size is None:
        raise ConfigError("train.global_batch_size is not set; training needs it")
    return train.global_batch_size


def _refuse_other_unit(optim: OptimConfig, unit: str) -> None:
    other = "samples" if unit == "iters" else "iters"
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(optim, f"{name}_{other}")
        if value:
            raise ConfigError(
                f"optim.{name}_{other} is {value}, but the run is counted in train.train_{unit}; "
                f"set optim.{name}_{unit} instead"
            )


def _check_lengths(optim: OptimConfig, unit: str, warmup: float, decay: int, wsd_decay: int) -> None:
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(optim, name) > optim.lr:
            raise ConfigError(
                f"optim.{name} ({getattr(optim, name)}) is above optim.lr ({optim.lr}); lower it"
            )
    lowest = optim.min_lr if optim.decoupled_min_lr is None else optim.decoupled_min_lr
    if optim.decoupled_lr is not None and max(lowest, optim.lr_warmup_init) > optim.decoupled_lr:
        raise ConfigError(
            f"optim.decoupled_lr ({optim.decoupled_lr}) is below its lowest rate ({lowest}) or optim.lr_warmup_init "
            f"({optim.lr_warmup_init}); raise it, or set optim.decoupled_min_lr"
        )
    if optim.lr_decay_style == "constant":
        return
    if warmup >= decay:
        raise ConfigError(
            f"the warm-up ({warmup:g} {unit}) must be shorter than the decay it is part of ({decay} {unit}); "
            f"shorten the warm-up or set optim.lr_decay_{unit} above it"
        )
    if optim.lr_decay_style == "WSD" and not 0 < wsd_decay <= decay - warmup:
        given = f"is {wsd_decay}" if wsd_decay else "is not set"
        raise ConfigError(
            f"optim.lr_wsd_decay_{unit} {given}; WSD needs its last decay to be between 1 and "
            f"{decay - warmup:g} {unit}: the decay ({decay}) less the warm-up ({warmup:g})"
        )


def _weight_decay_ends(optim: OptimConfig) -> tuple[float, float]:
    start, end = optim.start_weight_decay, optim.end_weight_decay
    if optim.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            raise ConfigError(
                f"optim.start_weight_decay ({start}) and optim.end_weight_decay ({end}) need "
                "optim.weight_decay_incr_style linear or cosine; a constant one is optim.weight_decay"
            )
        return optim.weight_decay, optim.weight_decay
    if start is None or end is None or end < start:
        raise ConfigError(
            f"optim.weight_decay_incr_style is {optim.weight_decay_incr_style}, which grows from "
            f"optim.start_weight_decay ({start}) to optim.end_weight_decay ({end}): set both, the end at "
            "or above the start"
        )
    return start, end
