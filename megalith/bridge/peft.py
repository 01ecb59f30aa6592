"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, with transformers' module names.

If the family has separate queries, keys and values (gate and up), each part of a Megalith linear is PEFT's adapter of
one module. If the family fuses them, PEFT has one pair A, B for all rows: Megalith's part `whole`. The rows of B are
in the order of the family's weights. The other two cases are exact as well:

    Megalith has parts, PEFT one module       A: the parts' A stacked; B: a block of columns per part, zero in the rows
                                              of the others; rank: the sum
    Megalith has `whole`, PEFT separate ones  A: the same for each module; B: split by rows

All experts of a layer are one parameter in transformers. PEFT adapts it as one of its `target_parameters`, with A
[experts · rank, in] and B [out, rank · experts].
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
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
from megalith.config.lora import EXPERTS, QKV, SITES, WHOLE, index_in_stack, target_name
from megalith.errors import CheckpointError, shorten
from megalith.io import make_folder, sync_folder, write_file
from megalith.models.adapters import ADAPTER

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Weights that can have adapters, in decoders and encoders: the layer's name, its number, and the site.
ADAPTED = re.compile(rf"((?:encoder\.)?layers\.(\d+))\.({'|'.join(map(re.escape, SITES))})\.weight")
TASKS = {"gpt": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": None}  # PEFT has no name for BERT's task
# Keys of adapter_config.json that select other methods than LoRA, with the only supported value.
ONLY = {
    "peft_type": "LORA", "bias": "none", "lora_bias": False, "use_qalora": False,
    "modules_to_save": None, "trainable_token_indices": None, "layer_replication": None,
}  # fmt: skip
MAGNITUDE = "lora_magnitude_vector"
PARAMETERS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""Parameters of the module of all experts in transformers 5."""

Pair = tuple[
    Tensor, Tensor
]  # A [rank, in] and B [out, rank]; of experts, a dimension of experts before these


@dataclass(frozen=True)
class AdapterTarget:
    """A matrix that can have adapters, and the Hugging Face modules that it is made of."""

    layer: str  # name of the layer, such as layers.0
    number: int  # number of the layer in the model
    site: str  # path in the layer
    group: Group  # the group of its weight

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.site}"

    @property
    def of_experts(self) -> bool:
        """True if the matrix is one per expert, and a parameter in transformers instead of a module."""
        return self.site.startswith(EXPERTS)

    @cached_property
    def modules(self) -> dict[str, str]:
        """Parts of the matrix → names of the Hugging Face modules, or of experts' parameter."""
        if self.of_experts:
            return {WHOLE: self._parameter()}
        names = [name.removesuffix(".weight") for name in self.group.names()]
        parts = SITES[self.site] if len(names) > 1 else (WHOLE,)
        return dict(zip(parts, names)) if len(parts) == len(names) else {}  # {}: divided otherwise

    def _parameter(self) -> str:
        """Return the name of the parameter in transformers 5, where files may have a tensor per expert."""
        name = self.group.names(0 if self.group.experts is not None else None)[0]
        block = re.split(r"\.(?:experts|input_linear|output_linear)\.", name)[0]
        if self.group.experts is not None:
            block = block.replace(".block_sparse_moe", ".mlp")
        return f"{block}.experts.{PARAMETERS[self.site.rpartition('.')[2]]}"

    @property
    def rows(self) -> int:
        """Number of rows of the matrix, or of one expert's."""
        return self.group.shape[-2]

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.group.shape[-1]

    def rows_of_modules(self) -> dict[str, Tensor]:
        """Return Megalith's row for each row of each Hugging Face module, int64 [rows of the module]."""
        if self.of_experts:
            rule = self.group.rule
            if len(rule.names) > 1:  # one parameter has them one after the other
                rule = replace(rule, names=(self.modules[WHOLE],))
            order = torch.empty(self.rows, dtype=torch.int64)
            for run in rule.runs(self.group.model, self.rows):
                order[run.theirs : run.theirs + run.count] = run.ours + run.step * torch.arange(run.count)
            return {self.modules[WHOLE]: order}
        rows = torch.arange(self.rows, dtype=torch.float64)[:, None]
        rule = replace(self.group.rule, transposed=False)
        group = replace(self.group, shape=tuple(rows.shape), rule=rule)
        theirs = to_theirs(group, rows, dict.fromkeys(group.sources, rows.dtype))
        return {name.removesuffix(".weight"): order.squeeze(1).long() for name, order in theirs}

    def rows_of_part(self, part: str) -> Tensor:
        """Return the rows of this part in Megalith's matrix, in the order of the rows of the part's B, int64."""
        rows, model, parts = torch.arange(self.rows), self.group.model, SITES[self.site]
        if part == WHOLE:
            return rows
        if "gate" in parts:  # gate 0, up 0, gate 1, up 1, …
            return rows.view(-1, 2)[:, parts.index(part)]
        queries = model.num_attention_heads // model.query_groups * (1 + model.attention_output_gate)
        queries = queries if self.site == QKV else 0
        heads = {"q": slice(queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, None)}
        return rows.view(model.query_groups, queries + 2, model.head_dim)[:, heads[part]].flatten()

    def rows_of_module(self, module: str, part: str) -> Tensor:
        """Return the row of the module for each row of the part's B, int64; the module must have them all."""
        position = torch.empty(self.rows, dtype=torch.int64)
        ours = self.rows_of_modules()[module]
        position[ours] = torch.arange(len(ours))
        return position[self.rows_of_part(part)]

    def shapes(self, module: str, rank: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of PEFT's A and B for a module and a rank."""
        experts = self.group.shape[0] if self.of_experts else 1
        rows = len(self.rows_of_modules()[module])
        return {"lora_A": (experts * rank, self.columns), "lora_B": (rows, rank * experts)}


def adapter_targets(family: Family, model: ModelConfig) -> Iterator[AdapterTarget]:
    """Yield the matrices of a model that can have adapters."""
    for group in family.groups(model):
        if match := ADAPTED.fullmatch(group.name):
            yield AdapterTarget(match[1], int(match[2]), match[3], group)


@dataclass(frozen=True)
class PeftPair:
    """PEFT's A and B of a module or parameter, with its rank and alpha."""

    target: AdapterTarget
    a: Tensor
    b: Tensor
    rank: int
    alpha: float
    magnitude: Tensor | None = None  # DoRA's, [out]


def save_peft(
    folder: Path,
    family: Family,
    model: ModelConfig,
    lora: LoraConfig,
    read: Callable[[str], Tensor],
    base: str | None,
) -> None:
    """Write adapters to a folder in PEFT's format; `read` returns their parameters by name, `base` names their base."""
    parts_by_site, pairs = lora.parts(model), {}
    for target in adapter_targets(family, model):
        parts = parts_by_site.get(target.site, ()) if lora.adapts_layer(target.number, model) else ()
        stored = {
            part: (
                read(f"{target.name}{ADAPTER}lora_A.{part}.weight"),
                read(f"{target.name}{ADAPTER}lora_B.{part}.weight"),
            )
            for part in parts
        }
        lengths = {}
        if lora.use_dora:
            lengths = {part: read(f"{target.name}{ADAPTER}lora_magnitude.{part}.weight") for part in parts}
        pairs |= _peft_pairs(target, stored, lora, lengths)
    nested, tensors = _nested(pairs), {}
    for module, pair in pairs.items():
        prefix = _prefix(pair.target, module, module in nested)
        tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = pair.a, pair.b
        if pair.magnitude is not None:
            tensors[f"{prefix}.{MAGNITUDE}"] = pair.magnitude
    make_folder(folder)
    write_safetensors(folder / TENSORS_FILE, tensors)
    config = json.dumps(_peft_config(family, model, lora, pairs, base), indent=2)
    write_file(folder / CONFIG_FILE, config + "\n")
    sync_folder(folder)


def _nested(parameters: Iterable[str]) -> set[str]:
    """Return the parameters that are not the last adapted one of their module: PEFT wraps the module once for each."""
    last = {name.rpartition(".")[0]: name for name in parameters}
    return {name for name in parameters if last[name.rpartition(".")[0]] != name}


def _prefix(target: AdapterTarget, module: str, nested: bool) -> str:
    """Return the name of PEFT's wrapper of a module, or of the module with experts' parameter."""
    if not target.of_experts:
        return f"{PREFIX}{module}"
    return f"{PREFIX}{module.rpartition('.')[0]}{'.base_layer' if nested else ''}"


def _peft_pairs(
    target: AdapterTarget, pairs: Mapping[str, Pair], lora: LoraConfig, lengths: Mapping[str, Tensor]
) -> dict[str, PeftPair]:
    """Return PEFT's A, B and magnitudes for each Hugging Face module with adapters."""
    modules, at = target.modules, (target.layer, target.site)

    def of_part(part: str, a: Tensor, b: Tensor, magnitude: Tensor | None = None) -> PeftPair:
        return PeftPair(target, a, b, lora.rank_of(*at, part), lora.alpha_of(*at, part), magnitude)

    if target.of_experts and pairs:
        [(module, rows)] = target.rows_of_modules().items()
        a, b = pairs[WHOLE]
        b = b[:, rows].permute(1, 2, 0)  # [out, rank, experts]
        return {module: of_part(WHOLE, a.flatten(0, 1), b.flatten(1))}
    if WHOLE in pairs:
        (a, b), length = pairs[WHOLE], lengths.get(WHOLE)
        return {
            module: of_part(WHOLE, a, b[rows], None if length is None else length[rows])
            for module, rows in target.rows_of_modules().items()
        }
    if pairs and not modules:
        raise CheckpointError(
            f"{target.name} has other parts in this family's models than its adapters; train one adapter for all its "
            f"rows, {target.site}.{WHOLE} in lora.targets, or merge them"
        )
    if WHOLE in modules and pairs:
        return {modules[WHOLE]: _fused_pair(target, pairs, lora, lengths)}
    return {
        modules[part]: of_part(
            part,
            a,
            _their_rows(target, modules[part], part, b),
            _their_rows(target, modules[part], part, lengths[part][:, None]).flatten() if lengths else None,
        )
        for part, (a, b) in pairs.items()
    }


def _their_rows(target: AdapterTarget, module: str, part: str, b: Tensor) -> Tensor:
    """Return B of a part with the module's rows in its order; rows of other parts are zero."""
    weight_rows = len(target.rows_of_modules()[module])
    rows = b.new_zeros(weight_rows, b.shape[1])
    rows[target.rows_of_module(module, part)] = b
    return rows


def _fused_pair(
    target: AdapterTarget, pairs: Mapping[str, Pair], lora: LoraConfig, lengths: Mapping[str, Tensor]
) -> PeftPair:
    """Return one pair for a module that fuses all parts, scaled as its first part."""
    if lengths and lengths.keys() != set(SITES[target.site]):
        raise CheckpointError(
            f"{target.name} has DoRA's magnitudes for some of its rows, but PEFT needs those of all; adapt all "
            "its parts, or merge them"
        )
    module, at = target.modules[WHOLE], (target.layer, target.site)
    ordered = [part for part in SITES[target.site] if part in pairs]
    scales = [lora.scaling_of(*at, part) for part in ordered]
    blocks = [_their_rows(target, module, part, pairs[part][1]) for part in ordered]
    blocks = [b if scale == scales[0] else b * (scale / scales[0]) for b, scale in zip(blocks, scales)]
    first, rank = lora.rank_of(*at, ordered[0]), sum(lora.rank_of(*at, part) for part in ordered)
    alpha = lora.alpha_of(*at, ordered[0])
    alpha = alpha * (rank / first) ** 0.5 if lora.use_rslora else alpha * rank / first
    a = torch.cat([pairs[part][0] for part in ordered])
    rows = [_their_rows(target, module, part, length[:, None]) for part, length in lengths.items()]
    return PeftPair(target, a, torch.cat(blocks, dim=1), rank, alpha, sum(rows).flatten() if rows else None)


def _peft_config(
    family: Family,
    model: ModelConfig,
    lora: LoraConfig,
    pairs: Mapping[str, PeftPair],
    base: str | None,
) -> dict[str, Any]:
    in_layers = {pair.target.layer for pair in pairs.values()}
    modules = [module for module, pair in pairs.items() if not pair.target.of_experts]
    suffixes = _target_suffixes(modules, family, model, in_layers)
    names = (
        suffixes
        | {  # PEFT ignores layers_to_transform for parameters
            name: name if lora.layers_to_transform is not None else ".".join(name.split(".")[-3:])
            for name, pair in pairs.items()
            if pair.target.of_experts
        }
    )
    return {
        **ONLY,
        "base_model_name_or_path": base,
        "task_type": TASKS[model.model_type],
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(set(suffixes.values())),
        "target_parameters": sorted({names[name] for name in names.keys() - suffixes.keys()}) or None,
        "layers_to_transform": lora.layers_to_transform,
        "rank_pattern": _pattern(names, {name: pair.rank for name, pair in pairs.items()}, lora.rank),
        "alpha_pattern": _pattern(names, {name: pair.alpha for name, pair in pairs.items()}, lora.alpha),
        "fan_in_fan_out": any(rule.transposed for rule in family.tensors.values()),
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "init_lora_weights": True,
    }


def _pattern(names: Mapping[str, str], values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Return the values other than the default, by the shared name of the modules if they have one value, else by
    module."""
    shared: dict[str, set] = {}
    for module, name in names.items():
        shared.setdefault(name, set()).add(values[module])
    keys = {module: name if len(shared[name]) == 1 else module for module, name in names.items()}
    return {keys[module]: value for module, value in values.items() if value != default}


def _target_suffixes(
    adapted_modules: Iterable[str], family: Family, model: ModelConfig, layers: set[str]
) -> dict[str, str]:
    """Return for each module the shortest suffix that matches adapted modules only. PEFT matches by suffix.

    `layers` are the names of the layers with adapters: modules of others are not matched.
    """
    all_modules = (
        name.removesuffix(".weight")
        for group in family.groups(model)
        if not (match := ADAPTED.fullmatch(group.name))
        or (match[1] in layers and not match[3].startswith(EXPERTS))
        for name in group.sources
        if name.endswith(".weight")
    )
    adapted_modules = list(adapted_modules)
    in_model, adapted = Counter(chain.from_iterable(map(_suffixes, all_modules))), Counter()
    for module in adapted_modules:
        adapted.update(_suffixes(module))
    return {
        module: next(suffix for suffix in _suffixes(module) if adapted[suffix] == in_model[suffix])
        for module in adapted_modules
    }


def _suffixes(name: str) -> list[str]:
    """Return `c`, `b.c` and `a.b.c` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _matching(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's name, as PEFT does."""
    try:
        return next(
            (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default
        )
    except re.error as error:
        raise CheckpointError(f"a pattern of {list(patterns)} is not a regular expression: {error}") from None


@dataclass(frozen=True)
class _Stored:
    """PEFT's adapter of one module in a folder."""

    target: AdapterTarget
    part: str  # part of the matrix that the module is
    prefix: str
    rank: int
    alpha: float  # as if use_rslora were off


class PeftFolder:
    """Reader of adapters in PEFT's format for a model of a family."""

    def __init__(self, path: str | Path, family: Family, model: ModelConfig):
        """Open a folder. Raises CheckpointError if it is missing, damaged, of another model, or of another method."""
        self.path, self._model = Path(path), model
        self._config = read_json(self.path / CONFIG_FILE)
        self._reject_other_methods()
        self._tensors = list_tensors(self.path / TENSORS_FILE)
        self._targets = {target.name: target for target in adapter_targets(family, model)}
        self._adapters = self._find_adapters()
        self._check_names()
        self._fused = self._find_fused_parts()
        self.lora = self._lora()

    def read(self, name: str) -> Tensor:
        """Return a parameter of an adapter by Megalith's name, in float32."""
        matrix, _, rest = name.partition(ADAPTER)
        half, part, _ = rest.split(".")
        target = self._targets[matrix]
        fused = self._fused.get(target.site)
        stored = self._adapters[matrix, WHOLE if fused else part]
        if half == "lora_magnitude":
            value = self._tensors[f"{stored.prefix}.{MAGNITUDE}"].read().float().flatten()
            return value[target.rows_of_module(target.modules[stored.part], part)]
        value = self._tensors[f"{stored.prefix}.{half}.weight"].read().float()
        if target.of_experts:
            return self._of_experts(target, half, value)
        if fused:
            rank = stored.rank // len(fused)
            columns = slice(fused.index(part) * rank, (fused.index(part) + 1) * rank)
            value = value[columns] if half == "lora_A" else value[:, columns]
        if half == "lora_A":
            return value
        return value[target.rows_of_module(target.modules[stored.part], part)]

    def _of_experts(self, target: AdapterTarget, half: str, value: Tensor) -> Tensor:
        experts = target.group.shape[0]
        if half == "lora_A":
            return value.unflatten(0, (experts, -1))
        b = value.unflatten(1, (-1, experts)).permute(2, 0, 1)  # [experts, out, rank]
        return b[:, target.rows_of_module(target.modules[WHOLE], WHOLE)]

    def _find_adapters(self) -> dict[tuple[str, str], _Stored]:
        """Return the stored adapters by the name of the matrix and the part that the module is."""
        patterns = {key: self._config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
        stored_adapters = {}
        for target in self._targets.values():
            for part, module in target.modules.items():
                prefix = self._stored_prefix(target, module)
                if prefix is None:
                    continue
                rank = _matching(patterns["rank_pattern"], module, self._config["r"])
                alpha = _matching(patterns["alpha_pattern"], module, self._config["lora_alpha"])
                stored_adapters[target.name, part] = stored = self._checked(target, part, prefix, rank, alpha)
                for half, expected in target.shapes(module, rank).items():
                    tensor = self._tensors.get(f"{stored.prefix}.{half}.weight")
                    if tensor is not None and tuple(tensor.shape) != expected:
                        raise CheckpointError(
                            f"{self.path}: {stored.prefix}.{half}.weight has the shape {list(tensor.shape)}, but the "
                            f"model and r {rank} give {list(expected)}; give adapters of the same base"
                        )
        return stored_adapters

    def _checked(self, target: AdapterTarget, part: str, prefix: str, rank: Any, alpha: Any) -> _Stored:
        """Return the adapter of a module, with valid rank and alpha."""
        try:
            if self._config.get("use_rslora") and rank > 0:
                alpha = alpha * rank**0.5
            LoraConfig(rank=rank, alpha=alpha, dropout=self._config.get("lora_dropout", 0.0))
        except (ValidationError, TypeError, OverflowError) as error:
            reason = as_config_error(error) if isinstance(error, ValidationError) else error
            raise CheckpointError(
                f"{self.path / CONFIG_FILE} has r {rank!r} and lora_alpha {alpha!r}, which is invalid: {reason}; give "
                "a folder that PEFT has saved"
            ) from None
        return _Stored(target, part, prefix, rank, alpha)

    def _stored_prefix(self, target: AdapterTarget, module: str) -> str | None:
        """Return the name of PEFT's wrapper of a module if the folder has it."""
        prefix = _prefix(target, module, nested=False)
        if not target.of_experts:
            return prefix if f"{prefix}.lora_A.weight" in self._tensors else None
        if module not in self._adapted_parameters:
            return None
        return _prefix(target, module, module in _nested(self._adapted_parameters))

    @cached_property
    def _adapted_parameters(self) -> list[str]:
        """Experts' parameters with adapters, in the model's order."""
        ends = tuple(self._config.get("target_parameters") or ())
        names = [target.modules[WHOLE] for target in self._targets.values() if target.of_experts]
        return [name for name in names if f".{name}".endswith(tuple(f".{end}" for end in ends))]

    def _check_names(self) -> None:
        """Raise CheckpointError unless the folder has A and B of the adapters, and nothing else."""
        expected = {
            f"{stored.prefix}.{half}.weight"
            for stored in self._adapters.values()
            for half in ("lora_A", "lora_B")
        }
        if self._config.get("use_dora"):
            expected |= {f"{stored.prefix}.{MAGNITUDE}" for stored in self._adapters.values()}
        missing, extra = expected - self._tensors.keys(), self._tensors.keys() - expected
        if missing or extra or not expected:
            messages = [
                f"{what} {shorten(sorted(names))}"
                for what, names in (("lacks", missing), ("has", extra))
                if names
            ]
            raise CheckpointError(
                f"{self.path / TENSORS_FILE} does not fit this model: it {' and '.join(messages) or 'is empty'}; "
                "give adapters of the same base, on the matrices of its layers; routers have none here"
            )

    def _find_fused_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the parts by site where a fused module has one adapter per part, as `save_peft` writes them.

        The rank of such a module is a multiple of `r`, and each block of `r` columns of its B is zero outside the rows
        of one part.
        """
        rank, kinds_by_site = self._config["r"], {}
        for stored in self._adapters.values():
            target = stored.target
            if stored.part == WHOLE and SITES[target.site]:
                parts = self._parts_of_blocks(stored, rank) if stored.rank != rank else ()
                kinds_by_site.setdefault(target.site, set()).add((parts, stored.rank))
        return {
            site: next(iter(kinds))[0]
            for site, kinds in kinds_by_site.items()
            if len(kinds) == 1 and next(iter(kinds))[0]
        }

    def _parts_of_blocks(self, stored: _Stored, rank: int) -> tuple[str, ...]:
        """Return the part of each block of `rank` columns of a fused module's B; empty if they are not parts."""
        target, b = stored.target, self._tensors[f"{stored.prefix}.lora_B.weight"].read()
        all_parts, module = SITES[target.site], target.modules[WHOLE]
        if rank < 1 or b.shape[1] % rank or b.shape[1] > rank * len(all_parts):
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

    def _lora(self) -> LoraConfig:
        by_site: dict[str, dict[str, set[str]]] = {}  # parts by site and layer
        ranks: dict[tuple[str, str, str], tuple[int, float]] = {}
        for stored in self._adapters.values():
            target = stored.target
            fused = self._fused.get(target.site)
            for part in fused or (stored.part,):
                by_site.setdefault(target.site, {}).setdefault(target.layer, set()).add(part)
                divisor = len(fused or (WHOLE,))
                ranks[target.layer, target.site, part] = stored.rank // divisor, stored.alpha / divisor
        layers = self._layers(by_site)
        default = self._config["r"], self._config["lora_alpha"]
        if self._config.get("use_rslora"):
            default = default[0], default[1] * default[0] ** 0.5
        targets = [
            target_name(site, part, self._model)
            for site in SITES
            if site in by_site
            for part in (WHOLE, *SITES[site])
            if part in next(iter(by_site[site].values()))
        ]
        names = {at: at[1] if at[2] == WHOLE else f"{at[1]}.{at[2]}" for at in ranks}
        patterns = [
            _pattern(
                {f"{at[0]}.{name}": name for at, name in names.items()},
                {f"{at[0]}.{name}": ranks[at][index] for at, name in names.items()},
                default[index],
            )
            for index in (0, 1)
        ]
        return LoraConfig(
            rank=default[0],
            alpha=default[1],
            dropout=self._config.get("lora_dropout", 0.0),
            targets=targets,
            rank_pattern=patterns[0],
            alpha_pattern=patterns[1],
            layers_to_transform=layers,
            use_dora=bool(self._config.get("use_dora")),
        )

    def _layers(self, by_site: Mapping[str, Mapping[str, set[str]]]) -> list[int] | None:
        """Return the layers with adapters, None for all; each must have the same adapters as the others."""
        with_site: dict[str, set[str]] = {}
        for target in self._targets.values():
            with_site.setdefault(target.site, set()).add(target.layer)
        stack_indices = {
            target.layer: index_in_stack(target.number, self._model) for target in self._targets.values()
        }
        adapted = {stack_indices[layer] for layers in by_site.values() for layer in layers}
        for site, layers in by_site.items():
            expected = {layer for layer in with_site[site] if stack_indices[layer] in adapted}
            if layers.keys() != expected or len(set(map(frozenset, layers.values()))) > 1:
                raise CheckpointError(
                    f"{self.path} has adapters on {site.rpartition('.')[2]} in some layers and none, or others, in the "
                    "rest; here the layers with adapters all have the same"
                )
        return None if adapted == set(stack_indices.values()) else sorted(adapted)

    def _reject_other_methods(self) -> None:
        for key, only in ONLY.items():
            value = self._config.get(key, only)
            if value != only and value not in (None, {}, []):
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE} has {key} {value!r}, but only LoRA is supported "
                    f"({key} {only!r}); merge them with PEFT, or train others"
                )
        for key, kind in (("rank_pattern", dict), ("alpha_pattern", dict), ("target_parameters", list)):
            value = self._config.get(key) or kind()
            if not isinstance(value, kind) or not all(isinstance(each, str) for each in value):
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE} has {key} {value!r:.80}, which PEFT does not write; give a folder that "
                    "PEFT has saved"
                )
        for key, kinds in (("r", (int,)), ("lora_alpha", (int, float))):
            if type(self._config.get(key)) not in kinds:
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE} has no {key}; give a folder that PEFT has saved"
                )


def is_peft(path: str | Path) -> bool:
    """Return whether a folder contains adapters in PEFT's format."""
    return (Path(path) / CONFIG_FILE).is_file()
