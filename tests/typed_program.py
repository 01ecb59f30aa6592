"""What a user writes against `megalith`, for a type checker to read (`make types`); nothing runs it.

Every line with `type: ignore` is a wrong use, and the error in its brackets is the one that the checker has to find:
an `ignore` that nothing needs is an error itself.
"""

from collections.abc import Sequence
from typing import assert_type

import torch
from torch import Tensor, nn

import megalith
from megalith.models.mixers.attention import Attention
from megalith.models.transformer import Transformer
from megalith.parallel.seams import plug
from megalith.training.trainer import TrainingResult


def a_run(input_ids: Tensor) -> Tensor:
    config = megalith.RunConfig.load("run.yaml", ["--train.train_iters", "100"])
    assert_type(config, megalith.RunConfig)
    assert_type(config.optim.lr, float | None)
    result = megalith.train(config.with_settings({"optim.lr": 1e-4}))
    assert_type(result, TrainingResult)
    assert_type(result.loss, float | None)
    assert result.checkpoint is not None  # None where nothing was saved
    model = megalith.load(result.checkpoint, device="cpu")
    assert_type(model, Transformer)
    best = megalith.plan(config, gpus=8, device="h200").best[0]
    assert_type(best.config, megalith.RunConfig)
    assert_type(best.fits, bool)
    assert_type(megalith.grpo(config, reward_funcs=length_reward), TrainingResult)
    return model(input_ids)


def length_reward(completions: Sequence[str]) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def a_loop(config: megalith.RunConfig, batch_sizes: list[int]) -> None:
    mesh, device = megalith.init_mesh(config.parallel)
    assert_type(mesh, megalith.Mesh)
    assert_type(mesh.tp.rank, int)
    assert_type(device, torch.device)
    model = megalith.parallelize(config, mesh, device)
    assert_type(model, megalith.ParallelModel)
    optimizer = megalith.Optimizer(model, config.optim)
    data = megalith.MockDataset(vocab_size=64, seq_length=16, num_samples=100, seed=0)
    loader = megalith.Loader(data, micro_batch_size=2, batch_sizes=batch_sizes, vocab_size=64)
    for batch in loader:
        assert_type(batch, megalith.Batch)
        assert_type(model.backward([batch], Policy()), Tensor)
        assert_type(optimizer.step(lr=1e-3).grad_norm, Tensor)
    megalith.save_checkpoint("checkpoints", optimizer, step=10)
    assert_type(megalith.load_checkpoint("checkpoints", optimizer).consumed_samples, int)


class Policy(megalith.Loss):
    def denominator(self, batch: megalith.Batch) -> Tensor:
        return batch.loss_mask.sum()

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: megalith.Batch) -> Tensor:
        return -(logprobs * batch.loss_mask).sum()


class OwnModel(megalith.Model):
    def __init__(self, mesh: megalith.Mesh):
        super().__init__()
        self.embedding = megalith.VocabParallelEmbedding(64, 32, mesh.tp)
        self.layers = nn.ModuleList([megalith.ColumnParallelLinear(32, 32, mesh.tp)])
        self.output = megalith.ColumnParallelLinear(32, 64, mesh.tp, bias=False)

    def forward(self, batch: megalith.Batch, head: megalith.Head) -> Tensor:
        return head(self.embedding(batch.input_ids), self.output)


def seams(attention: Attention, core: object) -> megalith.ModelSpec:
    plug(attention, "core", core)
    return megalith.ModelSpec(OwnModel, loss=Policy())


def wrong_uses(config: megalith.RunConfig, mesh: megalith.Mesh, device: torch.device) -> None:
    megalith.train("run.yaml")  # type: ignore[arg-type]
    megalith.RunConfig.load("run.yaml", 3)  # type: ignore[arg-type]
    print(config.optim.learning_rate)  # type: ignore[attr-defined]
    megalith.load(None)  # type: ignore[arg-type]
    megalith.load(megalith.train(config).checkpoint)  # type: ignore[arg-type]
    megalith.plan("llama3-8b", gpus=8)  # type: ignore[arg-type]
    megalith.plan(config, gpus="8")  # type: ignore[arg-type]
    megalith.parallelize(OwnModel, mesh, device)  # type: ignore[arg-type]
    megalith.parallelize(config, device, mesh)  # type: ignore[arg-type]
    megalith.Optimizer(OwnModel(mesh), config.optim)  # type: ignore[arg-type]
    megalith.Loader(["a", "b"], micro_batch_size=1, batch_sizes=[1], vocab_size=2)  # type: ignore[arg-type]
    megalith.Loader(megalith.MockDataset(2, 2, 2, 0), batch_sizes=[1], vocab_size=2)  # type: ignore[call-arg]
    megalith.ModelSpec(lambda mesh: nn.Linear(2, 2))  # type: ignore[arg-type, return-value]
    megalith.ColumnParallelLinear(32, 32, 2)  # type: ignore[arg-type]
    plug("core", None, None)  # type: ignore[arg-type]
    megalith.pretrain(config)  # type: ignore[attr-defined]
