"""One forward and backward pass of a model cut over the tensor axis, or whole, and what came of it by global name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.comm.collectives import all_reduce_no_grad
from megalith.config import ModelConfig, ParallelConfig
from megalith.generation.engine import Engine
from megalith.generation.requests import Sampling
from megalith.local_shards import local, local_shape_and_offset
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer
from megalith.parallel.data.data_parallel import apply_data, prepare_backward, wait_for_gradients
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.parallel.tensor.apply_tensor import apply_tensor
from megalith.parallel.tensor.partial_gradients import partial_gradients, reduce_partial_gradients

BATCH, SEQ = 2, 16
ALONE = ParallelConfig()

GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=151,
    max_position_embeddings=SEQ,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=40,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=6,
    qk_layernorm=True,
    vocab_size=151,
    max_position_embeddings=SEQ,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


@dataclass
class Outcome:
    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor]  # whole, by global name


def tensor_parallel_model(model: ModelConfig, parallel: ParallelConfig) -> tuple[Transformer, Mesh]:
    """The model cut over all processes, on the CPU; every value is random, none is 0 or 1."""
    mesh = build_mesh(parallel, dist.get_world_size() if dist.is_initialized() else 1, "cpu")
    transformer = Transformer(model, seed=3, device="meta")
    apply_tensor(transformer, mesh.tp, parallel.sequence_parallel, parallel.save_gathered_inputs)
    apply_data([transformer], mesh, parallel)
    transformer.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            value = random_like(name, parameter.shape)
            for dim, (length, first) in enumerate(zip(*local_shape_and_offset(parameter))):
                value = value.narrow(dim, first, length)
            local(parameter).copy_(value)
    return transformer, mesh


def layout(size: int, sequence_parallel: bool, strategy: str = "no_shard") -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel,
        data_parallel_sharding_strategy=strategy,
    )


def random_like(name: str, shape: torch.Size) -> Tensor:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2
    return value + 1.0 if "layernorm.weight" in name else value


def batch(vocab_size: int) -> dict[str, Tensor]:
    """Two sequences, the second with most of its tokens masked."""
    tokens = torch.randint(vocab_size, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(11))
    mask = torch.ones(BATCH, SEQ)
    mask[1, 3:] = 0.0
    numbers = torch.tensor([40, 2**33])
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": mask,
        "sample_numbers": numbers,
    }


def outcome(model: ModelConfig, parallel: ParallelConfig = ALONE, compiler: str | None = None) -> Outcome:
    """Of one pass in training mode, and logits in evaluation of a number of tokens that no axis divides.

    Data-parallel ranks take a sequence each.
    """
    transformer, mesh = tensor_parallel_model(model, parallel)
    if compiler:
        torch._dynamo.reset()
        for layer in transformer.layers.values():
            layer.compile(fullgraph=True, backend=compiler)
    local_values = {
        name: value.chunk(mesh.dp.size)[mesh.dp.rank] for name, value in batch(model.vocab_size).items()
    }
    inputs = TokenInputs(sample_numbers=local_values.pop("sample_numbers"))
    loss = transformer(**local_values, token_inputs=inputs)
    prepare_backward([transformer], parallel, is_last=True)
    (loss / 19).backward()
    wait_for_gradients([transformer], parallel)
    gradients = whole_gradients(transformer, mesh, parallel)
    transformer.eval()
    with torch.no_grad():
        logits = transformer(batch(model.vocab_size)["input_ids"][:1, :-1])
    return Outcome(all_reduce_no_grad(loss.detach(), mesh.dp), logits, gradients)


def outcome_of_logits(model: ModelConfig, parallel: ParallelConfig = ALONE) -> Outcome:
    """As `outcome`, the loss a function of the logits and in evaluation."""
    transformer, mesh = tensor_parallel_model(model, parallel)
    transformer.eval()
    logits = transformer(batch(model.vocab_size)["input_ids"])
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    loss = (logits.log_softmax(-1) * weights).sum()
    loss.backward()
    return Outcome(loss.detach(), logits.detach(), whole_gradients(transformer, mesh, parallel))


def generated(model: ModelConfig, parallel: ParallelConfig = ALONE) -> list[list[int]]:
    """By an engine over the tensor axis."""
    transformer, mesh = tensor_parallel_model(model, parallel)
    engine = Engine(model, "cpu", torch.float32, max_rows=2, max_tokens=12, tp=mesh.tp)
    engine.load(
        (name, random_like(name, parameter.shape)) for name, parameter in transformer.named_parameters()
    )
    done = engine.generate(
        [[5, 9, 2], [7, 1, 4, 4]], Sampling(max_new_tokens=8, temperature=0.7, seed=1, top_p=0.9)
    )
    return [each.ids for each in done]


def whole_gradients(transformer: Transformer, mesh: Mesh, parallel: ParallelConfig) -> dict[str, Tensor]:
    names = partial_gradients(transformer, mesh.tp.size, parallel.sequence_parallel)
    reduce_partial_gradients(transformer, mesh.tp, names)
    return {name: full(parameter.grad) for name, parameter in transformer.named_parameters()}


def full(gradient: Tensor) -> Tensor:
    """The global tensor; the copies of one that all ranks hold whole have to agree."""
    if not isinstance(gradient, DTensor):
        return gradient
    if all(place.is_replicate() for place in gradient.placements):
        mine = gradient.to_local()
        copies = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, mine.contiguous())
        assert all(torch.equal(copy, mine) for copy in copies)
    return gradient.full_tensor()


def assert_equal(ours: Outcome, whole: Outcome) -> None:
    """To the bounds of the numerics contract."""
    torch.testing.assert_close(ours.loss, whole.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.logits, whole.logits, rtol=1e-5, atol=1e-5)
    assert ours.gradients.keys() == whole.gradients.keys()
    everything = torch.stack([gradient.norm() for gradient in whole.gradients.values()]).norm()
    for name, gradient in whole.gradients.items():
        error = (ours.gradients[name] - gradient).norm() / max(gradient.norm(), 1e-6 * everything)
        assert error <= 1e-5, f"{name}: gradient off by {error:.1e}"
