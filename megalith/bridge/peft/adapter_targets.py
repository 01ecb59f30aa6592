"""The matrices that can have adapters, and the Hugging Face modules that correspond to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megalith.bridge.family import Family, Group
from megalith.bridge.transfer import to_theirs
from megalith.config import ModelConfig
from megalith.config.lora import EXPERTS, QKV, SITES, WHOLE

# Weights that can have adapters, in decoders and encoders: the layer's name, its number, and the site.
ADAPTED = re.compile(rf"((?:encoder\.)?layers\.(\d+))\.({'|'.join(map(re.escape, SITES))})\.weight")
PARAMETERS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""Parameters of the module of all experts in transformers 5."""


@dataclass(frozen=True)
class AdapterTarget:
    """A matrix that can have adapters, and the Hugging Face modules that correspond to it."""

    layer: str  # name of the layer, such as layers.0
    number: int  # index of the layer in the model
    site: str  # path in the layer
    group: Group  # the group of its weight

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.site}"

    @property
    def of_experts(self) -> bool:
        """True if there is one matrix per expert, stored in transformers as a parameter instead of a module."""
        return self.site.startswith(EXPERTS)

    @cached_property
    def modules(self) -> dict[str, str]:
        """Names of the Hugging Face modules, or of the experts' parameter, by sub-matrix."""
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
        """Number of columns of the matrix, or of one expert's."""
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
        """Return the row in Megalith's matrix of each row of this sub-matrix's B, int64."""
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
        """Return the module's row for each row of the sub-matrix's B, int64.

        The module must contain all of its rows.
        """
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
