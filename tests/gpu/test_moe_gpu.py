"""Experts on a GPU: torch's grouped GEMM, kernels compiled around it, and a host that never waits."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.mirrored_rank import init_mirror
from megalith.comm.collectives import Axis
from megalith.config import ModelConfig, ParallelConfig
from megalith.models.init import initialize
from megalith.models.inputs import LossInputs, TokenInputs
from megalith.models.moe import MoE, bounded_rows
from megalith.models.pass_context import Context, PassLayout
from megalith.models.transformer import Transformer
from megalith.ops.compiled import as_one_kernel
from megalith.ops.fp8.recipes import Fp8GroupedGemm
from megalith.ops.gemm import float32_matmul
from megalith.ops.grouped_gemm import (
    GroupedGemm,
    RowGroups,
    add_bias,
    grouped_linear,
    has_kernel,
    prepare_weight,
)
from megalith.ops.permute import sum_rows
from megalith.parallel.expert.dispatch_buffer import (
    DispatchPlan,
    pack,
    plan_dispatch,
    replicate_rows,
    unpack,
    unpack_replicated,
)
from megalith.parallel.expert.expert_parallel import ExpertParallel
from megalith.parallel.mesh import build_mesh
from megalith.parallel.seams import plug, replace_parameter

BATCH, SEQ, HIDDEN = 2, 128, 256
MODEL = dict(num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=512, num_attention_heads=4, swiglu=True,
             add_bias_linear=False, normalization="RMSNorm", position_embedding_type="rope", vocab_size=512,
             max_position_embeddings=SEQ, hidden_dropout=0.0, attention_dropout=0.0, num_experts=8,
             moe_ffn_hidden_size=128, moe_router_topk=2, moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001,
             moe_grouped_gemm=True)  # fmt: skip
BIASES = dict(add_bias_linear=True)
FILLED = dict(moe_expert_capacity_factor=1.25, moe_pad_expert_input_to_capacity=True)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("sizes", [(70, 0, 300, 14), (0, 0, 0, 128), (128, 128, 128, 128), (1, 2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_gemm_equals_the_loop_and_empty_groups_get_zeros(sizes, dtype):
    torch.manual_seed(0)
    torch.full((4, 192, HIDDEN), float("nan"), device="cuda", dtype=dtype)  # what freed memory may hold
    x = torch.randn(sum(sizes), HIDDEN, device="cuda", dtype=dtype)
    weight = torch.randn(4, 192, HIDDEN, device="cuda", dtype=dtype) / 16
    assert has_kernel(x, 192) == (dtype == torch.bfloat16)
    results, groups = [], RowGroups(torch.tensor(sizes, device="cuda"))
    for kernel in (True, False):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = grouped_linear(
            leaves[0], prepare_weight(leaves[1], leaves[1].detach()), groups, GroupedGemm(kernel)
        )
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*results):
        assert relative(ours, expected) < 1e-2 if dtype == torch.bfloat16 else relative(ours, expected) < 1e-5
    empty = torch.tensor([size == 0 for size in sizes], device="cuda")
    assert not results[0][2][empty].any()


def test_a_routers_product_in_bf16_is_that_in_fp32():
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(*s, device="cuda") for s in ((4096, 2048), (128, 2048), (4096, 128)))
    x, weight = (t.bfloat16().requires_grad_() for t in (x, weight))
    y = float32_matmul(x, weight)
    found = [y, *torch.autograd.grad(y, (x, weight), grad)]
    expected = [x.float() @ weight.float().T, grad @ weight.float(), grad.T @ x.float()]
    assert y.dtype == torch.float32 and relative(found[0], expected[0]) < 1e-5
    for ours, theirs in zip(found[1:], expected[1:]):
        assert relative(ours, theirs) < 1.05 * relative(theirs.bfloat16(), theirs)


def alone(weights: torch.Tensor, destinations: torch.Tensor) -> DispatchPlan:
    return plan_dispatch(weights, destinations, Axis(), 64)


@pytest.mark.parametrize("tokens", [4096, 16384, 5000])
def test_dispatch_rows_packed_by_kernels_equal_those_of_the_host(tokens):
    torch.manual_seed(0)
    destinations = torch.stack([torch.randperm(65)[:8] for _ in range(tokens)])  # 64: nowhere
    x, weights = torch.randn(tokens, 64).bfloat16(), torch.randn(tokens, 8)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [part.to(device).requires_grad_() for part in (x, weights)]
        plan = as_one_kernel(alone, leaves[1], destinations.to(device), sizes_vary=True)
        to, come, *counts = plan.sizes.tolist()
        assert to == come == tokens and sum(counts) == (destinations < 64).sum()
        packed, order = pack(leaves[0], plan, to, device == "cuda")
        rows, row_weights, here = unpack(packed, plan, sum(counts), device == "cuda")
        y = sum_rows(sum_rows(rows * row_weights, here, device == "cuda"), order, device == "cuda")
        results.append([rows, row_weights, y, *torch.autograd.grad(y.square().sum(), leaves)])
    for theirs, ours in zip(*results):
        assert relative(ours.detach().cpu(), theirs.detach()) < 1e-3
    assert all(torch.equal(ours.cpu(), theirs) for theirs, ours in zip(*(found[:2] for found in results)))


@pytest.mark.parametrize("tokens", [2048, 2500])
def test_rows_in_buffers_of_any_routing_are_those_of_the_host(tokens):
    """Two ranks of 32 experts by turns, each with the tokens of both."""
    torch.manual_seed(0)
    destinations = torch.stack([torch.randperm(65)[:8] for _ in range(2 * tokens)])  # 64: nowhere
    x, weights, results = torch.randn(tokens, 64).bfloat16(), torch.randn(tokens, 8), []
    for device in ("cpu", "cuda"):
        fused, leaves = device == "cuda", [part.to(device).requires_grad_() for part in (x, weights)]
        packed, y = replicate_rows(*leaves, 2, fused), 0.0
        for rank in range(2):
            here = destinations.to(device) - 32 * rank
            plan = bounded_rows(leaves[1], torch.where((here < 0) | (here >= 32), 32, here), 32)
            end = RowGroups(plan.counts, padded=True).end
            rows, row_weights, order = unpack_replicated(packed, plan, end, 64, fused)
            behind = torch.arange(len(rows), device=device)[:, None] >= end
            found = torch.where(behind, float("nan"), rows * row_weights)  # as a matmul may leave them
            y = y + sum_rows(found, order, fused)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for theirs, ours in zip(*results):
        assert relative(ours.detach().cpu(), theirs.detach()) < 1e-2


@pytest.fixture
def mirrored():
    """The mesh of rank 0 of two, the other of which does as it does, with experts on both."""
    init_mirror(2)
    yield build_mesh(ParallelConfig(expert_model_parallel_size=2), 2, "cuda", has_experts=True)
    dist.destroy_process_group()


def half(moe: MoE, mesh, dispatcher: str) -> MoE:
    """The layer with this rank's experts, and buffers as large as any routing needs."""
    for linear in (moe.experts.linear_fc1, moe.experts.linear_fc2):
        for name, parameter in list(linear.named_parameters()):
            own = parameter.detach()[: len(parameter) // 2].clone()
            replace_parameter(linear, name, torch.nn.Parameter(own))
    plug(moe, "dispatch", ExpertParallel(moe.router.config, mesh, None, dispatcher, bounded=True))
    return moe


SHARED = dict(moe_shared_expert_intermediate_size=256)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("settings", [{}, SHARED, BIASES, {"moe_expert_capacity_factor": 0.5}], ids=str)
def test_experts_of_two_ranks_never_wait_for_the_host_and_read_no_garbage(mirrored, settings, dispatcher):
    by_loop = half(layer(**settings, moe_grouped_gemm=False), mirrored, dispatcher)
    expected, inputs = passes(by_loop, context()), context()
    for fusion in (False, True):
        moe = half(layer(**settings, moe_permute_fusion=fusion), mirrored, dispatcher)
        passes(moe, inputs)  # what is made at first use
        moe.zero_grad()
        torch.full((2**28,), float("nan"), device="cuda")  # what freed memory may hold
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = passes(moe, inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for ours, theirs in zip(found, expected, strict=True):
            assert relative(ours, theirs) < 1e-2


def layer(**settings) -> MoE:
    torch.manual_seed(0)
    moe = MoE(ModelConfig(**(MODEL | settings)), torch.device("cuda"))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return moe


def context() -> Context:
    numbers = torch.arange(SEQ, device="cuda")[None] * BATCH + torch.arange(BATCH, device="cuda")[:, None]
    return Context(
        BATCH, PassLayout(), global_token_ids=numbers.flatten(), balance_scale=torch.ones((), device="cuda")
    )


def passes(moe: MoE, inputs: Context) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(
        BATCH, SEQ, HIDDEN, device="cuda", generator=generator, dtype=torch.bfloat16
    ).requires_grad_()
    y = moe(x, moe.plan(x, inputs), inputs)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in moe.parameters())]


