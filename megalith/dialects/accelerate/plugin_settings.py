"""The plugin, a Hugging Face model's config and the batch → the configuration of a run.

The model's own config decides what the model is; the plugin decides how it is spread and recomputed.
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
SMALLEST_SCALE = 2.0**-126  # of fp32's normal numbers
ENCODERS = ("pipeline_model_parallel_split_rank", "encoder_seq_length")
IDLE = {
    "attention_backend": "attention's kernel is chosen by the device",
    "attention_softmax_in_fp32": "softmax is computed in fp32",
    "use_precision_aware_optimizer": "optimizer state is fp32",
    "use_rotary_position_embeddings": "the model's own config says which positions it has",
    **dict.fromkeys(
        ("no_wd_decay_cond", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
        "each parameter keeps the weight decay of its group of the script's optimizer",
    ),
    **dict.fromkeys(
        ("scale_lr_cond", "lr_mult"),
        "each parameter keeps the rate of its group of the script's optimizer",
    ),
    **dict.fromkeys(
        ("train_samples", "lr_decay_samples", "lr_warmup_samples"),
        "schedules are counted in steps: lr_decay_iters, lr_warmup_iters, or a MegatronLMDummyScheduler's",
    ),
    **dict.fromkeys(
        ("tensorboard_dir", "set_all_logging_options"),
        "Accelerate's own trackers log: Accelerator(log_with=…)",
    ),
}


def run_config(
    plugin: MegatronLMPlugin,
    family: Family,
    theirs: Mapping[str, Any],
    precision: str,
    processes: int,
    device: str,
    checkpoints: bool = False,
    scaler: GradScalerKwargs | None = None,
) -> tuple[RunConfig, list[str]]:
    """The run of a model whose config.json is `theirs` on so many processes, and what its user should know.
    `checkpoints`: whether transformers' gradient checkpointing is on in it; `scaler`: what the script says of fp16's
    loss scale.

    `plugin.set_training_args` has been called. Raises ConfigError where the run is not possible.
    """
    model = family.read_config(theirs)
    check_model(model)
    config, notes = RunConfig(model=model), []
    length = plugin.seq_length or plugin.decoder_seq_length or model.max_position_embeddings or 2048
    whole = token_multiple(plugin)
    settings = {
        "data.mock": True,  # the script has the data
        "data.seq_length": max(whole, length // whole * whole),
        "train.train_iters": plugin.train_iters or 1,
        "train.micro_batch_size": plugin.micro_batch_size,
        "train.global_batch_size": plugin.global_batch_size,
        "train.precision": precision,
        "train.calculate_per_token_loss": plugin.calculate_per_token_loss,
        "optim.lr": 0.0,  # the script's optimizer has it
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
    left_off = (
        () if plugin.use_precision_aware_optimizer else ("use_precision_aware_optimizer",)
    )  # by the launcher
    notes += [
        f"{name} has no effect here: {IDLE[name]}"
        for name in IDLE
        if plugin.has(name) and name not in left_off
    ]
    notes += [f"{name} is for encoders, and has no effect here" for name in ENCODERS if plugin.has(name)]
    if theirs.get("output_router_logits"):
        notes.append(
            "output_router_logits: a balancing loss is each layer's own, with other_megatron_args' moe_aux_loss_coeff, "
            "and none without it; transformers' is one of all layers together"
        )
    check_layout(config, processes)
    return config, [*notes, *idle_notes(config)]


def token_multiple(plugin: MegatronLMPlugin) -> int:
    """What the length of a sequence has to be a multiple of, for its tokens to be sharded."""
    tokens = plugin.tp_degree if plugin.sequence_parallelism and plugin.tp_degree > 1 else 1
    return tokens * (2 * plugin.context_parallel_size if plugin.context_parallel_size > 1 else 1)


def require_dense_masks(config: RunConfig, padding: Tensor) -> None:
    """Raise ConfigError where attention cannot leave out single tokens: padding, bool [batch, seq]."""
    model, size = config.model, config.parallel.context_parallel_size
    runs = (pad((~padding).int(), (1, 0)).diff(dim=1) > 0).sum(1)  # of tokens in each sample
    reason = None
    if size > 1:
        reason = f"context_parallel_size is {size}, which cuts sequences into parts without such masks"
    elif model.linear_attention_layers:
        reason = "the model has linear attention, which goes through all tokens before"
    elif model.position_embedding_type == "alibi" and bool((runs > 1).any()):
        reason = "the model has ALiBi, which counts the tokens between two others"
    if reason is not None:
        raise ConfigError(
            "attention_mask has zeros between the tokens of a sample, or labels other than −100 on the padding at its "
            f"end, and {reason}; pad at the beginning or the end, with labels of −100"
        )


def _dropout(plugin: MegatronLMPlugin) -> dict[str, float]:
    """The model's own, unless the plugin has another."""
    names = [name for name in ("attention_dropout", "hidden_dropout") if plugin.has(name)]
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
                f"model's {model.num_layers} layers; choose another"
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
    """`recompute_activations` alone is selective, of attention's core; with a field of whole layers, it is theirs.
    `checkpoints`: gradient_checkpointing_enable() of the model, which is of whole layers where no field is given."""
    granularity = plugin.recompute_granularity if plugin.has("recompute_granularity") else None
    if (
        plugin.checkpoint_num_layers is not None
        or plugin.has("recompute_method")
        or plugin.has("recompute_num_layers")
    ):
        granularity = granularity or "full"
    elif plugin.recompute_activations:
        granularity = granularity or "selective"
    elif checkpoints:
        granularity = granularity or "full"
    found: dict[str, Any] = {"parallel.recompute_granularity": granularity}
    if granularity == "full":
        found["parallel.recompute_method"] = plugin.recompute_method
        found["parallel.recompute_num_layers"] = plugin.checkpoint_num_layers or plugin.recompute_num_layers
    if plugin.distribute_checkpointed_activations or plugin.partition_activations:
        can = granularity == "full" and plugin.tp_degree > 1 and not plugin.sequence_parallelism
        if can:
            found["parallel.distribute_saved_activations"] = True
        else:
            notes.append(
                "distribute_checkpointed_activations and partition_activations have no effect: they shard the saved "
                "inputs of recomputed layers over tensor parallelism, which takes full recomputation and tp_degree "
                f"above 1 without sequence_parallelism (here {granularity or 'no'} recomputation, {plugin.tp_degree})"
            )
    return found


