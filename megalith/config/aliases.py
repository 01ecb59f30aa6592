"""Accepted spellings of settings.

`ALIASES` is applied before validation. A `Rename` moves the value, a `Choose` translates it, a `Derive` computes it from
other settings, an `ObjectiveSpelling` depends on other spellings (objective_spellings.py), and an `Already` has no
effect, because Megalith always does it or does not need it; its note is printed at the start of the run.
other_systems.py has the names and files that are rejected with a suggestion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megalith.config.rules.objective_spellings import OBJECTIVES
from megalith.config.rules.spellings.spelling import ObjectiveSpelling
from megalith.errors import ConfigError
from megalith.remote import is_url


@dataclass(frozen=True)
class Rename:
    """A spelling that is an alias of a setting."""

    path: str
    for_url: str | None = None
    """Setting for values that are URLs."""


@dataclass(frozen=True)
class Choose:
    """An alias whose values differ from the setting's."""

    path: str
    values: dict[Any, Any]
    """Accepted value → value of the setting; None sets nothing."""
    off: str | None = None
    """Setting that null sets to false. None: null sets nothing."""


@dataclass(frozen=True)
class Already:
    """A spelling that is accepted and has no effect."""

    note: str
    takes: type | tuple[str, ...] = bool
    """Accepted values: a type, or Megatron's choices."""


@dataclass(frozen=True)
class Derive:
    """An alias from whose value, and other settings, the setting is computed."""

    path: str
    takes: type
    compute: Callable[[Any, dict[str, dict[str, Any]]], Any]
    note: str = ""
    """Printed with the computed value."""


def _virtual_stages(layers_per_stage: Any, tree: dict[str, dict[str, Any]]) -> int | None:
    if layers_per_stage is None:
        return None
    layers = tree["model"].get("num_layers")
    stages = tree["parallel"].get("pipeline_model_parallel_size", 1)
    counts = (layers, stages, layers_per_stage)
    if any(type(count) is not int or count < 1 for count in counts) or layers % (stages * layers_per_stage):
        raise ConfigError(
            f"num_layers_per_virtual_pipeline_stage {layers_per_stage!r} × "
            f"pipeline_model_parallel_size {stages!r} does not divide model.num_layers {layers!r}; "
            "choose whole numbers that do, or set parallel.virtual_pipeline_model_parallel_size "
            "(model chunks per pipeline rank) directly"
        )
    return layers // (stages * layers_per_stage)


def _granularity(recompute: Any, tree: dict[str, dict[str, Any]]) -> str | None:
    return (tree["parallel"].get("recompute_granularity") or "full") if recompute else None


def _resamples(batches: Any, tree: dict[str, dict[str, Any]]) -> int | None:
    if batches is not None and batches < 1:
        raise ConfigError(
            f"the maximum number of generation batches is {batches}, which means no limit in "
            "other systems; set rl.max_resamples to a finite number instead"
        )
    return None if batches is None else batches - 1


def _vllm_mode(mode: Any, tree: dict[str, dict[str, Any]]) -> str | None:
    url = tree["rl"].get("engine_url") or tree["rl"].get("vllm_server_base_url")
    if mode not in ("server", "colocate") or (mode == "colocate" and url):
        raise ConfigError(
            f"rl.vllm_mode is {mode!r} and rl.engine_url is {url!r}, but mode server needs an address and mode "
            "colocate must not have one; leave rl.vllm_mode out"
        )
    return url or "http://127.0.0.1:8000" if mode == "server" else None


def _check_weight_sync(enabled: Any, tree: dict[str, dict[str, Any]]) -> None:
    if enabled is False:
        raise ConfigError(
            "rl.enable_weight_sync is false, but the engine would then always sample with the initial weights; "
            "leave rl.enable_weight_sync out"
        )


_FP32_SUMS = "gradients are always accumulated and reduced in fp32"
_NO_RNG = "there is no random state to save: initial weights, dropout and data order follow from train.seed"
_ONE_FORMAT = "checkpoints have one format, loadable in any layout; Hugging Face's and Megatron's are detected automatically"
_CHECKED = (
    "every step is checked: a step with NaN or Inf in its loss or gradients is skipped, and a message names the "
    "tensor in which it began"
)
_ALL_LAYERS = (
    "full recomputation of every layer; Megatron's flag of this name only recomputes core attention, which is "
    "recompute_granularity selective"
)
_SAMPLES = "samples are found by binary search, so there is no index to cache"

