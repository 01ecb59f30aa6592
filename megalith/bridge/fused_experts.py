"""Splits tensors that contain the matrices of all experts of a layer into one matrix per expert.

Qwen3.5-MoE is published with `experts.gate_up_proj` [experts, 2 · ffn, hidden] and `experts.down_proj` [experts,
hidden, ffn], as transformers keeps them in memory. The families' tables instead have the names that transformers
writes: `experts.N.gate_proj.weight`, `up_proj` and `down_proj`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from torch import Tensor

from megalith.bridge.rows import Rule

GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"
GATE_OF_EXPERT = ".mlp.experts.{expert}.gate_proj.weight"


class Stored(Protocol):
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    def read(self) -> Tensor: ...


@dataclass(frozen=True)
class ExpertMatrix:
    """A matrix of one expert: rows `first` to `first` + `rows` of the expert in a tensor of all experts."""

    stored: Stored
    expert: int
    first: int
    rows: int

    @property
    def dtype(self) -> str:
        """Dtype code in the file."""
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.rows, self.stored.shape[2]

    def read(self) -> Tensor:
        """Return the matrix, memory-mapped if the tensor is."""
        return self.stored.read()[self.expert, self.first : self.first + self.rows]


def has_rows_per_expert(rules: Mapping[str, Rule]) -> bool:
    """Return True if a family's table names the gate, up and down matrices of single experts."""
    return any(name.endswith(GATE_OF_EXPERT) for rule in rules.values() for name in rule.names)


def split_fused_experts(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors, with each tensor of all experts replaced by one matrix per expert."""
    split: dict[str, Stored] = {}
    for name, stored in tensors.items():
        split |= dict(_matrices(name, stored)) or {name: stored}
    return split


def _matrices(name: str, stored: Stored) -> Iterator[tuple[str, ExpertMatrix]]:
    shape = stored.shape
    if not name.endswith((GATE_UP, DOWN)) or len(shape) != 3 or not prod(shape):
        return
    parts = ("gate_proj", "up_proj") if name.endswith(GATE_UP) else ("down_proj",)
    if shape[1] % len(parts):
        return
    rows, prefix = shape[1] // len(parts), name.rpartition(".")[0]
    for expert in range(shape[0]):
        for number, part in enumerate(parts):
            matrix = ExpertMatrix(stored, expert, number * rows, rows)
            yield f"{prefix}.{expert}.{part}.weight", matrix
