"""qk-clip: the largest logit of each head, and the rescaling of its projections as Megatron-LM's.

Layouts are in test_optimizer_layouts.py.
"""

from unittest import mock

import pytest
import torch
from optimizer_job import GATED, LATENT, batches, configuration, losses, started

import megalith
from megalith.config import RunConfig
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError
from megalith.ops import max_logits as tiles
from megalith.optim.qk_clip import clip_factors
from megalith.parallel import attention_logits
from megalith.parallel.context.zigzag import spans

ENDS = torch.tensor([[5, 12, 24], [9, 24, 24]], dtype=torch.int32)
MASK = torch.rand(2, 1, 24, 24, generator=torch.Generator().manual_seed(1)) < 0.4
CASES = {
    "causal": ({}, "causal"),
    "full": (dict(causal=False), "full"),
    "window": (dict(window=5), "window"),
    "documents": (dict(documents=ENDS), "documents"),
    "documents_window": (dict(documents=ENDS, window=5), "documents window"),
    "mask": (dict(mask=MASK), "mask"),
}


def visible_pairs(kind: str) -> torch.Tensor:
    """bool [2, 24, 24], from the definitions."""
    row, column = torch.arange(24)[:, None], torch.arange(24)[None]
    pairs = torch.ones(2, 24, 24, dtype=torch.bool)
    if "mask" in kind:
        return MASK[:, 0]
    if kind != "full":
        pairs &= column <= row
    if "window" in kind:
        pairs &= column > row - 5
    if "documents" in kind:
        for batch, ends in enumerate(ENDS.tolist()):
            numbers = torch.tensor([sum(end <= token for end in ends) for token in range(24)])
            pairs[batch] &= numbers[:, None] == numbers[None]
    return pairs


@pytest.mark.parametrize(("settings", "kind"), CASES.values(), ids=CASES)
def test_the_largest_logit_of_each_head_is_that_of_the_score_matrix(settings, kind, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 24, heads, 8, generator=generator) for heads in (4, 2))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key.repeat_interleave(2, dim=2)) * 0.3
    expected = scores.masked_fill(~visible_pairs(kind)[:, None], float("-inf")).amax((0, 2, 3))
    for keys, tile in ((2048, 2**25), (7, 7 * 8 * 3)):
        monkeypatch.setattr(tiles, "KEYS", keys)
        monkeypatch.setattr(tiles, "TILE", tile)
        torch.testing.assert_close(tiles.max_logits(query, key, scale=0.3, **settings), expected)
    parts = [spans(rank, 2, 12) for rank in range(2)]  # two ranks of context parallelism
    parts = [
        tiles.max_logits(
            query[:, [token for span in each for token in span]], key, scale=0.3, spans=each, **settings
        )
        for each in parts
    ]
    torch.testing.assert_close(torch.stack(parts).amax(0), expected)


def stepped(model: dict, threshold: float, **sections):
    """Return an optimizer after a step, the table of logits of that step, and the step's result."""
    optim = dict(qk_clip=threshold > 0, qk_clip_threshold=threshold or 100.0, qk_clip_alpha=0.3)
    config = RunConfig.from_tree(
        {
            **configuration("", model).to_tree(),
            "optim": {"lr": 3e-3, **optim},
            "log": {"log_max_attention_logit": True},
            **sections,
        }
    )
    optimizer = started(config)
    with torch.no_grad():
        for name, weight in optimizer.model.parameters.named:
            if name.endswith("linear_qkv.bias"):
                weight.copy_(torch.linspace(-0.5, 0.5, len(weight)))
    loader = batches(optimizer, 0, 1, seed=0)
    optimizer.model.backward([next(loader) for _ in range(4)])
    logits = optimizer.model.attention_logits.all_ranks().clone()
    return optimizer, logits, optimizer.step()


def weights(optimizer: megalith.Optimizer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in optimizer.model.parameters.named}


def megatron_qkv(weight, eta):
    """Megatron-LM's SelfAttention._clip_linear_qkv, for 2 groups of 2 heads of 8 rows."""
    eta = eta.view(2, 2).amin(1).view(2, 1, 1)
    query, key, value = weight.view(2, 32, -1).split([16, 8, 8], dim=1)
    return torch.cat([query * eta**0.3, key * eta**0.7, value], dim=1).view(weight.shape)


def megatron_latent(name, weight, eta):
    """Megatron-LM's MLASelfAttention._clip_q_proj_weight and _clip_kv_proj_weight."""
    eta = eta.view(4, 1, 1)
    if "linear_q_up_proj" in name:
        nope, rope = weight.view(4, 10, -1).split([6, 4], dim=1)
        return torch.cat([nope * eta**0.3, rope * eta], dim=1).view(weight.shape)
    key, value = weight.view(4, 14, -1).split([6, 8], dim=1)
    return torch.cat([key * eta**0.7, value], dim=1).view(weight.shape)


