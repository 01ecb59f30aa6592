"""What several keys of an Oumi configuration decide together: the layout, the batch, what is sharded and recomputed.

A function decides one thing, sets what it can in the run's tree, and adds a sentence to the problems where the keys
contradict each other or the layout. What is learned and how stands in oumi_objective.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megalith.dialects.oumi import oumi_objective
from megalith.dialects.oumi.oumi_keys import ACTOR, IN_VERL

if TYPE_CHECKING:
    from megalith.dialects.oumi.oumi_settings import Asked, DatasetAsked

IN_MEGATRON = f"{ACTOR}megatron."
OVERRIDE = f"{IN_MEGATRON}override_transformer_config."
LAYOUT = {  # the axis in the error's text → its key
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
}
STRATEGIES = {  # FSDP's → ours
    "FULL_SHARD": "optim_grads_params",
    "HYBRID_SHARD": "optim_grads_params",
    "SHARD_GRAD_OP": "optim_grads",
    "HYBRID_SHARD_ZERO2": "optim_grads",
    "NO_SHARD": "no_shard",
}
STAGES = {"ZERO_0": "no_shard", "ZERO_1": "optim", "ZERO_2": "optim_grads", "ZERO_3": "optim_grads_params"}
MXFP4 = {"quant_method": "mxfp4"}  # gpt-oss's
TEXT_MODULES = {
    f"model.layers.0.{part}"
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                 "mlp.up_proj", "mlp.down_proj", "mlp.experts")
}  # fmt: skip


def decide(asked: Asked, trainer: str, datasets: Sequence[DatasetAsked]) -> dict[str, Any]:
    """Sets what the keys decide together, and returns the fields of OumiRun that no setting has."""
    _model(asked)
    parallel = _layout(asked)
    rewards: list[str] = []
    if trainer == "grpo":
        oumi_objective.set_objective(asked)
        oumi_objective.set_engine(asked)
        rewards = oumi_objective.rewards_of(asked, datasets)
    else:
        asked.set(f"{trainer}.enabled", True)
        oumi_objective.set_chat(asked, trainer, datasets)
    _batch(asked, trainer, parallel)
    _sharding(asked, trainer, parallel)
    _recompute(asked)
    _offload(asked)
    oumi_objective.set_optimizer(asked)
    oumi_objective.set_schedule(asked)
    _output(asked)
    evaluates = _evaluation(asked, trainer)
    _adapters(asked)
    writes_bin = oumi_objective.read_trainer_kwargs(asked, trainer)
    return {
        "rewards": rewards,
        "epochs": _steps(asked, trainer),
        "evaluates": evaluates,
        "finds_precision": oumi_objective.finds_precision(asked),
        "exports": asked["training.save_final_model"],
        "writes_bin": writes_bin,
        "merges": asked["peft.peft_save_mode"].upper() == "MERGED",
        "model_parallel": parallel,
    }


def _model(asked: Asked) -> None:
    kwargs = dict(asked["model.model_kwargs"])
    if kwargs.get("quantization_config") == MXFP4:
        del kwargs["quantization_config"]
        asked.notes.append(
            "model.model_kwargs: published MXFP4 codes are read, and trained as the weights they mean"
        )
    if kwargs:
        asked.problems.append(
            f"model.model_kwargs is {kwargs!r:.60}, which is refused: the model is as its config.json has it; change "
            "that"
        )


def _layout(asked: Asked) -> int:
    sizes = {
        axis: asked.one(f"megatron.{key}", f"{IN_MEGATRON}{key}", default=1) for axis, key in LAYOUT.items()
    }
    for axis, size in sizes.items():
        asked.set(f"parallel.{LAYOUT[axis]}", size)
    product = math.prod(sizes.values())
    if asked.world_size and asked.world_size % product:
        asked.problems.append(indivisible(asked.world_size, sizes))
    if sizes["tensor"] > 1 and f"{IN_MEGATRON}sequence_parallel" not in asked:
        asked.set("parallel.sequence_parallel", True)
    tp, pp = sizes["tensor"], sizes["pipeline"]
    _experts(asked, product, tp)
    name = "virtual_pipeline_model_parallel_size"
    total = asked.one(f"megatron.{name}", default=None)
    if total is not None and (pp == 1 or total % pp):
        asked.problems.append(
            f"megatron.{name} is {total}, the virtual stages of all ranks together, which pipeline_model_parallel_size "
            f"({pp}) has to divide and be above 1; give {2 * pp if pp > 1 else 'none'}"
        )
    elif total is not None:
        asked.set(f"parallel.{name}", total // pp)
        asked.notes.append(
            f"megatron.{name} {total} / {pp} pipeline ranks = {total // pp} {'chunk' if total == pp else 'chunks'} of "
            "layers a rank"
        )
    chunks = asked[f"{IN_MEGATRON}{name}"]  # verl means those of a rank, as Megatron does
    if chunks is not None and total not in (None, chunks * pp):
        asked.problems.append(
            f"megatron.{name} is {total}, the virtual stages of all {pp} ranks, but {IN_MEGATRON}{name} is {chunks}, "
            f"those of a rank: {chunks * pp} in all; make them the same, or leave one out"
        )
    elif chunks is not None:
        asked.set(f"parallel.{name}", chunks)
    return product


def indivisible(world_size: int, sizes: Mapping[str, int]) -> str:
    """The sentence on a job that the model's layout does not divide."""
    told = " × ".join(f"{axis} ({size})" for axis, size in sizes.items())
    product = math.prod(sizes.values())
    return (
        f"world_size ({world_size}) must be divisible by the product of all model parallel sizes ({product}): {told}; "
        f"start a multiple of {product} processes, or lower megatron.{LAYOUT['tensor']} or {LAYOUT['pipeline']}"
    )


