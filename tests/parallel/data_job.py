"""A small training run that any number of data-parallel ranks can share, one included, and its comparison."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
import torch.distributed as dist

from megalith.comm.collectives import all_reduce_no_grad
from megalith.config import ModelConfig, OptimConfig, ParallelConfig
from megalith.config.rules.parallel_rules import shard_size
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step, sum_of_squares
from megalith.parallel.data.data_parallel import (
    apply_data,
    finish_weight_gradients,
    prepare_backward,
    wait_for_gradients,
)
from megalith.parallel.data.gradient_norm import GradientSquares, loss_denominators
from megalith.parallel.memory.recompute import apply_recompute
from megalith.parallel.mesh import build_mesh
from megalith.parallel.pipeline.deferred_wgrad import DeferredWgrads, compute_wgrads
from megalith.parallel.shards import LocalParameters
from megalith.parallel.tensor.apply_tensor import apply_tensor
from megalith.parallel.tensor.partial_gradients import partial_gradients, reduce_partial_gradients

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEQUENCE, MICRO_BATCH = 16, 1

GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=67,
    make_vocab_size_divisible_by=10,  # 70 rows: uneven over 4 ranks
    max_position_embeddings=SEQUENCE,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    untie_embeddings_and_output_weights=False,
)
LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=40,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,  # q_layernorm has 6 rows: of 4 ranks the last gets none
    qk_layernorm=True,
    vocab_size=67,
    make_vocab_size_divisible_by=10,
    max_position_embeddings=SEQUENCE,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


@dataclass
class Job:
    """What is trained; the layout comes from the number of processes and `parallel`."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: str = "fp32"
    steps: int = 2
    samples: int = 8  # in a global batch
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-2, clip_grad=1.0))
    compile: bool = False
    puts_off_weights: bool = False  # to the end of the step, as a zero-bubble schedule does with some

    def with_parallel(self, **fields) -> Job:
        return replace(self, parallel=ParallelConfig(**fields))


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, tuple]  # of the first step: the owned shard as (offset, shape, values)


