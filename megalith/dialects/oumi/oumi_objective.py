"""What several keys decide of the learning: GRPO's objective and engine, chat data, optimizer, schedule, precision.

GRPO's settings have three places in Oumi, and those of its trainer on verl are a fourth: of a value that stands in
several all have to be the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.config import RlConfig
from megalith.config.rules.objective_spellings import DUAL_CLIP
from megalith.dialects.oumi.oumi_keys import ACTOR, ENGINE_KEYS, IN_VERL, ROLLOUT

if TYPE_CHECKING:
    from megalith.dialects.oumi.oumi_settings import Asked, DatasetAsked

PROMPT = 512  # tokens, where no limit of the prompts is set and the model's is no shorter
PRECISIONS = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16",
              "float32": "fp32", "fp32": "fp32", "float": "fp32", "auto": "auto", "none": "none"}  # fmt: skip
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw in 8 bits"),
    "sgd": "sgd",
}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine", "constant": "constant",
             "constant_with_warmup": "constant"}  # fmt: skip
REWARDS = {"gsm8k": "gsm8k", "countdown": "countdown"}  # what a dataset's name implies
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
KWARGS: dict[
    str, dict[str, str | None]
] = {  # training.trainer_kwargs: the setting, or None where it changes nothing
    "sft": {
        "max_seq_length": "data.seq_length",
        "max_length": "data.seq_length",
        "packing": "sft.packing",
        "assistant_only_loss": "sft.assistant_only_loss",
        "completion_only_loss": "sft.completion_only_loss",
        "dataset_text_field": None,
        "dataset_kwargs": None,
        "remove_unused_columns": None,
        "use_liger_kernel": None,
    },
    "dpo": {
        "max_length": "data.seq_length",
        "max_prompt_length": None,
        "beta": "dpo.beta",
        "loss_type": "dpo.loss_type",
        "label_smoothing": "dpo.label_smoothing",
        "remove_unused_columns": None,
        "use_liger_kernel": None,
    },
    "grpo": {
        "vllm_server_base_url": "rl.engine_url",
        "vllm_server_timeout": "rl.weight_sync_timeout",
        **{
            name: f"rl.{name}"
            for name in RlConfig.model_fields
            if name not in ("prompts", "rollouts", "reward_funcs")
        },
        "vllm_mode": None,
        "remove_unused_columns": None,
        "use_liger_kernel": None,
    },
}
TWICE = (
    "num_generations",
    "temperature",
    "epsilon",
    "beta",
)  # have keys elsewhere, which have to say the same
KEY_OF = {  # settings that are decided here → the key that a reader of their error would change
    "parallel.tensor_model_parallel_size": "megatron.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size": "megatron.pipeline_model_parallel_size",
    "parallel.context_parallel_size": "megatron.context_parallel_size",
    "parallel.expert_model_parallel_size": "megatron.expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size": "megatron.expert_tensor_parallel_size",
    "parallel.virtual_pipeline_model_parallel_size": "megatron.virtual_pipeline_model_parallel_size / PP",
    "parallel.recompute_granularity": "megatron.transformer_config.recompute_granularity",
    "parallel.recompute_method": "megatron.transformer_config.recompute_method",
    "parallel.recompute_num_layers": "megatron.transformer_config.recompute_num_layers",
    "parallel.recompute_modules": "megatron.transformer_config.recompute_modules",
    "optim.optimizer_cpu_offload": "megatron.optimizer_config.optimizer_cpu_offload",
    "optim.optimizer_offload_fraction": "megatron.optimizer_config.optimizer_offload_fraction",
    "train.micro_batch_size": "megatron.micro_batch_size",
    "train.global_batch_size": "megatron.global_batch_size",
    "train.train_iters": "training.max_steps",
    "train.precision": "model.torch_dtype_str",
    "model.init_from": "model.model_name",
    "data.data_path": "data.train.datasets",
    "data.tokenizer_type": "model.tokenizer_name",
    "data.tokenizer_model": "model.tokenizer_name",
    "data.seq_length": "model.model_max_length (or max_prompt_length + max_completion_length)",
    "checkpoint.save_interval": "training.save_steps",
    "optim.lr_warmup_iters": "training.warmup_steps",
    "optim.lr_warmup_fraction": "training.warmup_ratio",
    "rl.prompts": "data.train.datasets",
    "rl.reward_funcs": "training.reward_functions",
    "rl.num_generations": "grpo.num_generations",
    "rl.temperature": "grpo.temperature",
    "rl.epsilon": "grpo.epsilon",
    "rl.max_prompt_length": "training.grpo.max_prompt_length",
    "rl.max_completion_length": "training.grpo.max_completion_length",
    "rl.beta": "megatron.grpo_config.kl_beta",
    "rl.packing": "megatron.enable_sequence_packing",
    "rl.engine": "training.trainer_kwargs.engine",
    "rl.max_staleness": "training.trainer_kwargs.max_staleness (megatron.vllm_weight_sync_interval - 1)",
    "lora.targets": "peft.lora_target_modules",
    "lora.rank": "peft.lora_r",
}


def generations(asked: Asked) -> int:
    return asked.one("grpo.num_generations", "training.grpo.num_generations", f"{ROLLOUT}n", default=8)


def set_objective(asked: Asked) -> None:
    config, verl = "megatron.grpo_config.", f"{ACTOR}"
    places = ("grpo.", "training.grpo.")
    asked.set("rl.num_generations", generations(asked))
    temperature = [f"{place}temperature" for place in (*places, "megatron.sampling_config.", ROLLOUT)]
    asked.set("rl.temperature", asked.one(*temperature, default=0.9))
    for name, whole in (("top_p", (1.0,)), ("top_k", (-1, 0))):
        for key in (f"megatron.sampling_config.{name}", f"{ROLLOUT}{name}"):
            if asked[key] not in whole:
                asked.problems.append(
                    f"{key} is {asked[key]}, which is refused: the probabilities of tokens that are cut off would not "
                    f"be the trainer's; leave it out, or set it to {whole[0]}"
                )
    both = [f"{place}epsilon" for place in places]
    if f"{verl}clip_ratio_low" not in asked and f"{verl}clip_ratio_high" not in asked:
        both.append(f"{verl}clip_ratio")
    epsilon = asked.one(*both, f"{config}clamp_eps_lower", f"{verl}clip_ratio_low", default=0.2)
    asked.set("rl.epsilon", epsilon)
    both_sides = any(key in asked for key in both) or epsilon == 0.2
    upper = asked.one(
        f"{config}clamp_eps_upper", f"{verl}clip_ratio_high", default=None if both_sides else 0.2
    )
    if upper is not None and upper != epsilon:
        asked.set("rl.epsilon_high", upper)
    if any(f"{verl}{name}" in asked for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")):
        asked.tree["rl"].setdefault("clip_ratio_c", DUAL_CLIP)
    prompt = [f"{place}max_prompt_length" for place in places]
    answer = [f"{place}max_completion_length" for place in places] + ["megatron.sampling_config.max_tokens"]
    answer_tokens = asked.one(*answer, f"{IN_VERL}data.max_response_length", default=256)
    left = max((asked["model.model_max_length"] or PROMPT + answer_tokens) - answer_tokens, 1)
    prompt_tokens = asked.one(*prompt, f"{IN_VERL}data.max_prompt_length", default=min(PROMPT, left))
    most = asked["model.model_max_length"]
    if most is not None and prompt_tokens + answer_tokens > most:
        asked.problems.append(
            f"model.model_max_length is {most}, but max_prompt_length ({prompt_tokens}) + max_completion_length "
            f"({answer_tokens}) = {prompt_tokens + answer_tokens} tokens; raise it, or lower one of them"
        )
    asked.set("rl.max_prompt_length", prompt_tokens)
    asked.set("rl.max_completion_length", answer_tokens)
    asked.set("rl.overlong_prompts", "drop")
    packs, longest = asked["megatron.enable_sequence_packing"], prompt_tokens + answer_tokens
    asked.set("rl.packing", packs)
    unit = (
        2
        * asked.tree["parallel"]["tensor_model_parallel_size"]
        * asked.tree["parallel"]["context_parallel_size"]
    )
    row = max(longest, most or 0) if packs else longest
    asked.set("data.seq_length", -(-row // unit) * unit)
    by_verl, beta = f"{verl}use_kl_loss", asked[f"{config}kl_beta"]
    if by_verl in asked:
        coefficient = asked[f"{verl}kl_loss_coef"] if asked[by_verl] else 0.0
        if f"{config}kl_beta" in asked and beta != coefficient:
            asked.problems.append(
                f"{config}kl_beta is {beta:g}, but {by_verl} is {asked[by_verl]} and the KL's coefficient by it "
                f"{coefficient:g}; make them the same, or leave one out"
            )
        beta = coefficient
    is_verls = by_verl in asked and bool(beta)
    asked.set("rl.kl_loss_coef" if is_verls else "rl.beta", beta)
    entropy = asked.one(f"{config}entropy_weight", f"{verl}entropy_coeff", default=0.0)
    asked.set("rl.entropy_coeff" if f"{verl}entropy_coeff" in asked else "rl.entropy_coef", entropy)
    if not asked[f"{config}normalize_advantages"]:
        asked.set("rl.scale_rewards", "none")
    if asked["grpo.log_completions"]:
        asked.set("rl.log_completions", True)


def set_engine(asked: Asked) -> None:
    """Which engine samples, and how weights reach it."""
    backend = asked.one("megatron.inference_backend", f"{ROLLOUT}name", default=None)
    uses_vllm = asked["training.grpo.use_vllm"] or asked["grpo.use_vllm"]
    if backend is None and uses_vllm:
        backend = "vllm"
    if backend not in (None, "vllm", "sglang", "megatron"):
        asked.problems.append(f"megatron.inference_backend is {backend!r}; there are vllm, sglang, megatron")
    method = asked["megatron.weight_sync_method"]
    if method not in ("nccl", "gloo", "checkpoint", "ipc"):
        asked.problems.append(
            f"megatron.weight_sync_method is {method!r}; there are nccl, gloo, checkpoint, ipc"
        )
    kwargs = asked["training.trainer_kwargs"]
    url = kwargs.get("engine_url") or kwargs.get("vllm_server_base_url")
    engine = kwargs.get("engine") or _engine_of(backend, url)
    if uses_vllm and engine == "own" and backend == "vllm":
        asked.problems.append(
            "use_vllm is true, but vLLM is not installed here; install it, name its server as "
            "training.trainer_kwargs.engine_url, or leave it out for Megalith's own engine"
        )
    if engine == "own" and url:
        asked.problems.append(
            f"training.trainer_kwargs.engine is own, but engine_url is {url!r:.60}, a server's; leave one out"
        )
    if (engine in ("vllm", "sglang") and backend not in (None, engine)) or engine == "megatron":
        told = f"engine is {engine}" if kwargs.get("engine") else f"engine_url is {url!r:.60}"
        asked.problems.append(
            f"training.trainer_kwargs.{told}, but megatron.inference_backend is {backend}; a server is of vllm or "
            "sglang, and both keys name the same"
        )
    colocated = engine == "vllm" and not url
    is_served = engine in ("vllm", "sglang") and not colocated
    if engine in ("vllm", "sglang"):
        asked.set("rl.engine", engine)
    if is_served:
        asked.set("rl.weight_sync_method", method)
    elif colocated:
        asked.notes.append("megatron.inference_backend is vllm, in the trainer's processes (docs/engines.md)")
    elif backend == "vllm":
        asked.notes.append(
            "megatron.inference_backend is vllm, which is not installed here: completions are sampled by Megalith's "
            "own engine, with the trainer's weights of that step, so that weight_sync_method changes nothing; install "
            "vLLM to have it sample in the trainer's processes, or name its server as "
            "training.trainer_kwargs.engine_url"
        )
    _set_share(asked, colocated)
    interval = asked["megatron.vllm_weight_sync_interval"]
    for path, value in (
        ("rl.max_staleness", None if interval is None else interval - 1),
        ("rl.weight_sync_timeout", asked["megatron.weight_sync_timeout"]),
    ):
        if value is None or (path == "rl.max_staleness" and value == 0):
            continue
        if is_served:
            asked.set(path, value)
        else:
            asked.problems.append(
                f"{ENGINE_KEYS[path]} is {asked[ENGINE_KEYS[path]]}, which is refused: rollouts of our own engine are "
                "always of the step's own weights; leave it out"
            )


def _engine_of(backend: str | None, url: object) -> str:
    """Which engine `megatron.inference_backend` names; vllm, Oumi's default, is ours where it is not installed."""
    if url:
        return backend or "vllm"
    if backend == "vllm":
        return "vllm" if "vllm" in sys.modules or find_spec("vllm") else "own"
    return "sglang" if backend == "sglang" else "own"


