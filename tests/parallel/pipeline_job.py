"""One step, one evaluation and one generation of a model in stages, or whole, and what came of them by global name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.comm.collectives import all_reduce_no_grad
from megalith.config import ModelConfig, ParallelConfig
from megalith.data.batch import Batch
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer
from megalith.parallel.data.data_parallel import (
    apply_data,
    finish_weight_gradients,
    prepare_backward,
    wait_for_gradients,
)
from megalith.parallel.mesh import build_mesh
from megalith.parallel.pipeline.executor import Pipeline, Streams, residual_shape
from megalith.parallel.pipeline.stages import assign_layers, schedule_kind, split_stages
from megalith.parallel.pipeline.tied_parameters import reduce_shared_gradients
from megalith.parallel.tensor.apply_tensor import apply_tensor
from megalith.parallel.tensor.partial_gradients import partial_gradients, reduce_partial_gradients

BATCH, SEQ = 2, 16

GPT2 = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=151,
    max_position_embeddings=SEQ,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
LLAMA = ModelConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=40,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=151,
    max_position_embeddings=SEQ,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.1,
    attention_dropout=0.0,
)


@dataclass
class Outcome:
    loss: float
    gradients: dict[str, Tensor]  # whole, of the parameters on this rank
    evaluation: float
    logits: Tensor  # float32 [BATCH, 8, vocab]
    timeline: object  # None without a pipeline


def run(model: ModelConfig, parallel: ParallelConfig, micro_batches: int, dtype=torch.float32) -> Outcome:
    """A step over `micro_batches` micro-batches in all; every rank of the process group calls it."""
    world = torch.distributed.get_world_size()
    mesh = build_mesh(parallel, world, "cpu")
    whole = Transformer(model, compute_dtype=dtype, seed=3, device="meta")
    chunks = split_stages(whole, assign_layers(model, parallel), mesh.pp.rank)
    for chunk in chunks:
        apply_tensor(chunk, mesh.tp, parallel.sequence_parallel)
    apply_data(chunks, mesh, parallel)
    fill(chunks, model)
    pipeline = Pipeline(
        chunks,
        mesh.pp,
        schedule_kind(parallel),
        forward,
        hidden_shape=residual_shape(model.hidden_size, mesh.tp.size, parallel.sequence_parallel),
        group=parallel.microbatch_group_size_per_virtual_pipeline_stage,
        before_backward=lambda chunk, last: prepare_backward([chunk], parallel, last),
        after_weights=lambda chunk, last: finish_weight_gradients([chunk], parallel, last),
    )
    batches = make_batches(micro_batches)
    factor = torch.tensor(1.0 / valid_tokens(batches))
    local = batches[mesh.dp.rank :: mesh.dp.size]
    pipeline.record = True
    loss = all_reduce_no_grad(pipeline.step(local, factor), mesh.pp)
    wait_for_gradients(chunks, parallel)
    reduce_shared_gradients(chunks, mesh)
    for chunk in chunks:
        names = partial_gradients(chunk, mesh.tp.size, parallel.sequence_parallel)
        reduce_partial_gradients(chunk, mesh.tp, names)
    gradients = {name: whole_tensor(p.grad) for chunk in chunks for name, p in chunk.named_parameters()}
    for chunk in chunks:
        chunk.eval()
    evaluation = all_reduce_no_grad(pipeline.evaluate(local), mesh.pp)
    return Outcome(
        loss=float(all_reduce_no_grad(loss, mesh.dp) * factor),
        gradients=gradients,
        evaluation=float(all_reduce_no_grad(evaluation, mesh.dp) * factor),
        logits=pipeline.logits(batches[0].input_ids).float(),
        timeline=pipeline.gather_timeline(),
    )


def run_alone(model: ModelConfig, micro_batches: int, dtype=torch.float32) -> Outcome:
    """The same by one process with one whole model."""
    whole = Transformer(model, compute_dtype=dtype, seed=3, device="meta")
    fill([whole], model)
    batches = make_batches(micro_batches)
    factor = torch.tensor(1.0 / valid_tokens(batches))
    loss = 0.0
    for batch in batches:
        loss_sum = forward(whole, batch, None)
        (loss_sum * factor).backward()
        loss += float(loss_sum.detach() * factor)
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    whole.eval()
    with torch.no_grad():
        evaluation = sum(float(forward(whole, batch, None) * factor) for batch in batches)
        logits = whole(batches[0].input_ids).float()
    return Outcome(loss, gradients, evaluation, logits, None)


def assert_equal(result: Outcome, expected: Outcome, bound: float = 1e-5) -> None:
    """Every figure of `result` within the relative `bound`; gradients against their own norm, with a floor."""
    assert result.loss == _near(expected.loss, bound)
    assert result.evaluation == _near(expected.evaluation, bound)
    assert (result.logits - expected.logits).norm() <= bound * expected.logits.norm()
    floor = 1e-6 * sum(g.double().square().sum() for g in expected.gradients.values()).sqrt()
    for name, gradient in result.gradients.items():
        reference = expected.gradients[name]
        error = (gradient - reference).norm() / max(reference.norm(), floor)
        assert error <= bound, f"{name}: relative error {error:.2e}"


def _near(value: float, bound: float):
    import pytest

    return pytest.approx(value, rel=bound)


def forward(chunk: Transformer, batch: Batch, streams: Streams | None) -> Streams | Tensor:
    return chunk(
        batch.input_ids,
        streams=streams,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        token_inputs=TokenInputs(
            position_ids=batch.position_ids,
            document_ends=batch.document_ends,
            sample_numbers=batch.sample_numbers,
        ),
    )


def fill(chunks: list[Transformer], model: ModelConfig) -> None:
    for chunk in chunks:
        chunk.to_empty(device="cpu")
        initialize(chunk, model, seed=1)
        chunk.train()


def make_batches(count: int) -> list[Batch]:
    """Micro-batches of random tokens in two documents a sequence, the masked ones unevenly spread."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(count):
        tokens = torch.randint(151, (BATCH, SEQ + 1), generator=generator)
        batches.append(
            Batch(
                input_ids=tokens[:, :-1].contiguous(),
                labels=tokens[:, 1:].contiguous(),
                loss_mask=(torch.rand(BATCH, SEQ, generator=generator) < (number + 1) / count).float(),
                position_ids=torch.arange(SEQ).expand(BATCH, SEQ).contiguous(),
                document_ends=torch.tensor([[10, SEQ]] * BATCH, dtype=torch.int32),
                sample_numbers=torch.arange(BATCH) + BATCH * number,
            )
        )
    return batches


def valid_tokens(batches: list[Batch]) -> float:
    return sum(float(batch.loss_mask.sum()) for batch in batches)


def whole_tensor(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def step_of(micro_batches: int, **parallel) -> None:
    """A step of a pipeline over all ranks, for its errors."""
    run(GPT2, ParallelConfig(**parallel), micro_batches)
