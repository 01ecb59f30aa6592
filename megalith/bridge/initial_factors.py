"""Adapter initializations that factor the adapted matrix: PiSSA, OLoRA and LoftQ.

PiSSA (Meng et al. 2024) takes the largest singular values and their vectors, OLoRA (Büyükakyüz 2024) the first columns
of a QR decomposition. For PiSSA, scale · B · A is the best approximation of W that has the adapter's rank. LoftQ (Li et
al. 2024) repeats two steps: quantize W − scale · B · A, and let scale · B · A be the best approximation, of that rank,
of the difference between W and the quantized matrix. Each matrix is decomposed by one process, so that all processes
get the same bits; different matrices are decomposed by different processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.agree import collectively
from megalith.checkpoint.state import Model, checkpoint_shards
from megalith.comm.collectives import Axis
from megalith.config import LoraConfig
from megalith.errors import ConfigError
from megalith.models.adapters import ADAPTER, LinearAdapter
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress


def decompose(method: str, weight: Tensor, rank: int, scaling: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the first A [rank, in] and B [out, rank] of a matrix, float32.

    Args:
        method: a value of lora.init_lora_weights other than default.
        weight: float32 [out, in].
        rank: at most the smaller of out and in.
        scaling: factor of B · A.
        seed: seed of the random projection of pissa_niter_N.
    """
    if method == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if method in ("pissa", "loftq"):
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        left, values, right = left[:, :rank], values[:rank], right[:rank]
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            left, values, right = torch.svd_lowrank(weight, rank, niter=int(method.rpartition("_")[2]))
        right = right.T
    roots = (values / scaling).sqrt()
    return roots[:, None] * right, left * roots


