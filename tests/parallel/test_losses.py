"""Losses of one's own equal plain PyTorch on whole logits in one process, and one process in every layout."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from default_cases import by_default
from torch import Tensor

from megalith.config import DpoConfig, ModelConfig, RunConfig
from megalith.data.batch import Batch
from megalith.errors import ConfigError
from megalith.models.loss import CrossEntropy, Loss, MicroBatchMean
from megalith.parallel.gather import global_tensors
from megalith.parallel.local_losses import check_z_loss
from megalith.parallel.mesh import build_mesh
from megalith.parallel.parallel_model import ParallelModel
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import BOUND, gradient_errors, relative_error
from megalith.rl import PreferenceLoss
from megalith.training.build import build_model

VOCAB, SEQ, SAMPLES, MICRO_BATCH, CANDIDATES = 61, 16, 4, 2, 3
ROUNDING = 1e-6
DENSE = dict(num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, vocab_size=VOCAB,
             make_vocab_size_divisible_by=8, max_position_embeddings=SEQ, hidden_dropout=0.0, attention_dropout=0.0,
             init_method_std=0.3, normalization="RMSNorm", final_logit_softcapping=5.0,
             add_output_bias=True)  # fmt: skip
EXPERTS = dict(num_layers=2, num_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.1, mtp_num_layers=1,
               position_embedding_type="rope", final_logit_softcapping=None)  # fmt: skip


@dataclass
class Rollouts(Batch):
    """What policy gradients, preferences and distillation read besides the tokens."""

    advantages: Tensor  # float32 [batch]
    old_logprobs: Tensor  # float32 [batch, seq]
    reference_logprobs: Tensor  # float32 [batch, seq]
    candidates: Tensor  # int64 [batch, seq, CANDIDATES]
    teacher: Tensor  # float32 [batch, seq, CANDIDATES]
    sequence_ids: Tensor  # int64 [batch, seq]: each row is a sequence
    sequence_tokens: Tensor  # float32 [batch]
    pairs_per_token: Tensor | None = None  # float32 scalar


class Grpo(Loss):
    """The clipped ratio, a KL penalty and an entropy bonus: means of sequences, over those with a token in the loss."""

    temperature, needs_entropy = 0.7, True

    def denominator(self, batch):
        return batch.loss_mask.any(1).sum()

    def __call__(self, logprobs, entropy, batch):
        ratio = (logprobs - batch.old_logprobs).exp()
        advantages = batch.advantages[:, None]
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        gap = batch.reference_logprobs - logprobs
        losses = policy + 0.04 * (gap.exp() - gap - 1) - 0.1 * entropy
        mask = batch.loss_mask
        return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).sum()


class GrpoByTokens(Grpo):
    """The same as a sum over tokens, whose gradient is made in the forward pass."""

    def tokens(self, batch):
        mask = batch.loss_mask
        return {
            "weights": mask / mask.sum(1, keepdim=True).clamp(min=1),
            "advantages": batch.advantages[:, None].expand_as(mask),
            "old": batch.old_logprobs,
            "reference": batch.reference_logprobs,
        }

    def token_losses(self, logprobs, entropy, tokens):
        ratio = (logprobs - tokens["old"]).exp()
        policy = -torch.min(ratio * tokens["advantages"], ratio.clamp(0.8, 1.28) * tokens["advantages"])
        gap = tokens["reference"] - logprobs
        return tokens["weights"] * (policy + 0.04 * (gap.exp() - gap - 1) - 0.1 * entropy)

    def observe(self, logprobs, entropy, batch):
        assert logprobs.shape == entropy.shape == batch.labels.shape and not logprobs.requires_grad
        self.seen = (logprobs, entropy)

    def __call__(self, logprobs, entropy, batch):
        return self.token_losses(logprobs, entropy, self.tokens(batch)).sum()


class Distillation(Loss):
    """The teacher's likeliest tokens: −Σ p log q."""

    temperature = 2.0

    def targets(self, batch):
        return batch.candidates

    def __call__(self, logprobs, entropy, batch):
        return -((batch.teacher * logprobs).sum(-1) * batch.loss_mask).sum()


