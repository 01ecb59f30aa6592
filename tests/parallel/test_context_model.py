"""A whole model on cut sequences gives one process's loss and gradients, and its logits when generating."""

import itertools

import pytest
import torch
from copies_by_gloo import as_if_direct
from default_cases import by_default, cases_that_run

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.config import ModelConfig, ParallelConfig
from megalith.data.batch import Batch, BoundaryRules, make_batch
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer
from megalith.parallel.context.context_parallel import apply_context, shard_batch, unshard
from megalith.parallel.mesh import build_mesh

VOCAB, SEQ, END = 61, 32, 5

GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=VOCAB,
    max_position_embeddings=SEQ,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=VOCAB,
    max_position_embeddings=SEQ,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    qk_layernorm=True,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
QKV_ROWS = 3 * GPT2.hidden_size
BLOOM = GPT2.model_copy(update=dict(position_embedding_type="alibi", embedding_layernorm=True))
MIXERS = {
    "delta net": dict(
        experimental_attention_variant="gated_delta_net", linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=6, linear_value_head_dim=5, linear_allow_neg_eigval=True,
    ),
    "mamba2": dict(
        experimental_attention_variant="mamba2", mamba_num_heads=8, mamba_num_groups=2, mamba_head_dim=5,
        mamba_state_dim=6,
    ),
    "short convolution": dict(experimental_attention_variant="short_conv", short_conv_bias=True),
}  # fmt: skip
MIXERS = {
    name: LLAMA.model_copy(update={"linear_attention_freq": 2, **fields}) for name, fields in MIXERS.items()
}
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "bloom": BLOOM, **MIXERS}
RULES = {
    "one document": BoundaryRules(),
    "documents": BoundaryRules(END, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True),
}
WAYS = [
    (2, "p2p", None),
    (4, "p2p", None),
    (4, "all_gather", None),
    (4, "a2a", None),
    (4, "a2a+p2p", [2, 2]),
]


def a_model(family: str) -> Transformer:
    model = Transformer(FAMILIES[family], seed=11)
    initialize(model, FAMILIES[family], seed=11)
    return model


def a_batch(rules: str) -> Batch:
    random = torch.Generator().manual_seed(2)
    samples = torch.randint(0, VOCAB, (2, SEQ + 1), generator=random)
    samples[0, [4, 13, 14, 27]] = END
    return make_batch(samples.numpy(), torch.tensor([40, 41]).numpy(), RULES[rules])


def loss_and_gradients(model: Transformer, batch: Batch, token_index: torch.Tensor, axis: Axis):
    """Sums over the axis: the loss, and the gradient of every parameter by its name."""
    loss = model(
        batch.input_ids,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        token_inputs=TokenInputs(
            position_ids=batch.position_ids,
            token_index=token_index,
            document_ends=batch.document_ends,
            sample_numbers=batch.sample_numbers,
        ),
    )
    loss.backward()
    gradients = {name: all_reduce_no_grad(p.grad, axis) for name, p in model.named_parameters()}
    return all_reduce_no_grad(loss.detach(), axis), gradients


def train(way: tuple, family: str, rules: str):
    size, cp_comm_type, sizes = way
    axis = build_mesh(ParallelConfig(context_parallel_size=size), size, "cpu").cp
    model = a_model(family)
    apply_context(model, axis, cp_comm_type, sizes)
    return loss_and_gradients(model, *shard_batch(a_batch(rules), axis), axis)


@pytest.fixture(scope="module")
def one_process() -> dict:
    runs = {}
    for family in FAMILIES:
        for rules in RULES:
            batch, token_index = shard_batch(a_batch(rules), Axis())
            runs[family, rules] = loss_and_gradients(a_model(family), batch, token_index, Axis())
    return runs


# Every way with every family among documents; whole sequences by a ring and by both ways at once.
TRAINED = list(itertools.product(WAYS, ("gpt2", "llama", "bloom"), ["documents"]))
CHOSEN = [  # each way and each family twice
    case
    for case in TRAINED
    if case[1] == ("llama", "gpt2", "bloom", "llama", "gpt2")[WAYS.index(case[0])]
    or case[:2] == ((4, "p2p", None), "bloom")
]
TRAINED += [(WAYS[0], "gpt2", "one document"), (WAYS[-1], "llama", "one document")]
OF_MIXERS = [(WAYS[at], name, rules) for at, name, rules in (
    (0, "delta net", "one document"), (1, "delta net", "documents"), (0, "mamba2", "documents"),
    (1, "mamba2", "one document"), (3, "mamba2", "documents"), (1, "short convolution", "documents"),
)]  # fmt: skip
TRAINED += OF_MIXERS
CHOSEN += OF_MIXERS


