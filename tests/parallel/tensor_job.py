"""One forward and backward pass of a model cut over the tensor axis, or whole, and what came of it by global name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.comm import local, local_place
from megalith.config import ModelConfig, ParallelConfig
from megalith.models.transformer import Transformer
from megalith.parallel.mesh import build_mesh
from megalith.parallel.tensor import apply_tensor, reduce_partial_gradients

BATCH, SEQ = 2, 16

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


def tensor_parallel_model(
    model: ModelConfig, size: int, sequence_parallel: bool
) -> tuple[Transformer, object]:
    """The model cut over all processes, on the CPU, and the tensor axis; every value is random, none is 0 or 1."""
    parallel = ParallelConfig(tensor_model_parallel_size=size, sequence_parallel=sequence_parallel)
    axis = build_mesh(parallel, size, "cpu").tp
    transformer = Transformer(model, seed=3, device="meta")
    apply_tensor(transformer, axis, sequence_parallel)
    transformer.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            value = random_like(name, parameter.shape)
            for dim, (length, first) in enumerate(zip(*local_place(parameter))):
                value = value.narrow(dim, first, length)
            local(parameter).copy_(value)
    return transformer, axis


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


def outcome(
    model: ModelConfig, size: int = 1, sequence_parallel: bool = False, compiler: str | None = None
) -> Outcome:
    """Of one pass in training mode, and logits in evaluation of a number of tokens that `size` does not divide."""
    transformer, axis = tensor_parallel_model(model, size, sequence_parallel)
    if compiler:
        torch._dynamo.reset()
        for layer in transformer.layers.values():
            layer.compile(fullgraph=True, backend=compiler)
    loss = transformer(**batch(model.vocab_size))
    (loss / 19).backward()
    reduce_partial_gradients(transformer, axis)
    gradients = {name: full(parameter.grad) for name, parameter in transformer.named_parameters()}
    transformer.eval()
    with torch.no_grad():
        logits = transformer(batch(model.vocab_size)["input_ids"][:1, :-1])
    return Outcome(loss.detach(), logits, gradients)


def full(gradient: Tensor) -> Tensor:
    """The global tensor; the copies of a replicated one have to agree on every rank."""
    if not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements[0].is_replicate():
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