class Policy(Loss):
    """REINFORCE by a constant divisor: a linear loss, with weights of either sign."""

    def denominator(self, batch):
        return batch.input_ids.numel()

    def weights(self, batch):
        return batch.advantages[:, None] * batch.loss_mask


BY_TOKENS = CrossEntropy(), Grpo(), GrpoByTokens(), Distillation()  # 0 / 0 where no token counts
LOSSES = (CrossEntropy(), Grpo(), GrpoByTokens(), PreferenceLoss(DpoConfig()), Distillation(), Policy(),
          MicroBatchMean())  # fmt: skip


def configuration(layout: str, **model) -> RunConfig:
    return RunConfig.from_tree(
        {
            "model": DENSE | model,
            "parallel": dict(LAYOUTS[layout].parallel) if layout else {},
            "data": {"seq_length": SEQ, "mock": True},
            "optim": {"lr": 1e-3},
            "train": {"micro_batch_size": MICRO_BATCH, "global_batch_size": SAMPLES},
            "runtime": {"device": "cpu", "compile": False},
        }
    )


def rollouts() -> list[Rollouts]:
    """The micro-batches of a step, of which one sequence has no token in the loss."""
    generator = torch.Generator().manual_seed(5)
    rand = functools.partial(torch.rand, generator=generator)
    tokens = torch.randint(0, VOCAB, (SAMPLES, SEQ + 1), generator=generator)
    mask = (torch.arange(SEQ) >= torch.randint(1, 9, (SAMPLES, 1), generator=generator)).float()
    mask[3] = 0
    whole = Rollouts(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, torch.arange(SEQ).expand(SAMPLES, SEQ), None,
        torch.arange(SAMPLES), 2 * rand(SAMPLES) - 1, -4 - rand(SAMPLES, SEQ), -4 - rand(SAMPLES, SEQ),
        torch.randint(0, VOCAB, (SAMPLES, SEQ, CANDIDATES), generator=generator), rand(SAMPLES, SEQ, CANDIDATES),
        (torch.arange(SAMPLES) % MICRO_BATCH)[:, None].expand(SAMPLES, SEQ), mask.sum(1),
    )  # fmt: skip
    rows = range(0, SAMPLES, MICRO_BATCH)
    return [whole._each(lambda x, row=row: x[row : row + MICRO_BATCH]) for row in rows]


def gradients(model: ParallelModel) -> dict[str, Tensor]:
    shards = model.parameters.shards
    local = {name: replace(shards[name], values=plain.grad) for name, plain in model.parameters.named}
    outputs = {name: x.gather() for name, x in global_tensors(local, model.mesh.world).items()}
    model.parameters.clear_gradients()
    return outputs


