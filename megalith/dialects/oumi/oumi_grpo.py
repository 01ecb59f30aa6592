"""Derive GRPO's objective, rollout engine and rewards from Oumi's keys.

Oumi has three sections for GRPO, and verl's overrides are a fourth. A value set in several of them must be the same in
all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from megalith.config.rules.spellings.loss_spellings import DUAL_CLIP
from megalith.dialects.oumi.oumi_keys import ACTOR, ENGINE_KEYS, ROLLOUT, VERL_PREFIX
from megalith.dialects.oumi.oumi_values import OumiDataset, OumiKeys

MAX_PROMPT_LENGTH = 512  # tokens; default if model_max_length leaves room for it
REWARDS = {"gsm8k": "gsm8k", "countdown": "countdown"}  # dataset name → reward
KNOWN_REWARDS = (
    "gsm8k",
    "gsm8k_flexible",
    "countdown",
    "arithmetic",
    "sort",
    "format",
    "length",
    "math_verify",
)


def num_generations(keys: OumiKeys) -> int:
    return keys.value_of("grpo.num_generations", "training.grpo.num_generations", f"{ROLLOUT}n", default=8)


def set_grpo_objective(keys: OumiKeys) -> None:
    """Set sampling, clipping, lengths, KL and entropy."""
    config, verl = "megatron.grpo_config.", f"{ACTOR}"
    sections = ("grpo.", "training.grpo.")
    keys.set("rl.num_generations", num_generations(keys))
    temperature = [f"{section}temperature" for section in (*sections, "megatron.sampling_config.", ROLLOUT)]
    keys.set("rl.temperature", keys.value_of(*temperature, default=0.9))
    for name, disabled in (("top_p", (1.0,)), ("top_k", (-1, 0))):
        for key in (f"megatron.sampling_config.{name}", f"{ROLLOUT}{name}"):
            if keys[key] not in disabled:
                keys.problems.append(
                    f"{key} is {keys[key]}, which is not supported, because the sampler's probabilities would differ "
                    f"from the trainer's; leave {key} out, or set it to {disabled[0]}"
                )
    both = [f"{section}epsilon" for section in sections]
    if f"{verl}clip_ratio_low" not in keys and f"{verl}clip_ratio_high" not in keys:
        both.append(f"{verl}clip_ratio")
    epsilon = keys.value_of(*both, f"{config}clamp_eps_lower", f"{verl}clip_ratio_low", default=0.2)
    keys.set("rl.epsilon", epsilon)
    both_sides = any(key in keys for key in both) or epsilon == 0.2
    upper = keys.value_of(
        f"{config}clamp_eps_upper", f"{verl}clip_ratio_high", default=None if both_sides else 0.2
    )
    if upper is not None and upper != epsilon:
        keys.set("rl.epsilon_high", upper)
    if any(f"{verl}{name}" in keys for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")):
        keys.tree["rl"].setdefault("clip_ratio_c", DUAL_CLIP)
    prompt = [f"{section}max_prompt_length" for section in sections]
    completion = [f"{section}max_completion_length" for section in sections]
    completion.append("megatron.sampling_config.max_tokens")
    completion_length = keys.value_of(*completion, f"{VERL_PREFIX}data.max_response_length", default=256)
    model_length = keys["model.model_max_length"]
    room = max((model_length or MAX_PROMPT_LENGTH + completion_length) - completion_length, 1)
    prompt_length = keys.value_of(
        *prompt, f"{VERL_PREFIX}data.max_prompt_length", default=min(MAX_PROMPT_LENGTH, room)
    )
    longest = prompt_length + completion_length
    if model_length is not None and longest > model_length:
        keys.problems.append(
            f"model.model_max_length is {model_length}, but max_prompt_length ({prompt_length}) + "
            f"max_completion_length ({completion_length}) = {longest} tokens; raise model.model_max_length, or lower "
            "one of the others"
        )
    keys.set("rl.max_prompt_length", prompt_length)
    keys.set("rl.max_completion_length", completion_length)
    keys.set("rl.overlong_prompts", "drop")
    packing = keys["megatron.enable_sequence_packing"]
    keys.set("rl.packing", packing)
    parallel = keys.tree["parallel"]
    unit = 2 * parallel["tensor_model_parallel_size"] * parallel["context_parallel_size"]
    row = max(longest, model_length or 0) if packing else longest
    keys.set("data.seq_length", -(-row // unit) * unit)
    use_kl_loss, beta = f"{verl}use_kl_loss", keys[f"{config}kl_beta"]
    if use_kl_loss in keys:
        coefficient = keys[f"{verl}kl_loss_coef"] if keys[use_kl_loss] else 0.0
        if f"{config}kl_beta" in keys and beta != coefficient:
            keys.problems.append(
                f"{config}kl_beta is {beta:g}, but {use_kl_loss} is {keys[use_kl_loss]}, which makes the KL "
                f"coefficient {coefficient:g}; make the two equal, or leave one of them out"
            )
        beta = coefficient
    keys.set("rl.kl_loss_coef" if use_kl_loss in keys and beta else "rl.beta", beta)
    entropy = keys.value_of(f"{config}entropy_weight", f"{verl}entropy_coeff", default=0.0)
    keys.set("rl.entropy_coeff" if f"{verl}entropy_coeff" in keys else "rl.entropy_coef", entropy)
    if not keys[f"{config}normalize_advantages"]:
        keys.set("rl.scale_rewards", "none")
    if keys["grpo.log_completions"]:
        keys.set("rl.log_completions", True)


def set_rollout_engine(keys: OumiKeys) -> None:
    """Set the engine that samples completions, and the weight synchronization."""
    backend = keys.value_of("megatron.inference_backend", f"{ROLLOUT}name", default=None)
    uses_vllm = keys["training.grpo.use_vllm"] or keys["grpo.use_vllm"]
    if backend is None and uses_vllm:
        backend = "vllm"
    if backend not in (None, "vllm", "sglang", "megatron"):
        keys.problems.append(f"megatron.inference_backend is {backend!r}; use vllm, sglang or megatron")
    method = keys["megatron.weight_sync_method"]
    if method not in ("nccl", "gloo", "checkpoint", "ipc"):
        keys.problems.append(f"megatron.weight_sync_method is {method!r}; use nccl, gloo, checkpoint or ipc")
    kwargs = keys["training.trainer_kwargs"]
    url = kwargs.get("engine_url") or kwargs.get("vllm_server_base_url")
    engine = kwargs.get("engine") or _select_engine(backend, url)
    if uses_vllm and engine == "own" and backend == "vllm":
        keys.problems.append(
            "use_vllm is true, but vLLM is not installed; install it, set training.trainer_kwargs.engine_url to a "
            "vLLM server, or leave use_vllm out for Megalith's built-in engine"
        )
    if engine == "own" and url:
        keys.problems.append(
            f"training.trainer_kwargs.engine is own, but engine_url is a server, {url!r:.60}; leave one of the "
            "two out"
        )
    if (engine in ("vllm", "sglang") and backend not in (None, engine)) or engine == "megatron":
        setting = f"engine is {engine}" if kwargs.get("engine") else f"engine_url is {url!r:.60}"
        keys.problems.append(
            f"training.trainer_kwargs.{setting}, but megatron.inference_backend is {backend}; a server runs vllm or "
            "sglang, and both keys must name the same engine"
        )
    colocated = engine == "vllm" and not url
    is_served = engine in ("vllm", "sglang") and not colocated
    if engine in ("vllm", "sglang"):
        keys.set("rl.engine", engine)
    if is_served:
        keys.set("rl.weight_sync_method", method)
    elif colocated:
        keys.notes.append(
            "megatron.inference_backend is vllm, which runs in the trainer's processes (docs/engines.md)"
        )
    elif backend == "vllm":
        keys.notes.append(
            "megatron.inference_backend is vllm, which is not installed: Megalith's built-in engine samples with the "
            "trainer's current weights, and weight_sync_method has no effect; install vLLM to run it in the trainer's "
            "processes, or set training.trainer_kwargs.engine_url to a vLLM server"
        )
    _set_vllm_memory(keys, colocated)
    interval = keys["megatron.vllm_weight_sync_interval"]
    for path, value in (
        ("rl.max_staleness", None if interval is None else interval - 1),
        ("rl.weight_sync_timeout", keys["megatron.weight_sync_timeout"]),
    ):
        if value is None or (path == "rl.max_staleness" and value == 0):
            continue
        if is_served:
            keys.set(path, value)
        else:
            keys.problems.append(
                f"{ENGINE_KEYS[path]} is {keys[ENGINE_KEYS[path]]}, which is not supported, because the built-in "
                f"engine always samples with the current weights; leave {ENGINE_KEYS[path]} out"
            )


def _select_engine(backend: str | None, url: object) -> str:
    """Return rl.engine. Oumi's default backend, vllm, becomes the built-in engine if vLLM is not installed."""
    if url:
        return backend or "vllm"
    if backend == "vllm":
        return "vllm" if "vllm" in sys.modules or find_spec("vllm") else "own"
    return "sglang" if backend == "sglang" else "own"


