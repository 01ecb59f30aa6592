"""Who holds what: each rank's shards of a small model, built as that rank builds it, and what the axis then moves.

The model is built for every rank in turn by `parallel/apply.py`, on the meta device, over a process group in which no
other rank is. What moves is the traffic model's (`planner/traffic.py`), for a model of a known size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megalith.checkpoint.plan import divide, entries
from megalith.checkpoint.state import model_shards
from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.data.loader import micro_batch_positions
from megalith.models.pass_context import PassLayout
from megalith.parallel.apply import apply
from megalith.parallel.context.zigzag import spans
from megalith.parallel.mesh import build_mesh
from megalith.parallel.shards import LocalShard
from megalith.parallel.tensor.tensor_parallel import TensorParallel
from megalith.planner.layout import build_layout
from megalith.planner.traffic import Transfer
from megalith.training.build import build_meta_model
from megalith.training.precheck import fake_process_group
from pictures.svg import COLOURS, RANKS, Picture

WORLD = 4
NAMES = {"llama3-8b": "Llama-3-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
EXPERTS = 8
BATCH, TOKENS = 8, 8192  # sequences of a step, and their length, where traffic is counted
LLAMA = dict(
    hidden_size=64, num_attention_heads=8, num_query_groups=4, position_embedding_type="rope", swiglu=True,
    normalization="RMSNorm", add_bias_linear=False, vocab_size=512, untie_embeddings_and_output_weights=True,
)  # fmt: skip
FIRST, STEP = 156, 82  # of a rank's column
WHOLE, HIGH = 66, 26  # of the box that is a whole matrix
Range = tuple[float, float]  # of a dimension, 0 to 1


def holdings(parallel: dict[str, Any], **model: Any) -> list[dict[str, LocalShard]]:
    """By rank, of WORLD: its shard of every parameter that it has."""
    config = RunConfig.from_tree(
        {
            "model": dict(num_layers=1) | LLAMA | model,
            "data": dict(mock=True, seq_length=64),
            "parallel": parallel,
            "train": dict(train_iters=1, micro_batch_size=1, global_batch_size=WORLD),
            "runtime": dict(compile=False),
        }
    )
    found = []
    for rank in range(WORLD):
        with fake_process_group(WORLD, rank):
            mesh = build_mesh(config.parallel, WORLD, "cpu", has_experts=config.model.num_experts is not None)
            chunks = apply(build_meta_model(config), config, mesh, torch.device("meta"))
            found.append(model_shards(chunks))
        _clear_sharding_prop_cache()  # it names the mesh as that rank saw it, which is equal to the next rank's
    return found


def ranges(shard: LocalShard) -> list[Range]:
    """Return the range of a shard in each dimension of the whole tensor, as fractions."""
    sizes = zip(shard.shape, shard.offset, shard.values.shape)
    return [(offset / whole, (offset + size) / whole) for whole, offset, size in sizes]


def moves(axis: str, parallel: dict[str, Any], preset: str = "llama3-8b", world: int = WORLD) -> str:
    """Return a sentence with the transfers of an axis and the bytes that a rank sends in a step of eight sequences."""
    transfer = traffic(axis, parallel, preset, world)
    return (
        f"{transfer.what}. {NAMES[preset]} on {world} GPUs, {BATCH} sequences of {TOKENS:,} tokens per step: "
        f"each sends {transfer.bytes / 1e9:.1f} GB."
    )


def traffic(axis: str, parallel: dict[str, Any], preset: str, world: int) -> Transfer:
    """Return the transfer of an axis in a training step in bf16, with micro-batches of one sequence."""
    config = RunConfig.from_tree(
        {
            "model": dict(preset=preset),
            "data": dict(mock=True, seq_length=TOKENS),
            "parallel": dict(fsdp_unsharded_layers=0) | parallel,
            "train": dict(train_iters=1, precision="bf16", micro_batch_size=1, global_batch_size=BATCH),
        }
    )
    return next(each for each in build_layout(config, world).transfers if each.axis == axis)


def short(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    return "experts." + parts[-1] if "experts" in parts else parts[-1]


def held(picture: Picture, x: float, y: float, has: Sequence[Range], colour: str) -> None:
    """Draw the part of a tensor that a rank holds. Rows run down, columns to the right; experts are side by side."""
    if len(has) == 1:  # a vector
        ((first, end),) = has
        picture.box(colour, x + first * WHOLE, y + HIGH / 2 - 4, (end - first) * WHOLE, 8)
        return
    *expert, (top, bottom), (left, right) = has
    copies = EXPERTS if expert else 1
    each = WHOLE / copies
    wide = each - 1.5 * (copies > 1)
    for copy in range(copies):
        if not expert or expert[0][0] <= copy / copies < expert[0][1]:
            at = x + copy * each + left * wide
            picture.box(colour, at, y + top * HIGH, (right - left) * wide, (bottom - top) * HIGH)


def heads_of(picture: Picture, title: str, names: Callable[[int], str] = "rank {}".format) -> float:
    """The title and the ranks' names above their columns; the y below."""
    picture.text(0, 14, title, "h")
    for rank in range(WORLD):
        picture.text(FIRST + rank * STEP + WHOLE / 2, 36, names(rank), "s m")
    return 44


