"""Checks of PEFT's adapter_config.json: only LoRA, and only values that PEFT writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.bridge.peft.peft_names import LEAVES_BASE, NO_EFFECT, ONLY, READ
from megalith.errors import CheckpointError


def check_adapter_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless adapter_config.json at `path` describes LoRA, with values that PEFT writes."""
    for key, only in ONLY.items():
        value = config.get(key, only)
        if value != only and value not in (None, {}, []):
            raise CheckpointError(
                f"{path} has {key} {value!r}, but only LoRA is supported ({key} {only!r}); merge the adapters with "
                "PEFT, or train LoRA adapters"
            )
    for key in sorted(config.keys() - {*ONLY, *READ, *NO_EFFECT}):
        if config[key] not in (None, False, "", {}, []):
            raise CheckpointError(
                f"{path} has {key} {config[key]!r:.60}, which Megalith does not know; remove {key} if it does not "
                "change what the adapters compute, or merge the adapters with PEFT"
            )
    for key, kind in (
        ("rank_pattern", dict),
        ("alpha_pattern", dict),
        ("target_parameters", list),
        ("modules_to_save", list),
    ):
        value = config.get(key) or kind()
        if not isinstance(value, kind) or not all(isinstance(each, str) for each in value):
            raise CheckpointError(
                f"{path} has {key} {value!r:.80}, which is not a value that PEFT writes; pass a folder that "
                "PEFT has saved"
            )
    tokens = config.get("trainable_token_indices") or []
    for each in tokens.values() if isinstance(tokens, dict) else [tokens]:
        if not isinstance(each, list) or not all(type(token) is int and token >= 0 for token in each):
            raise CheckpointError(
                f"{path} has trainable_token_indices {tokens!r:.80}, which is not a value that PEFT writes; "
                "pass a folder that PEFT has saved"
            )
    value = config.get("init_lora_weights", True)
    if value == "loftq":
        raise CheckpointError(
            f"{path} has init_lora_weights 'loftq', whose adapters are for weights that PEFT quantized; merge the "
            "adapters with PEFT, or train new ones with lora.init_lora_weights loftq"
        )
    if value not in LEAVES_BASE and str(value).lower() not in ("pissa", "olora"):
        raise CheckpointError(
            f"{path} has init_lora_weights {value!r:.60}, with which PEFT "
            "changes the base weights; save the adapters again in PEFT with "
            "path_initial_model_for_weight_conversion, which converts them to plain LoRA"
        )
    for key, kinds in (("r", (int,)), ("lora_alpha", (int, float))):
        if type(config.get(key)) not in kinds:
            raise CheckpointError(f"{path} has no {key}; pass a folder that PEFT has saved")


def match_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's name, as PEFT does."""
    try:
        return next(
            (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default
        )
    except re.error as error:
        raise CheckpointError(f"a pattern of {list(patterns)} is not a regular expression: {error}") from None