def factors_of(
    lora: LoraConfig, name: str, adapter: LinearAdapter, weight: Tensor, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the initial A and B of each sub-matrix that an adapter adapts.

    Args:
        lora: LoRA settings; `init_lora_weights` selects the initialization.
        name: name of the linear in the model.
        adapter: the unsharded adapter, on any device.
        weight: the linear's full weight.
        seed: seed of the run.
    """
    factors = {}
    for part, rank in adapter.ranks.items():
        rows = weight[adapter.part_rows(part).to(weight.device)].float()
        digest = hashlib.blake2b(f"{seed}/{name}/{part}".encode(), digest_size=7).digest()
        scaling = adapter.scaling * adapter.factors.get(part, 1.0)
        seed_of_part = int.from_bytes(digest, "little")
        factors[part] = decompose(lora.init_lora_weights, rows, rank, scaling, seed_of_part)
    return factors


@torch.no_grad()
def loftq(
    lora: LoraConfig,
    name: str,
    adapter: LinearAdapter,
    weight: Tensor,
    quantized: Callable[[Tensor | None], Tensor],
) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Return A and B of each sub-matrix after each LoftQ iteration.

    Args:
        lora: LoRA settings; `loftq_iter` is the number of iterations.
        name: name of the linear in the model.
        adapter: the unsharded adapter, on any device.
        weight: the linear's full weight, float32.
        quantized: function that subtracts a matrix (None: nothing) from the weight, quantizes the difference, and
            returns it dequantized.

    Raises:
        ConfigError: quantizing loses nothing, because the weight was quantized before.
    """
    iterations: list[dict[str, tuple[Tensor, Tensor]]] = []
    taken, product = None, deepcopy(adapter).to_empty(device=weight.device)
    for _ in range(lora.loftq_iter):
        lost = weight - quantized(taken).to(weight)
        if not lost.any():
            raise ConfigError(
                f"lora.init_lora_weights is loftq, but {name} is stored as lora.quantize_base {lora.quantize_base} "
                "already, so quantizing loses nothing; set model.init_from to the unquantized weights, or "
                "leave lora.init_lora_weights out"
            )
        iterations.append(factors_of(lora, name, adapter, lost, seed=0))
        for part, (a, b) in iterations[-1].items():
            product.lora_A[part].weight.copy_(a)
            product.lora_B[part].weight.copy_(b)
        taken = product.delta()
    return iterations


def _check_ranks(lora: LoraConfig, name: str, adapter: LinearAdapter) -> None:
    for part, rank in adapter.ranks.items():
        rows, columns = adapter.lora_B[part].weight.shape[0], adapter.lora_A[part].weight.shape[1]
        if rank > min(rows, columns):
            raise ConfigError(
                f"lora.init_lora_weights is {lora.init_lora_weights}, but the adapter of {name} has rank {rank}, "
                f"more than a matrix [{rows}, {columns}] can have; lower lora.rank to {min(rows, columns)} or less"
            )


@torch.no_grad()
def initialize_factors(
    model: Model,
    lora: LoraConfig,
    full: Mapping[str, LinearAdapter],
    read: Callable[[str], Tensor],
    seed: int,
    world: Axis,
    device: torch.device | str,
    trained: bool = True,
    quantized: Callable[[str, Tensor, Tensor | None], Tensor] | None = None,
) -> None:
    """Set this rank's shards of A₀ and B₀ to factors of the base. Collective over `world`.

    Args:
        model: the model with the adapters.
        lora: settings of the adapters.
        full: all adapters of the model, unsharded and without values.
        read: returns a weight of the base by its name.
        seed: seed of the run.
        world: the ranks that share the work.
        device: device that decomposes the matrices.
        trained: also set A and B, to the same values.
        quantized: with LoftQ, function of a weight's name, its values and a matrix to subtract (None: nothing). It
            returns the difference, quantized and dequantized again.
    """
    for name, adapter in full.items():
        _check_ranks(lora, name, adapter)
    shards = checkpoint_shards(model)
    with Progress("decompose", len(full), show=world.rank == 0) as progress:
        for number, (name, adapter) in enumerate(full.items()):
            owner, factors, initial = number % world.size, {}, {}

            def compute(
                owner: int = owner,
                name: str = name,
                adapter: LinearAdapter = adapter,
                factors: dict = factors,
                initial: dict = initial,
            ) -> None:
                if world.rank == owner:
                    weight = read(f"{name}.weight").to(device)
                    if quantized is None:
                        factors.update(factors_of(lora, name, adapter, weight, seed))
                        return
                    weight = weight.float()
                    *earlier, last = loftq(
                        lora, name, adapter, weight, lambda taken: quantized(f"{name}.weight", weight, taken)
                    )
                    factors.update(last)
                    initial.update(earlier[-1] if earlier else {})

            collectively(world, compute)
            of_kinds = {("initial", "lora") if trained else ("initial",): factors}
            if quantized is not None:
                of_kinds = {("lora",): factors} | (
                    {("initial",): initial} if lora.keeps_initial_factors else {}
                )
            for kinds, pairs in of_kinds.items():
                _share(
                    pairs, adapter, owner, world, device, shards, [f"{name}{ADAPTER}{kind}" for kind in kinds]
                )
            progress.add(1)


def _share(
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    adapter: LinearAdapter,
    owner: int,
    world: Axis,
    device: torch.device | str,
    shards: Mapping[str, LocalShard],
    prefixes: Sequence[str],
) -> None:
    """Send an adapter's factors from rank `owner` to all ranks, and set this rank's shards of these factors."""
    for part in adapter.ranks:
        pair = pairs.get(part) or tuple(
            torch.empty(each[part].weight.shape, device=device) for each in (adapter.lora_A, adapter.lora_B)
        )
        for half, values in zip("AB", pair):
            values = values.contiguous()
            if world.size > 1:
                dist.broadcast(values, owner, group=world.group)
            for prefix in prefixes:
                shard = shards.get(f"{prefix}_{half}.{part}.weight")
                if shard is not None:
                    shard.values.copy_(shard.slice_of(values))
