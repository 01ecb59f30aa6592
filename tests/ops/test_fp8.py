"""FP8 on a CPU: codes, scales and the three matmuls, against definitions written out here."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megalith.comm.collectives import Axis
from megalith.config import ModelConfig
from megalith.config.presets import PRESETS
from megalith.models.init import initialize
from megalith.models.linear import Linear
from megalith.models.transformer import Transformer
from megalith.ops.fp8 import codes as fp8
from megalith.ops.fp8.codes import E4M3, E5M2, GRADIENT, INPUT, WEIGHT
from megalith.ops.fp8.recipes import AmaxTable, BlockGemm, CurrentScaling, DelayedScaling, Fp8Gemm
from megalith.ops.gemm import GEMM, Gemm, linear
from megalith.parallel.seams import plug

TOKENS, WIDTH, OUT = 128, 256, 128


def numbers(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)])
def test_codes_saturate_and_keep_nan(dtype, largest):
    x = torch.tensor([0.0, 1.0, -3.0, 2 * largest, -math.inf, math.nan, largest * 1.03])
    codes = fp8.quantize(x, torch.tensor(1.0), dtype).float()
    assert codes[:3].tolist() == [0.0, 1.0, -3.0]
    assert codes[[3, 4, 6]].tolist() == [largest, -largest, largest] and codes[5].isnan()


def test_a_scale_is_the_largest_code_over_the_amax_and_tells_what_is_not_finite():
    amax = torch.tensor([3.0, 0.0, math.inf, math.nan, 1e-44])
    scale = fp8.scale_from_amax(amax, E4M3)
    assert scale[0] == torch.tensor(448.0 / 3.0).float() and scale[1] == 1.0
    assert scale[2:4].isnan().all() and scale[4] == torch.finfo(torch.float32).max
    assert fp8.scale_from_amax(amax[:1], E4M3, margin=2) == torch.tensor(448.0 / 3.0 / 4)


def test_casts_merge_their_amax_into_the_running_one():
    running = torch.tensor(0.0)
    for largest, expected in ((2.0, 2.0), (5.0, 5.0), (3.0, 5.0)):
        fp8.cast(torch.tensor([[1.0, -largest]]), torch.tensor(1.0), running, E4M3, True, False)
        assert running == expected


def test_a_power_of_two_is_below_its_scale_by_less_than_half():
    scale = torch.tensor([1.0, 1.9999999, 2.0, 448 / 3e38, torch.finfo(torch.float32).max, math.nan])
    assert fp8.power_of_two(scale)[:5].tolist() == [1.0, 1.0, 2.0, 2.0**-120, 2.0**127]
    assert fp8.power_of_two(scale)[5].isnan()


@pytest.mark.parametrize("shape", [(1, 16), (16, 1), (1, 1)])
def test_operators_give_memory_of_their_own(shape):
    """A matrix of one row is its transpose in the same memory, which torch refuses of an operator."""
    x = numbers(*shape)
    for by_row, by_column in ((True, True), (True, False), (False, True)):
        codes, turned = fp8.cast(x, torch.tensor(1.0), None, E4M3, by_row, by_column)
        assert codes.shape == (shape if by_row else (0,))
        assert turned.shape == (shape[::-1] if by_column else (0,))
    codes = fp8.quantize(x, torch.tensor(1.0), E4M3)
    assert torch.equal(fp8.transpose(codes).float(), codes.t().float())
    rows = fp8.cast_blocks(numbers(1, 128), True, False, False)
    assert rows[0].shape == (1, 128) and rows[1].shape == (1, 1)


@pytest.mark.parametrize("dim", [0, 1])
def test_codes_of_shards_are_shards_of_the_codes(dim):
    x = numbers(TOKENS, WIDTH)
    scaling = CurrentScaling("hybrid")
    (whole, inverse), (by_column, _) = scaling.codes(INPUT, x, True, True)
    amax = torch.stack([shard.abs().amax() for shard in x.chunk(4, dim)]).amax()
    scale = fp8.power_of_two(fp8.scale_from_amax(amax, E4M3))
    shards = [fp8.quantize(shard, scale, E4M3) for shard in x.chunk(4, dim)]
    assert torch.equal(torch.cat(shards, dim).view(torch.uint8), whole.view(torch.uint8))
    assert (
        inverse == 1 / scale
        and by_column.t().is_contiguous()
        and torch.equal(by_column.float(), whole.float())
    )


def test_products_of_codes_are_the_same_in_any_order():
    a, b = (fp8.quantize(numbers(64, 4096, seed=n, spread=50.0), torch.tensor(1.0), E4M3) for n in (1, 2))
    one = torch.tensor(1.0)
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(0))
    whole = fp8.scaled_matmul((a, one), (b, one), torch.float64)
    assert torch.equal(whole, fp8.scaled_matmul((a[:, order], one), (b[:, order], one), torch.float64))


def decoded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What x becomes with one scale, a power of two, by the definition."""
    scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / x.abs().max().item()))
    codes = (x * scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    return codes.double() / scale


def passes(gemm, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """y and the gradients of x and weight."""
    x, weight = (t.clone().requires_grad_() for t in (x, weight))
    y = linear(x, weight, None, gemm)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]


OPERANDS = (numbers(TOKENS, WIDTH), numbers(OUT, WIDTH, seed=1), numbers(TOKENS, OUT, seed=2, spread=1e-3))


def check(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """To fp32's rounding of the results, or where they were added up in fp32 of the largest of them."""
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=5e-7 * b.abs().max().item())


@pytest.mark.parametrize("fp8_wgrad", [True, False])
@pytest.mark.parametrize(("formats", "of_gradient"), [("hybrid", E5M2), ("e4m3", E4M3)])
def test_tensorwise_matmuls_are_those_of_the_codes(formats, of_gradient, fp8_wgrad):
    x, weight, grad = OPERANDS
    x8, w8, g8 = decoded(x, E4M3), decoded(weight, E4M3), decoded(grad, of_gradient)
    wgrad = g8.T @ x8 if fp8_wgrad else grad.double().T @ x.double()
    gemm = Fp8Gemm(CurrentScaling(formats), torch.float32, fp8_wgrad)
    check(passes(gemm, x, weight, grad), [x8 @ w8.T, g8 @ w8, wgrad])


def blocks(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What x becomes with a scale a block, rounded down to a power of two."""
    result = torch.empty_like(x, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns]
            scale = 2.0 ** math.floor(math.log2(448.0 / block.abs().max().item()))
            result[i : i + rows, j : j + columns] = (block * scale).to(E4M3).double() / scale
    return result


def test_blockwise_matmuls_are_those_of_the_codes():
    """Each block has another size, so that no scale can stand in the place of another."""
    generator, shapes = torch.Generator().manual_seed(7), ((256, 384), (512, 384), (256, 512))
    x, weight, grad = (
        numbers(*shape, seed=seed)
        * torch.randint(-6, 7, (shape[0] // 128, shape[1] // 128), generator=generator)
        .float()
        .exp2()
        .repeat_interleave(128, 0)
        .repeat_interleave(128, 1)
        for seed, shape in enumerate(shapes)
    )
    w8 = blocks(weight, 128, 128)
    expected = [
        blocks(x, 1, 128) @ w8.T,
        blocks(grad, 1, 128) @ w8,
        blocks(grad, 128, 1).T @ blocks(x, 128, 1),
    ]
    for saves_weights in (True, False):
        check(passes(BlockGemm(torch.float32, saves_weights), x, weight, grad), expected)


class FakeQuantised(Gemm):
    """A recipe by its definition: operands rounded as `roundings` say, matmuls in fp32."""

    def __init__(self, x, weight, grad, x_by_column, grad_by_column):
        self.roundings = x, weight, grad, x_by_column, grad_by_column

    def forward(self, x, weight, bias=None):
        y = self.roundings[0](x[0]) @ self.roundings[1](weight[0]).T
        return y.float() if bias is None else y.float() + bias

    def dgrad(self, grad, weight):
        return (self.roundings[2](grad[0]) @ self.roundings[1](weight[0])).float()

    def wgrad(self, grad, x):
        return (self.roundings[4](grad[0]).T @ self.roundings[3](x[0])).float()


def test_a_models_gradients_err_by_what_the_format_rounds():
    """Against fp32, by recipe: the error of ours is that of fake-quantised operands, e4m3 rounds less than e5m2, and a
    scale a block no more than one a tensor."""
    config = ModelConfig(**{**PRESETS["tiny-gpt"], "num_layers": 2, "hidden_size": 128, "num_attention_heads": 2,
        "vocab_size": 64, "max_position_embeddings": 128, "hidden_dropout": 0.0, "attention_dropout": 0.0})  # fmt: skip
    model = Transformer(config, seed=3)
    initialize(model, config, seed=5)
    ids = torch.randint(0, 64, (2, 129), generator=torch.Generator().manual_seed(1))

    def gradients(gemm: Gemm) -> torch.Tensor:
        for name, module in model.named_modules():
            if name.startswith("layers.") and isinstance(module, Linear):
                plug(module, "gemm", gemm)
        loss = model(ids[:, :-1], labels=ids[:, 1:])
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])

    e4m3, e5m2 = partial(decoded, dtype=E4M3), partial(decoded, dtype=E5M2)
    row, column, tile = (partial(blocks, rows=r, columns=c) for r, c in ((1, 128), (128, 1), (128, 128)))
    recipes = {
        "hybrid": (Fp8Gemm(CurrentScaling("hybrid"), torch.float32), (e4m3, e4m3, e5m2, e4m3, e5m2)),
        "e4m3": (Fp8Gemm(CurrentScaling("e4m3"), torch.float32), (e4m3,) * 5),
        "blocks": (BlockGemm(torch.float32), (row, tile, row, column, column)),
    }
    exact, errors = gradients(GEMM), {}
    for name, (ours, roundings) in recipes.items():
        found, expected = (
            (gradients(gemm) - exact).norm() / exact.norm() for gemm in (ours, FakeQuantised(*roundings))
        )
        print(f"{name}: {found:.2e}, transcribed {expected:.2e}")
        assert found == pytest.approx(expected.item(), rel=0.02), name
        errors[name] = found
    assert errors["blocks"] < 1.02 * errors["e4m3"] and errors["e4m3"] < errors["hybrid"]


def transcribed(amaxes: list[float], length: int, algo: str, largest: float) -> list[float]:
    """Scales after each step by Transformer Engine's rule, one micro-batch a step: slot 0 collects, the scale follows
    the largest slot or slot 0, slots roll towards 0, slot 0 is cleared."""
    history, scale, scales = [0.0] * length, 1.0, []
    for amax in amaxes:
        history[0] = amax
        chosen = max(history) if algo == "max" else history[0]
        if chosen > 0 and math.isfinite(chosen):
            scale = largest / chosen
        history = [0.0, *history[2:], history[0]][-length:] if length > 1 else [0.0]
        scales.append(scale)
    return scales


@pytest.mark.parametrize(("length", "algo"), [(1, "most_recent"), (3, "max"), (4, "most_recent")])
def test_delayed_scales_follow_transformer_engines_rule(length, algo):
    amaxes = [4.0, 1.0, 8.0, 2.0, 1.5, 1.0, 0.5, 0.25]
    table = AmaxTable(["a"], "hybrid", length, algo, 0, torch.device("cpu"))
    found = []
    for amax in amaxes:
        table.begin_step()
        table.step_amax[0, INPUT] = amax
        table.end_passes(Axis())
        table.end_step(torch.tensor(0.0))
        found.append(table.scale[0, INPUT].item())
    assert found == pytest.approx(transcribed(amaxes, length, algo, 448.0), rel=1e-7)


def test_a_skipped_step_and_one_that_saw_nothing_leave_the_scales():
    table = AmaxTable(["a"], "hybrid", 2, "max", 0, torch.device("cpu"))
    table.step_amax.fill_(2.0)
    table.end_step(0.0)
    before = table.scale.clone(), table.history.clone()
    for amax, skipped in ((9.0, 1.0), (0.0, 0.0), (math.inf, 0.0)):  # the last as of the first scales' passes
        table.step_amax.fill_(amax)
        table.end_step(torch.tensor(skipped))
        assert torch.equal(table.scale, before[0]) and torch.equal(table.history, before[1])
    table.step_amax[0, GRADIENT] = math.inf
    assert table.overflow().isnan()
    table.begin_step()
    assert table.overflow() == 0


def test_state_goes_to_a_table_of_another_length_with_the_newest():
    cpu = torch.device("cpu")
    long, short = (AmaxTable(["a", "b"], "hybrid", length, "max", 0, cpu) for length in (3, 2))
    for amax in (4.0, 2.0, 1.0):
        long.step_amax.fill_(amax)
        long.end_step(0.0)
    state = {name: x.clone() for name, x in long.state().items()}
    short.load_state(state.keys(), state.__getitem__)
    assert short.ready and short.history[:, 1, WEIGHT].tolist() == [1.0, 2.0]
    assert torch.equal(short.scale, long.scale) and torch.equal(short.inverse, long.inverse)
    fresh = AmaxTable(["a", "c"], "hybrid", 2, "max", 0, cpu)
    fresh.load_state(state.keys(), state.__getitem__)
    assert not fresh.ready  # c's are still to be found


def two_layers(table: AmaxTable, compiled: bool, recomputed: bool) -> list[torch.Tensor]:
    """Two micro-batches through two linears: gradients, and what the table has seen."""
    weights = [numbers(WIDTH, WIDTH, seed=n, spread=0.05).requires_grad_() for n in (3, 4)]
    layers = []
    for name, weight in zip(table.rows, weights):
        gemm = Fp8Gemm(DelayedScaling(table, name), torch.float32)

        def layer(x, weight=weight, gemm=gemm):
            return torch.tanh(linear(x, weight, None, gemm))

        layers.append(torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer)
    table.begin_step()
    for seed in (5, 6):
        x = numbers(TOKENS, WIDTH, seed=seed).requires_grad_()
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        x.square().sum().backward()
    return [weight.grad for weight in weights] + [table.step_amax.clone()]


def test_delayed_scaling_is_the_same_compiled_and_recomputed():
    def table() -> AmaxTable:
        made = AmaxTable(["a", "b"], "hybrid", 1, "most_recent", 0, torch.device("cpu"))
        made.step_amax.copy_(torch.tensor([[4.0, 0.25, 2.0]]))
        made.end_step(0.0)
        return made

    plain = two_layers(table(), False, False)
    assert (plain[-1] > 0).all()
    for compiled, recomputed in ((False, True), (True, False), (True, True)):
        found = two_layers(table(), compiled, recomputed)
        assert all(torch.equal(a, b) for a, b in zip(plain, found)), (compiled, recomputed)


def test_the_first_step_scales_currently_and_records():
    table = AmaxTable(["a"], "hybrid", 1, "most_recent", 0, torch.device("cpu"))
    gemm = Fp8Gemm(DelayedScaling(table, "a"), torch.float32)
    current = Fp8Gemm(CurrentScaling("hybrid"), torch.float32)
    for a, b in zip(passes(gemm, *OPERANDS), passes(current, *OPERANDS)):
        assert torch.equal(a, b)
    assert table.step_amax[0].tolist() == [x.abs().max().item() for x in OPERANDS]
    table.end_step(torch.tensor(1.0))
    assert not table.ready and not table.history.any()  # skipped: the next step is the first
    table.end_step(torch.tensor(0.0))
    assert table.ready
    delayed = passes(gemm, *OPERANDS)
    assert not torch.equal(delayed[0], passes(current, *OPERANDS)[0])
    check(delayed, delayed_by_definition(*OPERANDS))


def test_compiled_code_leaves_current_scales_after_the_first_step():
    def two_steps(compiled: bool) -> list[torch.Tensor]:
        table = AmaxTable(["a"], "hybrid", 1, "most_recent", 0, torch.device("cpu"))
        gemm = Fp8Gemm(DelayedScaling(table, "a"), torch.float32)
        function = torch.compile(linear, backend="aot_eager", fullgraph=True) if compiled else linear
        found = []
        for _ in range(2):
            x, weight = (t.clone().requires_grad_() for t in OPERANDS[:2])
            y = function(x, weight, None, gemm)
            found += [y.detach(), *torch.autograd.grad(y, (x, weight), OPERANDS[2])]
            table.end_step(torch.tensor(0.0))
        return found

    eager = two_steps(False)
    assert all(torch.equal(a, b) for a, b in zip(eager, two_steps(True)))
    assert not torch.equal(eager[0], eager[3])


def delayed_by_definition(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    x8, w8, g8 = (
        fp8.quantize(t, scale, dtype).double() * fp8.reciprocal(scale).double()
        for t, dtype in ((x, E4M3), (weight, E4M3), (grad, E5M2))
        for scale in [fp8.scale_from_amax(t.abs().max(), dtype)]
    )
    return [x8 @ w8.T, g8 @ w8, g8.T @ x8]


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("rows", [1, 6, 128, 200])
def test_a_gpus_block_matmul_gets_whole_blocks_and_gives_the_rows_alone(monkeypatch, rows, tiles):
    """cuBLAS in blocks, as its documentation has the layouts of scales, multiplied here in fp64."""

    def scaled_mm(a, b, a_inverse, kind_a, b_inverse, kind_b, output_dtype):
        assert (
            len(a) % 128 == 0 and a_inverse.shape == (len(a), a.shape[1] // 128) and a_inverse.stride(0) == 1
        )
        assert b.stride(0) == 1 and b_inverse.stride(0) == 1
        b, blocks = b.t(), a.shape[1] // 128
        if kind_b == torch.nn.functional.ScalingType.BlockWise128x128:
            assert b_inverse.shape == (-(-blocks // 4) * 4, len(b) // 128)
            b_inverse = b_inverse[:blocks].t().contiguous()
        return fp8.block_matmul(
            a, a_inverse, b, b_inverse, kind_b != torch.nn.functional.ScalingType.BlockWise1x128, output_dtype
        )

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    a, a_inverse, *_ = fp8.cast_blocks(numbers(rows, 384), True, False, False)
    b, b_inverse, *_ = fp8.cast_blocks(numbers(256, 384, seed=1), True, False, tiles)
    given = a, a_inverse.t(), b, b_inverse if tiles else b_inverse.t(), tiles, torch.float32
    found = fp8.block_matmul_on_gpu(*given)
    assert found.shape == (rows, 256) and torch.equal(found, fp8.block_matmul(*given))
