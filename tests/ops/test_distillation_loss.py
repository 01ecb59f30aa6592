"""The loss of distillation against plain PyTorch over whole logits: values and gradients, whatever the chunks."""

import pytest
import torch
import torch.nn.functional as F

from megalith.comm.collectives import Axis
from megalith.config import ParallelConfig, RunConfig
from megalith.errors import ConfigError
from megalith.ops import cross_entropy
from megalith.ops.distillation_loss import Taught, linear_distillation
from megalith.parallel.mesh import build_mesh

VOCAB, PADDED, HIDDEN, TEACHER, SHAPE = 36, 48, 12, 20, (3, 11)


def inputs():
    generator = torch.Generator().manual_seed(7)
    hidden, weight = (
        torch.randn(*shape, generator=generator, requires_grad=True)
        for shape in ((*SHAPE, HIDDEN), (PADDED, HIDDEN))
    )
    told, teacher = (
        torch.randn(*shape, generator=generator) for shape in ((*SHAPE, TEACHER), (PADDED, TEACHER))
    )
    labels = torch.randint(VOCAB, SHAPE, generator=generator)
    weights = torch.rand(SHAPE, generator=generator) * (torch.rand(SHAPE, generator=generator) > 0.3)
    return hidden, weight, labels, weights, told, teacher


def plain(hidden, weight, labels, weights, taught, softcap, bias):
    cap = lambda x, c: x if c is None else c * torch.tanh(x / c)  # noqa: E731
    z = cap(hidden @ weight[:VOCAB].T + bias[:VOCAB], softcap)
    t = cap(taught.hidden @ taught.weight[:VOCAB].T + taught.bias[:VOCAB], taught.softcap)
    q, p = (F.log_softmax(x / taught.temperature, -1) for x in (z, t))
    into, of = (q, p) if taught.divergence == "forward_kl" else (p, q)
    divergences = F.kl_div(into, of, log_target=True, reduction="none").sum(-1)
    entropies = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view(SHAPE)
    each = (1 - taught.share) * entropies + taught.share * taught.temperature**2 * divergences
    return (weights * each).sum(), -entropies, divergences


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_loss_and_gradients_are_those_over_whole_logits(divergence, temperature, softcap, monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNK_ELEMENTS, "cpu", 2 * 7 * PADDED)  # seven tokens at a time
    hidden, weight, labels, weights, told, teacher = inputs()
    bias, teachers = (torch.linspace(0, end, PADDED, requires_grad=end < 2) for end in (1, 2))
    taught = Taught(told, teacher, teachers, softcap and 5.0, 0.7, temperature, divergence)
    given = (hidden, weight, labels, weights, taught)
    found = linear_distillation(*given, VOCAB, softcap, torch.tensor(4.0), bias=bias)
    grads = torch.autograd.grad(3 * found[0], [hidden, weight, bias])
    expected = plain(*given, softcap, bias)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(grads, torch.autograd.grad(12 * expected[0], [hidden, weight, bias])):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_of_itself_a_model_learns_nothing():
    hidden, weight, labels, weights, *_ = inputs()
    taught = Taught(hidden.detach(), weight.detach(), None, None, 1.0, 2.0, "forward_kl")
    loss, _, divergences = linear_distillation(hidden, weight, labels, weights, taught, VOCAB)
    loss.backward()
    assert (
        divergences.abs().max() < 1e-6 and hidden.grad.abs().max() < 1e-6 and weight.grad.abs().max() < 1e-6
    )


@pytest.mark.parametrize("temperature", [1e-3, 1e4])
def test_a_temperature_beyond_fp32_is_refused(temperature):
    with pytest.raises(ConfigError, match=r"distill\.temperature"):
        RunConfig.from_tree({"distill": {"teacher": "x", "temperature": temperature}})


def of_a_shard(size: int, divergence: str) -> list[torch.Tensor]:
    """On a rank of tensor parallelism: the results, and the gradients of its part. The last has padding alone."""
    axis = build_mesh(ParallelConfig(tensor_model_parallel_size=size), size, "cpu").tp if size > 1 else Axis()
    hidden, weight, labels, weights, told, teacher = inputs()
    rows = PADDED // size
    own = slice(axis.rank * rows, axis.rank * rows + rows)
    taught = Taught(told, teacher[own], None, None, 0.4, 1.5, divergence)
    part = weight.detach()[own].requires_grad_()
    shard = dict(axis=axis, first=own.start, rows=rows)
    found = linear_distillation(hidden, part, labels, weights, taught, VOCAB, **shard)
    found[0].backward()
    return [*(x.detach() for x in found), hidden.grad, part.grad]


def test_over_a_vocabulary_in_shards_it_is_the_same(pool):
    for divergence in ("forward_kl", "reverse_kl"):
        one, ranks = of_a_shard(1, divergence), pool.run(of_a_shard, 4, divergence)
        for *found, _, _ in ranks:
            for a, b in zip(found, one):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sum(rank[3] for rank in ranks), one[3], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([rank[4] for rank in ranks]), one[4], rtol=1e-4, atol=1e-5)
