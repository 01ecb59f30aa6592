"""CodeGen of Salesforce: GPT-J with one QKV matrix, stored as four blocks, one per tensor-parallel rank of its
training.

Each block has its queries, then its values, then its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.bridge.families.separate_qkv import GPT_J
from megalith.bridge.family import Family
from megalith.bridge.rows import RowRun, Rule, deinterleave
from megalith.bridge.settings import Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError

PARTS = 4
ORDER = (0, 2, 1)  # index of queries, keys and values in a part


def _in_parts(model: ModelConfig, rows: int) -> list[RowRun]:
    """Order rows by head: query, key, value, with the rotary pairs of queries and keys split into halves."""
    size, rotary, in_part = model.head_dim, model.rotary_size, model.num_attention_heads // PARTS
    runs, ours = [], 0
    for head in range(model.num_attention_heads):
        part, number = divmod(head, in_part)
        for kind, index in enumerate(ORDER):
            theirs = ((3 * part + index) * in_part + number) * size
            rotated = rotary if kind < 2 else 0
            runs += deinterleave(0, theirs, ours, rotated)
            runs.append(RowRun(0, theirs + rotated, ours + rotated, size - rotated))
            ours += size
    return [run for run in runs if run.count]


class HeadsInParts:
    """Check that each of the four blocks of the QKV matrix contains whole heads."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if (hf_config.get("n_head") or 0) % PARTS:
            raise ConfigError(
                f"config.json has n_head {hf_config['n_head']}, but the QKV matrix of CodeGen is stored in {PARTS} "
                f"parts of whole heads; use a multiple of {PARTS}"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {}


# fmt: off
CODEGEN = replace(
    GPT_J,
    architecture="CodeGenForCausalLM",
    model_type="codegen",
    tensors={
        **GPT_J.tensors,
        "layers.{layer}.self_attention.linear_qkv.weight":
            Rule(("transformer.h.{layer}.attn.qkv_proj.weight",), _in_parts),
    },
    settings=(*GPT_J.settings, HeadsInParts()),
    ignored=(r"\.attn\.causal_mask$",),
)
# fmt: on


FAMILIES: tuple[Family, ...] = (CODEGEN,)
