"""Learning rate and weight decay as pure functions of the position in the run.

The learning rate rises linearly from `lr_warmup_init` to `lr`, then decays to `min_lr` and stays there. From
`lr_rewarm_start`, where a run continues from a checkpoint with another schedule, it rises a second time. Weight decay
is constant or grows over the run. Formulas and units are from Megatron's OptimizerParamScheduler: positions are in
samples. An iteration counts as `global_batch_size` samples or, with `schedule_unit: samples`, as the number of samples
that it had. The position of an update is the number of samples before it, so the first update of a warm-up from 0 has
learning rate 0.

In fp16 a step that is skipped for an overflow does not count, as in Megatron, Accelerate and transformers. Checkpoints
store the number of skipped steps and their samples; a resumed run computes its position from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megalith.config import OptimConfig, TrainConfig
from megalith.config.rules.optim_rules import check_schedule


@dataclass(frozen=True)
class ParamSchedule:
    """Schedule of one run, built by `build_schedule`. Steps are in samples."""

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
    samples_per_iteration: int | None  # None: the position is the number of consumed samples
    rewarm_start: int | None = None
    rewarm_steps: int = 1
    # schedule of the word embedding and the output matrix, if different
    decoupled: ParamSchedule | None = None

    def learning_rate(self, iteration: int, consumed_samples: int) -> float:
        """Return the learning rate of the update after `iteration` updates and `consumed_samples` samples.

        Skipped updates and their samples do not count.
        """
        steps = self._position(iteration, consumed_samples)
        rate = self._rate(steps)
        if self.rewarm_start is None or not 0 <= steps - self.rewarm_start < self.rewarm_steps:
            return rate
        return self.warmup_init + (rate - self.warmup_init) * (steps - self.rewarm_start) / self.rewarm_steps

    def _rate(self, steps: int) -> float:
        """Return the learning rate without a second warm-up."""
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
        """Return the weight decay of the update after `iteration` updates and `consumed_samples` samples.

        Skipped updates and their samples do not count.
        """
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
        """Return the decay coefficient: 1 at the end of the warm-up, 0 at `decay_steps`."""
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


_DECAYS = {  # from 1 at ratio 0 to 0 at ratio 1
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": _cosine,
    "exponential": lambda ratio: 2.0 * 0.5**ratio - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}


def build_schedule(optim: OptimConfig, train: TrainConfig) -> ParamSchedule:
    """Build the schedule of a run with length `train_iters` or `train_samples`.

    Decay lengths that are not set are the length of the run. Raises ConfigError in the same cases as `check_schedule`.
    """
    warmup, decay, wsd_decay = check_schedule(optim, train)
    counted, total = train.length
    start, end = optim.start_weight_decay, optim.end_weight_decay
    if optim.weight_decay_incr_style == "constant":
        start = end = optim.weight_decay
    scale = train.global_batch_size if counted == "iters" else 1
    schedule = ParamSchedule(
        lr=optim.lr,
        min_lr=optim.min_lr,
        decay_style=optim.lr_decay_style,
        decay_steps=decay * scale,
        warmup_steps=warmup * scale,
        warmup_init=optim.lr_warmup_init,
        wsd_decay_style=optim.lr_wsd_decay_style,
        wsd_decay_steps=wsd_decay * scale,
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_steps=total * scale,
        weight_decay_style=optim.weight_decay_incr_style,
        rewarm_start=None if optim.lr_rewarm_start is None else optim.lr_rewarm_start * scale,
        rewarm_steps=optim.lr_rewarm_length * scale,
        samples_per_iteration=scale if counted == optim.schedule_unit == "iters" else None,
    )
    if optim.decoupled_lr is None:
        return schedule
    min_lr = optim.min_lr if optim.decoupled_min_lr is None else optim.decoupled_min_lr
    return replace(schedule, decoupled=replace(schedule, lr=optim.decoupled_lr, min_lr=min_lr))
