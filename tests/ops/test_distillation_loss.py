"""The loss of distillation against plain PyTorch over whole logits: values and gradients, whatever the chunks."""

import pytest
import torch
import torch.nn.functional as F

from megalith.comm.collectives import Axis
from megalith.config import ParallelConfig, RunConfig
from megalith.errors import ConfigError
from megalith.ops import loss_chunks
from megalith.ops.distillation_loss import (
    TeacherOutput,
    TeacherTargets,
    TopLogProbs,
    linear_distillation,
    linear_top_logprobs,
)
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


KINDS = ("forward_kl", "reverse_kl", "generalized_jsd", "skewed_forward_kl", "skewed_reverse_kl")
MIXTURE = 0.3


def divergence_of(log_p, log_q, kind):
    """GKD's and DistiLLM's formulas over the last dimension; TRL's generalized_jsd_loss with beta 0.3."""

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    def mixed(a, b):
        return (MIXTURE * a.exp() + (1 - MIXTURE) * b.exp()).log()

    return {
        "forward_kl": lambda: kl(log_p, log_q),
        "reverse_kl": lambda: kl(log_q, log_p),
        "generalized_jsd": lambda: (
            MIXTURE * kl(log_p, mixed(log_p, log_q)) + (1 - MIXTURE) * kl(log_q, mixed(log_p, log_q))
        ),
        "skewed_forward_kl": lambda: kl(log_p, mixed(log_p, log_q)),
        "skewed_reverse_kl": lambda: kl(log_q, mixed(log_q, log_p)),
    }[kind]()


def plain(hidden, weight, labels, weights, taught, softcap, bias):
    cap = lambda x, c: x if c is None else c * torch.tanh(x / c)  # noqa: E731
    z = cap(hidden @ weight[:VOCAB].T + bias[:VOCAB], softcap)
    by = taught.teacher
    t = cap(by.hidden @ by.weight[:VOCAB].T + by.bias[:VOCAB], by.softcap)
    q, p = (F.log_softmax(x / taught.temperature, -1) for x in (z, t))
    divergences = divergence_of(p, q, taught.divergence)
    entropies = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view(SHAPE)
    each = (1 - taught.share) * entropies + taught.share * taught.temperature**2 * divergences
    return (weights * each).sum(), -entropies, divergences


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("divergence", KINDS)
def test_loss_and_gradients_are_those_over_whole_logits(divergence, temperature, softcap, monkeypatch):
    monkeypatch.setitem(loss_chunks.CHUNK_ELEMENTS, "cpu", 2 * 7 * PADDED)  # seven tokens at a time
    hidden, weight, labels, weights, told, teacher = inputs()
    bias, teachers = (torch.linspace(0, end, PADDED, requires_grad=end < 2) for end in (1, 2))
    taught = TeacherTargets(
        TeacherOutput(told, teacher, teachers, softcap and 5.0), 0.7, temperature, divergence, MIXTURE
    )
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
    taught = TeacherTargets(
        TeacherOutput(hidden.detach(), weight.detach(), None, None), 1.0, 2.0, "forward_kl"
    )
    loss, _, divergences = linear_distillation(hidden, weight, labels, weights, taught, VOCAB)
    loss.backward()
    assert (
        divergences.abs().max() < 1e-6 and hidden.grad.abs().max() < 1e-6 and weight.grad.abs().max() < 1e-6
    )


@pytest.mark.parametrize("temperature", [1e-3, 1e4])
def test_a_temperature_beyond_fp32_is_refused(temperature):
    with pytest.raises(ConfigError, match=r"distill\.temperature"):
        RunConfig.from_tree({"distill": {"teacher": "x", "temperature": temperature}})


def by_tail(z, p, k, temperature, divergence):
    """Of logits z and a teacher's log-probabilities p [tokens, vocab] the divergence of k + 1 entries: its k likeliest,
    and one that stands for all others (Anshumann et al. 2025)."""
    top = p.topk(k).indices
    others = torch.ones_like(p, dtype=torch.bool).scatter(1, top, False)
    q = F.log_softmax(z / temperature, -1)
    log_q, log_p = (
        torch.cat([x.gather(1, top), torch.where(others, x.exp(), 0.0).sum(1, keepdim=True).log()], 1)
        for x in (q, p)
    )
    return divergence_of(log_p, log_q, divergence)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("divergence", KINDS)