@pytest.mark.parametrize(
    "settings",
    [{}, {"moe_permute_fusion": True}, FILLED, BIASES, BIASES | FILLED | {"moe_permute_fusion": True}],
    ids=str,
)
def test_the_host_never_waits_for_the_device(settings):
    moe, inputs = layer(**settings), context()
    passes(moe, inputs)  # what is made at first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        passes(moe, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("gemm", [GroupedGemm(), Fp8GroupedGemm(kernel=True)], ids=["bf16", "fp8"])
def test_experts_matmuls_read_no_row_behind_the_last(gemm):
    torch.manual_seed(0)
    options = dict(device="cuda", dtype=torch.bfloat16)
    x, grad, weight = (torch.randn(*size, **options) for size in ((128, HIDDEN), (128, 96), (4, 96, HIDDEN)))
    groups, end, found = RowGroups(torch.tensor([5, 0, 70, 1], device="cuda"), padded=True), 76, []
    for behind in 0.0, float("nan"):
        x[end:], grad[end:] = behind, behind
        results = gemm.forward(x, weight, groups)[:end], gemm.dgrad(grad, weight, groups)[:end]
        found.append([*results, gemm.wgrad(grad, x, groups, torch.float32)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("biases", [{}, BIASES], ids=str)
@pytest.mark.parametrize("settings", [{"moe_permute_fusion": True}, {"moe_grouped_gemm": False}], ids=str)
def test_other_kernels_give_the_same(settings, biases):
    found = passes(layer(**settings, **biases), context()), passes(layer(**biases), context())
    for ours, expected in zip(*found):
        assert relative(ours, expected) < 1e-2


@pytest.mark.parametrize("sizes", [(70, 0, 300, 14), (0, 0, 0, 128), (128, 128, 128, 128), (1, 2, 3, 5)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", [0, 16])
def test_biases_in_bf16_are_those_in_fp32_and_empty_groups_get_zeros(sizes, fused, first):
    torch.manual_seed(0)
    torch.full((4, 192, 8), float("nan"), device="cuda", dtype=torch.bfloat16)  # what freed memory may hold
    shapes = ((sum(sizes), 192), (4, 192 - first), (sum(sizes), 1))
    values = [torch.randn(*shape, device="cuda").bfloat16().float() for shape in shapes]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        groups = RowGroups(torch.tensor(sizes, device="cuda"), sizes if dtype == torch.float32 else None)
        y, bias, factors = (value.clone().requires_grad_() for value in values)
        cast = prepare_weight(bias, bias.detach().to(dtype))
        total = add_bias(y.to(dtype), cast, groups, factors, first, fused=fused and dtype == torch.bfloat16)
        total.backward(torch.linspace(-1, 1, total.numel(), device="cuda").view_as(total).to(dtype))
        results.append([total.detach(), y.grad, bias.grad, factors.grad])
    for ours, expected in zip(*results):
        assert relative(ours, expected) < 1e-2
    empty = torch.tensor([size == 0 for size in sizes], device="cuda")
    assert not results[0][2][empty].any()


@pytest.mark.parametrize(
    "settings", [{}, BIASES, FILLED | {"moe_shared_expert_intermediate_size": 256}], ids=str
)
@pytest.mark.parametrize(
    "dtype, routing, bound",
    [
        (torch.float32, {}, 1e-4),
        # rounded to bf16, scores that are near each other change their order: the choice must not hang on them
        (torch.bfloat16, {"moe_router_force_load_balancing": True}, 5e-2),
    ],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_compiled_layers_give_the_loss_and_gradients_of_eager(settings, dtype, routing, bound, padded):
    results = []
    inputs = TokenInputs()
    if padded:
        inputs = TokenInputs(all_padding=(torch.arange(SEQ) >= torch.tensor([[90], [SEQ]])).cuda())
    for compiled in (False, True):
        model = Transformer(ModelConfig(**(MODEL | settings | routing)), compute_dtype=dtype, device="cuda")
        initialize(model, model.config, seed=5)
        if compiled:
            for block in model.layers.values():
                block.compile()
        ids = torch.randint(0, 512, (BATCH, SEQ), generator=torch.Generator().manual_seed(2)).cuda()
        losses = LossInputs(balance_scale=torch.ones((), device="cuda"))
        loss = model(ids, token_inputs=inputs, labels=ids, loss_inputs=losses)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, expected in zip(*reversed(results)):
        assert relative(ours, expected) < bound
