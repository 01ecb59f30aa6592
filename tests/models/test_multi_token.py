"""Multi-token prediction against its formula, written out position by position."""

import torch
from torch.nn.functional import cross_entropy

from megalith.config import ModelConfig
from megalith.models.flops import count_parameters
from megalith.models.init import initialize
from megalith.models.multi_token import future_of
from megalith.models.transformer import Transformer

BATCH, SEQ = 2, 10
CONFIG = ModelConfig(num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=2, vocab_size=30,
                     make_vocab_size_divisible_by=8, max_position_embeddings=SEQ, position_embedding_type="rope",
                     swiglu=True, normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0,
                     attention_dropout=0.0, init_method_std=0.2, untie_embeddings_and_output_weights=True,
                     mtp_num_layers=2, mtp_loss_scaling_factor=0.3)  # fmt: skip


def model_and_tokens() -> tuple[Transformer, torch.Tensor]:
    model = Transformer(CONFIG)
    initialize(model, CONFIG, seed=1)
    return model, torch.randint(0, 30, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))


def test_the_gradient_is_that_of_both_losses_and_the_loss_that_of_the_next_token():
    model, tokens = model_and_tokens()
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    mask = torch.ones(BATCH, SEQ)
    mask[0, 3] = 0
    loss = model(ids, labels=labels, loss_mask=mask, future=future_of(labels, mask, None, 2))
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    plain = model(ids, labels=labels, loss_mask=mask)
    assert torch.equal(loss, plain)
    assert all(found[name].any() for name in found)
    model.zero_grad()

    places = torch.arange(SEQ)
    context = model.context(places.expand(BATCH, SEQ), places, None, None, None)
    hidden = model.final_layernorm(model.run_layers(["0", "1"], model.embedding(ids, None), context))
    total = plain
    for k, number in enumerate(("2", "3"), 1):
        layer = model.layers[number]
        told = torch.zeros(BATCH, SEQ, 16)  # what lies behind the end is told nothing, and tells nobody
        told[:, : SEQ + 1 - k] = model.embedding(tokens[:, k:][:, :SEQ], None)
        both = [layer.join.embedding_layernorm(told), layer.join.hidden_layernorm(hidden)]
        x = torch.cat(both, -1) @ layer.join.linear_join.weight.T
        x = x + layer.self_attention(layer.input_layernorm(x), context)
        x = x + layer.mlp(layer.pre_mlp_layernorm(x), context)
        hidden = layer.final_layernorm(x)
        for row in range(BATCH):
            for i in range(SEQ - k):
                logits = hidden[row, i] @ model.output_layer.weight[:30].T
                wanted = cross_entropy(logits, tokens[row, i + k + 1])
                total = total + 0.3 / 2 * wanted * mask[row, i + k]
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_future_in_another_document_does_not_count():
    labels = torch.tensor([[1, 2, 3, 4]])
    future = future_of(labels, torch.tensor([[1.0, 1.0, 0.0, 1.0]]), torch.tensor([[0, 0, 1, 1]]), 2)
    assert future.tokens[:, 0].tolist() == [[1, 2, 3, 4], [2, 3, 4, 1]]
    assert future.labels[:, 0, :3].tolist() == [[2, 3, 4], [3, 4, 1]]
    assert future.loss_mask[:, 0].tolist() == [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_further_layers_are_counted_and_left_out_without_a_future():
    model, tokens = model_and_tokens()
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(CONFIG).total
    plain = Transformer(CONFIG.model_copy(update={"mtp_num_layers": None}))
    initialize(plain, plain.config, seed=1)
    assert torch.equal(model(tokens[:, :SEQ]), plain(tokens[:, :SEQ]))
