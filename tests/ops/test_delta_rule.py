"""The delta rule by chunks against the rule itself, a token at a time in fp64, documents by themselves."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalith.ops.causal_conv import causal_conv
from megalith.ops.delta_rule import gated_delta_rule, next_token, transition, with_last_state


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """Of one sequence, [seq, heads, ·]: S ← e^g S, then S ← S + k ⊗ β (v − Sᵀ k), o = Sᵀ q."""
    sharing = value.shape[1] // key.shape[1]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    out, states = [], []
    for head in range(value.shape[1]):
        state, read = torch.zeros(key.shape[2], value.shape[2], dtype=value.dtype), []
        for t in range(len(value)):
            kt, qt = k[t, head // sharing], q[t, head // sharing] / key.shape[2] ** 0.5
            state = state * (decay[t, head].exp() if decay.dim() == 2 else decay[t, head].exp()[:, None])
            state = state + torch.outer(kt, share[t, head] * (value[t, head] - state.T @ kt))
            read.append(state.T @ qt)
        out.append(torch.stack(read))
        states.append(state)
    return torch.stack(out, 1), torch.stack(states)


def inputs(seq: int, per_channel: bool = False) -> list[Tensor]:
    """Return queries, keys, values, decays and shares. Decays per channel are up to e^-12 per token."""
    generator = torch.Generator().manual_seed(seq)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(2, seq, *shape, generator=generator, dtype=torch.float64)

    if per_channel:
        given = [drawn(4, 5), drawn(4, 5), drawn(4, 7), -3 * drawn(4, 5).abs(), drawn(4).sigmoid()]
        return [x.requires_grad_() for x in given]
    given = [drawn(2, 5), drawn(2, 5), drawn(4, 7), -drawn(4).abs() / 4, drawn(4).sigmoid()]
    return [x.requires_grad_() for x in given]


@pytest.mark.parametrize("ends", [None, [(1, 70, 151), (64, 100, 151)]], ids=["one document", "three"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("seq", [151])
def test_chunks_give_what_tokens_give_and_the_same_gradients(
    seq: int, per_channel: bool, ends: list[tuple[int, ...]] | None
) -> None:
    given = inputs(seq, per_channel)
    numbers = None
    if ends is not None:
        places = torch.arange(seq)
        numbers = torch.stack([torch.searchsorted(torch.tensor(each), places, right=True) for each in ends])
    expected = torch.stack(
        [
            torch.cat(
                [
                    token_by_token(*(x[row, first:last] for x in given))[0]
                    for first, last in zip((0, *bounds), bounds)
                ]
            )
            for row, bounds in enumerate(ends or [(seq,), (seq,)])
        ]
    )
    found = gated_delta_rule(*(x.float() for x in given), numbers)
    assert (found - expected).abs().max() < 2e-6 * expected.abs().max()
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for ours, theirs in zip(
        *(torch.autograd.grad((out * weights).sum(), given) for out in (found, expected))
    ):
        assert (ours - theirs).abs().max() < 5e-6 * theirs.abs().max()


@pytest.mark.parametrize("per_channel", [False, True])
@torch.no_grad()
def test_the_state_goes_on_from_a_prefix(per_channel: bool) -> None:
    given = [x.float() for x in inputs(80, per_channel)]
    whole, last = with_last_state(*given)
    _, state = with_last_state(*(x[:, :77] for x in given))
    for t in range(77, 80):
        out, state = next_token(state, *(x[:, t : t + 1] for x in given))
        torch.testing.assert_close(out, whole[:, t : t + 1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_transition_maps_any_initial_state_to_the_state_after_the_tokens(per_channel: bool) -> None:
    arguments = [x.detach().float() for x in inputs(151, per_channel)]
    state = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(3)).requires_grad_()
    expected = with_last_state(*arguments, state=state)[1]
    written, matrix = transition(*arguments[1:]).split([7, 5], dim=-1)
    torch.testing.assert_close(matrix @ state + written, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    [gradient] = torch.autograd.grad((expected * weights).sum(), state)
    torch.testing.assert_close(gradient, matrix.mT @ weights, rtol=1e-4, atol=1e-5)


def test_the_convolution_stays_inside_of_documents() -> None:
    x, taps = torch.randn(2, 9, 3), torch.randn(3, 1, 4)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 2, 2, 2, 2, 2, 2, 2]])
    found = causal_conv(x, taps, numbers)
    for row, bounds in enumerate([(0, 3, 9), (0, 1, 2, 9)]):
        for first, last in pairwise(bounds):
            alone = causal_conv(x[row : row + 1, first:last], taps)
            torch.testing.assert_close(found[row : row + 1, first:last], alone)
