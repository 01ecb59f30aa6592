"""Rules on distillation, and on a teacher in GRPO."""

from __future__ import annotations

from megalith.config.distillation import WITHOUT_ADAPTERS, DistillConfig, is_served
from megalith.config.rules.addresses import check_address
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def check_distillation(config: RunConfig) -> None:
    """Raise ConfigError for settings of teachers that contradict each other or the rest of the run."""
    if config.rl.teacher is not None:
        _check_adapters(config, "rl.teacher")
        if config.rl.uses_critic:
            raise ConfigError(
                "rl.teacher is set, but rl.advantage_estimator gae computes advantages from the critic's values; "
                "choose another estimator, or leave rl.teacher out"
            )
        if is_served(config.rl.teacher) and config.rl.temperature != 1:
            raise ConfigError(
                f"rl.temperature is {config.rl.temperature:g}, but the server {config.rl.teacher} returns "
                "log-probabilities at temperature 1; set rl.temperature to 1, or name the teacher's folder"
            )
    distill = config.distill
    if distill.teacher_or_logits is None:
        return
    chat = None if config.sft.enabled else config.chat
    other = f"{chat.name}.enabled" if chat else "rl.prompts or rl.rollouts"
    if chat or config.rl.prompts_or_rollouts:
        raise ConfigError(
            f"distill.teacher and {other} are both set, but a run uses one method; leave {other} or distill.teacher "
            "out"
        )
    _check_teachers(config)
    if distill.on_policy_fraction:
        _check_on_policy(config)


def _check_teachers(config: RunConfig) -> None:
    distill, teachers = config.distill, config.distill.teachers
    if isinstance(distill.teacher, list) and not teachers:
        raise ConfigError(
            "distill.teacher is an empty list; list at least one teacher, or leave distill.teacher out"
        )
    if WITHOUT_ADAPTERS in teachers:
        _check_adapters(config, "distill.teacher")
    if len(teachers) != len(distill.teacher_data or teachers[:1]) and (teachers or distill.teacher_data):
        raise ConfigError(
            f"distill.teacher has {len(teachers)} teachers, but distill.teacher_data has "
            f"{len(distill.teacher_data or ())} files; list one file per teacher, or set a single teacher and "
            "no files"
        )
    if distill.logits_dir is not None:
        _check_stored(distill)
        return
    reason = "several teachers" if len(teachers) > 1 else "a served teacher"
    if (len(teachers) > 1 or any(map(is_served, teachers))) and distill.top_k is None:
        raise ConfigError(
            f"distill.top_k is not set, but {reason} can only be compared on its most likely vocabulary entries; set "
            "distill.top_k, for example to 20, the most that a vLLM server returns by default"
        )
    if distill.temperature != 1 and (served := [name for name in teachers if is_served(name)]):
        raise ConfigError(
            f"distill.temperature is {distill.temperature:g}, but the server {served[0]} returns log-probabilities "
            "at temperature 1; set distill.temperature to 1, or distill.teacher to a model folder"
        )
    if distill.teacher_data and config.sft.enabled and config.sft.packing:
        raise ConfigError(
            "sft.packing puts samples of several files into one row, but distill.teacher_data chooses one teacher "
            "per row; set sft.packing to false"
        )


def _check_stored(distill: DistillConfig) -> None:
    special = [name for name in distill.teachers if is_served(name) or name == WITHOUT_ADAPTERS]
    if special or len(distill.teachers) > 1 or distill.top_k is not None:
        setting = "distill.top_k" if distill.top_k is not None else f"distill.teacher {distill.teacher}"
        raise ConfigError(
            f"{setting} and distill.logits_dir are both set, but distill.logits_dir stores the predictions of one "
            f"model folder, with logits_top_k entries per token; leave {setting} or distill.logits_dir out"
        )


def _check_adapters(config: RunConfig, setting: str) -> None:
    section = config.rl if setting == "rl.teacher" else config.distill
    if section.teacher != WITHOUT_ADAPTERS and WITHOUT_ADAPTERS not in (section.teacher or ()):
        return
    if config.lora.rank is None and config.lora.load is None:
        raise ConfigError(
            f"{setting} is {WITHOUT_ADAPTERS}, but the run trains no adapters; set lora.rank, or set {setting} to a "
            "model folder"
        )
    if config.train.fp8_format is not None:
        raise ConfigError(
            f"{setting} is {WITHOUT_ADAPTERS}, but train.fp8_format is {config.train.fp8_format}, whose scales come "
            "from the model with adapters; leave out train.fp8_format, or set the teacher to a model folder"
        )


def _check_on_policy(config: RunConfig) -> None:
    distill = config.distill
    if distill.logits_dir is not None:
        raise ConfigError(
            f"distill.on_policy_fraction is {distill.on_policy_fraction:g}, but distill.logits_dir only has "
            "predictions "
            "for the data, not for answers that the student generates; leave out distill.logits_dir and set "
            "distill.teacher"
        )
    if not config.sft.enabled or config.sft.packing:
        state = "sft.packing is on" if config.sft.enabled else "sft.enabled is off"
        raise ConfigError(
            f"distill.on_policy_fraction is {distill.on_policy_fraction:g}, but {state}; on-policy "
            "distillation needs unpacked conversations, one per row; set sft.enabled to true and sft.packing to false"
        )
    if distill.engine != "own" and not distill.engine_urls:
        raise ConfigError(
            f"distill.engine is {distill.engine}, but distill.engine_url is not set; set distill.engine_url to the "
            "server's address, such as http://127.0.0.1:8000, or set distill.engine to own"
        )
    for url in distill.engine_urls:
        check_address(url, "distill.engine_url")
    if distill.kd_ratio != 1:
        raise ConfigError(
            f"distill.kd_ratio is {distill.kd_ratio:g}, but the student learns nothing from the cross-entropy of "
            "tokens that it sampled itself; set distill.kd_ratio to 1"
        )
