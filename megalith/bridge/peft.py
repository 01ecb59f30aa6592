"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, with transformers' module names.

If the family has separate queries, keys and values (gate and up), each part of a Megalith linear is PEFT's adapter of
one module. If the family fuses them, PEFT has one pair A, B for all rows: Megalith's part `whole`. The rows of B are
in the order of the family's weights. The other two cases are exact as well:

    Megalith has parts, PEFT one module       A: the parts' A stacked; B: a block of columns per part, zero in the rows
                                              of the others; rank: the sum
    Megalith has `whole`, PEFT separate ones  A: the same for each module; B: split by rows
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megalith.bridge.family import Family, Group
from megalith.bridge.folder import list_tensors, read_json
from megalith.bridge.transfer import to_theirs
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
    r"(?:encoder\.)?layers\.\d+\.(?:(?:self_attention|mamba)\.linear_(?:qkv|proj|zxbcdt|bcx|out)|mlp\.linear_fc[12])"
    r"\.weight"
)
TASKS = {"gpt": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": None}  # PEFT has no name for BERT's task
# Keys of adapter_config.json that select other methods than plain LoRA, with the only supported value.
ONLY = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "lora_bias": False, "use_qalora": False,
    "modules_to_save": None, "target_parameters": None, "trainable_token_indices": None, "layer_replication": None,
}  # fmt: skip
# LoraConfig's target for each part of a linear.
TARGET_OF = {
    ("linear_qkv", "q"): "q_proj",
    ("linear_qkv", "k"): "k_proj",
    ("linear_qkv", "v"): "v_proj",
    ("linear_qkv", WHOLE): "qkv_proj",
    ("linear_proj", WHOLE): "linear_proj",
    ("linear_zxbcdt", WHOLE): "linear_zxbcdt",
    ("linear_bcx", WHOLE): "linear_bcx",
    ("linear_out", WHOLE): "linear_out",
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

    def rows_of_modules(self) -> dict[str, Tensor]:
        """Return Megalith's row for each row of each Hugging Face module, int64 [rows of the module]."""
        rows = torch.arange(self.group.shape[0], dtype=torch.float64)[:, None]
        rule = replace(self.group.rule, transposed=False)
        group = replace(self.group, shape=tuple(rows.shape), rule=rule)
        theirs = to_theirs(group, rows, dict.fromkeys(group.sources, rows.dtype))
        return {name.removesuffix(".weight"): order.squeeze(1).long() for name, order in theirs}

    def rows_of_part(self, part: str) -> Tensor:
        """Return the rows of this part in Megalith's linear, in the order of the rows of the part's B, int64."""
        rows, model = torch.arange(self.group.shape[0]), self.group.model
        if part == WHOLE:
            return rows
        if self.role == "linear_fc1":  # gate 0, up 0, gate 1, up 1, …
            return rows.view(-1, 2)[:, PARTS[self.role].index(part)]
        queries = model.num_attention_heads // model.query_groups
        heads = {"q": slice(queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, None)}
        return rows.view(model.query_groups, queries + 2, model.head_dim)[:, heads[part]].flatten()

    def rows_of_module(self, module: str, part: str) -> Tensor:
        """Return the row of the module for each row of the part's B, int64; the module must have them all."""
        position = torch.empty(self.group.shape[0], dtype=torch.int64)
        ours = self.rows_of_modules()[module]
        position[ours] = torch.arange(len(ours))
        return position[self.rows_of_part(part)]


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
        return {module: (a, b[rows]) for module, rows in target.rows_of_modules().items()}
    if WHOLE in modules and pairs:
        return {modules[WHOLE]: _fused_pair(target, pairs)}
    return {modules[part]: (a, _their_rows(target, modules[part], part, b)) for part, (a, b) in pairs.items()}


def _their_rows(target: AdapterTarget, module: str, part: str, b: Tensor) -> Tensor:
    """Return B of a part with the module's rows in its order; rows of other parts are zero."""
    weight_rows = len(target.rows_of_modules()[module])
    rows = b.new_zeros(weight_rows, b.shape[1])
    rows[target.rows_of_module(module, part)] = b
    return rows


def _fused_pair(target: AdapterTarget, pairs: Mapping[str, Pair]) -> Pair:
    """Return one pair for a module that fuses all parts."""
    module = target.modules[WHOLE]
    ordered = [part for part in PARTS[target.role] if part in pairs]
    blocks = [_their_rows(target, module, part, pairs[part][1]) for part in ordered]
    return torch.cat([pairs[part][0] for part in ordered]), torch.cat(blocks, dim=1)


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
        self._fused = self._find_fused_parts(family, model)
        self._parts = self._find_parts()
        self.lora = self._lora()
        self._check_shapes()

    def read(self, name: str) -> Tensor:
        """Return a parameter of an adapter by Megalith's name, in float32."""
        linear, _, rest = name.partition(ADAPTER)
        half, part, _ = rest.split(".")
        target = self._targets[linear]
        fused = self._fused.get(target.role)
        stored_part = WHOLE if fused else part
        value = self._stored[_key(target, stored_part, half)].read().float()
        if fused:
            columns = slice(fused.index(part) * self.lora.rank, (fused.index(part) + 1) * self.lora.rank)
            value = value[columns] if half == "lora_A" else value[:, columns]
        if half == "lora_A":
            return value
        return value[target.rows_of_module(target.modules[stored_part], part)]

    def _find_fused_parts(self, family: Family, model: ModelConfig) -> dict[str, tuple[str, ...]]:
        """Return the parts by role where a fused module has one adapter per part, as `save_peft` writes them.

        Such a module has a rank of its own in `rank_pattern`, and each block of `r` columns of its B is zero outside
        the rows of one part. Raises CheckpointError for any other `rank_pattern` or `alpha_pattern`.
        """
        patterns = {key: self._config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
        rank, alpha = self._config["r"], self._config["lora_alpha"]
        if not any(patterns.values()) or rank < 1:  # `_lora` rejects such a rank
            return {}
        fused: dict[str, tuple[str, ...]] = {}
        ranks = {}
        for target in self._targets.values():
            module = target.modules.get(WHOLE)
            if module is None or _key(target, WHOLE, "lora_A") not in self._stored:
                continue
            shape = self._stored[_key(target, WHOLE, "lora_A")].shape
            ranks[module] = shape[0] if shape else rank  # `_check_shapes` rejects a scalar
            if ranks[module] != rank:
                parts = self._parts_of_blocks(target, rank)
                if fused.setdefault(target.role, parts) != parts:
                    fused[target.role] = ()
        larger = {
            target: size for target, size in _target_suffixes(ranks, family, model).items() if size != rank
        }
        try:
            alphas = {target: alpha * size / rank for target, size in larger.items()}
        except OverflowError:  # an integer beyond float
            alphas = None
        expected = {"rank_pattern": larger, "alpha_pattern": alphas}
        if patterns != expected or not all(fused.values()) or self._config.get("use_rslora"):
            key = next(key for key, value in patterns.items() if value)
            raise CheckpointError(
                f"{self.path / CONFIG_FILE} has {key} {patterns[key]!r}, but only plain LoRA of one rank is supported, "
                "and fused matrices with an adapter per part as `megalith lora export` writes them; merge the "
                "adapters with PEFT, or train others"
            )
        return fused

    def _parts_of_blocks(self, target: AdapterTarget, rank: int) -> tuple[str, ...]:
        """Return the part of each block of `rank` columns of a fused module's B; empty if they are not parts."""
        b = self._stored[_key(target, WHOLE, "lora_B")].read()
        all_parts, module = PARTS[target.role], target.modules[WHOLE]
        if rank < 1 or b.ndim != 2 or b.shape[1] % rank or b.shape[0] != target.group.shape[0]:
            return ()
        if b.shape[1] > rank * len(all_parts):
            return ()
        used = []
        for block in b.split(rank, dim=1):
            outside = {}
            for part in all_parts:
                rest = block.clone()
                rest[target.rows_of_module(module, part)] = 0
                outside[part] = not rest.any()
            used.append([part for part in all_parts if outside[part]])
        fitting = [
            parts
            for parts in combinations(all_parts, len(used))
            if all(part in possible for part, possible in zip(parts, used))
        ]
        return fitting[0] if len(fitting) == 1 else ()

    def _find_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the parts with adapters by role; they must be the same in every layer."""
        parts_by_role: dict[str, set[tuple[str, ...]]] = {}
        expected = set()
        for target in self._targets.values():
            parts = tuple(part for part in target.modules if _key(target, part, "lora_A") in self._stored)
            expected |= {_key(target, part, half) for part in parts for half in ("lora_A", "lora_B")}
            parts_by_role.setdefault(target.role, set()).add(
                self._fused.get(target.role, parts) if parts else ()
            )
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
            fused = self._fused.get(target.role)
            rank = self.lora.rank * len(fused or (WHOLE,))
            for part in (WHOLE,) if fused else self._parts.get(target.role, ()):
                weight_shape = target.group.sources[f"{target.modules[part]}.weight"]
                rows, columns = reversed(weight_shape) if target.group.rule.transposed else weight_shape
                expected = {"lora_A": (rank, columns), "lora_B": (rows, rank)}
                for half, expected_shape in expected.items():
                    shape = tuple(self._stored[_key(target, part, half)].shape)
                    if shape != expected_shape:
                        raise CheckpointError(
                            f"{self.path}: {_key(target, part, half)} has the shape {list(shape)}, but the model and "
                            f"r {rank} give {list(expected_shape)}; give adapters of the same base"
                        )

    def _reject_other_methods(self) -> None:
        for key, only in ONLY.items():
            value = self._config.get(key, only)
            if value != only and value not in (None, {}, []):
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE} has {key} {value!r}, but only plain LoRA is supported "
                    f"({key} {only!r}); merge them with PEFT, or train others"
                )
        for key, kinds in (("r", (int,)), ("lora_alpha", (int, float))):
            if type(self._config.get(key)) not in kinds:
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE} has no {key}; give a folder that PEFT has saved"
                )


def is_peft(path: str | Path) -> bool:
    """Return whether a folder contains adapters in PEFT's format."""
    return (Path(path) / CONFIG_FILE).is_file()


def _key(target: AdapterTarget, part: str, half: str) -> str:
    return f"{PREFIX}{target.modules[part]}.{half}.weight"
