"""A custom transformer with TP2 × DP2: trained, saved, loaded, and compared with one process.

torchrun --nproc-per-node 4 examples/own_model.py [folder]
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megalith
from megalith import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

VOCAB, WIDTH, HEADS, SEQ = 64, 32, 4, 16
PARALLEL = megalith.ParallelConfig(
    tensor_model_parallel_size=2, data_parallel_sharding_strategy="optim_grads_params"
)


class Block(nn.Module):
    """Parallel attention and MLP, as in PaLM. Tensors between the linears hold this rank's heads and units."""

    def __init__(self, tp):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (
            ColumnParallelLinear(WIDTH, WIDTH, tp, bias=False) for _ in range(3)
        )
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, tp)
        self.out, self.down = RowParallelLinear(WIDTH, WIDTH, tp), RowParallelLinear(4 * WIDTH, WIDTH, tp)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, WIDTH]
        y = self.norm(x)
        heads = (
            f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(attended) + self.down(F.silu(self.up(y)))


class OwnModel(megalith.Model):
    """Two blocks between an embedding and an output matrix of its own."""

    def __init__(self, mesh: megalith.Mesh):
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCAB, WIDTH, mesh.tp)
        self.positions = nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Block(mesh.tp) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = ColumnParallelLinear(WIDTH, VOCAB, mesh.tp, bias=False)

    def forward(self, batch: megalith.Batch, head: megalith.Head) -> Tensor:
        x = self.embedding(batch.input_ids) + self.positions(batch.position_ids)
        for block in self.layers:
            x = block(x)
        return head(self.norm(x), self.output)


def train(optimizer: megalith.Optimizer, mesh: megalith.Mesh, steps: range) -> list[float]:
    data, losses = megalith.MockDataset(VOCAB, SEQ, num_samples=100, seed=0), []
    loader = megalith.Loader(data, micro_batch_size=2, batch_sizes=[8] * len(steps), vocab_size=VOCAB,
                             data_parallel_rank=mesh.dp.rank, data_parallel_size=mesh.dp.size,
                             consumed_samples=8 * steps.start)  # fmt: skip
    for _ in steps:
        losses.append(optimizer.model.backward([next(loader) for _ in range(4 // mesh.dp.size)]).item())
        optimizer.step()
    return losses


def start(mesh: megalith.Mesh, device: torch.device, parallel: megalith.ParallelConfig) -> megalith.Optimizer:
    model = megalith.parallelize(megalith.ModelSpec(OwnModel), mesh, device, parallel)
    return megalith.Optimizer(model, megalith.OptimConfig(lr=1e-2))


def main(folder: str) -> tuple[list[float], list[float], list[float]]:
    mesh, device = megalith.init_mesh(PARALLEL, "cpu")
    spread, alone = (
        start(mesh, device, PARALLEL),
        start(megalith.Mesh.alone(), device, megalith.ParallelConfig()),
    )
    losses, expected = train(spread, mesh, range(10)), train(alone, megalith.Mesh.alone(), range(10))
    print("tp 2 × dp 2:", losses[-1], "one process:", expected[-1])
    megalith.save_checkpoint(folder, spread, step=10)
    again = start(mesh, device, PARALLEL)
    record = megalith.load_checkpoint(folder, again)
    resumed = train(again, mesh, range(record.step, 12))
    print("after loading:", resumed, "one process:", train(alone, megalith.Mesh.alone(), range(10, 12)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "own_model_checkpoints")
    torch.distributed.destroy_process_group()