class Trained:
    """The job's model and optimizer on this rank."""

    def __init__(self, job: Job):
        self.job = job
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.mesh = build_mesh(job.parallel, world, "cpu", shard_size(job.parallel, world))
        self.model = Transformer(job.model, compute_dtype=DTYPES[job.precision], seed=5, device="meta")
        apply_tensor(self.model, self.mesh.tp, job.parallel.sequence_parallel)
        apply_recompute(self.model, job.parallel)
        self.deferred_wgrads = DeferredWgrads([self.model]) if job.puts_off_weights else None
        if job.compile:
            for layer in self.model.layers.values():
                layer.compile(fullgraph=True, backend="aot_eager")
        apply_data([self.model], self.mesh, job.parallel)
        self.model.to_empty(device=CPU)
        initialize(self.model, job.model, seed=5)
        self.local = LocalParameters([self.model])
        self.optimizer = build_optimizer(self.local.named, job.optim)
        self.loss_scale = build_loss_scale(job.precision, job.optim, CPU)
        self.squares = GradientSquares(self.local, self.mesh.world, sum_of_squares)
        self.step = 0

    def micro_batches(self) -> list[dict[str, torch.Tensor]]:
        """This rank's share of the step's samples, as the loader deals them. Most masked tokens are on rank 0."""
        generator = torch.Generator().manual_seed(100 + self.step)
        size, job = self.mesh.dp_cp.size, self.job
        tokens = torch.randint(job.model.vocab_size, (job.samples, SEQUENCE + 1), generator=generator)
        mask = (torch.rand(job.samples, SEQUENCE, generator=generator) > 0.3).float()
        mask[:: max(1, job.samples // 2), 2:] = 0.0
        mask[0] = 0.0
        rows = range(self.mesh.dp_cp.rank * MICRO_BATCH, job.samples, MICRO_BATCH * size)
        return [
            {
                "input_ids": tokens[row : row + MICRO_BATCH, :-1],
                "labels": tokens[row : row + MICRO_BATCH, 1:],
                "loss_mask": mask[row : row + MICRO_BATCH],
                "token_inputs": TokenInputs(
                    sample_numbers=torch.arange(row, row + MICRO_BATCH) + self.step * job.samples
                ),
            }
            for row in rows
        ]

    def backward(self) -> torch.Tensor:
        """All micro-batches of a step; returns its mean loss and leaves the gradients attached."""
        batches = self.micro_batches()
        local_values = sum(batch["loss_mask"].sum(dtype=torch.float64) for batch in batches)
        tokens = loss_denominators(local_values, self.mesh.dp_cp, CPU)
        loss, later = torch.zeros(()), []
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            prepare_backward([self.model], self.job.parallel, is_last and not self.deferred_wgrads)
            loss_sum = self.model(**batch)
            (loss_sum * (self.loss_scale.scale / tokens)).backward()
            loss += loss_sum.detach()
            later.append(self.deferred_wgrads.take() if self.deferred_wgrads else [])
        for number, work in enumerate(later if self.deferred_wgrads else []):
            compute_wgrads(work)
            finish_weight_gradients([self.model], self.job.parallel, is_last=number == len(later) - 1)
        wait_for_gradients([self.model], self.job.parallel)
        names = partial_gradients(self.model, self.mesh.tp.size, self.job.parallel.sequence_parallel)
        reduce_partial_gradients(self.model, self.mesh.tp, names)
        self.local.attach_gradients()
        return all_reduce_no_grad(loss, self.mesh.dp_cp) / tokens

    def train_step(self) -> tuple[float, float]:
        """Loss and gradient norm."""
        loss = self.backward()
        result = optimizer_step(self.optimizer, self.loss_scale, self.job.optim.clip_grad, self.squares)
        self.local.clear_gradients()
        self.step += 1
        return loss.item(), result.grad_norm.item()

    def owned(self, kind: str) -> dict[str, tuple]:
        """The shards that this rank owns of the parameters ("data") or of their gradients ("grad")."""
        shards = self.local.shards
        return {
            name: (shards[name].offset, shards[name].shape, getattr(plain, kind).clone())
            for name, plain in self.local.named
            if shards[name].owned
        }


def train(job: Job) -> Outcome:
    """Runs the job on this rank."""
    run = Trained(job)
    run.backward()
    gradients = run.owned("grad")
    run.local.clear_gradients()
    losses, norms = zip(*(run.train_step() for _ in range(job.steps)))
    return Outcome(list(losses), list(norms), gradients)


COLLECTIVES = {  # torch renames them
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}


def collectives(job: Job) -> list[tuple[str, torch.dtype]]:
    """FSDP2's collectives on parameters and gradients of a step, with what they send, in their order."""
    run, seen = Trained(job), []
    run.backward()
    run.local.clear_gradients()

    def told(name: str, call: Callable) -> Callable:
        def spy(*args, **kwargs):
            sent = args[1] if len(args) > 1 else kwargs.get("input_tensor", kwargs.get("input"))
            seen.append((COLLECTIVES[name], sent.dtype))
            return call(*args, **kwargs)

        return spy

    with ExitStack() as patches:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                patches.enter_context(mock.patch.object(dist, name, told(name, getattr(dist, name))))
        run.backward()
    return seen


def assemble(shards_of_ranks: list[dict[str, tuple]]) -> dict[str, torch.Tensor]:
    """Global tensors from every rank's owned shards. Every element has exactly one owner."""
    whole, owners = {}, {}
    for shards in shards_of_ranks:
        for name, (offset, shape, values) in shards.items():
            place = tuple(slice(at, at + size) for at, size in zip(offset, values.shape))
            whole.setdefault(name, torch.zeros(shape))[place] = values
            owners.setdefault(name, torch.zeros(shape))[place] += 1
    assert all((count == 1).all() for count in owners.values())
    return whole


def assert_equal(ranks: list[Outcome], one: Outcome, bound: float = 1e-5) -> None:
    """The numerics contract: first gradients by name, norms and losses of all steps."""
    expected, results = assemble([one.gradients]), assemble([rank.gradients for rank in ranks])
    assert results.keys() == expected.keys()
    floor = 1e-6 * torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        error = (results[name] - value).norm() / max(value.norm(), floor)
        assert error < bound, f"gradient of {name}: {error}"
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank.norms), torch.tensor(one.norms), rtol=bound, atol=0)
        torch.testing.assert_close(torch.tensor(rank.losses), torch.tensor(one.losses), rtol=bound, atol=0)