def rows_of(picture: Picture, y: float, has: list[dict[str, LocalShard]], names: Sequence[str]) -> float:
    """A row for each parameter, a column for each rank; the y below."""
    for name in names:
        picture.text(FIRST - 10, y + HIGH / 2 + 4, short(name), "s e")
        for rank, shards in enumerate(has):
            has_here = ranges(shards[name])
            held(picture, FIRST + rank * STEP, y, [(0, 1)] * len(has_here), "void")
            held(picture, FIRST + rank * STEP, y, has_here, RANKS[rank])
        y += HIGH + 8
    return y


def tokens_of(
    picture: Picture, y: float, label: str, parts: int, has: Callable[[int], Sequence[int]]
) -> float:
    """A row of tokens or samples in `parts`, of which each rank has some; the y below."""
    picture.text(FIRST - 10, y + 12, label, "s e")
    each = WHOLE / parts
    for rank in range(WORLD):
        for part in range(parts):
            x = FIRST + rank * STEP + part * each
            picture.box(RANKS[rank] if part in has(rank) else "void", x, y, each - 1, 16)
    return y + 26


def own_samples(rank: int) -> range:
    return next(micro_batch_positions([range(WORLD)], 1, rank, WORLD))


def tensor() -> str:
    picture = Picture("Tensor and sequence parallelism over four ranks: what each rank holds")
    settings = dict(tensor_model_parallel_size=WORLD, sequence_parallel=True)
    has = holdings(settings)
    y = heads_of(picture, "TP 4 with sequence parallelism: what each rank holds of a layer")
    y = rows_of(picture, y, has, list(has[0]))
    tokens = torch.arange(8)[None]
    shares = [TensorParallel(Axis(WORLD, rank), True).shard_sequence(tokens, PassLayout(sharded=True))
              for rank in range(WORLD)]  # fmt: skip
    y = tokens_of(picture, y, "tokens of the stream", 8, lambda rank: shares[rank].flatten().tolist())
    picture.lines(y + 10, "Moves " + moves("tensor", settings))
    return picture.svg()


def context() -> str:
    picture = Picture("Context parallelism over four ranks: what each rank holds")
    has = holdings(dict(context_parallel_size=WORLD))
    y = heads_of(picture, "CP 4: every weight whole, two chunks of each sequence")
    names = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    y = rows_of(picture, y, has, [name for name in has[0] if short(name) in names])
    chunks = 2 * WORLD
    first = [[span.start for span in spans(rank, WORLD, 2)] for rank in range(WORLD)]
    y = tokens_of(picture, y, "chunks of a sequence", chunks, first.__getitem__)
    picture.lines(y + 10, "Moves " + moves("context", dict(context_parallel_size=WORLD, cp_comm_type="a2a")))
    return picture.svg()


def pipeline() -> str:
    picture = Picture("Pipeline parallelism over four ranks: which layers each rank holds")
    layers = 8
    has = holdings(dict(pipeline_model_parallel_size=WORLD), num_layers=layers)
    rows = {"embedding": "embedding.word_embeddings.weight"}
    rows |= {f"layer {number}": f"layers.{number}.mlp.linear_fc1.weight" for number in range(layers)}
    rows |= {"norm and head": "output_layer.weight"}
    y = heads_of(picture, "PP 4: which layers each rank holds", "stage {}".format)
    for label, name in rows.items():
        picture.text(FIRST - 10, y + 12, label, "s e")
        for rank, shards in enumerate(has):
            picture.box(RANKS[rank] if name in shards else "void", FIRST + rank * STEP, y, WHOLE, 15)
        y += 19
    picture.lines(y + 16, "Moves " + moves("pipeline", dict(pipeline_model_parallel_size=WORLD)))
    return picture.svg()


def expert() -> str:
    picture = Picture("Expert parallelism over four data-parallel ranks: what each rank holds")
    has = holdings(dict(expert_model_parallel_size=WORLD), num_experts=EXPERTS, moe_router_topk=2)
    y = heads_of(picture, "EP 4 over DP 4: eight experts of a layer, two on each rank")
    names = ("linear_qkv", "linear_proj", "router", "experts.linear_fc1", "experts.linear_fc2")
    y = rows_of(picture, y, has, [name for name in has[0] if short(name) in names])
    y = tokens_of(picture, y, "samples of a step", WORLD, own_samples)
    words = "Moves " + moves("expert", dict(expert_model_parallel_size=8), "qwen3-30b-a3b", 8)
    picture.lines(y + 10, words)
    return picture.svg()


