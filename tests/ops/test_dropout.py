"""Counter dropout: the right rate, no visible dependence, and a mask that follows from an element's place alone."""

import itertools
import math

import pytest
import torch

from megalith.ops.dropout import (
    ATTENTION_OUTPUT,
    ATTENTION_PROBABILITIES,
    EMBEDDING_OUTPUT,
    MLP_OUTPUT,
    DropoutKeys,
    attention_keep_mask,
    column_keys,
    counter_dropout,
    output_rows,
    token_keys,
)

BATCH, SEQ, WIDTH, P = 4, 128, 512, 0.1
COLUMNS = column_keys(WIDTH, "cpu")
SITES = (ATTENTION_OUTPUT, MLP_OUTPUT, EMBEDDING_OUTPUT)


def keys_of(seed=1234, samples=range(BATCH), positions=range(SEQ), layer=0):
    tokens = token_keys(seed, torch.tensor([*samples]), torch.tensor([*positions]))
    return DropoutKeys(
        queries=tokens, stream=tokens, columns=COLUMNS, layer=torch.tensor(layer, dtype=torch.int32)
    )


def dropped(x, p, rows):
    return counter_dropout(x, p, rows, column_keys(x.shape[-1], "cpu"))


def kept(p=P, site=MLP_OUTPUT, width=WIDTH, **place):
    """The stream's mask as 0 and 1, [batch, seq, width]."""
    rows = keys_of(**place).stream_rows(site)
    return (dropped(torch.ones(*rows.shape, width), p, rows) != 0).float()


def attention_kept(p=P, heads=6, length=SEQ, first_head=0, **place):
    rows = keys_of(**place).query_rows()
    return attention_keep_mask(rows, heads, torch.arange(length), p, first_head).float()


def assert_counts_are_binomial(ones, dim, p):
    """Chi-square of the numbers kept in each slice along `dim`, within 5 standard deviations."""
    others = [d for d in range(ones.ndim) if d != dim]
    counts = ones.sum(others)
    n = ones.numel() // len(counts)
    chi_square = ((counts - n * (1 - p)) ** 2 / (n * p * (1 - p))).sum().item()
    assert abs(chi_square - len(counts)) < 5 * math.sqrt(2 * len(counts)), (dim, chi_square)


def assert_uncorrelated(a, b):
    n = a.numel()
    assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()) < 5 / math.sqrt(n)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("mask", [kept, attention_kept])