def _experts(asked: Asked, product: int, tp: int) -> None:
    ep = asked.one(
        "megatron.expert_model_parallel_size", f"{IN_MEGATRON}expert_model_parallel_size", default=1
    )
    etp = asked.one(
        "megatron.expert_tensor_parallel_size", f"{IN_MEGATRON}expert_tensor_parallel_size", default=None
    )
    if ep == 1 and etp in (None, 1):
        return
    etp = tp if etp is None else etp
    asked.set("parallel.expert_model_parallel_size", ep)
    asked.set("parallel.expert_tensor_parallel_size", etp)
    world = asked.world_size or product * ep
    asked.notes.append(
        f"expert parallelism is folded out of the other axes: on {world} GPUs there are {world // product} replicas of "
        f"the layers without experts (world / TP·PP·CP), and the batch is theirs; Oumi's branch counts "
        f"{world / product / ep:g} (world / TP·PP·CP·EP)"
    )


def _replicas(asked: Asked, parallel: int) -> int:
    return max(1, (asked.world_size or parallel) // parallel)


def _batch(asked: Asked, trainer: str, parallel: int) -> None:
    per_device, accumulated = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
    default = 1 if trainer == "grpo" else asked[per_device]
    micro = asked.one(
        "megatron.micro_batch_size", per_device, f"{ACTOR}ppo_micro_batch_size_per_gpu", default=default
    )
    replicas, accumulation = _replicas(asked, parallel), asked[accumulated]
    by_steps = micro * accumulation * replicas
    each = oumi_objective.generations(asked) if trainer == "grpo" else 1
    whole = asked["megatron.global_batch_size"]
    minis = asked[f"{ACTOR}ppo_mini_batch_size"] if trainer == "grpo" else None
    if minis is not None:
        whole = asked.one("megatron.global_batch_size", default=minis * each)
        rollouts = asked.one(f"{IN_VERL}data.train_batch_size", default=minis)
        if rollouts % minis or whole != minis * each:
            asked.problems.append(
                f"verl's data.train_batch_size ({rollouts} prompts) has to be divisible by ppo_mini_batch_size "
                f"({minis}), and megatron.global_batch_size to be {minis} × {each} = {minis * each} sequences; it is "
                f"{whole}"
            )
        asked.set("rl.mini_batches", max(1, rollouts // minis))
    elif trainer == "grpo" and f"{IN_VERL}data.train_batch_size" in asked and whole is None:
        whole = asked[f"{IN_VERL}data.train_batch_size"] * each
    if whole is not None and accumulated in asked and whole != by_steps:
        asked.problems.append(
            f"megatron.global_batch_size is {whole}, but micro_batch_size ({micro}) × {accumulated} ({accumulation}) × "
            f"data parallel ({replicas}) = {by_steps}; make them the same, or leave one out"
        )
    whole = by_steps if whole is None else whole
    asked.set("train.micro_batch_size", micro)
    asked.set("train.global_batch_size", whole)
    if trainer != "grpo":
        return
    if whole % each:
        asked.problems.append(
            f"the global batch of {whole} sequences is not divisible by num_generations ({each}): a step takes whole "
            f"groups; set gradient_accumulation_steps so that micro_batch_size ({micro}) × accumulation × data "
            f"parallel ({replicas}) is a multiple of {each}, or megatron.global_batch_size"
        )
    prompts, many = whole // each, "replica" if replicas == 1 else "replicas"
    asked.notes.append(
        f"{prompts} {'prompt' if prompts == 1 else 'prompts'} × {each} completions = {whole} sequences a step, in "
        f"micro-batches of {micro} on {replicas} data-parallel {many}"
    )


def _steps(asked: Asked, trainer: str) -> float | None:
    steps = asked.one("training.max_steps", f"{IN_VERL}trainer.total_training_steps", default=-1)
    if steps > 0:
        asked.set("train.train_iters", steps)
        return None
    epochs = asked.one("training.num_train_epochs", f"{IN_VERL}trainer.total_epochs", default=3)
    if trainer == "grpo":
        return epochs
    asked.set(f"{trainer}.num_train_epochs", epochs)
    return None


def _sharding(asked: Asked, trainer: str, parallel: int) -> None:
    replicas = _replicas(asked, parallel) * asked.tree["parallel"][LAYOUT["context"]]
    strategy = "optim" if replicas > 1 else "no_shard"
    on = [key for key in ("fsdp.enable_fsdp", "deepspeed.enable_deepspeed") if asked[key]]
    if on and trainer == "grpo":
        asked.problems += [
            f"{key} is True, which excludes trainer_type MEGATRON_GRPO; set it False: the megatron section "
            "shards the model, and the optimizer's state is sharded over the replicas"
            for key in on
        ]
    elif len(on) == 2:
        asked.problems.append(f"{' and '.join(on)} are True, which shard the same; set one of them False")
    elif asked["fsdp.enable_fsdp"]:
        name = str(asked["fsdp.sharding_strategy"]).upper()
        if name not in STRATEGIES:
            asked.problems.append(f"fsdp.sharding_strategy is {name}; there are {', '.join(STRATEGIES)}")
        strategy = STRATEGIES.get(name, strategy) if replicas > 1 else "no_shard"
        if name.startswith("HYBRID") and replicas > 1:
            asked.notes.append(
                f"fsdp.sharding_strategy {name} shards over all replicas here; for one copy a machine set "
                "parallel.num_distributed_optimizer_instances in a run file"
            )
        if asked["fsdp.cpu_offload"]:
            asked.set("optim.optimizer_cpu_offload", True)
            asked.notes.append("fsdp.cpu_offload: the optimizer's state is in host memory; parameters stay")
    elif asked["deepspeed.enable_deepspeed"]:
        stage = _stage(asked)
        strategy = stage if replicas > 1 else "no_shard"
    asked.set("parallel.data_parallel_sharding_strategy", strategy)


def _stage(asked: Asked) -> str:
    """DeepSpeed's stage in our words."""
    name, place = (
        str(asked[f"deepspeed.{key}"]).upper() for key in ("zero_stage", "offload_optimizer.device")
    )
    if name not in STAGES:
        asked.problems.append(f"deepspeed.zero_stage is {name}; there are {', '.join(STAGES)}")
    if place not in ("NONE", "CPU"):
        asked.problems.append(f"deepspeed.offload_optimizer.device is {place}; there are CPU and NONE")
    if place == "CPU":
        asked.set("optim.optimizer_cpu_offload", True)
    asked.notes.append(
        f"deepspeed: {name} is done here by data_parallel_sharding_strategy {STAGES.get(name)}"
    )
    return STAGES.get(name, "optim")


def _recompute(asked: Asked) -> None:
    def one(name: str) -> Any:
        return asked.one(f"megatron.transformer_config.{name}", f"{OVERRIDE}{name}", default=None)

    granularity = one("recompute_granularity")
    in_verl = asked[f"{IN_VERL}actor_rollout_ref.model.enable_gradient_checkpointing"]
    checkpointing = asked["training.enable_gradient_checkpointing"] or in_verl
    if granularity is None and checkpointing:
        granularity = "full"
    if granularity not in (None, "full", "selective"):
        asked.problems.append(
            f"megatron.transformer_config.recompute_granularity is {granularity!r}; there are full, selective, null"
        )
    if granularity is not None:
        asked.set("parallel.recompute_granularity", granularity)
    read = {"full": ("recompute_method", "recompute_num_layers"), "selective": ("recompute_modules",)}
    for name in ("recompute_method", "recompute_num_layers", "recompute_modules"):
        value = one(name)
        if value is not None and name in read.get(granularity, ()):
            asked.set(f"parallel.{name}", value)
        elif value is not None:
            with_it = f"with {granularity} recomputation" if granularity else "without recompute_granularity"
            asked.notes.append(f"megatron.transformer_config.{name} {value} changes nothing {with_it}")
    if granularity == "full" and "recompute_method" not in asked.tree["parallel"]:
        asked.set("parallel.recompute_method", "uniform")


def _offload(asked: Asked) -> None:
    section = "megatron.optimizer_config."
    fraction, on = asked[f"{section}optimizer_offload_fraction"], asked[f"{section}optimizer_cpu_offload"]
    verl = [f"{ACTOR}{part}optimizer_offload" for part in ("", "fsdp_config.", "megatron.")]
    on = on or asked.one(*verl, default=False)
    given = f"{section}optimizer_offload_fraction" in asked
    if given and (not 0 <= fraction <= 1 or (fraction > 0 and not on) or (fraction == 0 and on)):
        asked.problems.append(
            f"{section}optimizer_cpu_offload is {on} and optimizer_offload_fraction {fraction:g}; offloading takes "
            "True and a share above 0, up to 1, none False and 0"
        )
    elif on:
        asked.set("optim.optimizer_cpu_offload", True)
        asked.set("optim.optimizer_offload_fraction", fraction if given else 1.0)
        name = "overlap_cpu_optimizer_d2h_h2d"
        asked.set(f"optim.{name}", asked.one(f"{section}{name}", default=True))


def _output(asked: Asked) -> None:
    steps = asked.one("training.save_steps", f"{IN_VERL}trainer.save_freq", default=500)
    if steps > 0:
        asked.set("checkpoint.save_interval", steps)
    if asked["training.use_deterministic"] or asked["training.full_determinism"]:
        asked.set("train.deterministic", True)
    if asked["training.compile"]:
        asked.set("runtime.compile", True)
    wanted = asked["training.enable_tensorboard"]
    if wanted and find_spec("tensorboard") is None:
        if "training.enable_tensorboard" in asked:
            asked.notes.append(
                "training.enable_tensorboard: TensorBoard is not installed, and nothing is written"
            )
        wanted = False
    asked.set("log.tensorboard", wanted)
    if not wanted:
        asked.tree["log"].pop("tensorboard_dir", None)
    if not asked.tree["log"].get("wandb"):
        for name in ("wandb_name", "wandb_project"):
            asked.tree["log"].pop(name, None)
    if asked["training.try_resume_from_last_checkpoint"] and not asked["training.resume_from_checkpoint"]:
        asked.set("checkpoint.load", asked["training.output_dir"])


def _evaluation(asked: Asked, trainer: str) -> str:
    """Sets when the loss or the rewards of data.validation are measured; returns Oumi's word for it."""
    when = asked["training.eval_strategy"].lower()
    known = ("no", "steps", "epoch") if trainer == "grpo" else ("no", "steps")
    if when not in known:
        asked.problems.append(f"training.eval_strategy is {when!r}; there are {' and '.join(known)}")
    if trainer == "grpo":
        every = asked[f"{IN_VERL}trainer.test_freq"]
        when = "steps" if every > 0 else when
        most = asked[f"{IN_VERL}data.val_max_samples"]
        if most > 0:
            asked.set("rl.max_eval_prompts", most)
        if when == "steps":
            asked.set("train.eval_interval", every if every > 0 else asked["training.eval_steps"])
    elif when == "steps":
        asked.set("train.eval_interval", asked["training.eval_steps"])
    else:
        asked.set("train.eval_iters", 0)
    if any(key.startswith("data.test.datasets[") for key in asked.values):
        asked.notes.append(
            "data.test: no trainer reads it, here as in Oumi; data.validation is what is measured"
        )
    return when


def _adapters(asked: Asked) -> None:
    if not asked["training.use_peft"]:
        return
    asked.set("lora.rank", asked["peft.lora_r"])
    asked.set("lora.alpha", asked["peft.lora_alpha"])
    asked.set("lora.dropout", asked["peft.lora_dropout"])
    mode = asked["peft.peft_save_mode"].upper()
    if mode not in ("ADAPTER_ONLY", "MERGED"):
        asked.problems.append(f"peft.peft_save_mode is {mode}; there are ADAPTER_ONLY and MERGED")
    for left_out in asked["peft.lora_exclude_modules"] or ():
        if any(_names(str(left_out), module) for module in TEXT_MODULES):
            asked.problems.append(
                f"peft.lora_exclude_modules has {left_out!r}, which leaves out modules of text; name those that get "
                "adapters alone, as lora_target_modules"
            )
    targets = asked["peft.lora_target_modules"]
    if targets is None:
        asked.problems.append(
            "peft.lora_target_modules is not set; name them, such as [q_proj, v_proj], or all-linear"
        )
    elif targets != ["all-linear"]:
        asked.set("lora.targets", targets)


def _names(pattern: str, module: str) -> bool:
    """Whether a name or a regular expression, as PEFT takes both, is of a module."""
    try:
        return module.endswith(f".{pattern}") or re.fullmatch(pattern, module) is not None
    except re.error:
        return True