def _set_share(asked: Asked, colocated: bool) -> None:
    """vLLM's share of each device, where it is in the trainer's processes."""
    keys = [f"{place}vllm_gpu_memory_utilization" for place in ("training.grpo.", "grpo.")]
    share = asked.one(*keys, default=None)
    if share is not None and colocated:
        asked.set("rl.vllm_gpu_memory_utilization", share)
    elif share is not None:
        asked.notes.append(
            f"vllm_gpu_memory_utilization {share:g} changes nothing: no vLLM is in the trainer's processes"
        )


def rewards_of(asked: Asked, datasets: Sequence[DatasetAsked]) -> list[str]:
    given = [name for name in asked["training.reward_functions"] or () if name]
    if not given:
        names = [(one.name or one.path or "").rstrip("/").rpartition("/")[2].lower() for one in datasets]
        implied = {REWARDS.get(name) for name in names}
        if len(implied) != 1 or None in implied:
            known = ", ".join(REWARDS)
            empty = "" if names else ", of which data.train.datasets has none"
            asked.problems.append(
                f"training.reward_functions is not set, and only the datasets {known} imply one{empty}; name it, or "
                "path.py:function"
            )
            return []
        given = [str(implied.pop())]
        asked.notes.append(
            f"reward: {given[0]}, which the dataset {names[0]} implies; training.reward_functions names another"
        )
    for name in given:
        if name not in KNOWN_REWARDS and ":" not in name:
            asked.problems.append(
                f"training.reward_functions names {name!r}; there are {', '.join(KNOWN_REWARDS)}, and path.py:function "
                "for one of your own"
            )
    return given


