"""The router against transcriptions of the published formulas: choice, weights, losses, capacity, bias."""

import math

import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from megalith.config import ModelConfig
from megalith.models.load_balance import AUX, DROPPED, Z, move_bias
from megalith.models.pass_context import LayerRoutes
from megalith.models.router import Router

TOKENS, HIDDEN, BATCH = 48, 16, 3
BASE = dict(num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_experts=8, moe_router_topk=2)
SIGMOID = dict(moe_router_score_function="sigmoid")
GROUPS = dict(moe_router_num_groups=4, moe_router_group_topk=2)


def router_of(**settings) -> Router:
    torch.manual_seed(1)
    router = Router(ModelConfig(**(BASE | settings)))
    torch.nn.init.normal_(router.weight)
    return router


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


def numbers() -> torch.Tensor:
    """Three sequences of 16 tokens, one after the other."""
    places = torch.arange(TOKENS // BATCH)
    return (places[None] * BATCH + torch.arange(BATCH)[:, None]).flatten()


def routed(router: Router, x: torch.Tensor, scale: float | None = 1.0):
    return router(x, numbers(), BATCH, None if scale is None else torch.tensor(scale))


@pytest.mark.parametrize("pre", [False, True])
def test_softmax_weights(x, pre):
    routing = routed(router_of(moe_router_pre_softmax=pre, moe_router_topk_scaling_factor=1.5), x)
    for token, experts, weights in zip(x, routing.experts, routing.weights):
        logits = (router_of().weight @ token).tolist()
        best = sorted(range(8), key=lambda e: -logits[e])[:2]
        assert experts.tolist() == best
        total = sum(math.exp(z) for z in (logits if pre else [logits[e] for e in best]))
        expected = [1.5 * math.exp(logits[e]) / total for e in best]
        assert weights.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("size", "counted"), [(2, 2), (4, 3)])
def test_sigmoid_weights_with_groups_and_bias(x, size, counted):
    """Two of four groups of so many experts, by the sum of the best topk / 2 of each."""
    settings = dict(num_experts=4 * size, moe_router_topk=2 * counted, moe_router_enable_expert_bias=True)
    router = router_of(**SIGMOID, **GROUPS, **settings)
    router.expert_bias += torch.linspace(-0.4, 0.4, 4 * size)
    routing = routed(router, x)
    for token, experts, weights in zip(x, routing.experts, routing.weights):
        scores = torch.sigmoid(router.weight @ token)
        biased = (scores + router.expert_bias).tolist()
        value = [sum(sorted(biased[size * g : size * g + size])[-counted:]) for g in range(4)]
        groups = sorted(range(4), key=lambda g: -value[g])[:2]
        allowed = [e for e in range(4 * size) if e // size in groups]
        best = sorted(allowed, key=lambda e: -biased[e])[: 2 * counted]
        assert experts.tolist() == best
        chosen = [scores[e].item() for e in best]
        assert weights.tolist() == pytest.approx([s / sum(chosen) for s in chosen], rel=1e-5)


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_sigmoid_weights_of_several_experts_are_shares_and_of_one_the_sigmoid(x, topk):
    router = router_of(**SIGMOID, moe_router_topk=topk)
    scores = (x @ router.weight.T).sigmoid().topk(topk).values
    expected = scores / scores.sum(1, keepdim=True) if topk > 1 else scores
    torch.testing.assert_close(routed(router, x).weights, expected)


@pytest.mark.parametrize("eps", [0.01, 0.3, 5.0])
def test_sparsemixer_is_that_of_transformers_with_its_gradient(x, eps):
    """With few, some and all experts compared for a weight; the reference is transformers' function in evaluation."""
    router = router_of(moe_router_score_function="sparsemixer", moe_sparsemixer_jitter_eps=eps)
    routing = routed(router, x)
    grad = torch.randn(TOKENS, 2, generator=torch.Generator().manual_seed(4))
    weight = router.weight.detach().requires_grad_()
    expected, experts = sparsemixer(x @ weight.T, jitter_eps=eps, training=False)
    assert routing.experts.equal(experts)
    torch.testing.assert_close(routing.weights, expected, rtol=1e-5, atol=1e-6)
    found, theirs = (torch.autograd.grad((w * grad).sum(), p)[0]
                     for w, p in ((routing.weights, router.weight), (expected, weight)))  # fmt: skip
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)
    assert theirs.abs().max() > 0.1


