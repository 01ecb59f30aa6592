"""A short run with an optimizer, in any layout: its losses, saved after the first step and loaded from another's."""

from unittest import mock

import torch
import torch.distributed as dist

import megalith
from megalith.comm.collectives import gather_json
from megalith.config import RunConfig
from megalith.optim import muon
from megalith.optim.newton_schulz import orthogonalize_all
from megalith.parallel.mesh import build_mesh
from megalith.parity.check import LAYOUTS

CPU = torch.device("cpu")
STEPS, BATCH = 3, 8  # saved after the first, so that the last loss is of a state that was loaded
GATED = dict(num_layers=2, hidden_size=32, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=2, vocab_size=61,
             make_vocab_size_divisible_by=8, swiglu=True, normalization="RMSNorm", position_embedding_type="rope",
             hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.1)  # fmt: skip
EXPERTS = GATED | dict(num_experts=4, moe_router_topk=2, moe_shared_expert_intermediate_size=16)
LATENT = GATED | dict(num_query_groups=0, multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=16,
                      qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=8)  # fmt: skip


def configuration(layout: str, model: dict, **optim) -> RunConfig:
    return RunConfig.from_tree(
        {
            "model": model,
            "parallel": dict(LAYOUTS[layout].parallel) if layout else {},
            "data": {"seq_length": 16, "mock": True},
            "optim": {"lr": 3e-3, "weight_decay": 0.1, "clip_grad": 0.5, **optim},
            "train": {"train_iters": STEPS, "micro_batch_size": 2, "global_batch_size": BATCH},
            "runtime": {"device": "cpu", "compile": False},
        }
    )


def started(config: RunConfig) -> megalith.Optimizer:
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = build_mesh(config.parallel, size, "cpu", has_experts=config.model.num_experts is not None)
    return megalith.Optimizer(megalith.parallelize(config, mesh, CPU), config.optim)


def batches(optimizer: megalith.Optimizer, first: int, last: int, seed: int) -> megalith.Loader:
    """Of the steps from `first` to `last`, this rank's samples."""
    dp = optimizer.model.mesh.dp
    return megalith.Loader(
        megalith.MockDataset(61, 16, 200, seed=seed), micro_batch_size=2, batch_sizes=[BATCH] * (last - first),
        vocab_size=61, data_parallel_rank=dp.rank, data_parallel_size=dp.size, consumed_samples=BATCH * first,
    )  # fmt: skip


def held_out_loss(optimizer: megalith.Optimizer) -> float:
    """Of the averaged weights, on samples that are not trained on."""
    held_out = batches(optimizer, 0, 1, seed=1)
    with optimizer.averaged_weights():
        count = BATCH // 2 // optimizer.model.mesh.dp.size
        loss, tokens = optimizer.model.evaluate([next(held_out) for _ in range(count)])
    return (loss / tokens).item()


def losses(config: RunConfig, save: str | None = None, load: str | None = None) -> list[float]:
    """Of all steps, or of those after the first after loading what the first saved; the last gradient norm; and
    the held-out loss."""
    optimizer = started(config)
    first = megalith.load_checkpoint(load, optimizer).step if load else 0
    loader = batches(optimizer, first, STEPS, seed=0)
    found = []
    for step in range(first, STEPS):
        count = BATCH // 2 // optimizer.model.mesh.dp.size
        found.append(optimizer.model.backward([next(loader) for _ in range(count)]).item())
        norm = optimizer.step().grad_norm.item()
        if save and step == 0:
            megalith.save_checkpoint(save, optimizer, 1)
    return [*found, norm, held_out_loss(optimizer)]


def orthogonalized_shapes(config: RunConfig) -> list[list[tuple[int, ...]]]:
    """Shapes of the matrices that each rank orthogonalizes in a step."""
    optimizer, shapes = started(config), []
    count = BATCH // 2 // optimizer.model.mesh.dp.size
    loader = batches(optimizer, 0, 1, seed=0)
    optimizer.model.backward([next(loader) for _ in range(count)])

    def record(matrices, *args):
        shapes.extend(tuple(matrix.shape) for matrix in matrices)
        return orthogonalize_all(matrices, *args)

    with mock.patch.object(muon, "orthogonalize_all", record):
        optimizer.step()
    return gather_json(shapes, optimizer.model.mesh.world)


def outcomes(
    configs: list[RunConfig], saves: list[str], loads: list[str]
) -> list[tuple[list[float], list[float]]]:
    """For each configuration all steps, saved on the way, and the last ones after loading one process's."""
    return [
        (losses(config, save=save), losses(config, load=load))
        for config, save, load in zip(configs, saves, loads, strict=True)
    ]