def set_chat(asked: Asked, trainer: str, datasets: Sequence[DatasetAsked]) -> None:
    asked.set("data.seq_length", asked["model.model_max_length"] or 1024)
    asked.set(f"{trainer}.truncation_mode", "keep_start")
    collator, target = asked["data.train.collator_name"], asked["data.train.train_target"]
    if collator not in (None, "text_with_padding", "text_completions_only_with_padding"):
        asked.problems.append(
            f"data.train.collator_name is {collator!r}; of text there are text_with_padding and "
            "text_completions_only_with_padding"
        )
    if str(target).lower() == "final_assistant_turn":
        asked.problems.append("data.train.train_target is FINAL_ASSISTANT_TURN; all of them can be learned")
    if trainer == "sft":
        answers_alone = collator == "text_completions_only_with_padding" or target is not None
        asked.set("sft.assistant_only_loss", answers_alone)
        asked.set("sft.completion_only_loss", answers_alone)
        asked.set("sft.packing", asked["data.train.pack"])
    template = asked["model.chat_template"]
    if template not in (None, "auto") and "/" not in template and not template.endswith(".jinja"):
        if path := template_of_oumi(template):
            asked.values["model.chat_template"] = str(path)
        else:
            asked.problems.append(
                f"model.chat_template is {template!r}, a template of Oumi's package, which is not installed here or "
                "has no such one; leave it out for the tokenizer's own, or give the path of a Jinja file"
            )
    harmless = {"hf_dataset_path", "return_conversations", "return_tensors", "return_conversations_format"}
    for key, value in asked.values.items():
        if key.endswith("].sample_count") and not key.startswith("data.test."):
            asked.problems.append(
                f"{key} is {value}, which is refused with this trainer: files are taken whole; cut them before"
            )
    for number, one in enumerate(datasets):
        other = {name for name in one.kwargs if name not in harmless} - {"messages_column"}
        if one.kwargs.get("messages_column", "messages") != "messages":
            other.add("messages_column")
        if other:
            asked.problems.append(
                f"data.train.datasets[{number}].dataset_kwargs has {', '.join(sorted(other))}, which is refused: "
                "records are read as docs/sft.md says; convert them before"
            )


