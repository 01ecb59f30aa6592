"""Multi-token prediction against its formula, written out position by position."""

import torch
from torch.nn.functional import cross_entropy

from megalith.config import ModelConfig, RunConfig
from megalith.data.batch import Batch
from megalith.models.init import initialize
from megalith.models.inputs import LossInputs
from megalith.models.mtp import make_mtp_targets
from megalith.models.transformer import Transformer
from megalith.parallel.mesh import build_mesh
from megalith.parallel.parallel_model import ParallelModel
from megalith.planner.counts import count_parameters
from megalith.training.build import build_model

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
    inputs = LossInputs(mtp_targets=make_mtp_targets(labels, mask, None, 2))
    loss = model(ids, labels=labels, loss_mask=mask, loss_inputs=inputs)
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    plain = model(ids, labels=labels, loss_mask=mask)
    assert torch.equal(loss, plain)
    assert all(found[name].any() for name in found)
    model.zero_grad()

    further = mtp_losses(model, tokens, mask)
    (plain + sum(0.3 / 2 * sum(losses) for losses, _ in further)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def mtp_losses(
    model: Transformer, tokens: torch.Tensor, mask: torch.Tensor
) -> list[tuple[list[torch.Tensor], float]]:
    """For each further layer the losses of the tokens that it predicts, times their masks, and the masks' sum."""
    ids, further = tokens[:, :-1], []
    context = model.context(ids)
    layers = [model.layers["0"], model.layers["1"]]
    hidden = model.final_layernorm(model.runner(layers, model.embedding(ids, None, context), context))
    for k, number in enumerate(("2", "3"), 1):
        layer = model.layers[number]
        told = torch.zeros(BATCH, SEQ, 16)  # what lies behind the end is told nothing, and tells nobody
        told[:, : SEQ + 1 - k] = model.embedding(tokens[:, k:][:, :SEQ], None, context)
        both = [layer.join.embedding_layernorm(told), layer.join.hidden_layernorm(hidden)]
        x = torch.cat(both, -1) @ layer.join.linear_join.weight.T
        x = x + layer.self_attention(layer.input_layernorm(x), context)
        x = x + layer.mlp(layer.pre_mlp_layernorm(x), context)
        hidden, losses = layer.final_layernorm(x), []
        for row in range(BATCH):
            for i in range(SEQ - k):
                logits = hidden[row, i] @ model.output_layer.weight[:30].T
                wanted = cross_entropy(logits, tokens[row, i + k + 1])
                losses.append(wanted * mask[row, i + k])
        further.append((losses, mask[:, k:].sum().item()))
    return further


def batch_of(tokens: torch.Tensor, mask: torch.Tensor) -> Batch:
    """A micro-batch of tokens [batch, SEQ + 1]."""
    places, number = torch.arange(SEQ).expand(len(tokens), SEQ), torch.arange(len(tokens))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, places, None, number)


def run_in_one_process() -> ParallelModel:
    config = RunConfig(model=CONFIG, data={"seq_length": SEQ}, optim={"lr": 1e-3}, runtime={"compile": False})
    return build_model(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"))


def test_each_depths_loss_is_the_mean_over_the_tokens_of_the_step_that_it_predicts():
    run = run_in_one_process()
    (model,), tokens = run.chunks, model_and_tokens()[1]
    mask = torch.ones(BATCH, SEQ)
    mask[0, 3] = mask[1, :4] = 0  # the micro-batches of a sequence have other counts each
    micro_batches = [batch_of(tokens[row : row + 1], mask[row : row + 1]) for row in range(BATCH)]
    loss = run.backward(micro_batches, loss_scale=torch.tensor(8.0))
    found = {name: parameter.grad.clone() / 8 for name, parameter in model.named_parameters()}
    model.zero_grad()
    plain = model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous(), loss_mask=mask) / mask.sum()
    torch.testing.assert_close(loss, plain.detach())
    further = mtp_losses(model, tokens, mask)
    assert [count for _, count in further] == [14.0, 13.0] and mask.sum() == 15
    logged = torch.stack([sum(losses) / count for losses, count in further])
    torch.testing.assert_close(run.mtp_losses, logged.detach())
    (plain + sum(0.3 / 2 * sum(losses) / count for losses, count in further)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_step_whose_tokens_are_all_masked_has_no_loss_and_no_gradient():
    run = run_in_one_process()
    loss = run.backward(
        [batch_of(model_and_tokens()[1], torch.zeros(BATCH, SEQ))], loss_scale=torch.tensor(8.0)
    )
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in run.chunks[0].parameters())


