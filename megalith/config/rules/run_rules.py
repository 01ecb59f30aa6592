"""Validation of complete runs: rules that involve several settings. `check_training` applies all of them.

Each subject has rules in a file of its own, such as model_rules.py, data_rules.py and parallel_rules.py.
"""

from __future__ import annotations

from megalith.config.base import NOT_YET
from megalith.config.data import SPECIAL_COUNT, DataConfig
from megalith.config.model import ModelConfig
from megalith.config.output import LogConfig
from megalith.config.rules.adapter_rules import check_adapters
from megalith.config.rules.batch_invariant_rules import check_batch_invariant
from megalith.config.rules.data_rules import check_data
from megalith.config.rules.distill_rules import check_distillation
from megalith.config.rules.dynamic_context_rules import check_dynamic_context
from megalith.config.rules.fine_tuning_rules import check_fine_tuning, check_score_head
from megalith.config.rules.fp8_rules import check_fp8
from megalith.config.rules.model_rules import check_model
from megalith.config.rules.optim_rules import check_loss_scale, check_schedule
from megalith.config.rules.parallel_rules import check_parallel, data_parallel_size
from megalith.config.rules.reference_rules import check_reference_sync
from megalith.config.rules.rollout_rules import check_rollouts
from megalith.config.run import RunConfig
from megalith.config.train import BatchSizeSchedule
from megalith.errors import ConfigError


def check_training(config: RunConfig, world_size: int = 1) -> None:
    """Raise ConfigError unless this run can be trained on `world_size` processes."""
    config.data.check_requirements("data", config)
    config.checkpoint.check_requirements("checkpoint")
    check_model(config.model)
    _check_available(config)
    check_fp8(config)
    check_parallel(config, world_size)
    check_adapters(config)
    _check_lengths(config.model, config.data)
    check_data(config)
    check_rollouts(config)
    check_fine_tuning(config)
    check_score_head(config)
    _check_encoder(config)
    check_distillation(config)
    check_reference_sync(config)
    check_batch_invariant(config)
    data = data_parallel_size(config.parallel, world_size)
    check_dynamic_context(config, data * config.parallel.context_parallel_size)
    BatchSizeSchedule.from_config(
        config.train, data_parallel_size=data_parallel_size(config.parallel, world_size)
    )
    check_schedule(config.optim, config.train)
    check_loss_scale(config.optim, config.train.precision)
    _check_mup(config)
    _check_qk_clip(config)
    _check_profile(config.log)


def _check_mup(config: RunConfig) -> None:
    base = config.model.mup_base_num_layers
    if base is not None and "sgd" in config.optim.optimizers:
        raise ConfigError(
            f"model.mup_base_num_layers {base} scales rates by depth for optimizers whose updates do not grow with "
            "the gradient, but the updates of sgd do; choose another optimizer, or leave model.mup_base_num_layers "
            "out"
        )


def _check_qk_clip(config: RunConfig) -> None:
    """Raise ConfigError if qk_clip cannot change the attention logits, or not consistently."""
    if not config.optim.qk_clip:
        return
    model = config.model
    norms = [name for name in ("qk_layernorm", "qk_l2_norm") if getattr(model, name)]
    if norms and not model.multi_latent_attention:
        raise ConfigError(
            f"optim.qk_clip is true and model.{norms[0]} is true, but attention logits of normalized queries and "
            "keys are already bounded and do not depend on the magnitude of the weights; set optim.qk_clip to false"
        )
    if config.lora.rank is not None or config.lora.load is not None:
        raise ConfigError(
            "optim.qk_clip is true, but with adapters the weights of queries and keys are frozen; set optim.qk_clip "
            "to false"
        )
    if "schedule_free_adamw" in config.optim.optimizers:
        raise ConfigError(
            "optim.qk_clip is true, but schedule_free_adamw averages weights, and the averages would not be "
            "rescaled; choose another optimizer, or set optim.qk_clip to false"
        )