def test_of_stored_log_probabilities_it_is_that_of_the_likeliest_and_a_tail(divergence, softcap, monkeypatch):
    monkeypatch.setitem(loss_chunks.CHUNK_ELEMENTS, "cpu", 2 * 7 * PADDED)
    hidden, weight, labels, weights, told, teacher = inputs()
    logprobs, indices = linear_top_logprobs(told, teacher, 5, VOCAB, softcap and 5.0, 1.5)
    t = told @ teacher[:VOCAB].T
    t = t if softcap is None else 5 * torch.tanh(t / 5)
    p = F.log_softmax(t / 1.5, -1).flatten(0, 1)
    assert torch.equal(indices.flatten(0, 1), p.topk(5).indices)
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(SHAPE))
    torch.testing.assert_close(logprobs[..., :5].flatten(0, 1), p.topk(5).values)

    taught = TeacherTargets(TopLogProbs(indices, logprobs), 0.7, 1.5, divergence, MIXTURE)
    found = linear_distillation(hidden, weight, labels, weights, taught, VOCAB, softcap)
    z = (hidden @ weight[:VOCAB].T).flatten(0, 1)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    divergences = by_tail(z, p, 5, 1.5, divergence)
    entropies = F.cross_entropy(z, labels.flatten(), reduction="none")
    loss = (weights.flatten() * (0.3 * entropies + 0.7 * 1.5**2 * divergences)).sum()
    torch.testing.assert_close(found[0], loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[2].flatten(), divergences, rtol=1e-5, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(x, [hidden, weight]) for x in (found[0], loss))):
        assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_of_all_stored_log_probabilities_it_is_that_of_the_teacher(divergence):
    hidden, weight, labels, weights, told, teacher = inputs()
    logprobs, indices = linear_top_logprobs(told, teacher, VOCAB, VOCAB, None, 2.0)
    found = []
    for by in (TeacherOutput(told, teacher, None, None), TopLogProbs(indices, logprobs)):
        taught = TeacherTargets(by, 0.7, 2.0, divergence)
        loss, *each = linear_distillation(hidden, weight, labels, weights, taught, VOCAB)
        found.append([loss, *each, *torch.autograd.grad(loss, [hidden, weight])])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def of_a_shard(size: int, divergence: str, k: int | None) -> list[torch.Tensor]:
    """On a rank of tensor parallelism: the results, and the gradients of its part. The last has padding alone."""
    axis = build_mesh(ParallelConfig(tensor_model_parallel_size=size), size, "cpu").tp if size > 1 else Axis()
    hidden, weight, labels, weights, told, teacher = inputs()
    rows = PADDED // size
    own = slice(axis.rank * rows, axis.rank * rows + rows)
    shard = dict(axis=axis, first=own.start, rows=rows)
    by = TeacherOutput(told, teacher[own], None, None)
    if k is not None:
        logprobs, indices = linear_top_logprobs(told, teacher[own], k, VOCAB, None, 1.5, **shard)
        by = TopLogProbs(indices - own.start, logprobs)
    taught = TeacherTargets(by, 0.4, 1.5, divergence, MIXTURE)
    part = weight.detach()[own].requires_grad_()
    found = linear_distillation(hidden, part, labels, weights, taught, VOCAB, **shard)
    found[0].backward()
    return [*(x.detach() for x in found), hidden.grad, part.grad]


def test_over_a_vocabulary_in_shards_it_is_the_same(pool):
    for given in (("forward_kl", None), ("reverse_kl", None), ("forward_kl", 15), ("reverse_kl", VOCAB),
                  ("generalized_jsd", None), ("skewed_reverse_kl", 15)):  # fmt: skip
        one, ranks = of_a_shard(1, *given), pool.run(of_a_shard, 4, *given)
        for *found, _, _ in ranks:
            for a, b in zip(found, one):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sum(rank[3] for rank in ranks), one[3], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([rank[4] for rank in ranks]), one[4], rtol=1e-4, atol=1e-5)