def test_a_future_in_another_document_does_not_count():
    labels = torch.tensor([[1, 2, 3, 4]])
    mtp_targets = make_mtp_targets(labels, torch.tensor([[1.0, 1.0, 1.0, 0.0]]), torch.tensor([[2, 4]]), 2)
    assert mtp_targets.tokens[:, 0].tolist() == [[1, 2, 3, 4], [2, 3, 4, 1]]
    assert mtp_targets.labels[:, 0, :3].tolist() == [[2, 3, 4], [3, 4, 1]]
    assert mtp_targets.loss_mask[:, 0].tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_depths_behind_the_end_of_a_short_sequence_count_nothing():
    mtp_targets = make_mtp_targets(torch.tensor([[1, 2]]), torch.ones(1, 2), None, 4)
    assert mtp_targets.loss_mask.tolist() == [[[1.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.0]]]
    assert mtp_targets.tokens.shape == mtp_targets.labels.shape == (4, 1, 2)


def test_targets_are_on_the_device_of_the_labels():
    labels = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    mtp_targets = make_mtp_targets(labels, torch.ones(2, 4, device="meta"), None, 2)
    parts = (mtp_targets.tokens, mtp_targets.labels, mtp_targets.loss_mask)
    assert all(part.is_meta for part in parts)


def test_further_layers_are_counted_and_left_out_without_a_future():
    model, tokens = model_and_tokens()
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(CONFIG).total
    plain = Transformer(CONFIG.model_copy(update={"mtp_num_layers": None}))
    initialize(plain, plain.config, seed=1)
    assert torch.equal(model(tokens[:, :SEQ]), plain(tokens[:, :SEQ]))


def branches(name: str) -> str:
    """The name of a parameter of a model with two layers in one whose layers have a branch each."""
    if not name.startswith(("layers.0.", "layers.1.")):
        return name.replace("layers.2.", "layers.4.")
    _, layer, rest = name.split(".", 2)
    return f"layers.{2 * int(layer) + ('mlp' in rest)}.{rest}"


def test_mtp_layers_after_layers_with_a_single_branch_are_those_after_whole_layers():
    whole = CONFIG.model_copy(update={"mtp_num_layers": 1})
    single = ModelConfig(
        **whole.model_dump(exclude_unset=True) | dict(num_layers=4, hybrid_layer_pattern="*-*-")
    )
    models = [Transformer(config) for config in (whole, single)]
    initialize(models[0], whole, seed=1)
    state = {branches(name): value for name, value in models[0].state_dict().items()}
    models[1].load_state_dict(state)
    tokens = torch.randint(0, 30, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    losses, mask = [], torch.ones(BATCH, SEQ)
    for model in models:
        ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        inputs = LossInputs(mtp_targets=make_mtp_targets(labels, mask, None, 1))
        losses.append(model(ids, labels=labels, loss_mask=mask, loss_inputs=inputs))
        losses[-1].backward()
    assert torch.equal(*losses)
    parameters = dict(models[1].named_parameters())
    for name, parameter in models[0].named_parameters():
        torch.testing.assert_close(
            parameters[branches(name)].grad, parameter.grad, rtol=1e-5, atol=1e-7, msg=name
        )


def test_mtp_layers_of_a_pattern_with_experts_have_experts_and_are_counted():
    pattern = dict(num_layers=3, hybrid_layer_pattern="ME*", num_experts=4, moe_grouped_gemm=False,
                   position_embedding_type="none", mamba_num_heads=4, mamba_head_dim=8, mamba_num_groups=2)  # fmt: skip
    config = ModelConfig(**CONFIG.model_dump(exclude_unset=True) | pattern)
    model = Transformer(config)
    assert config.expert_layers == [1, 3, 4] and config.attention_layers == [2, 3, 4]
    assert all(model.layers[number].has_experts for number in ("1", "3", "4"))
    counted = count_parameters(config, padded_vocab=False).total
    padded = 2 * (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    assert counted + padded == sum(parameter.numel() for parameter in model.parameters())
