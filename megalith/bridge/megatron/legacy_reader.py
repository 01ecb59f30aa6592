"""Reading of Megatron-LM's legacy checkpoints.

The format is `mp_rank_TT[_PPP]/model_optim_rng.pt`, one file per tensor and pipeline rank. Each tensor rank has some
rows or columns of each matrix. Each pipeline rank numbers its layers from 0. With interleaving, a file contains
`model0`, `model1`, …: chunk v of stage p follows chunk v of all earlier stages.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megalith.bridge.megatron.hybrid_rows import split_parts
from megalith.bridge.megatron.megatron_names import (
    LATENTS,
    join_shards,
    layer_of,
    renumber_layers,
    tp_split,
    unstack_experts,
)
from megalith.bridge.megatron.unpickle import load_torch
from megalith.checkpoint.files import DTYPE_CODES
from megalith.errors import CheckpointError

FILE = "model_optim_rng.pt"
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor that is stored as one shard per tensor-parallel rank."""

    parts: list[Tensor]
    kind: str  # "rows", "columns", "gated", or "copies"

    @property
    def dtype(self) -> str:
        return DTYPE_CODES.get(self.parts[0].dtype, str(self.parts[0].dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        if self.kind != "copies":
            shape[1 if self.kind == "columns" else 0] *= len(self.parts)
        return tuple(shape)

    def read(self) -> Tensor:
        """Return the joined tensor."""
        return join_shards(self.parts, self.kind)


def read_legacy(folder: Path, trust: bool) -> tuple[dict[str, JoinedTensor], dict[str, Any]]:
    """Return all tensors by their names in the full model, and Megatron's arguments. Raises CheckpointError."""
    states = _files(folder, trust)
    first = next(iter(states.values()))
    args = arguments_in(first)
    tensor_ranks = 1 + max(tp for tp, _ in states)
    stages = 1 + max(pp for _, pp in states)
    if len(states) != tensor_ranks * stages:
        raise CheckpointError(
            f"{folder} has {len(states)} of {tensor_ranks} × {stages} (tensor × pipeline) rank folders; copy the "
            "missing ones"
        )
    chunks = sorted(key for key in first if isinstance(key, str) and re.fullmatch(r"model\d*", key))
    try:
        if (ranks := args.get("expert_model_parallel_size") or 1) > 1:
            raise CheckpointError(
                f"{folder} was written by {ranks} expert-parallel ranks in the legacy format, whose files cannot be "
                "merged; save the checkpoint again with --ckpt-format torch_dist"
            )
        experts = int(args.get("num_experts") or 0)
        for state in states.values():
            for chunk in chunks:
                state[chunk] = split_parts(unstack_experts(state[chunk], experts), args, tensor_ranks)
        gated = bool(args.get("swiglu") or args.get("quick_geglu"))
        latents = _latent_rows(args)
        return _join_ranks(states, chunks, tensor_ranks, stages, gated, latents), args
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder} is damaged ({error!r}); copy the checkpoint again") from None


def _latent_rows(args: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows of MLA's down projections."""
    if not args.get("multi_latent_attention"):
        return {}
    rows = args.get("q_lora_rank") or 0, args["kv_lora_rank"] + args["qk_pos_emb_head_dim"]
    return dict(zip(LATENTS, rows))


def arguments_in(state: Any) -> dict[str, Any]:
    """Return the run's arguments from a saved state, or an empty mapping if it has none."""
    args = state.get("args") if isinstance(state, dict) else None
    return dict(vars(args)) if isinstance(args, Namespace) else {}


def _join_ranks(
    states: Mapping[tuple[int, int], dict[str, Any]],
    chunks: list[str],
    tensor_ranks: int,
    stages: int,
    gated: bool,
    latents: Mapping[str, int],
) -> dict[str, JoinedTensor]:
    tensors: dict[str, JoinedTensor] = {}
    layer_offset = 0
    for chunk in chunks:
        for pp in range(stages):
            shards = [states[tp, pp][chunk] for tp in range(tensor_ranks)]
            layers = {layer for name in shards[0] if (layer := layer_of(name)) is not None}
            for name, value in shards[0].items():
                if isinstance(value, Tensor):
                    parts = [shard[name] for shard in shards]
                    latent_rows = latents.get(name.rpartition(".self_attention.")[2])
                    kind = tp_split(name, gated, "copies" if value.shape[:1] == (latent_rows,) else "rows")
                    dimensions = {"copies": 0, "columns": 2}.get(kind, 1)
                    if value.ndim < dimensions or any(part.shape != value.shape for part in parts):
                        shapes = [list(part.shape) for part in parts]
                        raise ValueError(
                            f"the parts of {name} have the shapes {shapes}, which do not fit together"
                        )
                    tensors[renumber_layers(name, layer_offset)] = JoinedTensor(parts, kind)
            layer_offset += len(layers)
    return tensors


def _files(folder: Path, trust: bool) -> dict[tuple[int, int], dict[str, Any]]:
    states = {}
    for path in sorted(folder.iterdir()):
        if match := RANK.fullmatch(path.name):
            states[int(match[1]), int(match[2] or 0)] = load_torch(path / FILE, folder, trust)
    if not states and any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"{folder} has .distcp files, but no {METADATA}, which is written last, so the save or a copy is "
            "incomplete; use an earlier iteration"
        )
    if not states or not all(isinstance(state, dict) for state in states.values()):
        raise CheckpointError(f"{folder} has no {FILE} of Megatron; pass a folder that contains mp_rank_00")
    return states


METADATA = ".metadata"
