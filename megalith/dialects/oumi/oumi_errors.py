"""Rewrites errors in Oumi's terms: replaces the names of settings by the keys that set them."""

from __future__ import annotations

import re
from contextlib import contextmanager

from megalith.dialects.oumi.oumi_keys import ENGINE_KEYS, KEYS, TRAINER_KWARGS, Assigns
from megalith.errors import MegalithError

SETTING_TO_KEY = {  # derived settings → the key that the user would change
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
    "lora.modules_to_save": "peft.lora_modules_to_save",
}
NAME = re.compile(
    r"(?<![\w./-])[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*(?![\w/.])|(?<![\w./-])[a-z]+(?:_[a-z0-9]+)+(?![\w/.])"
)


@contextmanager
def oumi_key_errors():
    """Make errors raised in the block name Oumi's keys instead of Megalith's settings."""
    try:
        yield
    except MegalithError as error:
        error.args = (name_oumi_keys(str(error)),)
        raise


def name_oumi_keys(text: str) -> str:
    """Return `text` with each Megalith setting replaced by the Oumi key that sets it."""
    kwargs = TRAINER_KWARGS["grpo"].items()
    names = (
        {path: f"training.trainer_kwargs.{name}" for name, path in kwargs if path}
        | ENGINE_KEYS
        | SETTING_TO_KEY
        | {row.path: key for key, row in reversed(KEYS.items()) if isinstance(row, Assigns)}
    )
    names |= {path.partition(".")[2]: key for path, key in names.items() if "_" in path.partition(".")[2]}
    return NAME.sub(lambda match: names.get(match[0], match[0]), text)
