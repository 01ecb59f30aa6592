"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, with transformers' names of modules.

Where the family keeps queries, keys and values (gate and up) in matrices of their own, a part of ours is PEFT's adapter
of such a module, to the bit. Where it keeps them fused, PEFT has one pair A, B for all rows: that is our part `whole`,
with B's rows in another order. The other two cases are exact as well:

    parts of ours, fused there    A of all parts one below the other, B block by block, of as many times the rank
    whole of ours, apart there    the same A for each module, B cut by rows
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
# The weights that adapters are for: of every layer, an encoder's too.
ADAPTED = re.compile(
    r"(?:encoder\.)?layers\.\d+\.(?:self_attention\.linear_(?:qkv|proj)|mlp\.linear_fc[12])\.weight"
)
TASKS = {"gpt": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": None}  # PEFT has no name for the last one's
# What in an adapter_config.json would make the adapters something else, with the one value that it may have here.
ONLY = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "lora_bias": False, "use_qalora": False,
    "modules_to_save": None, "target_parameters": None, "trainable_token_indices": None, "layer_replication": None,
    "rank_pattern": {}, "alpha_pattern": {},
}  # fmt: skip
# The target of LoraConfig that stands for one part of a linear.
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
    """A linear of ours that may have adapters, and the modules of theirs whose rows it has."""

    name: str
    group: Group  # of its weight

    @property
    def role(self) -> str:
        """linear_qkv and so on."""
        return self.name.rpartition(".")[2]

    @property
    def modules(self) -> dict[str, str]:
        """The part that each module of theirs is, with the module's name."""
        names = [name.removesuffix(".weight") for name in self.group.names()]
        return dict(zip(PARTS[self.role] if len(names) > 1 else (WHOLE,), names))

    def of_rank(self, rank: int) -> Group:
        """The group of B of `whole`: the rows of the weight, in `rank` columns."""
        rule = replace(self.group.rule, transposed=False)
        return replace(self.group, shape=(self.group.shape[0], rank), rule=rule)


def adapter_targets(family: Family, model: ModelConfig) -> Iterator[AdapterTarget]:
    """Every linear of the model that adapters are for."""
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
    """Writes the folder; `read` gives the adapters' parameters by name, `base` is what they belong to."""
    wanted, tensors, ranks = lora.parts(model), {}, {}
    for target in adapter_targets(family, model):
        pairs = {
            part: (
                read(f"{target.name}{ADAPTER}lora_A.{part}.weight"),
                read(f"{target.name}{ADAPTER}lora_B.{part}.weight"),
            )
            for part in wanted.get(target.role, ())
        }
        for module, (a, b) in _their_pairs(target, pairs).items():
            tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"] = a, b
            ranks[module] = len(a)
    make_folder(folder)
    write_safetensors(folder / TENSORS_FILE, tensors)
    config = json.dumps(_their_config(family, model, lora, ranks, base), indent=2)
    write_file(folder / CONFIG_FILE, config + "\n")
    sync_folder(folder)