# fmt: off
ALIASES: dict[str, Rename | Choose | Already | Derive | ObjectiveSpelling] = {
    "parallel.hybrid_context_parallel":               Rename("parallel.dynamic_context_parallel"),
    "parallel.use_distributed_optimizer":             Choose("parallel.data_parallel_sharding_strategy", {True: "optim", False: "no_shard"}),
    "optim.use_distributed_optimizer":                Choose("parallel.data_parallel_sharding_strategy", {True: "optim", False: "no_shard"}),
    "parallel.num_layers_per_virtual_pipeline_stage": Derive("parallel.virtual_pipeline_model_parallel_size", int, _virtual_stages),
    "parallel.recompute_activations":                 Derive("parallel.recompute_granularity", bool, _granularity, _ALL_LAYERS),
    "parallel.distribute_checkpointed_activations":   Rename("parallel.distribute_saved_activations"),
    "parallel.accumulate_allreduce_grads_in_fp32":    Already(_FP32_SUMS),
    "parallel.grad_reduce_in_fp32":                   Already(_FP32_SUMS),
    "parallel.grad_reduce_in_bf16":                   Already(_FP32_SUMS),
    "parallel.average_in_collective":                 Already("gradients are summed; the loss is divided by the step's count of valid tokens"),
    "parallel.overlap_grad_reduce":                   Already("gradient reduction always overlaps the backward pass"),
    "parallel.overlap_param_gather":                  Already("parameter all-gathers always overlap the forward pass"),

    "model.seq_length":                               Rename("data.seq_length"),
    "model.norm_epsilon":                             Rename("model.layernorm_epsilon"),
    "model.disable_bias_linear":                      Choose("model.add_bias_linear", {True: False, False: True}),
    "model.use_rotary_position_embeddings":           Choose("model.position_embedding_type", {True: "rope", False: None}),
    "model.apply_layernorm_1p":                       Rename("model.layernorm_zero_centered_gamma"),
    "model.squared_relu":                             Choose("model.activation", {True: "squared_relu", False: None}),
    "model.attention_softmax_in_fp32":                Already("attention's softmax is always computed in fp32"),
    "model.expert_model_parallel_size":               Rename("parallel.expert_model_parallel_size"),

    "train.bf16":                                     Choose("train.precision", {True: "bf16", False: None}),
    "train.fp16":                                     Choose("train.precision", {True: "fp16", False: None}),
    "train.attention_softmax_in_fp32":                Already("attention's softmax is always computed in fp32"),
    "train.accumulate_allreduce_grads_in_fp32":       Already(_FP32_SUMS),
    "train.seq_length":                               Rename("data.seq_length"),
    "train.lr":                                       Rename("optim.lr"),
    "train.min_lr":                                   Rename("optim.min_lr"),
    "train.lr_decay_style":                           Rename("optim.lr_decay_style"),
    "train.lr_warmup_iters":                          Rename("optim.lr_warmup_iters"),
    "train.weight_decay":                             Rename("optim.weight_decay"),
    "train.clip_grad":                                Rename("optim.clip_grad"),
    "train.dataloader_type":                          Rename("data.dataloader_type"),
    "train.split":                                    Rename("data.split"),
    "train.save":                                     Rename("train.output_dir", for_url="checkpoint.save"),
    "train.load":                                     Rename("checkpoint.load"),
    "train.save_interval":                            Rename("checkpoint.save_interval"),

    "sft.max_length":                                 Rename("data.seq_length"),
    "dpo.max_length":                                 Rename("data.seq_length"),
    "dpo.reference_policy_kl_penalty":                Rename("dpo.beta"),  # NeMo-RL
    "optim.cpu_offload_optimizer":                    Rename("optim.optimizer_cpu_offload"),

    **OBJECTIVES,
    "rl.ppo_epochs":                                  Rename("rl.num_iterations"),
    "rl.num_generations_per_prompt":                  Rename("rl.num_generations"),  # NeMo-RL
    "rl.ratio_clip_c":                                Rename("rl.clip_ratio_c"),
    "rl.kl_beta":                                     Rename("rl.beta"),
    "rl.entropy_weight":                              Rename("rl.entropy_coef"),
    "rl.load_rollouts":                               Rename("rl.rollouts"),
    "rl.reward_functions":                            Rename("rl.reward_funcs"),
    "rl.max_new_tokens":                              Rename("rl.max_completion_length"),  # NeMo-RL
    "rl.max_response_length":                         Rename("rl.max_completion_length"),  # verl
    "rl.prompt_key":                                  Rename("rl.prompt_column"),
    "rl.train_files":                                 Rename("rl.prompts"),
    "rl.val_files":                                   Rename("rl.eval_prompts"),
    "rl.max_val_samples":                             Rename("rl.max_eval_prompts"),  # NeMo-RL
    "rl.shuffle":                                     Rename("rl.shuffle_dataset"),
    "rl.filter_overlong_prompts":                     Choose("rl.overlong_prompts", {True: "drop", False: "refuse"}),
    "rl.max_num_gen_batches":                         Derive("rl.max_resamples", int, _resamples, "not counting the first batch"),
    "rl.dynamic_sampling_max_gen_batches":            Derive("rl.max_resamples", int, _resamples, "not counting the first batch"),  # NeMo-RL
    "rl.filter_groups":                               Rename("rl.filter_zero_std"),
    "rl.use_dynamic_sampling":                        Rename("rl.filter_zero_std"),  # NeMo-RL
    "rl.n":                                           Rename("rl.num_generations"),
    "rl.bypass_mode":                                 Choose("rl.old_logprobs", {True: "rollout", False: "policy"}),
    "rl.vllm_importance_sampling_cap":                Rename("rl.vllm_importance_sampling_clip_max"),  # TRL, before
    "rl.use_vllm":                                  Choose("rl.engine", {True: "vllm", False: "own"}),  # TRL
    "rl.vllm_server_base_url":                      Rename("rl.engine_url"),
    "rl.vllm_mode":                                Derive("rl.engine_url", str, _vllm_mode),
    "rl.vllm_server_timeout":                       Rename("rl.weight_sync_timeout"),
    "rl.inference_backend":                         Choose("rl.engine", {"vllm": "vllm", "sglang": "sglang", "megatron": "own"}),  # Oumi
    "rl.enable_weight_sync":                        Derive("rl.engine", bool, _check_weight_sync),
    "rl.max_trajectory_age_steps":                 Rename("rl.max_staleness"),  # NeMo-RL
    "rl.max_async_level":                           Rename("rl.max_staleness"),  # prime-rl
    "rl.max_head_offpolicyness":                    Rename("rl.max_staleness"),  # AReaL
    "rl.recompute_logprob":                          Choose("rl.old_logprobs", {True: "policy", False: "rollout"}),  # AReaL
    "rl.multi_objective_aggregation":                 Choose("rl.advantage_estimator", {"sum_then_normalize": "group", "normalize_then_sum": "gdpo"}),
    "rl.normalize_advantages":                        Choose("rl.scale_rewards", {True: "group", False: "none"}),  # Oumi

    "data.index_cache":                               Already(_SAMPLES, str),
    "data.data_cache_path":                           Already(_SAMPLES, str),

    "checkpoint.save":                                Rename("train.output_dir", for_url="checkpoint.save"),
    "checkpoint.no_save_optim":                       Choose("checkpoint.save_optim", {True: False, False: True}),
    "checkpoint.no_load_optim":                       Choose("checkpoint.load_optim", {True: False, False: True}),
    "checkpoint.no_save_rng":                         Already(_NO_RNG),
    "checkpoint.no_load_rng":                         Already(_NO_RNG),
    "checkpoint.ckpt_format":                         Already(_ONE_FORMAT, ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor")),
    "checkpoint.ckpt_fully_parallel_save":            Already("every rank writes its share of a checkpoint"),
    "checkpoint.auto_detect_ckpt_format":             Already(_ONE_FORMAT),

    "log.enable_straggler_detection":                 Rename("runtime.enable_straggler_detection"),
    "train.check_for_nan_in_loss_and_grad":           Already(_CHECKED),
    "runtime.check_for_nan_in_loss_and_grad":         Already(_CHECKED),
    "train.exit_signal_handler":                      Already("SIGTERM, SIGUSR1 and SIGINT always end a run with a checkpoint"),
    "train.distributed_timeout_minutes":              Rename("runtime.distributed_timeout_minutes"),
}
# fmt: on


def remove_overridden(tree: dict[str, dict[str, Any]], name: str, value: Any) -> None:
    """Remove from `tree` every other spelling of the setting that `name` = `value` sets.

    A spelling set to false only excludes one value of the setting, so spellings with other values stay.
    """
    path, excluded = _target(name, value), None
    if isinstance(ALIASES.get(name), Choose) and value is False:
        excluded = ALIASES[name].values[True]
    for section, values in tree.items():
        for key in list(values):
            other = f"{section}.{key}"
            if other == name or _target(other, values[key]) != path:
                continue
            meaning, current = ALIASES.get(other), values[key]
            if isinstance(meaning, Choose) and isinstance(current, bool):
                current = meaning.values[current]
            if excluded is None or current == excluded:
                del values[key]


def _target(name: str, value: Any) -> str:
    """Return the setting that the spelling `name` sets if its value is `value`."""
    meaning = ALIASES.get(name)
    if isinstance(meaning, Rename) and meaning.for_url and is_url(value):
        return meaning.for_url
    if isinstance(meaning, Choose) and meaning.off and value is None:
        return meaning.off
    return meaning.path if isinstance(meaning, Rename | Choose | Derive | ObjectiveSpelling) else name


def apply_aliases(tree: dict[str, dict[str, Any]], preset: dict[str, Any]) -> list[str]:
    """Replace aliases in `tree` in place.

    Args:
        tree: section → key → value.
        preset: model fields of the preset, which aliases override.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: an alias has an unsupported value or contradicts a setting.
    """
    notes, objectives = [], {}
    for name, meaning in ALIASES.items():
        section, key = name.split(".")
        if key not in tree[section]:
            continue
        value = tree[section].pop(key)
        match meaning:
            case Already(note=note, takes=takes):
                _check_taken(name, value, takes)
                notes.append(f"{name} = {value}: {note}")
            case Rename():
                _set(tree, _target(name, value), value, name)
            case Derive(path=path, takes=takes, compute=compute, note=note):
                _check_taken(name, value, takes)
                with_preset = {**tree, "model": {**preset, **tree["model"]}}
                computed, before = compute(value, with_preset), dict(tree[path.partition(".")[0]])
                _set(tree, path, computed, name)
                if note and computed is not None and path.partition(".")[2] not in before:
                    notes.append(f"{name} = {value} sets {path} = {computed}: {note}")
            case Choose(path=path, values=values):
                _check_taken(name, value, bool if True in values else tuple(values))
                target = _target(name, value)
                _set(tree, target, values.get(value) if target == path else False, name)
            case ObjectiveSpelling() if value is not None or meaning.null_counts:
                if meaning.takes is not None:
                    _check_taken(name, value, meaning.takes)
                for setting, new in meaning.settings(value, tree["rl"]).items():
                    if new is None:
                        tree["rl"].pop(setting, None)
                    _set(tree, f"rl.{setting}", new, name)
                objectives[name] = value
    return notes + [
        note for name, value in objectives.items() if (note := _add_objective_defaults(tree, name, value))
    ]


def _add_objective_defaults(tree: dict[str, dict[str, Any]], name: str, value: Any) -> str:
    """Set the defaults of a spelling's formula that are not set; returns a note about them, or ""."""
    defaults = ALIASES[name].defaults(value, tree["rl"]).items()
    added = {setting: default for setting, default in defaults if setting not in tree["rl"]}
    tree["rl"].update(added)
    settings = ", ".join(f"rl.{setting} = {default}" for setting, default in added.items())
    return (
        f"{name} = {value} also sets {settings}, as its formula does; set them yourself for other values"
        if settings
        else ""
    )


def _check_taken(name: str, value: Any, takes: type | tuple[str, ...]) -> None:
    if isinstance(takes, tuple):
        fits, requirements = value is None or value in takes, f"one of {', '.join(takes)}"
    else:
        fits, requirements = value is None or type(value) is takes, _TYPE_NAMES[takes]
    if not fits:
        raise ConfigError(f"{name} is {value!r}: it must be {requirements}")


_TYPE_NAMES = {bool: "true or false", int: "a whole number", str: "text"}


def _set(tree: dict[str, dict[str, Any]], path: str, value: Any, alias: str) -> None:
    section, key = path.split(".")
    if value is None:
        return
    if tree[section].get(key, value) != value:
        raise ConfigError(
            f"{alias} sets {path} to {value!r}, but {path} is already {tree[section][key]!r}; remove one of them"
        )
    tree[section][key] = value


# fmt: on
