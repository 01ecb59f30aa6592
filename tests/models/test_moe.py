"""The layer of experts against a transcription token by token, in every way that rows can be ordered."""

import functools

import pytest
import torch
from default_cases import in_full
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import silu

from megalith.config import ModelConfig, OptimConfig
from megalith.models.init import initialize
from megalith.models.inputs import LossInputs
from megalith.models.moe import GroupedLinear, MoE
from megalith.models.pass_context import Context, PassLayout
from megalith.models.transformer import Transformer
from megalith.ops import compiled as one_kernel
from megalith.optim import build_optimizer

BATCH, SEQ, HIDDEN = 2, 12, 16
BASE = dict(num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=24, num_attention_heads=2, swiglu=True,
            add_bias_linear=False, num_experts=4, vocab_size=32, make_vocab_size_divisible_by=8,
            max_position_embeddings=SEQ, hidden_dropout=0.0, attention_dropout=0.0)  # fmt: skip
BIASES = dict(add_bias_linear=True)
DROP = dict(moe_expert_capacity_factor=0.75)


def moe_of(**settings) -> MoE:
    torch.manual_seed(0)
    moe = MoE(ModelConfig(**(BASE | settings)))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return moe


def context(scale: float | None = 1.0) -> Context:
    numbers = torch.arange(SEQ)[None] * BATCH + torch.arange(BATCH)[:, None]
    return Context(
        BATCH,
        PassLayout(),
        global_token_ids=numbers.flatten(),
        balance_scale=None if scale is None else torch.tensor(scale),
    )


def linear(layer: GroupedLinear, number: int, x: torch.Tensor) -> torch.Tensor:
    y = x @ layer.weight[number].T
    return y if layer.bias is None else y + layer.bias[number]


def expert(moe: MoE, number: int, x: torch.Tensor) -> torch.Tensor:
    gate_up = linear(moe.experts.linear_fc1, number, x)
    hidden = (
        silu(gate_up[..., 0::2]) * gate_up[..., 1::2]
        if moe.experts.gated
        else moe.experts.activation(gate_up)
    )
    return linear(moe.experts.linear_fc2, number, hidden)


def token_by_token(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    routing = moe.router(x.flatten(0, 1), context().global_token_ids, BATCH, torch.tensor(1.0))
    rows = []
    for number, token in enumerate(x.flatten(0, 1)):
        row = torch.zeros(HIDDEN)
        for choice, chosen in enumerate(routing.experts[number].tolist()):
            if routing.kept is None or routing.kept[number, choice]:
                row = row + routing.weights[number, choice] * expert(moe, chosen, token)
        rows.append(row)
    y = torch.stack(rows).view_as(x)
    if moe.shared_experts is not None:
        shared = moe.shared_experts(x)
        y = y + (
            shared
            if moe.shared_expert_gate is None
            else torch.sigmoid(x @ moe.shared_expert_gate.weight.T) * shared
        )
    return y


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"swiglu": False, "activation": "relu", "moe_router_topk": 1, "moe_ffn_hidden_size": 20},
        {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True, "moe_router_topk": 3},
        DROP,
        DROP | {"moe_token_drop_policy": "position", "moe_shared_expert_intermediate_size": 8},
        DROP | {"moe_pad_expert_input_to_capacity": True},
        {"moe_expert_capacity_factor": 9.0, "moe_pad_expert_input_to_capacity": True},
        BIASES,
        BIASES | {"swiglu": False, "moe_shared_expert_intermediate_size": 40, "moe_permute_fusion": True},
        BIASES | DROP,
        BIASES | DROP | {"moe_pad_expert_input_to_capacity": True},
    ],
    ids=str,
)
def test_values_and_gradients_equal_those_token_by_token(settings):
    moe = moe_of(**settings)
    outcomes = []
    for function in (lambda x: moe(x, moe.plan(x, context()), context()), lambda x: token_by_token(moe, x)):
        x = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = function(x)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        outcomes.append([y.detach(), x.grad] + [p.grad for p in moe.parameters()])
        moe.zero_grad()
    for ours, expected in zip(*outcomes):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_no_expert_is_filled_up_with_more_rows_than_there_are_tokens():
    dispatch = moe_of(**DROP, moe_pad_expert_input_to_capacity=True).dispatch
    plan = dispatch.rows(torch.rand(5, 2), torch.tensor([[0, 1]] * 5), 100, 4)
    assert plan.size == 5 and plan.counts.tolist() == [5, 5, 5, 5] and len(plan.pair) == 20
    assert plan.pair.tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9] + [10] * 10