@pytest.mark.parametrize("model", [GATED | dict(add_qkv_bias=True), LATENT], ids=["grouped", "latent"])
def test_heads_above_the_threshold_are_rescaled_as_megatrons_and_nothing_else_changes(model):
    plain, logits, result = stepped(model, 0.0)
    assert result.max_attention_logit == logits.max()
    threshold = logits.median().item()
    clipped, again, _ = stepped(model, threshold)
    assert torch.equal(again, logits)
    eta = (threshold / logits).clamp(max=1)
    assert (eta < 1).any() and (eta == 1).any()
    before, changed = weights(plain), set()
    for name, weight in weights(clipped).items():
        expected = before[name]
        row = {"layers.0.": 0, "layers.1.": 1}.get(name[:9])
        if "linear_qkv" in name:
            expected = megatron_qkv(expected, eta[row])
        elif "linear_q_up_proj" in name or "linear_kv_up_proj" in name:
            expected = megatron_latent(name, expected, eta[row])
        changed |= {name.split(".", 2)[-1]} if not torch.equal(weight, before[name]) else set()
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)
    linears = {"linear_qkv.weight", "linear_qkv.bias"} if model is not LATENT else {
        "linear_q_up_proj.weight", "linear_kv_up_proj.weight"
    }  # fmt: skip
    assert changed == {f"self_attention.{name}" for name in linears}


@pytest.mark.parametrize("model", [GATED | dict(add_qkv_bias=True), LATENT], ids=["grouped", "latent"])
def test_a_clipped_heads_logits_shrink_by_the_factor(model):
    optimizer, logits, _ = stepped(model, 0.5, optim=dict(lr=0.0, qk_clip=True, qk_clip_threshold=0.5))
    loader = batches(optimizer, 0, 1, seed=0)
    optimizer.model.backward([next(loader) for _ in range(4)])
    first = optimizer.model.attention_logits.all_ranks()[0]  # the input of later layers has changed
    group = 1 if model is LATENT else 2
    eta = (0.5 / logits[0].view(-1, group).amax(1)).clamp(max=1).repeat_interleave(group)
    torch.testing.assert_close(first, logits[0] * eta, rtol=1e-5, atol=1e-6)
    assert (eta < 1).any() and first.max() <= 0.5 + 1e-6


def test_a_skipped_step_and_logits_that_are_not_finite_change_no_weight():
    optimizer, _, _ = stepped(GATED, 0.1)
    before = weights(optimizer)
    loader = batches(optimizer, 0, 1, seed=0)
    optimizer.model.backward([next(loader) for _ in range(4)])
    optimizer.model.parameters.named[0][1].grad.fill_(float("nan"))
    assert optimizer.step().skipped == 1
    assert all(torch.equal(before[name], weight) for name, weight in weights(optimizer).items())
    logits = torch.tensor([float("nan"), float("-inf"), float("inf"), 0.05, 0.4])
    assert clip_factors(logits, 0.1).tolist() == pytest.approx([1, 1, 1, 1, 0.25])


def test_recomputed_passes_record_nothing_and_the_run_is_the_same():
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    outcomes = []
    for parallel in ({}, full):
        with mock.patch.object(attention_logits, "max_logits", side_effect=tiles.max_logits) as recorded:
            optimizer, logits, _ = stepped(GATED, 0.5, parallel=parallel)
        assert recorded.call_count == 2 * 4  # layers · micro-batches
        outcomes.append((logits, weights(optimizer)))
    (logits, plain), (again, recomputed) = outcomes
    assert torch.equal(logits, again) and all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_evaluation_records_nothing_and_a_step_begins_without_logits():
    optimizer, _, _ = stepped(GATED, 0.5)
    assert optimizer.model.attention_logits.all_ranks().eq(float("-inf")).all()
    loader = batches(optimizer, 0, 1, seed=0)
    optimizer.model.evaluate([next(loader) for _ in range(4)])
    assert optimizer.model.attention_logits.all_ranks().eq(float("-inf")).all()


def test_a_resumed_run_is_bitwise_the_same(tmp_path):
    config = configuration("", GATED, optimizer="muon", qk_clip=True, qk_clip_threshold=0.5)
    whole = losses(config, save=str(tmp_path))
    assert losses(config, load=str(tmp_path)) == whole[1:]
    assert whole[1:] != losses(configuration("", GATED, optimizer="muon"))[1:]


@pytest.mark.parametrize(("settings", "words"), [
    ({"model.qk_layernorm": True}, "model.qk_layernorm is true, but attention logits of normalized"),
    ({"lora.rank": 4}, "with adapters the weights"),
    ({"optim.optimizer": "schedule_free_adamw", "optim.lr_decay_style": "constant"}, "choose another optimizer"),
])  # fmt: skip
def test_what_qk_clip_cannot_change_is_refused(settings, words):
    config = configuration("", GATED, qk_clip=True).with_settings(settings)
    with pytest.raises(ConfigError, match=words):
        check_training(config)


def test_a_model_that_records_no_logits_is_refused():
    optimizer = started(configuration("", GATED))
    with pytest.raises(ConfigError, match="does not record attention logits"):
        megalith.Optimizer(optimizer.model, optimizer.config.model_copy(update={"qk_clip": True}))


@pytest.mark.full
def test_compiled_layers_record_the_same_logits():
    _, expected, _ = stepped(GATED, 0.5)
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    for parallel in ({}, full):
        _, logits, _ = stepped(GATED, 0.5, parallel=parallel, runtime=dict(device="cpu", compile=True))
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
