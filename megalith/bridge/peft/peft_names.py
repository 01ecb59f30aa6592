"""Names in PEFT's folders: files, settings, tensors and wrapped modules."""

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
    "modules_to_save": None, "trainable_token_indices": None, "layer_replication": None,
}  # fmt: skip
LEAVES_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which PEFT leaves the base as it is."""
MAGNITUDE = "lora_magnitude_vector"


def is_peft(path: str | Path) -> bool:
    """Return whether a folder contains adapters in PEFT's format."""
    return (Path(path) / CONFIG_FILE).is_file()


def nested_parameters(parameters: Iterable[str]) -> set[str]:
    """Return the parameters that are not the last adapted one of their module: PEFT wraps the module once for each."""
    last = {name.rpartition(".")[0]: name for name in parameters}
    return {name for name in parameters if last[name.rpartition(".")[0]] != name}


def wrapper_name(target: AdapterTarget, module: str, nested: bool) -> str:
    """Return the name of PEFT's wrapper of a module, or of the module with experts' parameter."""
    if not target.of_experts:
        return f"{PREFIX}{module}"
    return f"{PREFIX}{module.rpartition('.')[0]}{'.base_layer' if nested else ''}"