def outcome(config: RunConfig, losses: tuple[Loss, ...] = LOSSES[1:]) -> list[tuple]:
    """Of each loss (parity shows the cross-entropy): its value, its gradients on rank 0, its evaluation, and what the
    log has of it and of further layers; and the log-probabilities here."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = build_mesh(config.parallel, size, "cpu", has_experts=config.model.num_experts is not None)
    model = build_model(config, mesh, torch.device("cpu"))
    local = rollouts()[mesh.dp.rank :: mesh.dp.size]
    results = []
    for loss in losses:
        value = model.backward(local, loss, loss_scale=4.0).item()
        outputs, further = gradients(model), model.mtp_losses
        logged = [model.logged_loss.item(), *([] if further is None else further.tolist())]
        evaluated, divisor = model.evaluate(local, loss)
        results.append((value, outputs, (evaluated / divisor).item(), logged))
    logprobs = model.all_logprobs(local, 0.7)
    assert torch.equal(model.logprobs(local[0], 0.7), logprobs[0])
    return [*results, torch.stack(logprobs)]


@functools.cache
def alone(**model) -> list[tuple]:
    return outcome(configuration("", **model))


def test_equal_plain_pytorch_on_whole_logits():
    config = configuration("")
    *outputs, logprobs = outcome(config, LOSSES)
    model = build_model(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"))
    (chunk,) = model.chunks
    for loss, (value, grads, evaluated, logged) in zip(LOSSES, outputs, strict=True):
        total, divisor = torch.zeros(()), sum(float(loss.denominator(batch)) for batch in rollouts())
        for number, batch in enumerate(rollouts()):
            distribution = torch.log_softmax(chunk(batch.input_ids) / loss.temperature, -1)
            targets = loss.targets(batch).view(MICRO_BATCH, SEQ, -1)
            gathered = distribution.gather(-1, targets)
            entropy = -(distribution.exp() * distribution).sum(-1)
            total = total + loss(gathered.view(loss.targets(batch).shape), entropy, batch)
            if isinstance(loss, Grpo):
                torch.testing.assert_close(logprobs[number], gathered[..., 0].detach(), rtol=1e-5, atol=1e-6)
        (4 * total / divisor).backward()
        expected = {name: parameter.grad for name, parameter in chunk.named_parameters()}
        assert max(gradient_errors(grads, expected).values()) < BOUND, type(loss)
        assert relative_error([value, evaluated], [(total / divisor).item()] * 2) < BOUND
        by_tokens = outputs[0][0] if isinstance(loss, MicroBatchMean) else value
        assert relative_error(logged, [by_tokens]) < BOUND, type(loss)
        chunk.zero_grad()


@pytest.mark.parametrize("loss", BY_TOKENS, ids=lambda loss: type(loss).__name__)
def test_a_step_without_a_valid_token_has_loss_zero_and_no_gradient(loss):
    config = configuration("")
    model = build_model(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"))
    masked = [replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)) for batch in rollouts()]
    assert model.backward(masked, loss).item() == 0.0
    assert not any(gradient.any() for gradient in gradients(model).values())  # NaN counts as non-zero


def same_as_alone(ranks: list[list[tuple]], one: list[tuple], layout: str) -> None:
    for number, loss in enumerate(LOSSES[1:]):
        value, grads, evaluated, logged = one[number]
        for rank in ranks:
            figures = [rank[number][0], rank[number][2], *rank[number][3]]
            assert relative_error(figures, [value, evaluated, *logged]) < BOUND, (layout, loss)
        assert max(gradient_errors(ranks[0][number][1], grads).values()) < BOUND, (layout, loss)
    assert max(gradient_errors(ranks[0][1][1], ranks[0][0][1]).values()) < ROUNDING, layout
    for rank in ranks:  # one pass over the output matrix or two
        two, one_pass = rank[:2]
        assert relative_error([one_pass[0], one_pass[2]], [two[0], two[2]]) < ROUNDING, layout
    for rank in ranks:  # of its data-parallel rank's own micro-batches
        copies = len(one[-1]) // len(rank[-1])
        mine = [one[-1][first::copies] for first in range(copies)]
        assert any(torch.allclose(rank[-1], each, rtol=1e-5, atol=1e-5) for each in mine), layout


def outcomes(configs: list[RunConfig]) -> list[list[tuple]]:
    return [outcome(config) for config in configs]


LAYOUTS_OF = [
    (["cp2-a2a-pp2-interleaved"], {}),
    (["tp2-sp-dp2-zero3"], {"num_layers": 2}),
    (["tp2-sp-cp2-a2a-overlap", "pp2-zero_bubble-dp2-zero1"], {"num_layers": 2}),
    (["tp2-sp-cp2-a2a-ep4"], EXPERTS),
    (["tp2-pp2", "tp2-sp-pp2-overlap", "cp2-dp2-zero3"], {}),
    (["pp2-ep2", "tp2-sp-etp2-ep2"], EXPERTS),
]


@pytest.mark.parametrize(("layouts", "model"), by_default(LAYOUTS_OF, LAYOUTS_OF[0]))
def test_equal_one_process_in_every_layout(pool, layouts, model):
    ranks = pool.run(outcomes, [configuration(layout, **model) for layout in layouts], size=4)
    for number, layout in enumerate(layouts):
        same_as_alone([rank[number] for rank in ranks], alone(**model), layout)


Z_LOSSES = CrossEntropy(), MicroBatchMean()
Z_MODEL = {"num_layers": 4, "output_z_loss_coeff": 0.05}
Z_LAYOUTS = [name for name, layout in LAYOUTS.items() if layout.processes == 4 and not layout.has_experts]
Z_BY_DEFAULT = ["tp4-sp", "pp4-interleaved", "tp2-sp-pp2-zero_bubble", "cp2-dp2-zero3"]


def z_configuration(layout: str) -> RunConfig:
    train = {"train.micro_batch_size": 1, "train.global_batch_size": 8}
    return configuration(layout, **Z_MODEL).with_settings(train)


def logged_z_losses(configs: list[RunConfig]) -> list[list[float]]:
    """The mean z-loss of a step that is logged with each loss, in each configuration."""
    results = []
    for config in configs:
        size = dist.get_world_size() if dist.is_initialized() else 1
        mesh = build_mesh(config.parallel, size, "cpu")
        model = build_model(config, mesh, torch.device("cpu"))
        local = [row for batch in rollouts() * 2 for row in batch.rows()][mesh.dp.rank :: mesh.dp.size]
        results.append([])
        for loss in Z_LOSSES:
            model.backward(local, loss, loss_scale=4.0)
            results[-1].append(model.output_z_loss.item())
            model.evaluate(local, loss)
            assert model.output_z_loss.item() == results[-1][-1]
            model.parameters.clear_gradients()
    return results


@functools.cache
def z_loss_of_whole_logits() -> float:
    model = build_model(
        z_configuration(""), build_mesh(z_configuration("").parallel, 1, "cpu"), torch.device("cpu")
    )
    total, count = 0.0, 0.0
    with torch.no_grad():
        for batch in rollouts() * 2:
            logits = model.chunks[0](batch.input_ids).double()
            total += (batch.loss_mask * logits.exp().sum(-1).log().square()).sum().item()
            count += batch.loss_mask.sum().item()
    return total / count


@pytest.mark.parametrize("layout", ["", *by_default(Z_LAYOUTS, *Z_BY_DEFAULT)])
def test_the_logged_z_loss_is_the_mean_over_the_tokens_of_whole_logits(pool, layout):
    configs = [z_configuration(layout)]
    ranks = pool.run(logged_z_losses, configs, size=4) if layout else [logged_z_losses(configs)]
    for ((by_tokens, by_micro_batches),) in ranks:
        assert relative_error([by_tokens, by_micro_batches], [z_loss_of_whole_logits()] * 2) < BOUND


def test_runs_without_a_z_loss_log_none():
    model = build_model(
        configuration(""), build_mesh(configuration("").parallel, 1, "cpu"), torch.device("cpu")
    )
    model.backward(rollouts(), CrossEntropy())
    assert model.output_z_loss is None


class Tempered(CrossEntropy):
    temperature = 0.5


def test_a_z_loss_of_the_logits_is_refused_for_other_losses():
    config = ModelConfig(output_z_loss_coeff=1e-4)
    check_z_loss(config, CrossEntropy())
    with pytest.raises(
        ConfigError, match=r"Tempered with a temperature, .*; set model.output_z_loss_coeff to 0"
    ):
        check_z_loss(config, Tempered())
    with pytest.raises(
        ConfigError, match=r"output_z_loss_coeff is 0.0001, .* but the loss is Grpo; set model"
    ):
        check_z_loss(config, Grpo())
