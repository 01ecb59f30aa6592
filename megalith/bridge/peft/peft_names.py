"""PEFT's names for files, settings, tensors and wrapped modules."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megalith.bridge.peft.adapter_targets import AdapterTarget

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SCORE_TASK, SCORE_MODULES = "SEQ_CLS", ("score", "classifier")  # of reward models; PEFT names both heads
# Keys of adapter_config.json that select other methods than LoRA, with the only supported value.
ONLY = {
    "peft_type": "LORA", "bias": "none", "lora_bias": False, "use_qalora": False,
    "layer_replication": None, "alora_invocation_tokens": None, "use_bdlora": None,
    "arrow_config": None, "kasa_config": None, "monteclora_config": None, "velora_config": None,
    "megatron_config": None,
}  # fmt: skip
READ = (
    "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "target_parameters",
    "modules_to_save", "ensure_weight_tying", "trainable_token_indices", "init_lora_weights",
    "base_model_name_or_path",
)  # fmt: skip
"""Keys that are read, or that the tensors of a folder must agree with."""
NO_EFFECT = (
    # which modules have adapters: a folder's tensors are those modules'
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "fan_in_fan_out",  # the base's layout; A and B do not depend on it
    # of other settings' methods, which are refused or leave plain LoRA
    "qalora_group_size", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "task_type", "auto_mapping", "inference_mode", "peft_version", "revision", "runtime_config",
)  # fmt: skip
"""Keys that do not change what the tensors of a folder mean."""
LEAVES_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which PEFT does not change the base."""
MAGNITUDE = "lora_magnitude_vector"
TOKEN_ROWS = "token_adapter.trainable_tokens_delta"  # PEFT's name; they are the rows, not differences


def is_peft(path: str | Path) -> bool:
    """Return True if a folder contains adapters in PEFT's format."""
    return (Path(path) / CONFIG_FILE).is_file()


def nested_parameters(parameters: Iterable[str]) -> set[str]:
    """Return the adapted parameters that are not the last adapted one of their module.

    PEFT wraps a module once per adapted parameter, so the wrappers of these parameters are inside the last one's.
    """
    last = {name.rpartition(".")[0]: name for name in parameters}
    return {name for name in parameters if last[name.rpartition(".")[0]] != name}


def wrapper_name(target: AdapterTarget, module: str, nested: bool) -> str:
    """Return the name of the PEFT wrapper of a module, or of the module that holds the expert parameter."""
    if not target.of_experts:
        return f"{PREFIX}{module}"
    return f"{PREFIX}{module.rpartition('.')[0]}{'.base_layer' if nested else ''}"