def test_sparsemixer_weights_an_expert_that_is_replayed_against_the_scores(x):
    router = router_of(moe_router_score_function="sparsemixer")
    worst = (x @ router.weight.T).argsort(1)[:, :2]
    routes = LayerRoutes(replayed=worst.short())
    weights = router(x, numbers(), BATCH, None, routes=routes).weights
    assert weights.isfinite().all() and (weights > 0).all()


@pytest.mark.parametrize(("topk", "score"), [(1, "sigmoid"), (2, "softmax")])
def test_sinkhorn_balances_the_choices_of_training_alone(x, topk, score):
    """By the published iteration over exp(logits), to convergence; the weights are the scores as they are."""
    settings = dict(moe_router_load_balancing_type="sinkhorn", moe_router_topk=topk)
    router = router_of(**settings, moe_router_score_function=score, moe_router_pre_softmax=score == "softmax")
    logits = (x @ router.weight.T).detach()
    cost, of_experts = logits.double().exp(), torch.ones(8, dtype=torch.float64)
    for _ in range(1000):
        of_tokens = 1 / (TOKENS * cost @ of_experts)
        of_experts = 1 / (8 * of_tokens @ cost)
    expected = (of_tokens[:, None] * cost * of_experts).topk(topk).indices
    trained, evaluated = routed(router, x), routed(router, x, None)
    assert trained.experts.equal(expected) and evaluated.experts.equal(logits.topk(topk).indices)
    assert not trained.experts.equal(evaluated.experts)
    scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    for routing in (trained, evaluated):
        torch.testing.assert_close(routing.weights, scores.gather(1, routing.experts))
    loads = [routing.experts.flatten().bincount(minlength=8).max() for routing in (trained, evaluated)]
    assert loads[0] < loads[1]