def test_a_fused_permutation_changes_nothing(quick_compile):
    x = torch.randn(5, 3, requires_grad=True)
    from megalith.ops.permute import Permutation, sum_rows, take_rows

    pair = torch.tensor([3, 0, 9, 5, 1, 2, 4, 7, 6, 8])
    row = torch.empty(10, dtype=torch.int64).scatter_(0, pair, torch.arange(10)).view(5, 2)
    results = []
    for fused in (False, True):
        y = sum_rows(
            take_rows(x, Permutation(pair // 2, row), fused) * torch.arange(10.0)[:, None],
            Permutation(pair // 2, row),
            fused,
        )
        results += [y, torch.autograd.grad(y.square().sum(), x)[0]]
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


@pytest.mark.full
@pytest.mark.parametrize(
    "settings", [*(pytest.param(few, marks=pytest.mark.full) for few in ({}, BIASES)), BIASES | DROP], ids=str
)
def test_fused_steps_as_they_are_traced_change_nothing(monkeypatch, settings):
    @functools.cache
    def traced(function, dynamic):
        return torch.compile(function, dynamic=dynamic, backend="aot_eager")

    outcomes = []
    for fused in (False, True):
        if fused:
            monkeypatch.setattr(one_kernel, "_on_gpu", lambda x: True)
            monkeypatch.setattr(one_kernel, "_compiled", traced)
        moe = moe_of(**settings, moe_permute_fusion=fused)
        x = torch.randn(BATCH, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = moe(x, moe.plan(x, context()), context())
        y.square().sum().backward()
        outcomes.append([y.detach(), x.grad, *(parameter.grad for parameter in moe.parameters())])
    torch._dynamo.reset()
    for ours, expected in zip(*outcomes):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_model_that_is_recomputed_counts_its_tokens_once():
    from torch.utils.checkpoint import checkpoint

    moe, x = moe_of(), torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    checkpoint(lambda x: moe(x, moe.plan(x, context()), context()), x, use_reentrant=False).sum().backward()
    assert moe.router.tally[:4].sum() == BATCH * SEQ * 2


def test_layers_alternate_and_every_expert_starts_from_values_of_its_own():
    model = Transformer(ModelConfig(**BASE, moe_layer_freq=[0, 1]))
    initialize(model, model.config, seed=3)
    assert [layer.has_experts for layer in model.layers.values()] == [False, True]
    assert model.layers["1"].mlp.experts.linear_fc2.bias is None
    weight = model.layers["1"].mlp.experts.linear_fc2.weight
    assert weight.shape == (4, HIDDEN, 24) and weight.std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert len({w.sum().item() for w in weight}) == 4
    assert not model.layers["1"].mlp.router.tally.any()


def test_biases_of_experts_start_at_zero_and_have_no_weight_decay():
    model = Transformer(ModelConfig(**(BASE | BIASES)))
    initialize(model, model.config, seed=3)
    fc1, fc2 = model.layers["0"].mlp.experts.linear_fc1.bias, model.layers["0"].mlp.experts.linear_fc2.bias
    assert (fc1.shape, fc2.shape) == ((4, 48), (4, HIDDEN)) and not fc1.any() and not fc2.any()
    groups = build_optimizer(model.named_parameters(), OptimConfig(lr=0.1)).param_groups
    decayed = {id(parameter) for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert not {id(fc1), id(fc2)} & decayed
    assert id(model.layers["0"].mlp.experts.linear_fc2.weight) in decayed


@pytest.mark.parametrize("placement, graphs", [("pre", 1), in_full("sandwich", 1)])
def test_layers_are_one_graph_before_the_experts_and_share_it(placement, graphs):
    settings = BASE | {"moe_aux_loss_coeff": 0.1, "norm_placement": placement}
    counter, gradients = CompileCounterWithBackend("aot_eager"), []
    for compiled in (False, True):
        model = Transformer(ModelConfig(**settings))
        initialize(model, model.config, seed=3)
        for layer in model.layers.values() if compiled else ():
            layer.compile(backend=counter)
        ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
        model(ids, labels=ids, loss_inputs=LossInputs(balance_scale=torch.tensor(1.0))).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch._dynamo.reset()
    assert counter.frame_count == graphs
    for eager, traced in zip(*gradients):
        torch.testing.assert_close(eager, traced, rtol=1e-6, atol=1e-6)