def _loss_scale(given: GradScalerKwargs) -> dict[str, Any]:
    """Return the settings of torch's GradScaler: it halves at each overflow, and has no least scale."""
    if (given.growth_factor, given.backoff_factor) != (2.0, 0.5):
        raise ConfigError(
            f"GradScalerKwargs has growth_factor {given.growth_factor:g} and backoff_factor {given.backoff_factor:g}, "
            "but the loss scale doubles and halves; leave them at 2 and 0.5"
        )
    if not given.enabled:
        return {"optim.loss_scale": 1.0}
    return {
        "optim.initial_loss_scale": given.init_scale,
        "optim.loss_scale_window": given.growth_interval,
        "optim.hysteresis": 1,
        "optim.min_loss_scale": SMALLEST_SCALE,
    }


def _with_other_arguments(
    config: RunConfig, given: Mapping[str, Any], processes: int, notes: list[str]
) -> RunConfig:
    """With what Megatron's own arguments change, by the table of its flags: as a command line with them differs from
    one without. Raises ConfigError for one that is refused, and where the model would be another."""
    if not given:
        return config
    plain = _command_line(config)
    with_them = translate([*plain, *_words(given)], processes)
    before, changed = translate(plain, processes).tree, {}
    named = {FLAGS[word].path for word in _words(given) if isinstance(FLAGS.get(word), Sets)}
    for section, values in with_them.tree.items():
        for name, value in values.items():
            if before.get(section, {}).get(name, values) != value or f"{section}.{name}" in named:
                changed[f"{section}.{name}"] = value
    for name in ModelConfig.deciding(Decides.FUNCTION):
        path = f"model.{name}"
        if path in changed and changed.pop(path) != getattr(config.model, name):
            raise ConfigError(
                f"other_megatron_args changes {path}, which the Hugging Face model's config decides; leave it out, and "
                "set it there"
            )
    notes += [f"other_megatron_args: {note}" for note in with_them.notes]
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


def _words(given: Mapping[str, Any]) -> list[str]:
    """`{"overlap_grad_reduce": True, "masked_softmax_fusion": False}` as words of a command line."""
    words = []
    for name, value in given.items():
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