def test_softmax_groups_are_as_good_as_their_best_expert(x):
    router = router_of(**GROUPS)
    for token, experts in zip(x, routed(router, x).experts):
        logits = (router.weight @ token).tolist()
        groups = sorted(range(4), key=lambda g: -max(logits[2 * g : 2 * g + 2]))[:2]
        best = sorted((e for e in range(8) if e // 2 in groups), key=lambda e: -logits[e])[:2]
        assert experts.tolist() == best


def auxiliary(probabilities: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """E / (k · T²) · Σ_e (Σ_t p_te) · n_e, written out."""
    tokens, count = probabilities.shape
    loss = torch.zeros(())
    for e in range(count):
        loss = loss + probabilities[:, e].sum() * (experts == e).sum()
    return loss * count / (experts.shape[1] * tokens**2)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_losses_and_their_gradient(x, score, kind):
    settings = dict(moe_router_score_function=score, moe_router_load_balancing_type=kind)
    router = router_of(**settings, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02)
    x.requires_grad_()
    routing = routed(router, x, scale=5.0)
    (routing.weights.sum() * 0).backward()
    found, found_x = router.weight.grad.clone(), x.grad.clone()
    router.weight.grad = x.grad = None

    logits = x @ router.weight.T
    p = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    p = p / p.sum(-1, keepdim=True)
    parts = [slice(0, TOKENS)] if kind == "aux_loss" else [slice(i, i + 16) for i in range(0, TOKENS, 16)]
    aux = sum(auxiliary(p[part], routing.experts[part]) for part in parts) / len(parts)
    z = sum(torch.logsumexp(row, 0) ** 2 for row in logits) / TOKENS
    (5.0 * (0.3 * aux + 0.02 * z)).backward()
    torch.testing.assert_close(found, router.weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_x, x.grad, rtol=1e-5, atol=1e-6)
    assert router.tally[AUX].item() == pytest.approx(aux.item(), rel=1e-5)
    assert router.tally[Z].item() == pytest.approx(z.item(), rel=1e-5)
    counts = [(routing.experts == e).sum().item() for e in range(8)]
    assert router.tally[:8].tolist() == counts and router.tally[DROPPED] == 0


REAL = (7, 16, 11)
"""Tokens of the three sequences that are no padding."""


def real_tokens() -> torch.Tensor:
    """bool [tokens]: the sequences end after as many tokens as REAL says."""
    return torch.cat([torch.arange(TOKENS // BATCH) < length for length in REAL])


def padded_grads(router: Router, x: torch.Tensor) -> torch.Tensor:
    routing = router(x, numbers(), BATCH, torch.tensor(5.0), real_tokens())
    (routing.weights.sum() * 0).backward()
    gradient, router.weight.grad = router.weight.grad, None
    return gradient


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_padding_counts_in_no_loss_and_in_no_tally(x, score, kind):
    settings = dict(moe_router_score_function=score, moe_router_load_balancing_type=kind)
    router = router_of(**settings, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02)
    gradient = padded_grads(router, x)

    logits = x @ router.weight.T
    p = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    p, experts = p / p.sum(-1, keepdim=True), logits.topk(2).indices
    real = real_tokens()
    parts = [real]
    if kind == "seq_aux_loss":
        parts = [torch.arange(i * 16, i * 16 + length) for i, length in enumerate(REAL)]
    aux = sum(auxiliary(p[part], experts[part]) for part in parts) / len(parts)
    z = sum(torch.logsumexp(row, 0) ** 2 for row in logits[real]) / sum(REAL)
    (5.0 * (0.3 * aux + 0.02 * z)).backward()
    torch.testing.assert_close(gradient, router.weight.grad, rtol=1e-5, atol=1e-6)
    assert router.tally[AUX].item() == pytest.approx(aux.item(), rel=1e-5)
    assert router.tally[Z].item() == pytest.approx(z.item(), rel=1e-5)
    assert router.tally[:8].tolist() == [(experts[real] == e).sum().item() for e in range(8)]

    router.tally.zero_()
    router.weight.grad = None
    changed = torch.where(real[:, None], x, 3.0)  # what padding has does not matter
    torch.testing.assert_close(padded_grads(router, changed), gradient, rtol=1e-6, atol=1e-7)


def test_a_micro_batch_of_padding_has_no_loss(x):
    router = router_of(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02)
    routing = router(x, numbers(), BATCH, torch.tensor(1.0), torch.zeros(TOKENS, dtype=torch.bool))
    (routing.weights.sum() * 0).backward()
    assert not router.weight.grad.any() and not router.tally.any()


def test_padding_does_not_change_what_sinkhorn_chooses(x):
    router, real = router_of(moe_router_load_balancing_type="sinkhorn"), real_tokens()
    padded = router(x, numbers(), BATCH, torch.tensor(1.0), real)
    alone = router(x[real], torch.arange(sum(REAL)), 1, torch.tensor(1.0))
    assert padded.experts[real].equal(alone.experts)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_padding_takes_no_capacity_from_tokens(policy):
    """Padding comes first and scores highest, yet is dropped before any token."""
    router = router_of(moe_expert_capacity_factor=1.0, moe_token_drop_policy=policy)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    real = torch.arange(TOKENS) >= 24
    x[~real] = 4.0 * x[30]
    routing = router(x, torch.arange(TOKENS), 1, torch.tensor(1.0), real)
    alone = router(x[real], torch.arange(24), 1, torch.tensor(1.0))
    chosen = routing.experts[real]
    for e in range(8):
        pairs = torch.where(chosen == e)
        assert routing.kept[real][pairs].sum() == min(routing.capacity, len(pairs[0]))
    assert alone.experts.equal(chosen)
    routing.weights.sum().backward()
    assert router.tally[DROPPED] == (~routing.kept[real]).sum()


def test_the_losses_count_experts_by_score_without_the_bias(x):
    router = router_of(**SIGMOID, moe_router_enable_expert_bias=True, moe_aux_loss_coeff=1.0)
    router.expert_bias[3] = 9.0  # everyone is sent to it
    routing = routed(router, x)
    routing.weights.sum().backward()
    assert router.tally[3] == TOKENS
    scores = torch.sigmoid(x @ router.weight.T)
    expected = auxiliary(scores / scores.sum(-1, keepdim=True), scores.topk(2).indices)
    assert router.tally[AUX].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_an_expert_keeps_its_best_or_its_first_tokens(x, policy):
    router = router_of(moe_expert_capacity_factor=0.75, moe_token_drop_policy=policy)
    routing = routed(router, x)
    assert routing.capacity == math.ceil(TOKENS * 2 / 8 * 0.75)
    for e in range(8):
        token, choice = torch.where(routing.experts == e)
        key = -routing.weights[token, choice] if policy == "probs" else numbers()[token]
        best = set(token[key.argsort()][: routing.capacity].tolist())
        assert set(token[routing.kept[token, choice]].tolist()) == best
    routing.weights.sum().backward()
    assert router.tally[DROPPED] == (~routing.kept).sum() > 0


def test_nothing_is_dropped_without_a_backward_pass(x):
    routing = routed(router_of(moe_expert_capacity_factor=0.5), x, scale=None)
    assert routing.kept is None and routing.capacity is None


def test_forced_balance_sends_as_many_tokens_to_each_expert(x):
    routing = routed(router_of(moe_router_force_load_balancing=True), x)
    assert torch.bincount(routing.experts.flatten(), minlength=8).tolist() == [12] * 8
    assert all(len(set(row)) == 2 for row in routing.experts.tolist())


def test_the_bias_moves_towards_experts_with_few_tokens_unless_the_step_is_skipped():
    bias, counts = torch.zeros(4), torch.tensor([1.0, 5.0, 3.0, 3.0])
    move_bias(bias, counts, 0.001, torch.tensor(1.0))
    assert not bias.any()
    move_bias(bias, counts, 0.001, torch.tensor(0.0))
    assert bias.tolist() == pytest.approx([0.001, -0.001, 0.0, 0.0])


@pytest.mark.parametrize(
    ("tokens", "factor", "capacity"),
    [
        (10, 1.0, 3),
        (10, 1.25, 4),
        (10, 2.0, 5),
        (10, 0.9, 3),
        (12, 1.0, 3),
        (10, 100.0, 10),
    ],  # a share of 2.5, of 3
)
def test_a_share_of_the_tokens_is_rounded_up_only_after_the_factor(tokens, factor, capacity):
    router = router_of(moe_expert_capacity_factor=factor)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2))
    routing = router(x, torch.arange(tokens), 1, torch.tensor(1.0))
    assert routing.capacity == capacity
    kept = torch.bincount(routing.experts[routing.kept], minlength=8)
    assert torch.equal(kept, torch.bincount(routing.experts.flatten(), minlength=8).clamp(max=capacity))


def test_the_weight_of_a_single_expert_is_its_sigmoid(x):
    routing = routed(router_of(**SIGMOID, moe_router_topk=1), x)
    best = torch.sigmoid(x @ router_of().weight.T).max(1, keepdim=True).values
    torch.testing.assert_close(routing.weights, best)


@pytest.mark.parametrize(("experts", "stride"), [(8, 11), (22, 13)])
def test_a_forced_choice_steps_over_the_experts_by_a_number_that_reaches_all(x, experts, stride):
    routing = routed(router_of(moe_router_force_load_balancing=True, num_experts=experts), x)
    turns = 2 * numbers()[:, None] + torch.arange(2)
    assert torch.equal(routing.experts, turns * stride % experts)
    assert len(routing.experts.unique()) == experts
