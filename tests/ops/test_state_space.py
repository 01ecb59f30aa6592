"""Mamba-2's recurrence by chunks against the recurrence itself, a token at a time in fp64, documents by themselves."""

import pytest
import torch
from torch import Tensor

from megalith.ops.state_space import next_token, state_space, transition, with_last_state

SEQ = 151


def token_by_token(x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
    """Return the outputs of one sequence, [seq, heads, ·]: S ← α S + Δ b ⊗ x, y = Sᵀ c + D x."""
    sharing, out = x.shape[1] // b.shape[1], []
    for head in range(x.shape[1]):
        state, read = torch.zeros(b.shape[2], x.shape[2], dtype=x.dtype), []
        for t in range(len(x)):
            of_token = b[t, head // sharing], c[t, head // sharing]
            state = state * decay[t, head].exp() + torch.outer(of_token[0], step[t, head] * x[t, head])
            read.append(state.T @ of_token[1] + skip[head] * x[t, head])
        out.append(torch.stack(read))
    return torch.stack(out, 1)


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    step = random(2, SEQ, 4).abs() / 3
    values = [random(2, SEQ, 4, 7), step, -step * 2, random(2, SEQ, 2, 5), random(2, SEQ, 2, 5), random(4)]
    return [x.requires_grad_() for x in values]


@pytest.mark.parametrize("ends", [None, [(1, 70, SEQ), (64, 100, SEQ)]], ids=["one document", "three"])
def test_chunks_give_the_outputs_and_gradients_of_the_recurrence(ends: list[tuple[int, ...]] | None) -> None:
    arguments, documents = inputs(), None
    if ends is not None:
        tokens = torch.arange(SEQ)
        documents = torch.stack([torch.searchsorted(torch.tensor(row), tokens, right=True) for row in ends])
    skip = arguments[-1]
    rows = [
        [
            token_by_token(*(x[row, first:last] for x in arguments[:-1]), skip)
            for first, last in zip((0, *bounds), bounds)
        ]
        for row, bounds in enumerate(ends or [(SEQ,), (SEQ,)])
    ]
    expected = torch.stack([torch.cat(row) for row in rows])
    out = state_space(*(x.float() for x in arguments), documents)
    assert (out - expected).abs().max() < 2e-6 * expected.abs().max()
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((y * weights).sum(), arguments) for y in (out, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).abs().max() < 5e-6 * theirs.abs().max()


@torch.no_grad()
def test_the_state_continues_a_prefix_in_chunks_and_by_token() -> None:
    *by_token, skip = (x.float() for x in inputs())
    complete, last = with_last_state(*by_token, skip)
    _, state = with_last_state(*(x[:, :77] for x in by_token), skip)
    rest, end = with_last_state(*(x[:, 77:] for x in by_token), skip, state=state)
    torch.testing.assert_close(rest, complete[:, 77:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(end, last, rtol=1e-5, atol=1e-5)
    for t in range(77, 80):
        out, state = next_token(state, *(x[:, t : t + 1] for x in by_token), skip)
        torch.testing.assert_close(out, complete[:, t : t + 1], rtol=1e-5, atol=1e-5)


def test_the_transition_maps_any_initial_state_to_the_state_after_the_tokens() -> None:
    x, step, decay, b, c, skip = (x.detach().float() for x in inputs())
    state = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(2)).requires_grad_()
    expected = with_last_state(x, step, decay, b, c, skip, state=state)[1]
    written, factor = transition(x, step, decay, b)
    torch.testing.assert_close(factor * state + written, expected, rtol=1e-4, atol=1e-5)
    [gradient] = torch.autograd.grad(expected.sum(), state)
    torch.testing.assert_close(gradient, factor.expand_as(gradient), rtol=1e-4, atol=1e-12)
