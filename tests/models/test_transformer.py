"""The whole model: it learns, it does not see the future, documents are closed, and compiled code is the same."""

import pytest
import torch
from default_cases import in_full
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

from megalith.config import ModelConfig
from megalith.config.presets import PRESETS
from megalith.errors import ConfigError
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.layer import TransformerLayer
from megalith.models.norm import HeadNorms, HeadsNorm
from megalith.models.transformer import Transformer
from megalith.ops.activation import ACTIVATIONS
from megalith.ops.dropout import ATTENTION_OUTPUT, MLP_OUTPUT

VOCAB, LONGEST = 61, 32
FAMILIES = {"gpt": "tiny-gpt", "llama": "tiny-llama", "qwen": "tiny-qwen"}


def build(family: str, dropout: float = 0.0, **fields) -> Transformer:
    options = {
        "vocab_size": VOCAB,
        "max_position_embeddings": LONGEST,
        "init_method_std": 0.1,  # large enough that attention matters from the start
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        **fields,
    }
    config = ModelConfig(**{**PRESETS[FAMILIES[family]], **options})
    model = Transformer(config, seed=3)
    initialize(model, config, seed=5)
    return model


def tokens(batch: int = 2, seq: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model: Transformer, **extra) -> tuple[float, dict[str, Tensor]]:
    ids = tokens(seq=17)
    inputs = TokenInputs(sample_numbers=torch.tensor([5, 2**33]), **extra)
    loss = model(ids[:, :-1], labels=ids[:, 1:], token_inputs=inputs)
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_the_l2_norm_of_heads_is_llama_4s_and_a_norm_whose_weights_are_1():
    normed, plain = build("llama", qk_layernorm=True), build("llama", qk_l2_norm=True)
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens()), normed(tokens()), rtol=1e-5, atol=1e-6)
    heads = torch.randn(2, 5, 4, 16, generator=torch.Generator().manual_seed(1))
    norm = plain.layers["0"].self_attention.q_layernorm
    torch.testing.assert_close(norm(heads), Llama4TextL2Norm(norm.epsilon)(heads))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_overfits_one_batch(family):
    model, ids = build(family, init_method_std=0.02).train(), tokens(seq=17)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(ids[:, :-1], labels=ids[:, 1:]) / (2 * 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_changes_no_logits_before_its_own_and_every_one_after(family):
    model, ids = build(family).eval(), tokens()
    changed = ids.clone()
    changed[:, 9] = (ids[:, 9] + 1) % VOCAB
    difference = (model(ids) - model(changed)).abs().amax(-1)  # [batch, seq]
    assert not difference[:, :9].any()
    assert (difference[:, 9:] > 1e-6).all()


def test_without_a_causal_mask_a_token_sees_all_others_of_its_document():
    model, ids = build("llama").eval(), tokens()
    model.causal = False
    changed = ids.clone()
    changed[:, 9] = (ids[:, 9] + 1) % VOCAB
    assert ((model(ids) - model(changed)).abs().amax(-1) > 1e-6).all()
    documents = torch.tensor([[8, 16]] * 2, dtype=torch.int32)
    difference = [model(x, token_inputs=TokenInputs(document_ends=documents)) for x in (ids, changed)]
    moved = (difference[0] - difference[1]).abs().amax(-1)
    assert not moved[:, :8].any() and (moved[:, 8:] > 1e-6).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_a_document_does_not_see_the_one_before_it(family, training):
    model, ids = build(family, dropout=0.1).train(training), tokens()
    documents = torch.tensor([[7, 16]] * 2, dtype=torch.int32)
    changed = ids.clone()
    changed[:, :7] = (ids[:, :7] + 5) % VOCAB
    first, second = (model(x, token_inputs=TokenInputs(document_ends=documents)) for x in (ids, changed))
    assert torch.equal(first[:, 7:], second[:, 7:])
    assert not torch.equal(first[:, :7], second[:, :7])
    assert not torch.equal(model(ids)[:, 7:], first[:, 7:])


@pytest.mark.parametrize("family", FAMILIES)
def test_with_positions_reset_a_document_in_a_sample_is_the_document_alone(family):
    model, ids = build(family).eval(), tokens()
    documents = torch.tensor([[7, 16]] * 2, dtype=torch.int32)
    positions = torch.tensor([[*range(7), *range(9)]] * 2)
    together = model(ids, token_inputs=TokenInputs(document_ends=documents, position_ids=positions))
    torch.testing.assert_close(together[:, :7], model(ids[:, :7]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together[:, 7:], model(ids[:, 7:]), rtol=1e-5, atol=1e-5)


def test_learned_positions_that_are_not_reset_tell_the_second_document_from_one_alone():
    model, ids = build("gpt").eval(), tokens()
    documents = torch.tensor([[7, 16]] * 2, dtype=torch.int32)
    assert (
        model(ids, token_inputs=TokenInputs(document_ends=documents))[:, 7:] - model(ids[:, 7:])
    ).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_follows_the_sample_and_not_its_place_in_the_batch(family):
    model, ids = build(family, dropout=0.2).train(), tokens(batch=4)
    numbers = torch.tensor([40, 41, 42, 43])
    together = model(ids, token_inputs=TokenInputs(sample_numbers=numbers))
    apart = torch.cat(
        [model(ids[i : i + 1], token_inputs=TokenInputs(sample_numbers=numbers[i : i + 1])) for i in range(4)]
    )
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        together, model(ids, token_inputs=TokenInputs(sample_numbers=numbers + 4)), rtol=1e-2
    )
    assert not torch.allclose(together, model.eval()(ids), rtol=1e-2)


def test_dropout_depends_on_the_seed_and_draws_from_no_random_state():
    ids, before = tokens(), torch.random.get_rng_state()
    model, other = build("gpt", dropout=0.2).train(), build("gpt", dropout=0.2).train()
    other.seed = 4
    assert torch.equal(model(ids), model(ids))
    assert not torch.allclose(model(ids), other(ids), rtol=1e-2)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_is_the_cross_entropy_of_the_logits_over_the_tokens_that_count(family):
    model, ids = build(family).eval(), tokens(seq=17)
    mask = (torch.rand(2, 16, generator=torch.Generator().manual_seed(1)) > 0.4).float()
    labels = ids[:, 1:]
    logits = model(ids[:, :-1])
    assert logits.shape == (2, 16, VOCAB)
    picked = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    expected = -(picked * mask).sum()
    loss = model(ids[:, :-1], labels=labels, loss_mask=mask)
    assert loss.shape == () and loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_the_vocabulary_changes_no_logits_and_no_gradients(family):
    narrow, wide = (build(family, make_vocab_size_divisible_by=divisor) for divisor in (1, 128))
    (loss, gradients), (other_loss, others) = loss_and_gradients(narrow), loss_and_gradients(wide)
    assert loss == pytest.approx(other_loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name][: len(gradient)], gradient, rtol=1e-4, atol=1e-5)
        assert not others[name][len(gradient) :].any()


