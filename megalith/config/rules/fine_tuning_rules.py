"""Rules of training on chat data: SFT, preference training and reward models."""

from __future__ import annotations

from megalith.config.preferences import OF_MARGINS, REFERENCE_FREE, SORTED, DpoConfig
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def check_fine_tuning(config: RunConfig) -> None:
    data, chat = config.data, config.chat
    if chat is None:
        return
    enabled = [f"{section.name}.enabled" for section in config.chat_sections if section.enabled]
    if len(enabled) > 1:
        raise ConfigError(
            f"{enabled[0]} and {enabled[1]} are both on, but a run uses one method; leave one of the two out"
        )
    if config.rl.prompts_or_rollouts:
        raise ConfigError(
            f"rl.{'prompts' if config.rl.prompts else 'rollouts'} is set, which `megalith grpo` trains on, but "
            f"{chat.name}.enabled trains on data.data_path; use `megalith grpo`, or leave "
            f"rl.{'prompts' if config.rl.prompts else 'rollouts'} out"
        )
    names = ("dataset", "mock", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    if conflicting := [name for name in names if getattr(data, name)]:
        raise ConfigError(
            f"data.{' and data.'.join(conflicting)} {'are' if conflicting[1:] else 'is'} on, but {chat.name}.enabled "
            f"reads chat data, whose samples are always separate; leave data.{' and data.'.join(conflicting)} out, "
            "and set data.data_path, or one data path per split"
        )
    if chat.num_train_epochs is not None:
        check_epochs(config)
    if config.dpo.enabled:
        check_preference_losses(config.dpo)
    if config.sft.enabled and config.sft.loss_type == "dft" and config.distill.teacher_or_logits is not None:
        raise ConfigError(
            "sft.loss_type is dft, but `megalith distill` has its own loss; leave sft.loss_type out"
        )
    fp8 = config.train.fp8_format
    if (config.dpo.enabled or config.kto.enabled) and fp8 is not None:
        raise ConfigError(
            f"train.fp8_format is {fp8}, but {chat.name} computes the reference's log-probabilities before a backward "
            "pass has set the FP8 scales; leave train.fp8_format out"
        )


def check_score_head(config: RunConfig) -> None:
    """Raise ConfigError if a reward model has no score head, or if a model with a score head is trained by another
    method.
    """
    if config.model.score_head and not config.reward.enabled:
        raise ConfigError(
            "model.score_head is on, so the model predicts scores instead of tokens, but only `megalith reward` "
            "trains such a model; use `megalith reward`, or leave model.score_head out"
        )
    if not config.reward.enabled:
        return
    if not config.model.score_head:
        raise ConfigError(
            "reward.enabled trains a score, but model.score_head is false; leave model.score_head out"
        )


def check_preference_losses(dpo: DpoConfig) -> None:
    """Raise ConfigError unless every loss of a pair has its weight and its settings."""
    names = dpo.loss_type if isinstance(dpo.loss_type, list) else [dpo.loss_type]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"dpo.loss_type has {repeated[0]} {names.count(repeated[0])} times; list each loss once, and weight it "
            "by dpo.loss_weights"
        )
    if dpo.loss_weights is not None and len(dpo.loss_weights) != len(names):
        raise ConfigError(
            f"dpo.loss_weights has {len(dpo.loss_weights)} weights for {len(names)} losses; list one weight "
            "per loss"
        )
    if dpo.f_divergence_type != "reverse_kl" and (
        others := {name for name in names if ":" not in name} - OF_MARGINS - {"sft"}
    ):
        raise ConfigError(
            f"dpo.f_divergence_type is {dpo.f_divergence_type}, but dpo.loss_type {min(others)} does not use a "
            f"divergence; set dpo.loss_type to {', '.join(sorted(OF_MARGINS))} or sft, or leave dpo.f_divergence_type "
            "out"
        )
    if dpo.ld_alpha is not None and (others := set(names) & (REFERENCE_FREE | SORTED) - {"sft"}):
        raise ConfigError(
            f"dpo.ld_alpha is {dpo.ld_alpha}, but dpo.loss_type {min(others)} does not use a log-ratio per answer "
            "to the reference; leave dpo.ld_alpha out"
        )
    if dpo.use_weighting and (others := set(names) & SORTED):
        raise ConfigError(
            f"dpo.use_weighting is true, but dpo.loss_type {min(others)} compares a pair with other pairs; leave "
            "dpo.use_weighting out"
        )
    if "exo_pair" in names and not dpo.label_smoothing:
        raise ConfigError(
            "dpo.loss_type exo_pair needs dpo.label_smoothing above 0, because it compares the policy with "
            "probabilities of 1 − label_smoothing and label_smoothing; set dpo.label_smoothing, for example to 0.001"
        )


def check_epochs(config: RunConfig) -> None:
    """Raise ConfigError if num_train_epochs of the chat data cannot set the length of the run."""
    train, setting = config.train, f"{config.chat.name}.num_train_epochs"
    lengths = {name: getattr(train, name) for name in ("train_iters", "train_samples", "rampup_batch_size")}
    lengths = [f"train.{name} is {value}" for name, value in lengths.items() if value is not None]
    if lengths:
        raise ConfigError(
            f"{setting} is {config.chat.num_train_epochs} and {' and '.join(lengths)}, but both set the length of "
            "the run; leave one of them out"
        )
    if train.global_batch_size is None:
        raise ConfigError(
            f"train.global_batch_size is not set, but {setting} needs it to count steps; set train.global_batch_size"
        )