def template_of_oumi(name: str) -> Path | None:
    """The Jinja file of a name, where Oumi is installed, which is not imported."""
    found = find_spec("oumi")
    path = (
        found and found.origin and Path(found.origin).parent / "datasets" / "chat_templates" / f"{name}.jinja"
    )
    return path if path and path.is_file() else None


def set_optimizer(asked: Asked) -> None:
    name = asked["training.optimizer"].lower()
    if name not in OPTIMIZERS:
        asked.problems.append(f"training.optimizer is {name!r}; there are {', '.join(OPTIMIZERS)}")
        return
    asked.set("optim.optimizer", OPTIMIZERS[name].split()[0])
    if OPTIMIZERS[name].endswith("8 bits") and asked.tree["optim"].get("optimizer_cpu_offload"):
        asked.notes.append(f"training.optimizer {name}: moments on the host are in fp32")
    elif OPTIMIZERS[name].endswith("8 bits"):
        asked.set("optim.exp_avg_dtype", "fp8")
        asked.set("optim.exp_avg_sq_dtype", "fp8")
    if OPTIMIZERS[name] == "sgd":
        for moment in ("adam_beta1", "adam_beta2", "adam_eps"):
            asked.tree["optim"].pop(moment, None)
    else:
        asked.tree["optim"].pop("sgd_momentum", None)
    if name.startswith("paged"):
        asked.notes.append(
            f"training.optimizer {name}: nothing is paged; offload with megatron.optimizer_config"
        )
    for key, path in (("lr", "lr"), ("weight_decay", "weight_decay")):
        ours = {"lr": "training.learning_rate"}.get(key, f"training.{key}")
        asked.set(f"optim.{path}", asked.one(ours, f"{ACTOR}optim.{key}", default=asked[ours]))


