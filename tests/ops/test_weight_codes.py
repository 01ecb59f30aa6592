"""Codes of frozen weights: bitsandbytes' arithmetic, nearest numbers, and any rows and columns without the rest."""

from itertools import pairwise

import pytest
import torch

from megalith.ops.weight_codes import (
    BLOCK,
    E2M1,
    NF4,
    CodedMatrix,
    assemble,
    decode,
    dynamic_map,
    encode,
    stack,
    take,
)

FORMS = ("int8", "fp8", "nf4", "mxfp4")


def matrix(rows: int = 96, columns: int = 512) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    values[5] = 0
    return values * torch.logspace(-3, 1, rows)[:, None]


def coded(form: str, values: torch.Tensor) -> CodedMatrix:
    return encode(form, values, torch.arange(len(values)))


def bitsandbytes_nf4(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes, absmax codes, scales and mean by bitsandbytes 0.50's generic quantize_4bit, written out."""
    blocks = values.reshape(-1, 64)
    absmax = blocks.abs().max(1)[0]
    scaled = torch.clamp(blocks * (1.0 / absmax.clamp(min=1e-38).view(-1, 1)), -1, 1).reshape(-1)
    indices = (scaled[:, None] - torch.tensor(NF4)).abs().argmin(1).to(torch.uint8)
    mean = absmax.mean()
    rest = absmax - mean
    rest = torch.nn.functional.pad(rest, (0, -len(rest) % 256)).view(-1, 256)
    scales = rest.abs().max(1)[0]
    rest = torch.clamp(rest * (1 / scales.view(-1, 1)), -1, 1).flatten()[: len(absmax)]
    codes = (rest[:, None] - dynamic_map()).abs().argmin(1).to(torch.uint8)
    return (indices[::2] << 4) | indices[1::2], codes, scales, mean


def test_nf4_and_its_double_quantization_are_those_of_bitsandbytes() -> None:
    values = matrix()
    ours, (codes, absmax, scales, mean) = coded("nf4", values), bitsandbytes_nf4(values)
    assert torch.equal(ours.codes.flatten(), codes) and torch.equal(ours.scales.flatten(), absmax)
    assert torch.equal(ours.table[:, 0], scales) and torch.equal(ours.table[0, 1], mean)
    bounds = dynamic_map()[absmax.long()].view(-1, 8) * scales.repeat_interleave(256)[:768].view(-1, 8) + mean
    numbers = torch.tensor(NF4)[torch.stack([codes >> 4, codes & 15], 1).flatten().long()]
    expected = (numbers.view(-1, 64) * bounds.flatten()[:, None]).view(values.shape)
    assert torch.equal(decode("nf4", assemble("nf4", values.shape, [ours]), torch.float32), expected)
    # of create_dynamic_map() of bitsandbytes 0.50
    assert dynamic_map().double().sum().item() == 1.0
    assert dynamic_map()[[0, 1, 127, 128, 254, 255]].tolist() == pytest.approx(
        [-0.992968738079071, -0.9789062738418579, 0.0, 5.4999998e-07, 0.992968738079071, 1.0]
    )


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_near_and_coding_them_again_changes_nothing(form: str) -> None:
    values = matrix()
    once = decode(form, assemble(form, values.shape, [coded(form, values)]), torch.float32)
    error = (once - values).norm() / values.norm()
    assert error < {"int8": 0.01, "fp8": 0.03, "nf4": 0.1, "mxfp4": 0.12}[form]
    if form != "nf4":  # the mean of its absmaxes moves
        again = decode(form, assemble(form, values.shape, [coded(form, once)]), torch.float32)
        torch.testing.assert_close(again, once, rtol=1e-6, atol=0)


def test_mxfp4_rounds_to_the_nearest_and_in_the_middle_to_the_even_code() -> None:
    middles = [(a + b) / 2 for a, b in pairwise(E2M1)]
    row = torch.tensor([*E2M1, *middles, *[-value for value in middles], 7.0, -9.0, 0.1, 0.3])
    values = torch.nn.functional.pad(row, (0, 32 - len(row)))[None]
    expected = [*E2M1, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4]
    values[0, -1] = 6.0  # the largest value decides the exponent
    values[0, 22:24] = 0
    back = decode("mxfp4", assemble("mxfp4", values.shape, [coded("mxfp4", values)]), torch.float32)
    assert back[0, : len(expected)].tolist() == pytest.approx(expected)
    assert back[0, 24:26].tolist() == [0.0, 0.5]


@pytest.mark.parametrize("form", FORMS)
def test_any_rows_of_several_matrices_and_any_blocks_of_columns_are_those_of_the_whole(form: str) -> None:
    """Two matrices whose rows alternate, as gate and up; of two experts."""
    values = torch.stack([matrix(300), matrix(300).flip(0)])
    whole, experts = [], []
    for each in values:
        rows = torch.arange(300).view(-1, 2).T
        parts = [encode(form, each[of_part], of_part) for of_part in rows]
        experts.append(assemble(form, each.shape, parts))
        whole.append(torch.empty(300, 512))
        for of_part in rows:
            alone = assemble(form, (150, 512), [coded(form, each[of_part])])
            whole[-1][of_part] = decode(form, alone, torch.float32)
    both, stacked = stack(form, experts), torch.stack(whole)
    assert torch.equal(decode(form, both, torch.float32), stacked)
    part = take(form, both, slice(37, 201), slice(192, 320))
    assert torch.equal(decode(form, part, torch.float32, 192), stacked[:, 37:201, 192:320])
    assert part.codes.numel() * part.codes.itemsize * (2 if form in BLOCK else 1) == 2 * 164 * 128
