"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, with transformers' module names.

If the family has separate queries, keys and values (gate and up), each part of a Megalith linear is bitwise PEFT's
adapter of one module. If the family fuses them, PEFT has one pair A, B for all rows: Megalith's part `whole`, with the
rows of B in another order. The other two cases are exact as well:

    Megalith has parts, PEFT one module       A: the parts' A stacked; B: block-diagonal; rank: the sum
    Megalith has `whole`, PEFT separate ones  A: the same for each module; B: split by rows
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megalith.bridge.family import Family, Group
from megalith.bridge.folder import list_tensors, read_json
from megalith.bridge.transfer import to_ours, to_theirs
from megalith.checkpoint.files import write_safetensors
from megalith.config import LoraConfig, ModelConfig
from megalith.config.base import as_config_error
from megalith.config.lora import PARTS, WHOLE
from megalith.errors import CheckpointError, shorten
from megalith.io import make_folder, sync_folder, write_file
from megalith.models.adapters import ADAPTER

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Weights that can have adapters, in decoders and encoders.
ADAPTED = re.compile(
    r"(?:encoder\.)?layers\.\d+\.(?:self_attention\.linear_(?:qkv|proj)|mlp\.linear_fc[12])\.weight"
)
TASKS = {"gpt": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": None}  # PEFT has no name for BERT's task
# Keys of adapter_config.json that select other methods than plain LoRA, with the only supported value.
ONLY = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "lora_bias": False, "use_qalora": False,
    "modules_to_save": None, "target_parameters": None, "trainable_token_indices": None, "layer_replication": None,
    "rank_pattern": {}, "alpha_pattern": {},
}  # fmt: skip
# LoraConfig's target for each part of a linear.
TARGET_OF = {
    ("linear_qkv", "q"): "q_proj",
    ("linear_qkv", "k"): "k_proj",
    ("linear_qkv", "v"): "v_proj",
    ("linear_qkv", WHOLE): "qkv_proj",
    ("linear_proj", WHOLE): "linear_proj",
    ("linear_fc1", "gate"): "gate_proj",
    ("linear_fc1", "up"): "up_proj",
    ("linear_fc1", WHOLE): "gate_up_proj",
    ("linear_fc2", WHOLE): "linear_fc2",
}

Pair = tuple[Tensor, Tensor]  # A [rank, in] and B [out, rank]


@dataclass(frozen=True)
class AdapterTarget:
    """A linear that can have adapters, and the Hugging Face modules that it is made of."""

    name: str
    group: Group  # the group of its weight

    @property
    def role(self) -> str:
        """Last part of the name, such as linear_qkv."""
        return self.name.rpartition(".")[2]

    @property
    def modules(self) -> dict[str, str]:
        """Parts of the linear → names of the Hugging Face modules."""
        names = [name.removesuffix(".weight") for name in self.group.names()]
        return dict(zip(PARTS[self.role] if len(names) > 1 else (WHOLE,), names))

    def lora_b_group(self, rank: int) -> Group:
        """Return the group of B of part `whole`: the weight's rows, with `rank` columns."""
        rule = replace(self.group.rule, transposed=False)
        return replace(self.group, shape=(self.group.shape[0], rank), rule=rule)


def adapter_targets(family: Family, model: ModelConfig) -> Iterator[AdapterTarget]:
    """Yield the linears of a model that can have adapters."""
    for group in family.groups(model):
        if ADAPTED.fullmatch(group.name):
            yield AdapterTarget(group.name.removesuffix(".weight"), group)


def save_peft(
    folder: Path,
    family: Family,
    model: ModelConfig,
    lora: LoraConfig,
    read: Callable[[str], Tensor],
    base: str | None,
) -> None:
    """Write adapters to a folder in PEFT's format; `read` returns their parameters by name, `base` names their base."""
    parts_by_role, tensors, ranks = lora.parts(model), {}, {}
    for target in adapter_targets(family, model):
        pairs = {
            part: (
                read(f"{target.name}{ADAPTER}lora_A.{part}.weight"),
                read(f"{target.name}{ADAPTER}lora_B.{part}.weight"),
            )
            for part in parts_by_role.get(target.role, ())
        }
        for module, (a, b) in _peft_pairs(target, pairs).items():
            tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"] = a, b
            ranks[module] = len(a)
    make_folder(folder)
    write_safetensors(folder / TENSORS_FILE, tensors)
    config = json.dumps(_peft_config(family, model, lora, ranks, base), indent=2)
    write_file(folder / CONFIG_FILE, config + "\n")
    sync_folder(folder)