def set_schedule(asked: Asked) -> None:
    name = asked.one(
        "training.lr_scheduler_type", f"{ACTOR}optim.lr_scheduler_type", default="linear"
    ).lower()
    if name not in SCHEDULES:
        asked.problems.append(f"training.lr_scheduler_type is {name!r}; there are {', '.join(SCHEDULES)}")
        return
    asked.set("optim.lr_decay_style", SCHEDULES[name])
    kwargs = dict(asked["training.lr_scheduler_kwargs"])
    lowest = kwargs.pop("min_lr", None)
    share = kwargs.pop("min_lr_rate", asked[f"{ACTOR}optim.min_lr_ratio"])
    rate, least, part = map(_finite, (asked.tree["optim"]["lr"], lowest, share))
    unread = (lowest is not None and least is None) or (share is not None and part is None)
    if kwargs.pop("num_cycles", 0.5) != 0.5 or kwargs or unread:
        asked.problems.append(
            f"training.lr_scheduler_kwargs is {asked['training.lr_scheduler_kwargs']}; there are min_lr, min_lr_rate, "
            "and num_cycles 0.5"
        )
    if least is not None:
        asked.set("optim.min_lr", least)
    elif part is not None and rate is not None:  # of a rate that is no number the settings have the sentence
        asked.set("optim.min_lr", rate * part)
    steps = asked.one("training.warmup_steps", f"{ACTOR}optim.lr_warmup_steps", default=0)
    if steps:
        asked.set("optim.lr_warmup_iters", steps)
    elif asked["training.warmup_ratio"]:
        asked.set("optim.lr_warmup_fraction", asked["training.warmup_ratio"])


def _finite(value: Any) -> float | None:
    try:
        return number if math.isfinite(number := float(value)) else None
    except (TypeError, ValueError, OverflowError):
        return None


def finds_precision(asked: Asked) -> bool:
    """True where it is that of the weights."""
    kept, mixed = (
        str(asked[key]).lower() for key in ("model.torch_dtype_str", "training.mixed_precision_dtype")
    )
    for key, name in (("model.torch_dtype_str", kept), ("training.mixed_precision_dtype", mixed)):
        if name not in PRECISIONS:
            asked.problems.append(f"{key} is {name!r}; there are {', '.join(PRECISIONS)}")
            return False
    precision = PRECISIONS[mixed] if mixed != "none" else PRECISIONS[kept]
    if precision == "auto":
        return True
    asked.set("train.precision", precision)
    return False


def read_trainer_kwargs(asked: Asked, trainer: str) -> bool:
    """Reads training.trainer_kwargs; whether pytorch_model.bin is asked for."""
    kwargs, known = dict(asked["training.trainer_kwargs"]), KWARGS[trainer]
    safetensors = kwargs.pop("save_safetensors", True)
    for name, value in kwargs.items():
        if name not in known:
            asked.problems.append(
                f"training.trainer_kwargs has {name!r}, which is refused; with this trainer there are "
                f"{', '.join(sorted(known))}"
            )
        elif (path := known[name]) is not None:
            section, _, setting = path.partition(".")
            old = asked.tree.get(section, {}).get(setting)
            if (
                trainer == "grpo"
                and old != value
                and (name in TWICE or (path != "rl.engine" and ENGINE_KEYS.get(path) in asked))
            ):
                key = ENGINE_KEYS.get(path) or KEY_OF[path]
                asked.problems.append(
                    f"training.trainer_kwargs.{name} is {value}, but {key} gives {old}; leave the first out"
                )
            asked.set(path, value)
    return not safetensors