@pytest.fixture(scope="module")
def trained(pool, request) -> dict:
    """What each rank gives, by way, family and rules."""
    trained, cases = {}, cases_that_run(request, TRAINED, "way", "family", "rules")
    for size in (2, 4):
        trained |= pool.run_cases(train, {str(case): case for case in cases if case[0][0] == size}, size)
    return trained


@pytest.mark.parametrize(("way", "family", "rules"), by_default(TRAINED, *CHOSEN))
def test_loss_and_every_gradient_equal_one_process(trained, one_process, way, family, rules):
    expected_loss, expected = one_process[family, rules]
    everything = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for loss, gradients in trained[str((way, family, rules))]:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            error = (gradient - expected[name]).norm() / max(expected[name].norm(), 1e-6 * everything)
            assert error < 1e-5, f"{name}: relative error {error:.1e}"


def train_by_copy_engines(family: str):
    with as_if_direct():
        return train((4, "a2a", None), family, "documents")


@pytest.mark.parametrize("family", by_default(FAMILIES, "llama"))
def test_exchanges_by_copy_engines_give_one_process_gradients(pool, one_process, family):
    expected_loss, expected = one_process[family, "documents"]
    for loss, gradients in pool.run(train_by_copy_engines, family, size=4):
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def logits_in_parts_and_at_once(way: tuple, family: str) -> tuple[torch.Tensor, torch.Tensor]:
    size, cp_comm_type, sizes = way
    axis = build_mesh(ParallelConfig(context_parallel_size=size), size, "cpu").cp
    model = a_model(family).eval()
    apply_context(model, axis, cp_comm_type, sizes)
    whole = a_batch("one document")
    with torch.no_grad():
        part, token_index = shard_batch(whole, axis)
        inputs = TokenInputs(position_ids=part.position_ids, token_index=token_index)
        in_parts = unshard(model(part.input_ids, token_inputs=inputs), axis)
        at_once = model(whole.input_ids)
        again = unshard(model(part.input_ids, token_inputs=inputs), axis)
        assert torch.equal(in_parts, again)
    return in_parts, at_once


@pytest.mark.parametrize("family", by_default(FAMILIES, "bloom"))
@pytest.mark.parametrize("way", [(2, "p2p", None), (4, "a2a+p2p", [2, 2])], ids=lambda way: way[1])
def test_evaluating_in_parts_and_whole_sequences_give_one_process_logits(pool, way, family):
    with torch.no_grad():
        expected = a_model(family).eval()(a_batch("one document").input_ids)
    for in_parts, at_once in pool.run(logits_in_parts_and_at_once, way, family, size=way[0]):
        torch.testing.assert_close(in_parts, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(at_once, expected, rtol=1e-5, atol=1e-5)


def one_step_compiled_and_eager(way: tuple, family: str):
    size, cp_comm_type, sizes = way
    axis = build_mesh(ParallelConfig(context_parallel_size=size), size, "cpu").cp
    answers = []
    for compiled in (False, True):
        model = a_model(family)
        apply_context(model, axis, cp_comm_type, sizes)
        if compiled:
            torch._dynamo.reset()
            for layer in model.layers.values():
                layer.compile(fullgraph=True, backend="aot_eager")
        answers.append(loss_and_gradients(model, *shard_batch(a_batch("documents"), axis), axis))
    return answers


# By default test_context_attention.py traces the ring.
@pytest.mark.full  # test_context_attention.py traces exchanges, models/test_transformer.py layers
@pytest.mark.parametrize("family, cp_comm_type", [("gpt2", "p2p"), ("llama", "a2a")])
def test_layers_compiled_in_one_graph_equal_eager_ones(pool, family, cp_comm_type):
    for eager, compiled in pool.run(one_step_compiled_and_eager, (2, cp_comm_type, None), family, size=2):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


def test_chunks_of_a_batch_pair_early_with_late_tokens():
    batch = a_batch("documents")
    axes = [Axis(size=4, rank=rank) for rank in range(4)]
    shards = [shard_batch(batch, axis) for axis in axes]
    assert [token_index.tolist() for _, token_index in shards][1] == [*range(4, 8), *range(24, 28)]
    for part, token_index in shards:
        for name in ("input_ids", "labels", "loss_mask", "position_ids"):
            assert torch.equal(getattr(part, name), getattr(batch, name)[:, token_index])
        assert part.sample_numbers is batch.sample_numbers and part.document_ends is batch.document_ends
    assert sorted(torch.cat([token_index for _, token_index in shards]).tolist()) == list(range(SEQ))