def _their_pairs(target: AdapterTarget, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """PEFT's A and B for each module of the linear that has any."""
    modules = target.modules
    if WHOLE in pairs:
        a, b = pairs[WHOLE]
        group = target.of_rank(len(a))
        rows = to_theirs(group, b, dict.fromkeys(group.sources, b.dtype))
        return {name.removesuffix(".weight"): (a, part) for name, part in rows}
    if WHOLE in modules and pairs:
        return {modules[WHOLE]: _one_pair(target, [pairs.get(part) for part in PARTS[target.role]])}
    return {modules[part]: pair for part, pair in pairs.items()}


def _one_pair(target: AdapterTarget, pairs: list[Pair | None]) -> Pair:
    """One pair for the rows of all parts, one part below the other; rows of a part without a pair are zero."""
    model = target.group.model
    heads = (model.num_attention_heads, model.query_groups, model.query_groups)
    counts = [count * model.head_dim for count in heads] if len(pairs) == 3 else [model.ffn_size] * 2
    row_slices = [torch.empty(count, 0) if pair is None else pair[1] for pair, count in zip(pairs, counts)]
    return torch.cat([pair[0] for pair in pairs if pair is not None]), torch.block_diag(*row_slices)


def _their_config(
    family: Family, model: ModelConfig, lora: LoraConfig, ranks: Mapping[str, int], base: str | None
) -> dict[str, Any]:
    targets = _ends(ranks, family, model)
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


def _ends(ranks: Mapping[str, int], family: Family, model: ModelConfig) -> dict[str, int]:
    """The shortest ends of names that mean these modules and no others of the model, each with its modules' rank: PEFT
    finds modules by the ends of their names."""
    every = (
        name.removesuffix(".weight")
        for group in family.groups(model)
        for name in group.sources
        if name.endswith(".weight")
    )
    found, wanted = Counter(chain.from_iterable(map(_tails, every))), Counter()
    for module in ranks:
        wanted.update(_tails(module))
    return {
        next(tail for tail in _tails(module) if wanted[tail] == found[tail]): rank
        for module, rank in ranks.items()
    }


def _tails(name: str) -> list[str]:
    """`c`, `b.c` and `a.b.c` of `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


class PeftFolder:
    """Adapters in PEFT's format, read as ours for a model of a family."""

    def __init__(self, path: str | Path, family: Family, model: ModelConfig):
        """Raises CheckpointError where they are missing, damaged, of another model, or more than plain LoRA."""
        self.path = Path(path)
        self._config = read_json(self.path / CONFIG_FILE)
        self._refuse_more_than_lora()
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
        """A parameter of an adapter by our name, in float32."""
        linear, _, rest = name.partition(ADAPTER)
        half, part, _ = rest.split(".")
        target = self._targets[linear]
        value = self._stored[_key(target, part, half)].read().float()
        if part == WHOLE and half == "lora_B":
            return to_ours(target.of_rank(value.shape[1]), lambda _: value)
        return value

    def _find_parts(self) -> dict[str, tuple[str, ...]]:
        """For each role that has adapters its parts, which have to be the same in every layer."""
        found: dict[str, set[tuple[str, ...]]] = {}
        known = set()
        for target in self._targets.values():
            here = tuple(part for part in target.modules if _key(target, part, "lora_A") in self._stored)
            known |= {_key(target, part, half) for part in here for half in ("lora_A", "lora_B")}
            found.setdefault(target.role, set()).add(here)
        missing, extra = known - self._stored.keys(), self._stored.keys() - known
        if missing or extra or not known:
            told = [
                f"{what} {shorten(sorted(names))}"
                for what, names in (("lacks", missing), ("has", extra))
                if names
            ]
            raise CheckpointError(
                f"{self.path / TENSORS_FILE} is not of adapters for this model: it {' and '.join(told) or 'is empty'}; "
                "give adapters of the same base, on its attention and MLP alone"
            )
        if uneven := [role for role, kinds in found.items() if len(kinds) > 1]:
            raise CheckpointError(
                f"{self.path} has adapters on {', '.join(uneven)} in some layers and none, or others, in the rest; "
                "here every layer has the same"
            )
        parts = {role: kinds.pop() for role, kinds in found.items()}
        return {role: here for role, here in parts.items() if here}

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
                f"{self.path / CONFIG_FILE} has r {rank!r} and lora_alpha {alpha!r}, which cannot be: {reason}; give a "
                "folder that PEFT has saved"
            ) from None

    def _check_shapes(self) -> None:
        for target in self._targets.values():
            for part in self._parts.get(target.role, ()):
                shape = target.group.sources[f"{target.modules[part]}.weight"]
                rows, columns = reversed(shape) if target.group.rule.transposed else shape
                wanted = {"lora_A": (self.lora.rank, columns), "lora_B": (rows, self.lora.rank)}
                for half, sizes in wanted.items():
                    found = tuple(self._stored[_key(target, part, half)].shape)
                    if found != sizes:
                        raise CheckpointError(
                            f"{self.path}: {_key(target, part, half)} has the shape {list(found)}, but the model and "
                            f"r {self.lora.rank} give {list(sizes)}; give adapters of the same base"
                        )

    def _refuse_more_than_lora(self) -> None:
        for key, only in ONLY.items():
            value = self._config.get(key, only)
            if value != only and value not in (None, {}, []):
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE} has {key} {value!r}, but adapters can be plain LoRA alone here "
                    f"({key} {only!r}); merge them with PEFT, or train others"
                )
        for key in ("r", "lora_alpha"):
            if type(self._config.get(key)) not in (int, float):
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE} has no {key}; give a folder that PEFT has saved"
                )


def is_peft(path: str | Path) -> bool:
    """Whether a folder holds adapters in PEFT's format."""
    return (Path(path) / CONFIG_FILE).is_file()


def _key(target: AdapterTarget, part: str, half: str) -> str:
    return f"{PREFIX}{target.modules[part]}.{half}.weight"
