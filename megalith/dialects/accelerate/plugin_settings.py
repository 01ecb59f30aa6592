"""Build a run's configuration from a MegatronLMPlugin, a Hugging Face config and the batch size.

The Hugging Face config defines the model; the plugin defines its layout and recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import GradScalerKwargs
from torch import Tensor
from torch.nn.functional import pad

from megalith.bridge.family import Family
from megalith.config import ModelConfig, RunConfig
from megalith.config.base import Decides
from megalith.config.rules.model_rules import check_model
from megalith.config.rules.notes import idle_notes
from megalith.dialects.accelerate.plugin import MegatronLMPlugin
from megalith.dialects.megatron.flag_kinds import Sets
from megalith.dialects.megatron.flag_table import FLAGS
from megalith.dialects.megatron.translate import translate
from megalith.errors import ConfigError
from megalith.parallel.pipeline.pipeline_rules import check_layout

PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32 number
ENCODER_FIELDS = ("pipeline_model_parallel_split_rank", "encoder_seq_length")
NO_EFFECT = {
    "attention_backend": "the device decides the attention kernel",
    "attention_softmax_in_fp32": "softmax is always computed in fp32",
    "use_precision_aware_optimizer": "optimizer state is fp32",
    "use_rotary_position_embeddings": "the model's config sets the position embedding",
    **dict.fromkeys(
        ("no_wd_decay_cond", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
        "parameters use the weight decay of their group in the script's optimizer",
    ),
    **dict.fromkeys(
        ("scale_lr_cond", "lr_mult"),
        "parameters use the learning rate of their group in the script's optimizer",
    ),
    **dict.fromkeys(
        ("train_samples", "lr_decay_samples", "lr_warmup_samples"),
        "schedules count steps: use lr_decay_iters, lr_warmup_iters or MegatronLMDummyScheduler",
    ),
    **dict.fromkeys(
        ("tensorboard_dir", "set_all_logging_options"),
        "use Accelerate's trackers: Accelerator(log_with=…)",
    ),
}


def run_config(
    plugin: MegatronLMPlugin,
    family: Family,
    hf_config: Mapping[str, Any],
    precision: str,
    processes: int,
    device: str,
    checkpoints: bool = False,
    scaler: GradScalerKwargs | None = None,
) -> tuple[RunConfig, list[str]]:
    """Build the configuration of a run.

    Args:
        plugin: layout and recomputation; `set_training_args` has been called.
        family: family of the model.
        hf_config: content of the model's config.json.
        precision: fp32, bf16 or fp16.
        processes: world size.
        device: device type.
        checkpoints: gradient checkpointing is enabled in the transformers model.
        scaler: the script's settings of the fp16 loss scale.

    Returns:
        The configuration and notes for the user.

    Raises:
        ConfigError: the run is not possible.
    """
    model = family.read_config(hf_config)
    check_model(model)
    config, notes = RunConfig(model=model), []
    length = plugin.seq_length or plugin.decoder_seq_length or model.max_position_embeddings or 2048
    multiple = token_multiple(plugin)
    settings = {
        "data.mock": True,  # the script provides the data
        "data.seq_length": max(multiple, length // multiple * multiple),
        "train.train_iters": plugin.train_iters or 1,
        "train.micro_batch_size": plugin.micro_batch_size,
        "train.global_batch_size": plugin.global_batch_size,
        "train.precision": precision,
        "train.calculate_per_token_loss": plugin.calculate_per_token_loss,
        "optim.lr": 0.0,  # the script's optimizer sets it
        "optim.clip_grad": plugin.gradient_clipping,
        "optim.optimizer_cpu_offload": plugin.optimizer_cpu_offload or None,
        "optim.overlap_cpu_optimizer_d2h_h2d": plugin.overlap_cpu_optimizer_d2h_h2d or None,
        "runtime.device": device,
        **_dropout(plugin),
        **_parallel(plugin, model, notes),
        **_recompute(plugin, notes, checkpoints),
        **(_loss_scale(scaler or GradScalerKwargs()) if precision == "fp16" else {}),
    }
    config = config.with_settings({name: value for name, value in settings.items() if value is not None})
    config = _with_other_arguments(config, plugin.other_megatron_args or {}, processes, notes)
    # Accelerate's launcher always sets this one, usually to False.
    unset = () if plugin.use_precision_aware_optimizer else ("use_precision_aware_optimizer",)
    notes += [
        f"{name} has no effect in Megalith: {reason}"
        for name, reason in NO_EFFECT.items()
        if plugin.is_set(name) and name not in unset
    ]
    notes += [
        f"{name} is for encoders, and has no effect in Megalith"
        for name in ENCODER_FIELDS
        if plugin.is_set(name)
    ]
    if hf_config.get("output_router_logits"):
        notes.append(
            "output_router_logits: set moe_aux_loss_coeff in other_megatron_args for a load-balancing loss, which is "
            "computed per layer in Megalith; transformers computes one over all layers"
        )
    check_layout(config, processes)
    return config, [*notes, *idle_notes(config)]


def token_multiple(plugin: MegatronLMPlugin) -> int:
    """Return the number that sequence lengths must be a multiple of, for SP and CP to shard them."""
    tokens = plugin.tp_degree if plugin.sequence_parallelism and plugin.tp_degree > 1 else 1
    return tokens * (2 * plugin.context_parallel_size if plugin.context_parallel_size > 1 else 1)


def reject_inner_padding(config: RunConfig, padding: Tensor) -> None:
    """Raise ConfigError if the layout or the model does not support padding between tokens.

    Args:
        config: the run.
        padding: bool [batch, seq], True for padding.
    """
    model, size = config.model, config.parallel.context_parallel_size
    runs = (pad((~padding).int(), (1, 0)).diff(dim=1) > 0).sum(1)  # contiguous runs of tokens per sample
    reason = None
    if size > 1:
        reason = f"context_parallel_size is {size}, and context parallelism does not support such masks"
    elif model.linear_attention_layers:
        reason = "the model has linear attention, whose state includes all earlier tokens"
    elif model.position_embedding_type == "alibi" and bool((runs > 1).any()):
        reason = "the model uses ALiBi, whose bias counts the tokens in between"
    if reason is not None:
        raise ConfigError(
            "attention_mask has zeros between the tokens of a sample, or the padding at its end has labels other than "
            f"−100, but {reason}; pad at the beginning or the end, with labels of −100"
        )


def _dropout(plugin: MegatronLMPlugin) -> dict[str, float]:
    """Return the dropout settings that the plugin overrides."""
    names = [name for name in ("attention_dropout", "hidden_dropout") if plugin.is_set(name)]
    return {f"model.{name}": getattr(plugin, name) for name in names}


def _parallel(plugin: MegatronLMPlugin, model: ModelConfig, notes: list[str]) -> dict[str, Any]:
    strategy = (
        "optim_grads_params"
        if plugin.use_custom_fsdp
        else "optim"
        if plugin.use_distributed_optimizer
        else None
    )
    if plugin.sequence_parallelism and plugin.tp_degree == 1:
        notes.append("sequence_parallelism has no effect with tp_degree 1")
    virtual, layers = None, plugin.num_layers_per_virtual_pipeline_stage
    if layers is not None:
        virtual, rest = divmod(model.num_layers, plugin.pp_degree * layers)
        if rest:
            raise ConfigError(
                f"num_layers_per_virtual_pipeline_stage {layers} × pp_degree {plugin.pp_degree} does not divide the "
                f"model's {model.num_layers} layers; choose another number of layers per stage"
            )
    experts = {
        "parallel.expert_model_parallel_size": plugin.expert_model_parallel_size,
        "parallel.expert_tensor_parallel_size": plugin.expert_tensor_parallel_size,
    }
    return {
        "parallel.tensor_model_parallel_size": plugin.tp_degree,
        "parallel.pipeline_model_parallel_size": plugin.pp_degree,
        "parallel.virtual_pipeline_model_parallel_size": virtual if virtual != 1 else None,
        "parallel.decoder_last_pipeline_num_layers": plugin.decoder_last_pipeline_num_layers,
        "parallel.context_parallel_size": plugin.context_parallel_size,
        "parallel.sequence_parallel": (plugin.sequence_parallelism and plugin.tp_degree > 1) or None,
        "parallel.data_parallel_sharding_strategy": strategy,
        **{name: value for name, value in experts.items() if value != 1},
    }


def _recompute(plugin: MegatronLMPlugin, notes: list[str], checkpoints: bool) -> dict[str, Any]:
    """Return the recomputation settings.

    The granularity is `recompute_granularity` if it is set. Otherwise it is `full` if a field about layers is set,
    `selective` if recompute_activations is on, and `full` if the model called gradient_checkpointing_enable()
    (`checkpoints`).
    """
    granularity = plugin.recompute_granularity if plugin.is_set("recompute_granularity") else None
    if (
        plugin.checkpoint_num_layers is not None
        or plugin.is_set("recompute_method")
        or plugin.is_set("recompute_num_layers")
    ):
        granularity = granularity or "full"
    elif plugin.recompute_activations:
        granularity = granularity or "selective"
    elif checkpoints:
        granularity = granularity or "full"
    settings: dict[str, Any] = {"parallel.recompute_granularity": granularity}
    if granularity == "full":
        settings["parallel.recompute_method"] = plugin.recompute_method
        settings["parallel.recompute_num_layers"] = (
            plugin.checkpoint_num_layers or plugin.recompute_num_layers
        )
    if plugin.distribute_checkpointed_activations or plugin.partition_activations:
        if granularity == "full" and plugin.tp_degree > 1 and not plugin.sequence_parallelism:
            settings["parallel.distribute_saved_activations"] = True
        else:
            notes.append(
                "distribute_checkpointed_activations and partition_activations have no effect: they shard the saved "
                "inputs of recomputed layers over tensor parallelism, which needs full recomputation and tp_degree "
                f"above 1 without sequence_parallelism (now {granularity or 'no'} recomputation, {plugin.tp_degree})"
            )
    return settings


def _loss_scale(scaler: GradScalerKwargs) -> dict[str, Any]:
    """Return the loss-scale settings that match torch's GradScaler: halve at each overflow, no minimum."""
    if (scaler.growth_factor, scaler.backoff_factor) != (2.0, 0.5):
        raise ConfigError(
            f"GradScalerKwargs has growth_factor {scaler.growth_factor:g} and backoff_factor "
            f"{scaler.backoff_factor:g}, but the loss scale is always doubled and halved; leave the factors at 2 and "
            "0.5"
        )
    if not scaler.enabled:
        return {"optim.loss_scale": 1.0}
    return {
        "optim.initial_loss_scale": scaler.init_scale,
        "optim.loss_scale_window": scaler.growth_interval,
        "optim.hysteresis": 1,
        "optim.min_loss_scale": SMALLEST_SCALE,
    }


