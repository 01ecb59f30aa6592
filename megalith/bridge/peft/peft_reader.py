"""Reading of adapters in PEFT's format."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megalith.bridge.family import Family, Group
from megalith.bridge.folder import list_tensors, read_json
from megalith.bridge.peft.adapter_config import check_adapter_config, match_pattern
from megalith.bridge.peft.adapter_targets import AdapterTarget, adapter_targets
from megalith.bridge.peft.peft_modules import (
    EMBEDDING,
    can_group_be_saved,
    is_tied,
    resolve_saved_modules,
    saved_tensor_names,
)
from megalith.bridge.peft.peft_names import (
    CONFIG_FILE,
    MAGNITUDE,
    PREFIX,
    SCORE_MODULES,
    TENSORS_FILE,
    TOKEN_ROWS,
    nested_parameters,
    wrapper_name,
)
from megalith.bridge.peft.peft_tokens import resolve_tokens, token_modules
from megalith.bridge.peft.peft_writer import pattern_values
from megalith.bridge.transfer import to_ours
from megalith.config import LoraConfig, ModelConfig
from megalith.config.base import as_config_error
from megalith.config.lora import SITES, WHOLE, index_in_stack, target_name
from megalith.errors import CheckpointError, ConfigError, shorten
from megalith.models.adapters import ADAPTER
from megalith.models.saved_modules import path_of
from megalith.models.score_model import SCORE


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
        check_adapter_config(self.path / CONFIG_FILE, self._config)
        self._tensors = list_tensors(self.path / TENSORS_FILE)
        self._targets = {target.name: target for target in adapter_targets(family, model)}
        self._adapters = self._find_adapters()
        self._family, self._saved = family, self._find_saved(family)
        self._tokens, self._token_tensors = self._find_tokens()
        self._check_names()
        self._fused = self._find_fused_parts()
        self.lora = self._lora()

    @property
    def has_score(self) -> bool:
        """True if the folder contains a trained score head, which only a reward model can use."""
        return self._model.score_head and bool(
            {*SCORE_MODULES} & {*(self._config.get("modules_to_save") or ())}
        )

    def read(self, name: str) -> Tensor:
        """Return a parameter of an adapter, or the score, by Megalith's name, in float32."""
        if name == SCORE:
            return self._tensors[f"{PREFIX}{SCORE}"].read().float()
        if name in self._saved:
            group, stored = self._saved[name], self._saved_tensors[name]
            by_file_name = dict(zip(group.names(), stored))
            return to_ours(group, lambda each: self._tensors[by_file_name[each]].read()).float()
        matrix, _, rest = name.partition(ADAPTER)
        if matrix in self._token_tensors:
            return self._tensors[self._token_tensors[matrix]].read().float()
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

    def check_trained(self, modules: Collection[str] | None) -> None:
        """Raise ConfigError if training would continue with modules that PEFT did not train, unless `modules` are
        set."""
        untrained = sorted(self._saved_paths - set(self._resolved))
        if untrained and not modules:
            raise ConfigError(
                f"{self.path / TENSORS_FILE} has {', '.join(untrained)}, which PEFT saved (save_embedding_layers) but "
                "did not train; list them in lora.modules_to_save to train them in full, or merge the folder (megalith "
                "lora merge) and train on the result"
            )

    @property
    def _saved_paths(self) -> set[str]:
        return {path_of(name) for name in self._saved}

    @cached_property
    def _resolved(self) -> list[str]:
        """The paths of the modules in the folder's `modules_to_save`."""
        names = self._config.get("modules_to_save") or []
        if self._model.score_head:
            names = [name for name in names if name not in SCORE_MODULES]
        return resolve_saved_modules(names, self._family, self._model) or []

    def _find_saved(self, family: Family) -> dict[str, Group]:
        """Return the groups of the modules that the folder contains in full, by name. Also sets the names of their
        tensors.

        PEFT writes the trained modules. It also writes embedding and output matrix if it is configured to, or if the
        vocabulary was resized.
        """
        groups = [group for group in family.groups(self._model) if can_group_be_saved(group)]
        theirs = saved_tensor_names(family, {group.name: group for group in groups})
        self._saved_tensors = {name: [f"{PREFIX}{each}" for each in names] for name, names in theirs.items()}
        has = {
            name: [each for each in stored if each in self._tensors]
            for name, stored in self._saved_tensors.items()
        }
        self._saved_tensors = {name: stored for name, stored in self._saved_tensors.items() if has[name]}
        saved = {group.name: group for group in groups if has.get(group.name)}
        for name, group in saved.items():
            self._check_saved(group, self._saved_tensors[name], has[name])
        return saved

    def _check_saved(self, group: Group, stored: Sequence[str], present: Sequence[str]) -> None:
        """Raise CheckpointError if a module's shape differs from the model's, or a tied output matrix differs from the
        embedding.
        """
        for name, shape in zip(stored, group.sources.values()):
            if name in self._tensors and tuple(self._tensors[name].shape) != tuple(shape):
                rows = self._tensors[name].shape[0]
                raise CheckpointError(
                    f"{self.path}: {name} has the shape {list(self._tensors[name].shape)}, but the model's is "
                    f"{list(shape)}; if the vocabulary was resized, resize the base too, in transformers "
                    f"(model.resize_token_embeddings({rows}), save_pretrained), and use the result as the base"
                )
        if path_of(group.name) != EMBEDDING or not is_tied(self._model):
            return
        tensors = [self._tensors[name].read() for name in present]
        if len(present) < 2 or not torch.equal(*tensors):
            raise CheckpointError(
                f"{self.path} has {' and '.join(present)} with different values, but the base ties the output matrix "
                "to the embedding; train them in PEFT with ensure_weight_tying, or on a base with "
                "tie_word_embeddings false"
            )

    def _find_tokens(self) -> tuple[dict[str, list[int]] | None, dict[str, str]]:
        """Return the tokens whose rows the folder has, and the names of the rows' tensors, by Megalith's names of the
        matrices. Raise CheckpointError for rows of another shape."""
        tokens = self._config.get("trainable_token_indices")
        if not tokens:
            return None, {}
        try:
            tokens = resolve_tokens(tokens, self._family, self._model)
        except ConfigError as error:
            raise CheckpointError(str(error.within(self.path / CONFIG_FILE))) from None
        modules = token_modules(tokens, self._family, self._model)
        names = {path: f"{PREFIX}{module}.{TOKEN_ROWS}" for path, module in modules.items()}
        for path, name in names.items():
            expected = (len(tokens[path]), self._model.hidden_size)
            if name in self._tensors and tuple(self._tensors[name].shape) != expected:
                raise CheckpointError(
                    f"{self.path}: {name} has the shape {list(self._tensors[name].shape)}, but with this "
                    f"model and trainable_token_indices it must be {list(expected)}; use adapters of the same "
                    "base"
                )
            if (largest := max(tokens[path])) >= self._model.vocab_size:
                raise CheckpointError(
                    f"{self.path / CONFIG_FILE}: trainable_token_indices has {largest}, but the base has "
                    f"{self._model.vocab_size} tokens; if the vocabulary was resized, resize the base too, in "
                    "transformers (model.resize_token_embeddings, save_pretrained), and use the result as "
                    "the base"
                )
        return tokens, names

    def _of_experts(self, target: AdapterTarget, half: str, value: Tensor) -> Tensor:
        experts = target.group.shape[0]
        if half == "lora_A":
            return value.unflatten(0, (experts, -1))
        b = value.unflatten(1, (-1, experts)).permute(2, 0, 1)  # [experts, out, rank]
        return b[:, target.rows_of_module(target.modules[WHOLE], WHOLE)]

    def _find_adapters(self) -> dict[tuple[str, str], _Stored]:
        """Return the stored adapters, keyed by matrix name and by the sub-matrix that the Hugging Face module
        corresponds to.
        """
        patterns = {key: self._config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
        stored_adapters = {}
        for target in self._targets.values():
            for part, module in target.modules.items():
                prefix = self._stored_prefix(target, module)
                if prefix is None:
                    continue
                rank = match_pattern(patterns["rank_pattern"], module, self._config["r"])
                alpha = match_pattern(patterns["alpha_pattern"], module, self._config["lora_alpha"])
                stored_adapters[target.name, part] = stored = self._checked(target, part, prefix, rank, alpha)
                for half, expected in target.shapes(module, rank).items():
                    tensor = self._tensors.get(f"{stored.prefix}.{half}.weight")
                    if tensor is not None and tuple(tensor.shape) != expected:
                        raise CheckpointError(
                            f"{self.path}: {stored.prefix}.{half}.weight has the shape {list(tensor.shape)}, "
                            f"but with this model and r {rank} it must be {list(expected)}; use adapters of "
                            "the same base"
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
                f"{self.path / CONFIG_FILE} has r {rank!r} and lora_alpha {alpha!r}, which is invalid: "
                f"{reason}; pass a folder that PEFT has saved"
            ) from None
        return _Stored(target, part, prefix, rank, alpha)

    def _stored_prefix(self, target: AdapterTarget, module: str) -> str | None:
        """Return the name prefix of a module's PEFT wrapper if the folder contains tensors under it."""
        prefix = wrapper_name(target, module, nested=False)
        if not target.of_experts:
            return prefix if f"{prefix}.lora_A.weight" in self._tensors else None
        if module not in self._adapted_parameters:
            return None
        return wrapper_name(target, module, module in nested_parameters(self._adapted_parameters))

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
        if self.has_score:
            expected.add(f"{PREFIX}{SCORE}")
        expected |= {each for stored in self._saved_tensors.values() for each in stored}
        expected |= {*self._token_tensors.values()}
        missing, extra = expected - self._tensors.keys(), self._tensors.keys() - expected
        if missing or extra or not expected:
            messages = [
                f"{what} {shorten(sorted(names))}"
                for what, names in (("lacks", missing), ("has", extra))
                if names
            ]
            raise CheckpointError(
                f"{self.path / TENSORS_FILE} does not fit this model: it "
                f"{' and '.join(messages) or 'is empty'}; use adapters of the same base, on matrices of its "
                "layers other than routers"
            )

    def _find_fused_parts(self) -> dict[str, tuple[str, ...]]:
        """Return the sub-matrices, by site, of fused modules with one adapter per sub-matrix, as `save_peft` writes
        them.

        The rank of such a module is a multiple of `r`, and each block of `r` columns of its B is zero outside the rows
        of one sub-matrix.
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
        """Return the sub-matrix of each block of `rank` columns of a fused module's B. Empty if the blocks do not
        correspond to sub-matrices.
        """
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
            pattern_values(
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
            init_lora_weights=self._initialization,
            modules_to_save=[*dict.fromkeys(map(path_of, self._saved))] or None,
            trainable_token_indices=self._tokens,
        )

    @property
    def _initialization(self) -> str:
        """The initialization whose factors PEFT subtracts from the base when it loads the folder.

        By default there is none.
        """
        value = str(self._config.get("init_lora_weights", True)).lower()
        return value if value in ("pissa", "olora") else "default"

    def _layers(self, by_site: Mapping[str, Mapping[str, set[str]]]) -> list[int] | None:
        """The layers with adapters; None means all. All of them must have adapters on the same modules."""
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
                    f"{self.path} has adapters on {site.rpartition('.')[2]} in some layers, but "
                    "not the same ones in the other layers; only adapters on the same matrices "
                    "of every adapted layer are supported"
                )
        return None if adapted == set(stack_indices.values()) else sorted(adapted)
