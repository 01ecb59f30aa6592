"""Writing of adapters in PEFT's format."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.family import Family, build_on_meta
from megalith.bridge.peft.adapter_targets import ADAPTED, AdapterTarget, adapter_targets
from megalith.bridge.peft.peft_modules import (
    EMBEDDING,
    is_tied,
    modules_to_save,
    saved_groups,
    saved_tensor_names,
)
from megalith.bridge.peft.peft_names import (
    CONFIG_FILE,
    MAGNITUDE,
    ONLY,
    PREFIX,
    SCORE_TASK,
    TENSORS_FILE,
    TOKEN_ROWS,
    nested_parameters,
    wrapper_name,
)
from megalith.bridge.peft.peft_tokens import token_modules
from megalith.bridge.transfer import to_theirs
from megalith.checkpoint.files import write_safetensors
from megalith.config import LoraConfig, ModelConfig
from megalith.config.lora import EXPERTS, SITES, WHOLE
from megalith.errors import CheckpointError
from megalith.io import make_folder, sync_folder, write_file
from megalith.models.adapters import ADAPTER
from megalith.models.score_model import SCORE

TASKS = {"gpt": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": None}  # PEFT has no name for BERT's task

Pair = tuple[
    Tensor, Tensor
]  # A [rank, in] and B [out, rank]; of experts, a dimension of experts before these


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
    """Write adapters to a folder in PEFT's format.

    `read` returns a parameter by name; `base` is the name of the base model.
    """
    parts_by_site, pairs = lora.parts(model), {}
    if lora.decomposes_base:
        read, lora = _difference_to_initial(read), _with_doubled_rank(lora)
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
    nested, tensors = nested_parameters(pairs), {}
    if model.score_head:
        tensors[f"{PREFIX}{SCORE}"] = read(SCORE)
    tensors |= _saved_tensors(family, model, lora, read)
    for path, module in token_modules(lora.tokens_by_matrix(), family, model).items():
        tensors[f"{PREFIX}{module}.{TOKEN_ROWS}"] = read(f"{path}{ADAPTER}weight")
    for module, pair in pairs.items():
        prefix = wrapper_name(pair.target, module, module in nested)
        tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = pair.a, pair.b
        if pair.magnitude is not None:
            tensors[f"{prefix}.{MAGNITUDE}"] = pair.magnitude
    make_folder(folder)
    write_safetensors(folder / TENSORS_FILE, tensors)
    config = json.dumps(_peft_config(family, model, lora, pairs, base), indent=2)
    write_file(folder / CONFIG_FILE, config + "\n")
    sync_folder(folder)


def _saved_tensors(
    family: Family, model: ModelConfig, lora: LoraConfig, read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of the modules in `lora.modules_to_save`, by PEFT's names."""
    tensors = {}
    groups = saved_groups(family.groups(model), build_on_meta(model, lora).saved_names)
    for name, theirs in saved_tensor_names(family, groups).items():
        values = read(name)
        converted = to_theirs(groups[name], values, dict.fromkeys(groups[name].sources, values.dtype))
        stored = [value.contiguous() for _, value in converted]
        stored += [stored[0].clone()] * (len(theirs) - len(stored))  # a tied output matrix
        tensors |= {f"{PREFIX}{each}": value for each, value in zip(theirs, stored, strict=True)}
    return tensors


