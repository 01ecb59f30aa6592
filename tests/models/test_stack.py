"""Stacks: cross-attention is its formula, padding is as if it were not there, a decoder sees a whole other sequence."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from examples.seams.causal_convolution import TAPS, CausalConvolution
from examples.seams.encoder_decoder import EncoderDecoder
from megalith.config import ModelConfig
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.pass_context import Context, Encoded, PassLayout
from megalith.models.transformer import Stack, Transformer, layers_of, stacks_of

BATCH, SEQ, KEYS, HIDDEN, VOCAB = 2, 6, 9, 32, 61
SIZES = dict(num_layers=4, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2, vocab_size=VOCAB,
             max_position_embeddings=16, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3)  # fmt: skip


def config(**fields) -> ModelConfig:
    return ModelConfig(**(SIZES | fields))


def filled(model: torch.nn.Module) -> torch.nn.Module:
    initialize(model, model.config, seed=3)
    random = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3, generator=random)
    return model.eval()


def tokens(seq: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, seq), generator=torch.Generator().manual_seed(seed))


def padded() -> tuple[Tensor, Tensor]:
    """Tokens of which the last three of the second sequence fill up, and which ones do not."""
    mask = torch.ones(BATCH, KEYS, dtype=torch.bool)
    mask[1, -3:] = False
    return tokens(KEYS, seed=1), mask


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_a_layer_with_cross_attention_is_its_formula(placement):
    model = filled(Stack(config(norm_placement=placement), range(2), cross=True))
    layer, random = model.layers["1"], torch.Generator().manual_seed(0)
    x, other = (torch.randn(BATCH, seq, HIDDEN, generator=random) for seq in (SEQ, KEYS))
    _, mask = padded()
    context = model.context(tokens(SEQ))
    context.encoded = Encoded(other, Context(BATCH, PassLayout()), mask[:, None, None])
    found = layer(x, context)

    def norm(kind: str, x: Tensor, *placements: str) -> Tensor:
        return getattr(layer, kind)(x) if placement in placements else x

    def cross(h: Tensor) -> Tensor:
        mixer = layer.cross_attention
        query = mixer.linear_q(h).view(BATCH, SEQ, 4, 8).transpose(1, 2)
        both = mixer.linear_kv(other).view(BATCH, KEYS, 2, 2, 8)  # by group: its key, its value
        key, value = (both[:, :, :, i].repeat_interleave(2, 2).transpose(1, 2) for i in range(2))
        out = scaled_dot_product_attention(query, key, value, mask[:, None, None])
        return mixer.linear_proj(out.transpose(1, 2).flatten(2))

    def added(x: Tensor, before: str, part, after: str) -> Tensor:
        return x + norm(after, part(norm(before, x, "pre", "sandwich")), "post", "sandwich")

    x = added(x, "input_layernorm", lambda h: layer.self_attention(h, context), "post_attention_layernorm")
    x = added(x, "pre_cross_attn_layernorm", cross, "post_cross_attn_layernorm")
    x = added(x, "pre_mlp_layernorm", layer.mlp, "post_mlp_layernorm")
    torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_seen_by_no_token(causal):
    model = filled(Transformer(config(), causal=causal))
    ids, mask = padded()
    logits = model(ids, token_inputs=TokenInputs(padding_mask=mask))
    torch.testing.assert_close(logits[:1], model(ids[:1]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[1:, :-3], model(ids[1:, :-3]), rtol=1e-5, atol=1e-5)
    documents = torch.tensor([[4, 9]] * BATCH, dtype=torch.int32)
    changed = ids.clone()
    changed[:, :4] = changed[:, -3:-2] = 7
    inputs = TokenInputs(document_ends=documents, padding_mask=mask)
    first, second = (model(x, token_inputs=inputs) for x in (ids, changed))
    assert torch.equal(first[1, 4:-3], second[1, 4:-3]) and torch.isfinite(first).all()


def encoder_decoder(**fields) -> EncoderDecoder:
    return filled(EncoderDecoder(config(**fields), 2))


def test_a_decoder_sees_its_past_and_all_of_the_other_sequence_but_its_padding():
    model, ids, (others, mask) = encoder_decoder(), tokens(SEQ), padded()

    def logits(ids: Tensor, others: Tensor) -> Tensor:
        return model(ids, encoder_input_ids=others, encoder_padding_mask=mask)

    expected = logits(ids, others)
    assert expected.shape == (BATCH, SEQ, VOCAB)
    later, first, filling = ids.clone(), others.clone(), others.clone()
    later[:, 3], first[:, 0], filling[1, -2] = later[:, 3] + 1, first[:, 0] + 1, 5
    moved = (logits(later % VOCAB, others) - expected).abs().amax(-1)
    assert not moved[:, :3].any() and (moved[:, 3:] > 1e-6).all()
    assert ((logits(ids, first % VOCAB) - expected).abs().amax(-1) > 1e-6).all()
    assert torch.equal(logits(ids, filling), expected)


def test_a_model_tells_its_stacks_and_layers():
    model = encoder_decoder()
    assert stacks_of(model) == [model, model.encoder] and model.encoder.embedding is None
    names = ["encoder.layers.0", "encoder.layers.1", "layers.2", "layers.3"]
    assert [*layers_of(model)] == names and [len(layer.mixers) for layer in layers_of(model).values()] == [
        1,
        1,
        2,
        2,
    ]
    assert {name for name, _ in model.named_parameters() if "cross" in name and "encoder" in name} == set()


def test_dropout_of_the_two_streams_and_of_cross_attention_has_masks_of_its_own():
    ids, mask = tokens(SEQ), torch.ones(BATCH, SEQ, dtype=torch.bool)
    model = encoder_decoder(hidden_dropout=0.5, position_embedding_type="rope").train()
    contexts = [model.encoder.context(ids), model.context(ids)]
    rows = [context.dropout.stream_rows(3) for context in contexts]
    rows += [context.at_layer(2).dropout.output_rows(site) for context in contexts[1:] for site in (1, 2, -1)]
    assert len({tuple(each.flatten().tolist()) for each in rows}) == 5
    given = dict(encoder_input_ids=ids, encoder_padding_mask=mask)
    numbers = torch.tensor([4, 9])
    inputs, others = TokenInputs(sample_numbers=numbers), TokenInputs(sample_numbers=numbers + 1)
    first, again = (model(ids, token_inputs=inputs, **given) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, model(ids, token_inputs=others, **given))


def test_a_convolution_sees_its_last_tokens_alone():
    model = filled(Transformer(config(num_layers=1, position_embedding_type="rope"), mixer=CausalConvolution))
    ids = tokens(12)
    changed = ids.clone()
    changed[:, 5] = (ids[:, 5] + 1) % VOCAB
    moved = (model(ids) - model(changed)).abs().amax(-1) > 1e-6
    assert moved.all(0).nonzero().flatten().tolist() == list(range(5, 5 + TAPS))
    assert not moved[:, :5].any() and not moved[:, 5 + TAPS :].any()


@pytest.mark.full
def test_a_layer_with_cross_attention_is_one_graph():
    found, (others, mask), ids = [], padded(), tokens(SEQ + 1)
    for compiled in (False, True):
        model = encoder_decoder(num_layers=3, hidden_dropout=0.1, attention_dropout=0.1).train()
        if compiled:
            model.layers["2"].compile(fullgraph=True, backend="eager")
        given = dict(encoder_input_ids=others, encoder_padding_mask=mask)
        model(ids[:, :-1], labels=ids[:, 1:].contiguous(), **given).backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