def _set_vllm_memory(keys: OumiKeys, colocated: bool) -> None:
    """Set the fraction of each GPU's memory for vLLM, if it runs in the trainer's processes."""
    names = [f"{section}vllm_gpu_memory_utilization" for section in ("training.grpo.", "grpo.")]
    fraction = keys.value_of(*names, default=None)
    if fraction is not None and colocated:
        keys.set("rl.vllm_gpu_memory_utilization", fraction)
    elif fraction is not None:
        keys.notes.append(
            f"vllm_gpu_memory_utilization {fraction:g} has no effect: vLLM does not run in the trainer's processes"
        )


def reward_names(keys: OumiKeys, datasets: Sequence[OumiDataset]) -> list[str]:
    """Return the configured reward functions, or the reward that belongs to the dataset."""
    rewards = [name for name in keys["training.reward_functions"] or () if name]
    if not rewards:
        names = [
            (dataset.name or dataset.path or "").rstrip("/").rpartition("/")[2].lower()
            for dataset in datasets
        ]
        implied = {REWARDS.get(name) for name in names}
        if len(implied) != 1 or None in implied:
            empty = "" if names else " (data.train.datasets is empty)"
            keys.problems.append(
                f"training.reward_functions is not set, and only the datasets {', '.join(REWARDS)} imply a "
                f"reward{empty}; use a built-in reward, or path.py:function"
            )
            return []
        rewards = [str(implied.pop())]
        keys.notes.append(
            f"reward: {rewards[0]}, implied by the dataset {names[0]}; set training.reward_functions for another"
        )
    for name in rewards:
        if name not in KNOWN_REWARDS and ":" not in name:
            keys.problems.append(
                f"training.reward_functions has {name!r}; use one of {', '.join(KNOWN_REWARDS)}, or path.py:function "
                "for a function of yours"
            )
    return rewards