def _with_other_arguments(
    config: RunConfig, arguments: Mapping[str, Any], processes: int, notes: list[str]
) -> RunConfig:
    """Apply other_megatron_args through the table of Megatron's flags.

    The result has the settings in which a command line with these arguments differs from one without them. Raises
    ConfigError for unsupported arguments, and for one that changes the model.
    """
    if not arguments:
        return config
    base = _command_line(config)
    words = _words(arguments)
    translated = translate([*base, *words], processes)
    before, changed = translate(base, processes).tree, {}
    set_directly = {FLAGS[word].path for word in words if isinstance(FLAGS.get(word), Sets)}
    for section, values in translated.tree.items():
        for name, value in values.items():
            if before.get(section, {}).get(name, values) != value or f"{section}.{name}" in set_directly:
                changed[f"{section}.{name}"] = value
    for name in ModelConfig.fields_deciding(Decides.FUNCTION):
        path = f"model.{name}"
        if path in changed and changed.pop(path) != getattr(config.model, name):
            raise ConfigError(
                f"other_megatron_args changes {path}, which the Hugging Face model's config determines; remove it "
                "from other_megatron_args, and change the config"
            )
    notes += [f"other_megatron_args: {note}" for note in translated.notes]
    return config.with_settings(changed)


def _command_line(config: RunConfig) -> list[str]:
    model = config.model
    sizes = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
        "--seq-length": config.data.seq_length,
        "--max-position-embeddings": model.max_position_embeddings or config.data.seq_length,
        "--micro-batch-size": config.train.micro_batch_size,
        "--global-batch-size": config.train.global_batch_size,
        "--train-iters": config.train.train_iters,
        "--lr": 1e-3,
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": model.vocab_size,
        "--tensor-model-parallel-size": config.parallel.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": config.parallel.pipeline_model_parallel_size,
        "--context-parallel-size": config.parallel.context_parallel_size,
    }
    words = [word for flag, value in sizes.items() for word in (flag, str(value))]
    experts = ["--num-experts", str(model.num_experts)] if model.num_experts is not None else []
    precision = [f"--{config.train.precision}"] if config.train.precision != "fp32" else []
    return [*words, *experts, *precision, "--mock-data"]


def _words(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments, such as `{"overlap_grad_reduce": True, "masked_softmax_fusion": False}`, as flags."""
    words = []
    for name, value in arguments.items():
        flag = next(
            (f for f in FLAGS if f.removeprefix("--").replace("-", "_") == name),
            f"--{name.replace('_', '-')}",
        )
        off = f"--no-{name.replace('_', '-')}"
        if value is False and off in FLAGS:
            words.append(off)
        elif value is True:
            words.append(flag)
        elif value not in (None, False):
            words += [flag, *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words