def _difference_to_initial(read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Wrap `read` so that A and B become [A; A₀] and [B, −B₀].

    PEFT turns an adapter with a modified base into a plain LoRA in the same way.
    """

    def read_difference(name: str) -> Tensor:
        values = read(name)
        if f"{ADAPTER}lora_A." in name:
            return torch.cat([values, read(name.replace("lora_A", "initial_A"))])
        if f"{ADAPTER}lora_B." in name:
            return torch.cat([values, -read(name.replace("lora_B", "initial_B"))], dim=1)
        return values

    return read_difference


def _with_doubled_rank(lora: LoraConfig) -> LoraConfig:
    """Return settings with twice the ranks and the same scales."""
    factor = 2**0.5 if lora.use_rslora else 2
    return lora.model_copy(
        update={
            "rank": 2 * lora.rank,
            "alpha": factor * lora.alpha,
            "rank_pattern": {name: 2 * rank for name, rank in lora.rank_pattern.items()},
            "alpha_pattern": {name: factor * alpha for name, alpha in lora.alpha_pattern.items()},
        }
    )


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
            f"{target.name} is fused differently in this family's models than in the adapters; train one adapter for "
            f"the whole matrix ({target.site}.{WHOLE} in lora.targets), or merge the adapters"
        )
    if WHOLE in modules and pairs:
        return {modules[WHOLE]: _fused_pair(target, pairs, lora, lengths)}
    return {
        modules[part]: of_part(
            part,
            a,
            _hugging_face_rows(target, modules[part], part, b),
            _hugging_face_rows(target, modules[part], part, lengths[part][:, None]).flatten()
            if lengths
            else None,
        )
        for part, (a, b) in pairs.items()
    }


def _hugging_face_rows(target: AdapterTarget, module: str, part: str, b: Tensor) -> Tensor:
    """Return a sub-matrix's B with all rows of the Hugging Face module, in its order.

    Rows of other sub-matrices are zero.
    """
    weight_rows = len(target.rows_of_modules()[module])
    rows = b.new_zeros(weight_rows, b.shape[1])
    rows[target.rows_of_module(module, part)] = b
    return rows


def _fused_pair(
    target: AdapterTarget, pairs: Mapping[str, Pair], lora: LoraConfig, lengths: Mapping[str, Tensor]
) -> PeftPair:
    """Return one (A, B) pair for a module that fuses all sub-matrices, with the scale of the first one."""
    if lengths and lengths.keys() != set(SITES[target.site]):
        raise CheckpointError(
            f"{target.name} has DoRA's magnitudes for some of its rows, but PEFT needs those of all rows; adapt all "
            f"parts of {target.name}, or merge the adapters"
        )
    module, at = target.modules[WHOLE], (target.layer, target.site)
    ordered = [part for part in SITES[target.site] if part in pairs]
    scales = [lora.scaling_of(*at, part) for part in ordered]
    blocks = [_hugging_face_rows(target, module, part, pairs[part][1]) for part in ordered]
    blocks = [b if scale == scales[0] else b * (scale / scales[0]) for b, scale in zip(blocks, scales)]
    first, rank = lora.rank_of(*at, ordered[0]), sum(lora.rank_of(*at, part) for part in ordered)
    alpha = lora.alpha_of(*at, ordered[0])
    alpha = alpha * (rank / first) ** 0.5 if lora.use_rslora else alpha * rank / first
    a = torch.cat([pairs[part][0] for part in ordered])
    rows = [_hugging_face_rows(target, module, part, length[:, None]) for part, length in lengths.items()]
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
    saved = build_on_meta(model, lora).saved_names
    modules = modules_to_save(family, family.groups(model), saved) + ["score"] * model.score_head
    return {
        **ONLY,
        "base_model_name_or_path": base,
        "task_type": SCORE_TASK if model.score_head else TASKS[model.model_type],
        "modules_to_save": modules or None,
        "trainable_token_indices": _their_tokens(family, model, lora),
        "ensure_weight_tying": f"{EMBEDDING}.weight" in saved and is_tied(model),
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(set(suffixes.values())),
        "target_parameters": sorted({names[name] for name in names.keys() - suffixes.keys()}) or None,
        "layers_to_transform": lora.layers_to_transform,
        "rank_pattern": pattern_values(names, {name: pair.rank for name, pair in pairs.items()}, lora.rank),
        "alpha_pattern": pattern_values(
            names, {name: pair.alpha for name, pair in pairs.items()}, lora.alpha
        ),
        "fan_in_fan_out": any(rule.transposed for rule in family.tensors.values()),
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "init_lora_weights": True,
    }


def _their_tokens(
    family: Family, model: ModelConfig, lora: LoraConfig
) -> list[int] | dict[str, list[int]] | None:
    """Return PEFT's `trainable_token_indices`: the embedding's tokens, or tokens keyed by the last component of
    module names.
    """
    tokens = lora.tokens_by_matrix()
    if tokens.keys() <= {EMBEDDING}:
        return tokens.get(EMBEDDING)
    modules = token_modules(tokens, family, model)
    return {modules[path].rpartition(".")[2]: each for path, each in tokens.items()}


def pattern_values(names: Mapping[str, str], values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Return a PEFT pattern: module name → value, for values that differ from the default.

    A name in the pattern is a suffix if all modules whose names end with it have the same value, and otherwise the full
    name of a module. No two names then give a module different values, so their order does not matter, although PEFT
    sorts them when it saves.
    """
    shared: dict[str, set] = {
        name: {values[module] for module in names if f".{module}".endswith(f".{name}")}
        for name in set(names.values())
    }
    keys = {module: name if len(shared[name]) == 1 else module for module, name in names.items()}
    return {keys[module]: value for module, value in values.items() if value != default}


def _target_suffixes(
    adapted_modules: Iterable[str], family: Family, model: ModelConfig, layers: set[str]
) -> dict[str, str]:
    """Return, for each module, its shortest suffix that matches only adapted modules. PEFT matches by suffix.

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
