"""Notes on settings without effect in this run.

These are not errors, because one file may serve many runs, but a user who sets `recompute_modules` without
`recompute_granularity` should know. Requirements on other settings are annotations (`RequiresSetting`); requirements on
the device or on compiled layers are here.
"""

from __future__ import annotations

from collections.abc import Iterator

from megalith.config.base import Section
from megalith.config.extensions import ADVANTAGE_ESTIMATORS
from megalith.config.rl import RlConfig
from megalith.config.rules.auto_settings import Machine
from megalith.config.run import RunConfig

SLOW_LAUNCH = 8.0  # microseconds; 2 to 6 on the machines of benchmarks/RESULTS.md

UNCLIPPED = ("sapo", "vespo", "gpg", "kl_cov", "reinforce", "online_dpo", "online_ipo")
"""Values of rl.loss_type that read neither epsilon nor epsilon_high."""

GROUP_SETTINGS: dict[str, tuple[str, ...]] = {
    "advantage_baseline": (),
    "scale_rewards": ("grpo_passk",),
    "advantage_epsilon": ("grpo_passk", "gdpo"),
    "advantage_deviation": (),
}
"""Settings of rl.advantage_estimator group, and the other built-in estimators that read them."""


def idle_notes(config: RunConfig) -> list[str]:
    """Return a note for each setting that has a non-default value but no effect in this run."""
    notes = [note for name in RunConfig.model_fields for note in _idle(getattr(config, name), name, config)]
    return notes + _estimator_notes(config) + _clip_notes(config) + _mup_notes(config)


def _mup_notes(config: RunConfig) -> list[str]:
    """Return a note if Muon's updates grow with the width in spite of µP."""
    optim = config.optim
    if not config.model.use_mup or "muon" not in optim.optimizers or optim.muon_scale_mode != "spectral":
        return []
    return [
        "model.use_mup: with optim.muon_scale_mode spectral, Muon's best learning rate depends on the width, as in "
        "Megatron-LM; unit_rms_norm follows µP"
    ]


def _clip_notes(config: RunConfig) -> list[str]:
    """Return notes on the bounds of a clip that the built-in loss does not have."""
    rl = config.rl
    if not rl.prompts_or_rollouts or rl.loss_type not in UNCLIPPED:
        return []
    return [
        f"rl.{name} {getattr(rl, name)} has no effect: rl.loss_type {rl.loss_type} does not read it"
        for name in ("epsilon", "epsilon_high")
        if getattr(rl, name) != RlConfig.model_fields[name].default
    ]


def _estimator_notes(config: RunConfig) -> list[str]:
    """Return notes on settings of the group advantage that the selected built-in estimator ignores."""
    rl, fields = config.rl, RlConfig.model_fields
    estimator = rl.advantage_estimator
    if not rl.prompts_or_rollouts or estimator == "group" or estimator not in ADVANTAGE_ESTIMATORS:
        return []
    unread = [name for name in GROUP_SETTINGS if estimator not in GROUP_SETTINGS[name]]
    return [
        f"rl.{name} {getattr(rl, name)} has no effect: rl.advantage_estimator {estimator} does not read it"
        for name in unread
        if getattr(rl, name) != fields[name].default
    ]


def _idle(section: Section, path: str, config: RunConfig) -> Iterator[str]:
    unread = section.unread(config)
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name in unread and value != field.default:
            requirement = unread[name]
            outer = "" if "." in requirement.path else f"{path}."
            yield f"{path}.{name} {value} has no effect: it requires {outer}{requirement}"
        elif isinstance(value, Section):
            yield from _idle(value, f"{path}.{name}", config)


def offload_notes(config: RunConfig, device_type: str) -> list[str]:
    """Return notes on offloading if the device is the CPU."""
    if device_type != "cpu":
        return []
    notes = []
    if config.optim.optimizer_cpu_offload:
        notes.append("optim.optimizer_cpu_offload has no effect on a CPU: the state is always in host memory")
    if config.parallel.cpu_offloading_num_layers:
        notes.append(
            "parallel.cpu_offloading_num_layers saves no memory on a CPU: activations are copied within host memory"
        )
    return notes


def overlap_notes(config: RunConfig, compiled: bool) -> list[str]:
    """Return notes on tp_comm_overlap without compilation, and on copy engines with nothing to move."""
    parallel, notes = config.parallel, []
    if parallel.overlaps and not compiled:
        notes.append(
            "parallel.tp_comm_overlap hides nothing without runtime.compile: the halves of a micro-batch run one after "
            "the other"
        )
    if "dp" in parallel.symmetric_memory_groups:
        notes.append(
            "parallel.symmetric_memory_groups has dp, which has no effect: NCCL reduces gradients as fast without "
            "symmetric memory"
        )
    has_no_a2a = parallel.context_parallel_size > 1 and "a2a" not in parallel.resolved_cp_comm_type
    if "cp" in parallel.copy_engine_axes and has_no_a2a:
        notes.append(
            "parallel.symmetric_memory_groups has cp, which has no effect: copy engines exchange heads, but "
            f"cp_comm_type {parallel.resolved_cp_comm_type} exchanges none; set parallel.cp_comm_type to a2a or "
            "a2a+p2p if the heads are divisible"
        )
    return notes


def host_notes(config: RunConfig, machine: Machine) -> list[str]:
    """Return a note if the host launches kernels so slowly that layers with short kernels may wait for it."""
    if machine.launch < SLOW_LAUNCH:
        return []
    compare = ", and compare parallel.tp_comm_overlap false" if config.parallel.overlaps else ""
    return [
        f"the slowest rank's host takes {machine.launch:.1f} µs to launch a kernel (2 to 6 are usual), so layers with "
        f"short kernels wait for it; raise train.micro_batch_size if memory allows{compare}"
    ]