def _peft_pairs(target: AdapterTarget, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Return PEFT's A and B for each Hugging Face module with adapters."""
    modules = target.modules
    if WHOLE in pairs:
        a, b = pairs[WHOLE]
        group = target.lora_b_group(len(a))
        rows = to_theirs(group, b, dict.fromkeys(group.sources, b.dtype))
        return {name.removesuffix(".weight"): (a, part) for name, part in rows}
    if WHOLE in modules and pairs:
        return {modules[WHOLE]: _fused_pair(target, [pairs.get(part) for part in PARTS[target.role]])}
    return {modules[part]: pair for part, pair in pairs.items()}


def _fused_pair(target: AdapterTarget, pairs: list[Pair | None]) -> Pair:
    """Return one pair for the stacked rows of all parts; rows of a part without adapters are zero."""
    model = target.group.model
    heads = (model.num_attention_heads, model.query_groups, model.query_groups)
    counts = [count * model.head_dim for count in heads] if len(pairs) == 3 else [model.ffn_size] * 2
    blocks = [torch.empty(count, 0) if pair is None else pair[1] for pair, count in zip(pairs, counts)]
    return torch.cat([pair[0] for pair in pairs if pair is not None]), torch.block_diag(*blocks)


def _peft_config(
    family: Family, model: ModelConfig, lora: LoraConfig, ranks: Mapping[str, int], base: str | None
) -> dict[str, Any]:
    targets = _target_suffixes(ranks, family, model)
    larger = {target: rank for target, rank in targets.items() if rank != lora.rank}
    return {
        **ONLY,
        "base_model_name_or_path": base,
        "task_type": TASKS[model.model_type],
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(targets),
        "rank_pattern": larger,
        "alpha_pattern": {target: lora.alpha * rank / lora.rank for target, rank in larger.items()},
        "fan_in_fan_out": any(rule.transposed for rule in family.tensors.values()),
        "use_rslora": False,
        "init_lora_weights": True,
    }


def _target_suffixes(ranks: Mapping[str, int], family: Family, model: ModelConfig) -> dict[str, int]:
    """Return the shortest name suffixes that match exactly these modules, with their rank. PEFT matches by suffix."""
    all_modules = (
        name.removesuffix(".weight")
        for group in family.groups(model)
        for name in group.sources
        if name.endswith(".weight")
    )
    in_model, adapted = Counter(chain.from_iterable(map(_suffixes, all_modules))), Counter()
    for module in ranks:
        adapted.update(_suffixes(module))
    return {
        next(suffix for suffix in _suffixes(module) if adapted[suffix] == in_model[suffix]): rank
        for module, rank in ranks.items()
    }


def _suffixes(name: str) -> list[str]:
    """Return `c`, `b.c` and `a.b.c` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


class PeftFolder:
    """Reader of adapters in PEFT's format for a model of a family."""

    def __init__(self, path: str | Path, family: Family, model: ModelConfig):
        """Open a folder. Raises CheckpointError if it is missing, damaged, of another model, or not plain LoRA."""
        self.path = Path(path)
        self._config = read_json(self.path / CONFIG_FILE)
        self._reject_other_methods()
        self._stored = list_tensors(self.path / TENSORS_FILE)
        if model.num_layers > len(self._stored):
            raise CheckpointError(
                f"{self.path / TENSORS_FILE} has {len(self._stored)} tensors, fewer than the model has layers "
                f"({model.num_layers}); give adapters of the same base"
            )
        self._targets = {target.name: target for target in adapter_targets(family, model)}
        self._parts = self._find_parts()
        self.lora = self._lora()
        self._check_shapes()

    def read(self, name: str) -> Tensor:
        """Return a parameter of an adapter by Megalith's name, in float32."""
        linear, _, rest = name.partition(ADAPTER)
        half, part, _ = rest.split(".")
        target = self._targets[linear]
        value = self._stored[_key(target, part, half)].read().float()
        if part == WHOLE and half == "lora_B":
            return to_ours(target.lora_b_group(value.shape[1]), lambda _: value)
        return value

    def _find_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the parts with adapters by role; they must be the same in every layer."""
        parts_by_role: dict[str, set[tuple[str, ...]]] = {}
        expected = set()
        for target in self._targets.values():
            parts = tuple(part for part in target.modules if _key(target, part, "lora_A") in self._stored)
            expected |= {_key(target, part, half) for part in parts for half in ("lora_A", "lora_B")}
            parts_by_role.setdefault(target.role, set()).add(parts)
        missing, extra = expected - self._stored.keys(), self._stored.keys() - expected
        if missing or extra or not expected:
            messages = [
                f"{what} {shorten(sorted(names))}"
                for what, names in (("lacks", missing), ("has", extra))
                if names
            ]
            raise CheckpointError(
                f"{self.path / TENSORS_FILE} does not fit this model: it {' and '.join(messages) or 'is empty'}; "
                "give adapters of the same base, on its attention and MLP only"
            )
        if uneven := [role for role, kinds in parts_by_role.items() if len(kinds) > 1]:
            raise CheckpointError(
                f"{self.path} has adapters on {', '.join(uneven)} in some layers and none, or others, in the rest; "
                "here every layer has the same"
            )
        common = {role: kinds.pop() for role, kinds in parts_by_role.items()}
        return {role: parts for role, parts in common.items() if parts}

    def _lora(self) -> LoraConfig:
        rank, alpha = self._config["r"], self._config["lora_alpha"]
        try:
            return LoraConfig(
                rank=rank,
                alpha=alpha * rank**0.5 if self._config.get("use_rslora") else alpha,
                dropout=self._config.get("lora_dropout", 0.0),
                targets=[TARGET_OF[role, part] for role, parts in self._parts.items() for part in parts],
            )
        except (ValidationError, TypeError, OverflowError) as error:
            reason = as_config_error(error) if isinstance(error, ValidationError) else error
            raise CheckpointError(
                f"{self.path / CONFIG_FILE} has r {rank!r} and lora_alpha {alpha!r}, which is invalid: {reason}; give "
                "a folder that PEFT has saved"
            ) from None

    def _check_shapes(self) -> None:
        for target in self._targets.values():
            for part in self._parts.get(target.role, ()):
                weight_shape = target.group.sources[f"{target.modules[part]}.weight"]
                rows, columns = reversed(weight_shape) if target.group.rule.transposed else weight_shape
                expected = {"lora_A": (self.lora.rank, columns), "lora_B": (rows, self.lora.rank)}
                for half, expected_shape in expected.items():
                    shape = tuple(self._stored[_key(target, part, half)].shape)
                    if shape != expected_shape:
                        raise CheckpointError(
                            f"{self.path}: {_key(target, part, half)} has the shape {list(shape)}, but the model and "
                            f"r {self.lora.rank} give {list(expected_shape)}; give adapters of the same base"
                        )

    def _reject_other_methods(self) -> None:
        for key, only in ONLY.items():
            value = self._config.get(key, only)
            if value != only and value not in (None, {}, []):
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE} has {key} {value!r}, but only plain LoRA is supported "
                    f"({key} {only!r}); merge them with PEFT, or train others"
                )
        for key in ("r", "lora_alpha"):
            if type(self._config.get(key)) not in (int, float):
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE} has no {key}; give a folder that PEFT has saved"
                )


def is_peft(path: str | Path) -> bool:
    """Return whether a folder contains adapters in PEFT's format."""
    return (Path(path) / CONFIG_FILE).is_file()


def _key(target: AdapterTarget, part: str, half: str) -> str:
    return f"{PREFIX}{target.modules[part]}.{half}.weight"
