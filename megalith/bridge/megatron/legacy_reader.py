"""Reading of Megatron-LM's legacy checkpoints.

The format is `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, one file per tensor, pipeline and expert rank. PPP and EEE
are left out if there is only one such rank. Each tensor rank has some rows or columns of each matrix. Each pipeline
rank numbers its layers from 0, each expert rank its experts. With interleaving, a file contains `model0`, `model1`, …:
chunk v of stage p follows chunk v of all earlier stages.
"""

from __future__ import annotations

import itertools
import math
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
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


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
    files = _files(folder, trust)
    args = arguments_in(next(iter(files.values())))
    try:
        states = _by_rank(folder, files, args)
        first = states[0, 0, 0]
        chunks = sorted(
            (key for key in first if isinstance(key, str) and re.fullmatch(r"model\d*", key)),
            key=lambda key: int(key.removeprefix("model") or 0),
        )
        tensor_ranks, stages, expert_ranks = (1 + max(ranks) for ranks in zip(*states))
        experts = int(args.get("num_experts") or 0)
        for (_, _, ep), state in states.items():
            for chunk in chunks:
                local = unstack_experts(state[chunk], experts // expert_ranks)
                numbered = _number_experts(local, ep * experts // expert_ranks)
                state[chunk] = split_parts(numbered, args, tensor_ranks)
        for tp, pp in itertools.product(range(tensor_ranks), range(stages)):
            for chunk, ep in itertools.product(chunks, range(1, expert_ranks)):
                states[tp, pp, 0][chunk] |= states[tp, pp, ep][chunk]
        whole = {(tp, pp): state for (tp, pp, ep), state in states.items() if ep == 0}
        gated = bool(args.get("swiglu") or args.get("quick_geglu"))
        latents = _latent_rows(args)
        return _join_ranks(whole, chunks, tensor_ranks, stages, gated, latents), args
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder} is damaged ({error!r}); copy the checkpoint again") from None


def _by_rank(
    folder: Path, files: Mapping[tuple[int, ...], dict[str, Any]], args: Mapping[str, Any]
) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Return the files' states by tensor, pipeline and expert rank. A second number alone may be either of the two."""
    is_expert = (args.get("expert_model_parallel_size") or 1) > 1
    is_expert = is_expert and (args.get("pipeline_model_parallel_size") or 1) == 1
    states = {}
    for (tp, *others), state in files.items():
        pp, ep = (0, *others) if is_expert and len(others) == 1 else (*others, 0, 0)[:2]
        states[tp, pp, ep] = state
    sizes = [1 + max(ranks) for ranks in zip(*states)]
    expert_tensor_ranks = args.get("expert_tensor_parallel_size") or sizes[0]
    if args.get("num_experts") and expert_tensor_ranks != sizes[0]:
        raise CheckpointError(
            f"{folder} has rank files of {sizes[0]} tensor-parallel ranks with expert_tensor_parallel_size "
            f"{expert_tensor_ranks}; only equal sizes can be merged; save the checkpoint again with --ckpt-format "
            "torch_dist"
        )
    if len(files) != math.prod(sizes):
        needed = " × ".join(map(str, sizes))
        raise CheckpointError(
            f"{folder} has {len(files)} of {needed} (tensor × pipeline × expert) rank folders; copy the missing ones, "
            "or save the checkpoint again with --ckpt-format torch_dist"
        )
    return states


def _number_experts(state: dict[str, Any], offset: int) -> dict[str, Any]:
    """Return the tensors of an expert rank with the experts' numbers in the full model."""
    return {
        LOCAL_EXPERT.sub(lambda match: str(int(match[0]) + offset), name): value
        for name, value in state.items()
    }


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
                            f"the parts of {name} have the shapes {shapes}, which do not fit together; copy "
                            "the checkpoint again"
                        )
                    tensors[renumber_layers(name, layer_offset)] = JoinedTensor(parts, kind)
            layer_offset += len(layers)
    return tensors


def _files(folder: Path, trust: bool) -> dict[tuple[int, ...], dict[str, Any]]:
    """Return the contents of each rank's file, by the numbers in the name of its folder."""
    states = {}
    for path in sorted(folder.iterdir()):
        if match := RANK.fullmatch(path.name):
            ranks = tuple(int(number) for number in match.groups() if number)
            states[ranks] = load_torch(path / FILE, folder, trust)
    if not states and any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"{folder} has .distcp files, but no {METADATA}, which is written last, so the save or a copy is "
            "incomplete; use an earlier iteration"
        )
    if not states or not all(isinstance(state, dict) for state in states.values()):
        raise CheckpointError(f"{folder} has no {FILE} of Megatron; pass a folder that contains mp_rank_00")
    return states


METADATA = ".metadata"