def test_more_tokens_than_learned_positions_are_refused_and_rotary_ones_have_no_end():
    longer = torch.zeros(1, LONGEST + 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="has 33 tokens, but the model has 32 learned positions"):
        build("gpt")(longer)
    assert build("llama").eval()(longer).shape == (1, LONGEST + 1, VOCAB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_weights_and_gradients_stay_fp32_and_the_result_is_near(dtype):
    model = build("llama").train()
    loss, gradients = loss_and_gradients(model)
    model.compute_dtype = dtype
    half_loss, half_gradients = loss_and_gradients(model)
    assert model(tokens()).dtype == dtype
    assert half_loss == pytest.approx(loss, rel=1e-2)
    for name, gradient in gradients.items():
        assert half_gradients[name].dtype == torch.float32
        assert (half_gradients[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_float_and_its_like_change_what_the_layers_compute_in():
    model = build("llama").eval()
    exact = model(tokens())
    for dtype in (torch.bfloat16, torch.float16):
        model.compute_dtype = dtype
        assert model.to("cpu")(tokens()).dtype == dtype
        logits = model.float()(tokens())
        assert logits.dtype == torch.float32 and torch.equal(logits, exact)
    assert model.bfloat16()(tokens()).dtype == model.compute_dtype == torch.bfloat16


@pytest.mark.parametrize(
    "family", ["gpt", pytest.param("qwen", marks=pytest.mark.full)]
)  # some 10 s each the first time: the C++ compiler
def test_compiled_layers_give_the_loss_and_gradients_of_eager(family, quick_compile):
    documents = torch.tensor([[7, 16], [16, 16]], dtype=torch.int32)
    loss, gradients = loss_and_gradients(build(family, dropout=0.1).train(), document_ends=documents)
    compiled = build(family, dropout=0.1).train()
    for layer in compiled.layers.values():
        layer.compile(fullgraph=True)
    compiled_loss, compiled_gradients = loss_and_gradients(compiled, document_ends=documents)
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        assert (compiled_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize(
    ("fields", "normed", "compiled"),
    [
        (dict(), False, True),
        (dict(), False, False),
        in_full(dict(num_query_groups=4), False, True),
        (dict(qk_layernorm=True), True, True),
        (dict(qk_l2_norm=True), True, True),
    ],
    ids=["rotary", "rotary, not compiled", "a group per head", "norms of heads", "L2 norms"],
)
def test_attention_saves_queries_keys_and_values_once(fields, normed, compiled):
    """Norms save their inputs too, which are linear_qkv's output; a view of the values would hold all of it."""
    torch._dynamo.reset()
    sizes = dict(num_layers=1, hidden_size=64, kv_channels=20, num_attention_heads=4, num_query_groups=2)
    model = build("llama", **(sizes | fields)).bfloat16()
    if compiled:  # divided into forward and backward pass as by Inductor, without its code
        model.layers["0"].compile(fullgraph=True, backend="aot_eager_decomp_partition")
    ids, saved = tokens(), {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == 20 and tensor.ndim >= 4:  # heads
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids).float().sum()
    elements = sum(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in saved.values())
    query, key = 4 * 20, model.config.query_groups * 20
    output = query
    expected = query + 2 * key + output + normed * (query + key)
    assert elements / ids.numel() == expected


def test_the_further_activations_of_megatron_are_their_formulas():
    x = torch.randn(64)
    torch.testing.assert_close(ACTIVATIONS["squared_relu"](x), x.clamp(min=0) ** 2)
    torch.testing.assert_close(ACTIVATIONS["quick_gelu"](x), x / (1 + torch.exp(-1.702 * x)))


@torch.no_grad()
def test_a_softmax_off_by_one_is_one_with_a_learned_score_of_nothing_at_0():
    plain, off, learned = (
        build("llama", softmax_type=kind) for kind in ("vanilla", "off-by-one", "learnable")
    )
    off.load_state_dict(plain.state_dict())
    weights = {
        name: torch.zeros_like(x) for name, x in learned.state_dict().items() if "softmax_offset" in name
    }
    learned.load_state_dict(plain.state_dict() | weights)
    ids = torch.arange(12)[None] % 7
    assert len(weights) == len(learned.layers) and torch.equal(off(ids), learned(ids))
    assert (off(ids) - plain(ids)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [HeadsNorm, HeadNorms])
def test_zero_centred_weights_of_norms_of_heads_are_shifted_by_one(kind):
    plain = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=8)
    norms = [kind(plain.model_copy(update={"layernorm_zero_centered_gamma": c}), 2) for c in (False, True)]
    with torch.no_grad():
        norms[0].weight.normal_(1.0, 0.1)
        norms[1].weight.copy_(norms[0].weight - 1)
    x = torch.randn(2, 3, 2, 8)
    torch.testing.assert_close(norms[1](x), norms[0](x))


@pytest.mark.parametrize(
    "settings", [{}, {"parallel_attn_mlp": True}, {"num_experts": 2, "moe_ffn_hidden_size": 8}], ids=str
)
def test_each_branch_of_a_layer_has_a_dropout_mask_of_its_own(monkeypatch, settings):
    sites = []
    monkeypatch.setattr(TransformerLayer, "dropout_mask", lambda layer, context, site: sites.append(site))
    sizes = dict(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=8, max_position_embeddings=4)
    model = Transformer(ModelConfig(**sizes, **settings))
    initialize(model, model.config, seed=1)
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert sorted(sites) == sorted((ATTENTION_OUTPUT, MLP_OUTPUT))