def check_base(config: RunConfig) -> None:
    """Raise ConfigError for adapters on random weights, and for an evaluation without weights."""
    _check_evaluation(config)
    lora = config.lora
    if config.model.init_from is None and (lora.rank is not None or lora.load is not None):
        setting = f"lora.rank is {lora.rank}" if lora.load is None else f"lora.load is {lora.load}"
        raise ConfigError(
            f"{setting}, but model.init_from is not set, so adapters would be trained on random frozen weights; set "
            "model.init_from to the base model: a Hugging Face folder or name, or a run folder"
        )


def _check_evaluation(config: RunConfig) -> None:
    if not config.train.skip_train:
        return
    if config.checkpoint.load is None and config.model.init_from is None:
        raise ConfigError(
            "train.skip_train is true, but there are no weights to evaluate; set checkpoint.load or "
            "model.init_from, or leave train.skip_train out to train"
        )
    if not config.train.eval_iters:
        raise ConfigError(
            "train.skip_train is true and train.eval_iters is 0, so there is nothing to do; set train.eval_iters to "
            "the number of global batches to evaluate"
        )


NOT_IMPLEMENTED = {"fp8_param_gather": "gathering weights in FP8"}  # by the name of a setting marked NOT_YET


def _check_available(config: RunConfig) -> None:
    """Raise ConfigError for settings marked NOT_YET on their fields."""
    for section in RunConfig.model_fields:
        values = getattr(config, section)
        for name, field in type(values).model_fields.items():
            if NOT_YET not in field.metadata or (value := getattr(values, name)) == field.default:
                continue
            if name not in values.unread(config):
                raise ConfigError(
                    f"{section}.{name} is {str(value).lower()}, but {NOT_IMPLEMENTED[name]} is not implemented; remove "
                    f"{section}.{name}"
                )


def _check_lengths(model: ModelConfig, data: DataConfig) -> None:
    lengths = {"seq_length": data.seq_length}
    if model.encoder_layers:
        lengths["decoder_seq_length"] = data.decoder_length
    for name, length in lengths.items():
        if (longest := model.max_position_embeddings) is not None and length > longest:
            rows = model.padding_positions
            note = f" ({rows} more rows of the table are for padding)" if rows else ""
            raise ConfigError(
                f"data.{name} {length} is longer than model.max_position_embeddings {longest}{note}; lower "
                f"data.{name}, or raise model.max_position_embeddings"
            )


def _check_encoder(config: RunConfig) -> None:
    model, data = config.model, config.data
    if model.causal:
        return
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    conflicting = [f"data.{name}" for name in names if getattr(data, name)]
    conflicting += [f"{config.chat.name}.enabled"] if config.chat is not None else []
    conflicting += ["rl.prompts or rl.rollouts"] if config.rl.prompts_or_rollouts else []
    conflicting += ["distill.teacher"] if config.distill.teacher_or_logits is not None else []
    if conflicting:
        raise ConfigError(
            f"{' and '.join(conflicting)} {'require' if conflicting[1:] else 'requires'} a decoder-only model, but "
            f"model.model_type is {model.model_type}; leave {'them' if conflicting[1:] else 'it'} out"
        )
    if not model.add_lm_head:
        raise ConfigError(
            "model.add_lm_head is false, but predicting masked tokens needs the head; set model.add_lm_head to true"
        )
    if model.model_type == "bert" and data.mask_prob * (data.seq_length - SPECIAL_COUNT) < 1:
        raise ConfigError(
            f"data.mask_prob {data.mask_prob} × (data.seq_length {data.seq_length} - {SPECIAL_COUNT} special tokens) "
            "is less than one token, so no token would ever be masked; raise data.mask_prob or data.seq_length"
        )


def _check_profile(log: LogConfig) -> None:
    if log.profile and log.profile_step_end <= log.profile_step_start:
        raise ConfigError(
            f"log.profile_step_end {log.profile_step_end} is not after log.profile_step_start "
            f"{log.profile_step_start}; raise log.profile_step_end"
        )