def test_the_share_dropped_is_the_probability_over_all_and_over_every_slice(mask, p):
    ones = mask(p)
    n = ones.numel()
    assert abs(ones.mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    for dim in range(ones.ndim):
        assert_counts_are_binomial(ones, dim, p)


def test_kept_values_are_scaled_so_that_the_mean_stays():
    rows = keys_of().stream_rows(MLP_OUTPUT)
    x = torch.randn(BATCH, SEQ, WIDTH)
    out = dropped(x, 0.25, rows)
    assert torch.equal(out, torch.where(kept(0.25) != 0, x * (1 / 0.75), 0.0))


@pytest.mark.parametrize("mask", [kept, attention_kept])
def test_masks_of_other_seeds_samples_and_layers_are_unrelated(mask):
    base = mask()
    others = [
        mask(seed=1235),
        mask(seed=1234 + 2**31),
        mask(samples=range(BATCH, 2 * BATCH)),
        mask(samples=range(2**32, 2**32 + BATCH)),  # the high half of a sample's number counts
        mask(samples=range(2**40, 2**40 + BATCH)),
        mask(positions=range(SEQ, 2 * SEQ)),
        mask(positions=range(2**20, 2**20 + SEQ)),
        *(mask(layer=layer) for layer in (-1, 1, 2, 125)),
    ]
    for a, b in itertools.combinations([base, *others], 2):
        assert_uncorrelated(a, b)


def test_masks_of_the_sites_of_a_layer_are_unrelated_also_to_those_of_its_neighbours():
    masks = [kept(site=site, layer=layer) for site in (*SITES, ATTENTION_PROBABILITIES) for layer in range(3)]
    for a, b in itertools.combinations(masks, 2):
        assert_uncorrelated(a, b)


@pytest.mark.parametrize("mask", [kept, attention_kept])
def test_neighbours_at_any_distance_in_any_direction_are_unrelated(mask):
    ones = mask(0.5)
    for dim in range(ones.ndim):
        for distance in (1, 2, 3, 8, 16, 64):
            if distance < ones.shape[dim]:
                length = ones.shape[dim] - distance
                assert_uncorrelated(ones.narrow(dim, 0, length), ones.narrow(dim, distance, length))


def test_no_two_tokens_of_a_batch_share_a_row_of_the_mask():
    rows = kept(0.5, samples=range(64), width=64).flatten(0, 1)
    assert len(torch.unique(rows, dim=0)) == len(rows)


@pytest.mark.parametrize("mask", [kept, attention_kept])
def test_a_part_of_the_batch_or_of_the_sequence_sees_its_part_of_the_mask(mask):
    whole = mask()
    token_dim = whole.ndim - 2
    assert torch.equal(mask(samples=range(1, 3)), whole[1:3])
    assert torch.equal(mask(positions=range(40, 97)), whole.narrow(token_dim, 40, 57))


def test_a_narrower_tensor_or_fewer_heads_see_the_first_part_of_the_mask():
    assert torch.equal(kept(width=100), kept()[..., :100])
    assert torch.equal(attention_kept(heads=2), attention_kept()[:, :2])
    assert torch.equal(attention_kept(heads=2, first_head=3), attention_kept()[:, 3:5])
    assert torch.equal(attention_kept(length=33), attention_kept()[..., :33])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_passes_where_the_value_passed_and_nowhere_else(dtype):
    rows = keys_of().stream_rows(MLP_OUTPUT)
    x = torch.randn(BATCH, SEQ, WIDTH, dtype=dtype, requires_grad=True)
    out = dropped(x, P, rows)
    weight = torch.rand_like(out) + 1
    out.backward(weight)
    assert out.dtype == x.grad.dtype == dtype
    assert torch.equal(x.grad != 0, kept() != 0)
    assert torch.equal(x.grad, torch.where(kept() != 0, weight * (1 / (1 - P)), 0.0))


def test_nothing_is_drawn_from_the_global_random_state():
    before = torch.random.get_rng_state()
    kept()
    attention_kept()
    assert torch.equal(before, torch.random.get_rng_state())


def test_rows_of_all_layers_are_those_of_each():
    rows = output_rows(keys_of().stream, torch.arange(3, dtype=torch.int32))
    for layer in range(3):
        for place, site in enumerate((ATTENTION_OUTPUT, MLP_OUTPUT)):
            assert torch.equal(rows[layer, place], keys_of(layer=layer).stream_rows(site))


@pytest.mark.full  # models/test_transformer.py compiles both masks in a layer
def test_compiled_masks_are_those_of_eager(quick_compile):
    def masks(x, samples, positions, layer):
        tokens = token_keys(1234, samples, positions)
        keys = DropoutKeys(queries=tokens, stream=tokens, columns=COLUMNS[:40], layer=layer)
        stream = counter_dropout(x, P, keys.stream_rows(MLP_OUTPUT), keys.columns)
        return stream, attention_keep_mask(keys.query_rows(), 3, positions, P)

    x = torch.randn(2, 24, 40)
    samples, positions = torch.tensor([3, 2**33 + 1]), torch.arange(5, 29)
    compiled = torch.compile(masks, fullgraph=True)
    for number in (0, 1):
        layer = torch.tensor(number, dtype=torch.int32)
        arguments = (x, samples, positions, layer)
        for ours, theirs in zip(compiled(*arguments), masks(*arguments)):
            assert torch.equal(ours, theirs)


def murmur(h: int) -> int:
    """Murmur3's finalizer on 32 bits, in whole numbers without a bound."""
    h &= 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_masks_are_those_of_the_hash_in_plain_integers():
    """A run that goes on with another version of this package, or on another device, drops the same elements."""
    seed, samples, positions, layer, heads, first = (
        4_000_000_007,
        [0, 3, 2**31 + 5, 2**40 + 9],
        [0, 1, 70_001],
        6,
        2,
        3,
    )
    place = dict(seed=seed, samples=samples, positions=positions, layer=layer)
    for p in (0.1, 0.5):
        least = int(p * 2**31)
        rows = keys_of(**place).query_rows()
        stream = counter_dropout(
            torch.ones(4, 3, 40), p, keys_of(**place).stream_rows(MLP_OUTPUT), COLUMNS[:40]
        )
        attention = attention_keep_mask(rows, heads, torch.tensor(positions), p, first)
        for i, sample in enumerate(samples):
            for j, position in enumerate(positions):
                of_sample = murmur(sample ^ murmur(sample >> 32 ^ seed * 0x9E3779B1))
                token = murmur(of_sample ^ murmur(position + 0x632BE5AB))
                row = murmur(token ^ murmur(layer * 8 + MLP_OUTPUT + 1))
                kept = [murmur(row ^ murmur(column)) & 0x7FFFFFFF >= least for column in range(40)]
                assert stream[i, j].tolist() == pytest.approx([value / (1 - p) for value in kept])
                row = murmur(token ^ murmur(layer * 8 + ATTENTION_PROBABILITIES + 1))
                for head in range(heads):
                    columns = [(first + head + 1) * 0x1000000 ^ key for key in positions]
                    kept = [murmur(row ^ murmur(column)) & 0x7FFFFFFF >= least for column in columns]
                    assert attention[i, head, j].tolist() == kept


def test_the_embeddings_output_is_a_layer_before_the_first():
    token, row = (
        int(keys[0, 0]) for keys in (keys_of().stream, keys_of(layer=-1).stream_rows(EMBEDDING_OUTPUT))
    )
    assert row & 0xFFFFFFFF == murmur(token ^ murmur(-8 + EMBEDDING_OUTPUT + 1))
