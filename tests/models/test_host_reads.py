"""Nothing that a step computes is read by the host: a pass on the meta device, which has no values to read."""

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megalith.config import OptimConfig, ParallelConfig, RunConfig
from megalith.models.encoders.t5 import T5
from megalith.models.inputs import LossInputs, TokenInputs
from megalith.models.transformer import Transformer
from megalith.ops import grouped_gemm, loss_chunks
from megalith.optim import build_optimizer
from megalith.optim.loss_scale import build_loss_scale
from megalith.optim.step import optimizer_step
from megalith.parallel.expert.expert_parallel import apply_expert
from megalith.parallel.mesh import build_mesh
from megalith.parallel.shards import to_local_parameters

BATCH, SEQ = 2, 16
TINY = dict(vocab_size=64, max_position_embeddings=SEQ)
SHAPES = {
    "gpt": dict(TINY, preset="tiny-gpt"),
    "llama": dict(TINY, preset="tiny-llama"),
    "mixtral": dict(TINY, preset="tiny-mixtral"),
    "mixtral, filled up to a capacity": dict(
        TINY, preset="tiny-mixtral", moe_expert_capacity_factor=0.75, moe_pad_expert_input_to_capacity=True
    ),
    "deepseek": dict(TINY, preset="tiny-deepseek"),
    "t5": dict(
        TINY, preset="t5-base", num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4
    ),
}


def step(shape: dict, kernel: bool = True, spread: Callable | None = None) -> None:
    """Loss, backward pass and update in bf16 with documents, as on a GPU: experts by one kernel."""
    config = RunConfig.load(None, [f"model.{name}={value}" for name, value in shape.items()]).model
    with torch.device("meta"):
        model = (T5 if config.model_type == "t5" else Transformer)(
            config, compute_dtype=torch.bfloat16, device="meta"
        )
        if spread is not None:
            spread(model)
            to_local_parameters(model)
        ids, numbers = torch.zeros(BATCH, SEQ, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int64)
        ends = torch.zeros(BATCH, 4, dtype=torch.int32)
        inputs = TokenInputs(sample_numbers=numbers, document_ends=ends)
        losses = dict(loss_mask=torch.ones(BATCH, SEQ), loss_inputs=LossInputs(balance_scale=torch.ones(())))
        with mock.patch.object(grouped_gemm, "has_kernel", lambda rows, width: kernel):
            model(ids, token_inputs=inputs, labels=ids, **losses).backward()
    optim = OptimConfig(lr=0.1)
    optimizer_step(
        build_optimizer(model.named_parameters(), optim), build_loss_scale("fp16", optim, "meta"), 1.0
    )


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    monkeypatch.setitem(loss_chunks.CHUNK_ELEMENTS, "meta", loss_chunks.CHUNK_ELEMENTS["cuda"])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_reads_nothing_of_what_it_computes(shape):
    step(SHAPES[shape])


@pytest.fixture
def two_ranks():
    """The mesh of two ranks whose collectives give shapes alone, with experts on both."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield build_mesh(ParallelConfig(expert_model_parallel_size=2), 2, "cpu", has_experts=True)
    dist.destroy_process_group()


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    "more", [{}, {"moe_expert_capacity_factor": 0.75}, {"add_mlp_bias": True}, {"moe_permute_fusion": True}]
)
def test_static_dispatch_reads_no_sizes(two_ranks, dispatcher, more):
    args = dict(mesh=two_ranks, tensor=None, dispatcher=dispatcher, bounded=True)
    step(SHAPES["mixtral"] | more, spread=partial(apply_expert, **args))


def test_exact_sizes_are_read(two_ranks):
    with pytest.raises(NotImplementedError, match="no data"):
        args = dict(mesh=two_ranks, tensor=None, dispatcher="alltoall")
        step(SHAPES["mixtral"], spread=partial(apply_expert, **args))


def test_experts_one_by_one_are_read():
    with pytest.raises(NotImplementedError, match="no data"):
        step(SHAPES["mixtral"], kernel=False)