def data() -> str:
    picture = Picture("Data parallelism over four ranks: what each rank holds between two layers' passes")
    y = heads_of(picture, "DP 4: what each rank holds of the weights, at rest")
    names = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "pre_mlp_layernorm")
    for strategy in ("no_shard", "optim_grads_params"):
        has = holdings(dict(data_parallel_sharding_strategy=strategy))
        picture.text(0, y + 12, strategy, "h")
        y = rows_of(picture, y + 20, has, [name for name in has[0] if short(name) in names])
    y = tokens_of(picture, y, "samples of a step", WORLD, own_samples)
    for strategy in ("no_shard", "optim_grads_params"):
        words = moves("data × context", dict(data_parallel_sharding_strategy=strategy))
        y = picture.lines(y + 10, f"{strategy} moves {words}")
    return picture.svg()


def checkpoint() -> str:
    """A save of TP 2 × DP 2 by the saver's own plan, and what one rank of TP 4 reads of it."""
    picture = Picture("A checkpoint: which file holds which shard, and what a rank of another layout reads")
    settings = dict(tensor_model_parallel_size=2, data_parallel_sharding_strategy="optim")
    saved, reader = holdings(settings), holdings(dict(tensor_model_parallel_size=WORLD))[1]
    _, shares = divide([entries({"model": shards}) for shards in saved])
    picture.text(0, 14, "Saved by TP 2 × DP 2 (optim), loaded by TP 4", "h")
    left, right = FIRST + 10, FIRST + 150
    picture.text(left + WHOLE / 2, 36, "the global tensor", "s m")
    picture.text(right + WHOLE / 2, 36, "what rank 1 of TP 4 reads", "s m")
    y = 46
    names = [name for name in saved[0] if short(name) != "final_layernorm"]
    for name in names:
        picture.text(FIRST - 10, y + HIGH / 2 + 4, short(name), "s e")
        wanted = ranges(reader[name])
        held(picture, right, y, [(0, 1)] * len(wanted), "void")
        for rank, share in enumerate(shares):
            if ("model", name) in share:
                has = ranges(saved[rank][name])
                held(picture, left, y, has, RANKS[rank])
                met = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(has, wanted)]
                if all(first < end for first, end in met):
                    held(picture, right, y, met, RANKS[rank])
        y += HIGH + 8
    for rank in range(WORLD):
        picture.labelled(RANKS[rank], rank * 121, y + 8, 115, 22, f"model-{rank:05d}-000")
    y = picture.lines(
        y + 50, "Each colour is a file of safetensors that one rank wrote: model-RRRRR-NNN.safetensors."
    )
    picture.lines(
        y, "manifest.json says of every global tensor which ranges are in which file, never who held them."
    )
    return picture.svg()


AXES = {
    "tensor": "tp",
    "context": "cp",
    "data": "dp",
    "pipeline": "pp",
    "experts": "ep",
    "expert DP": "edp",
}


def ranks() -> str:
    """Two hosts of eight GPUs, every axis of two but experts', which takes four."""
    picture = Picture("Which ranks form a group of each axis: 16 ranks, TP 2, CP 2, DP 2, PP 2, EP 4")
    parallel = RunConfig.from_tree(
        {
            "parallel": dict(
                tensor_model_parallel_size=2,
                context_parallel_size=2,
                pipeline_model_parallel_size=2,
                expert_model_parallel_size=4,
                expert_tensor_parallel_size=1,
            )
        }
    ).parallel
    groups: dict[str, list[tuple[int, ...]]] = {label: [] for label in AXES}
    for rank in range(16):
        with fake_process_group(16, rank):
            mesh = build_mesh(parallel, 16, "cpu", has_experts=True)
            for label, axis in AXES.items():
                members = tuple(get_process_group_ranks(getattr(mesh, axis).group))
                if members not in groups[label]:
                    groups[label].append(members)
    picture.text(0, 14, "16 ranks: TP 2, CP 2, DP 2, PP 2, and EP 4 for experts", "h")
    picture.text(0, 31, "In a row, ranks of one colour form a group", "s")
    for host in range(2):
        picture.text(80 + host * 203 + 98, 54, f"host {host}", "s m")
    y = 62
    for label in AXES:
        picture.text(72, y + 16, label, "s e")
        for colour, members in zip(COLOURS, groups[label]):
            for rank in members:
                x = 80 + rank * 24.5 + (rank // 8) * 7
                picture.box(colour, x, y, 23, 24)
                picture.text(x + 11.5, y + 16, str(rank), "s m on")
        y += 32
    return picture.svg()
