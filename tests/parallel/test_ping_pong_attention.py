"""Attention that goes through one half of the sequences and then through the other, as context parallelism alone has
it: what one pass over all of them gives."""

import copy

import pytest
import torch

from megalith.config import RunConfig
from megalith.generation.sampling import generate
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.pass_context import Context, PassLayout, set_window_mask
from megalith.models.transformer import Transformer
from megalith.parallel.overlap.ping_pong import _slice_context, apply_ping_pong

SIZES = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, max_position_embeddings=32)
FAMILIES = {
    "gpt2": dict(preset="gpt2", hidden_dropout=0.1, attention_dropout=0.1),
    "llama": dict(preset="llama3-8b", num_query_groups=2, ffn_hidden_size=64, attention_dropout=0.1),
    "gemma": dict(
        preset="gemma3-1b", num_query_groups=2, kv_channels=8, ffn_hidden_size=64, attention_dropout=0.1
    ),
}


def whole_and_halved(family: str) -> tuple[Transformer, Transformer]:
    """The same model twice, the second with attention in halves."""
    config = RunConfig.from_tree({"model": SIZES | FAMILIES[family], "parallel": {"tp_comm_overlap": True}})
    whole = Transformer(config.model)
    initialize(whole, config.model, seed=3)
    halved = copy.deepcopy(whole)
    apply_ping_pong(halved, config.parallel, None)
    return whole, halved


def tokens(batch: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (batch, 16), generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_those_of_the_whole_with_dropout(family, documents):
    ids = tokens(4)
    settings = dict(
        document_ends=torch.tensor([[5, 10, 15, 16]] * 4, dtype=torch.int32) if documents else None
    )
    settings["position_ids"] = (torch.arange(16) % 5).expand(4, 16) if documents else None
    runs = []
    for model in whole_and_halved(family):
        loss = model(ids, labels=ids.roll(-1, 1), token_inputs=TokenInputs(**settings))
        loss.backward()
        runs.append((loss, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (loss, gradients), (halved_loss, halved_gradients) = runs
    torch.testing.assert_close(halved_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            halved_gradients[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max()
        )


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_logits_and_generated_text_are_those_of_the_whole(batch):
    whole, halved = (model.eval() for model in whole_and_halved("llama"))
    with torch.no_grad():
        torch.testing.assert_close(halved(tokens(batch)), whole(tokens(batch)), rtol=1e-5, atol=1e-6)
    prompts = tokens(batch)[:, :5].tolist()
    first, second = (generate(model, prompts, max_new_tokens=6, temperature=0.0) for model in (whole, halved))
    assert first == second


@pytest.mark.parametrize("padded", [False, True])
def test_each_half_has_its_sequences_masks_of_an_encoders_windows(padded):
    context = Context(4, PassLayout(), causal=False, position_ids=torch.arange(16).expand(4, 16))
    if padded:
        context.mask = (torch.arange(16) < torch.tensor([16, 9, 12, 7])[:, None])[:, None, None]
    set_window_mask(context, 2, 3, 16)
    whole = context.window_mask.expand(4, 1, 16, 16)
    halves = [_slice_context(context, number, 2, torch.chunk).window_mask for number in range(2)]
    assert torch.equal(torch.cat([half.expand(2, 1, 16, 16) for half in halves]), whole)


@pytest.mark.full
def test_a_layer_whose_attention_runs_in_halves_is_one_graph():
    _, halved = whole_and_halved("llama")
    eager = halved(tokens(4)).detach()
    next(iter(halved.layers.values())).compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(halved(tokens(4)), eager, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
