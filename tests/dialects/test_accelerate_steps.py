"""A script's own train step, batch, loss, schedule and indexed data."""

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from accelerate_job import (
    BATCH,
    RATE,
    close,
    fresh_accelerator,
    model_of,
    plain_sgd,
    prepared,
    samples,
    stacked,
)
from default_cases import by_default

from megalith.accelerate import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    T5TrainStep,
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
)
from megalith.data.batch import Batch
from megalith.dialects.accelerate.script_batches import split_micro_batches
from megalith.errors import ConfigError


def weighted(losses):
    """A loss that is none of the usual ones: later tokens count for more."""
    return (losses * torch.arange(losses.shape[1])).sum() / losses.numel()


def local_loss(loss_mask, losses):
    loss = weighted(losses * loss_mask)
    return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}


def own_batch(data_iterator):
    """Megatron's: labels are the next tokens, and the mask says True where a token must not look."""
    tokens = next(data_iterator)["input_ids"]
    seq = tokens.shape[1] - 1
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    hidden[5:, :5] = True  # two documents
    positions = torch.arange(seq).expand(len(tokens), seq)
    return tokens[:, :-1], tokens[:, 1:], torch.ones(len(tokens), seq), hidden[None, None], positions


class OwnStep(AbstractTrainStep):
    def __init__(self, megatron_args, factor):
        super().__init__("OwnStep")
        self.factor, self.heads = factor, megatron_args.num_attention_heads
        self.forward_step = self.get_forward_step_func()

    def get_forward_step_func(self):
        def forward_step(data_iterator, model):
            tokens, labels, _, mask, positions = own_batch(data_iterator)
            return model(
                tokens, positions, mask, labels=labels
            ), lambda losses: self.factor * weighted(losses)

        return forward_step


def plain_losses(plain, batch, mask=None):
    logits = plain(
        **{name: value for name, value in batch.items() if name != "labels"}, attention_mask=mask
    ).logits
    return logits.log_softmax(-1)


def gradient_of(accelerator, model, own, batch):
    accelerator.backward(model(**batch).loss)
    own.step()
    before, after = model_of("llama").state_dict(), accelerator.get_state_dict(model)
    return {name: (before[name] - after[name]) / RATE for name in before}


def with_own_loss():
    """On two pipeline stages; test_accelerate_loop.py has the processes."""
    layout = dict(num_micro_batches=2, gradient_clipping=0.0, custom_loss_function=local_loss)
    accelerator = fresh_accelerator(**layout, pp_degree=2)
    model, own, loader, _ = prepared(accelerator, "llama", samples(BATCH), "sgd")
    found = gradient_of(accelerator, model, own, next(iter(loader)))
    batch, plain = stacked(samples(BATCH)), model_of("llama")
    logprobs = plain(input_ids=batch["input_ids"]).logits.log_softmax(-1)
    counts = batch["labels"][:, 1:] != -100
    losses = -logprobs[:, :-1].gather(-1, batch["labels"][:, 1:].clamp(min=0)[..., None])[..., 0] * counts
    losses = torch.nn.functional.pad(losses, (0, 1))
    (sum(weighted(part) for part in losses.split(4)) / 2).backward()
    for name, parameter in plain.named_parameters():
        close(found[name], parameter.grad)
    assert torch.equal(gather_across_data_parallel_groups([torch.ones(2)])[0], torch.ones(2))


def test_a_train_step_of_the_scripts_own_with_its_batch_and_mask():
    accelerator = fresh_accelerator(
        gradient_clipping=0.0, custom_train_step_class=OwnStep, custom_train_step_kwargs={"factor": 3.0}
    )
    model, own, loader, _ = prepared(accelerator, "llama", samples(BATCH), "sgd")
    assert model.train_step._handler.heads == 4
    model.train()
    found = gradient_of(accelerator, model, own, next(iter(loader)))
    tokens, plain = stacked(samples(BATCH))["input_ids"], model_of("llama")
    hidden = torch.ones(15, 15, dtype=torch.bool).triu(1)
    hidden[5:, :5] = True
    mask = torch.zeros(15, 15).masked_fill(hidden, float("-inf")).expand(BATCH, 1, 15, 15)
    logprobs = plain(input_ids=tokens[:, :-1], attention_mask=mask).logits.log_softmax(-1)
    (3 * weighted(-logprobs.gather(-1, tokens[:, 1:, None])[..., 0])).backward()
    for name, parameter in plain.named_parameters():
        close(found[name], parameter.grad)


def test_a_batch_function_of_the_scripts_own_and_masks_that_are_not_had():
    accelerator = fresh_accelerator(custom_get_batch_function=own_batch)
    model, _, loader, _ = prepared(accelerator, "llama", samples(BATCH))
    assert model(**next(iter(loader))).loss > 0

    def sees_all(data_iterator):
        tokens, labels, loss_mask, mask, positions = own_batch(data_iterator)
        return tokens, labels, loss_mask, torch.zeros_like(mask), positions

    accelerator = fresh_accelerator(custom_get_batch_function=sees_all)
    model, _, loader, _ = prepared(accelerator, "llama", samples(BATCH))
    with pytest.raises(ConfigError, match="neither causal nor causal within"):
        model(**next(iter(loader)))


def masked_samples() -> list[dict[str, torch.Tensor]]:
    """Of two segments, of several lengths, filled up at their ends."""
    made = samples(BATCH)
    for number, sample in enumerate(made):
        length = sample["input_ids"].shape[0] - number
        real = torch.arange(sample["input_ids"].shape[0]) < length
        sample["labels"] = sample["labels"].masked_fill(~real, -100)
        sample["attention_mask"] = real.long()
        sample["token_type_ids"] = ((torch.arange(len(real)) > 5) & real).long()
        sample["next_sentence_label"] = torch.tensor(number % 3 == 0).long()
    return made


def test_an_encoder_trains_by_its_masked_tokens_and_the_order_of_its_segments():
    accelerator = fresh_accelerator(gradient_clipping=0.0, num_micro_batches=2)
    model, own, loader, _ = prepared(accelerator, "bert", masked_samples(), "sgd")
    batch = next(iter(loader))
    model.train()
    loss = model(**batch).loss
    accelerator.backward(loss)
    own.step()
    after, plain = accelerator.get_state_dict(model), model_of("bert")
    halves = [plain(**{name: value[part] for name, value in stacked(masked_samples()).items()}).loss
              for part in (slice(4), slice(4, 8))]  # fmt: skip
    expected = sum(halves) / 2
    expected.backward()
    assert torch.allclose(loss.detach(), expected.detach(), rtol=1e-5)
    for name, parameter in model_of("bert").named_parameters():
        gradient = plain.get_parameter(name).grad
        if gradient.norm() > 1e-5 * expected:  # those of keys' biases are rounding alone
            close((parameter - after[name]) / RATE, gradient)
    with pytest.raises(ConfigError, match="a prepared encoder was called without labels"):
        model(input_ids=batch["input_ids"])
    left = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    with pytest.raises(ConfigError, match="has zeros before its tokens; pad at the end"):
        model(**left)


@pytest.mark.parametrize("kind", by_default(["t5", "bart", "mbart", "marian"], "t5", "mbart"))
def test_an_encoder_decoder_trains_by_its_labels(kind: str) -> None:
    pairs = [{name: sample[name] for name in ("input_ids", "attention_mask")} for sample in masked_samples()]
    for number, pair in enumerate(pairs):
        labels = pair["input_ids"].flip(0)[:10]
        pair["labels"] = labels.masked_fill(torch.arange(10) > 9 - number, -100)
    accelerator = fresh_accelerator(gradient_clipping=0.0, num_micro_batches=2)
    model, own, loader, _ = prepared(accelerator, kind, pairs, "sgd")
    batch = next(iter(loader))
    model.train()
    loss = model(**batch).loss
    accelerator.backward(loss)
    own.step()
    after, plain = accelerator.get_state_dict(model), model_of(kind)
    halves = [plain(**{name: value[part] for name, value in stacked(pairs).items()}).loss
              for part in (slice(4), slice(4, 8))]  # fmt: skip
    expected = sum(halves) / 2
    expected.backward()
    assert torch.allclose(loss.detach(), expected.detach(), rtol=1e-5)
    for name, parameter in model_of(kind).named_parameters():
        if (gradient := plain.get_parameter(name).grad) is None:
            assert torch.equal(parameter, after[name])  # Marian's sinusoids
        elif gradient.norm() > 1e-5 * expected:  # those of keys' biases are rounding alone
            close((parameter - after[name]) / RATE, gradient)
    model.eval()
    shifted = plain.prepare_decoder_input_ids_from_labels(batch["labels"])
    assert torch.allclose(model(**batch).loss, model(**batch, decoder_input_ids=shifted).loss)
    with pytest.raises(ConfigError, match="a prepared encoder-decoder was called without labels"):
        model(input_ids=batch["input_ids"])


def test_what_an_encoders_step_does_not_have_is_refused():
    steps = BertTrainStep, GPTTrainStep, T5TrainStep
    assert all(issubclass(step, AbstractTrainStep) for step in steps)
    accelerator = fresh_accelerator(custom_loss_function=local_loss)
    with pytest.raises(
        ConfigError, match="custom_loss_function is set, but an encoder is always trained with BertTrainStep"
    ):
        prepared(accelerator, "bert", masked_samples())
    model, _, loader, _ = prepared(fresh_accelerator(), "llama", masked_samples())
    batch = next(iter(loader))
    with pytest.raises(
        ConfigError, match="token_type_ids that are not all 0, but LlamaForCausalLM has no segments"
    ):
        model(**batch)
    del batch["token_type_ids"]
    with pytest.raises(ConfigError, match="called with next_sentence_label, which decoder-only"):
        model(**batch)


def test_a_dummy_schedule_is_megatrons_curve_over_the_scripts_steps():
    accelerator = fresh_accelerator(min_lr=1e-4)
    model = model_of("llama")
    own = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dummy = MegatronLMDummyScheduler(own, total_num_steps=10, warmup_num_steps=2)
    model, own, schedule = accelerator.prepare(model, own, dummy)
    rates = []
    for _ in range(10):
        rates.append(own.param_groups[0]["lr"])
        accelerator.backward(model(**stacked(samples(2))).loss)
        own.step()
        schedule.step()
    line = [1e-2 - (1e-2 - 1e-4) * step / 8 for step in range(8)]
    assert rates == pytest.approx([0, 5e-3, *line])


def test_a_scheduler_of_torch_steps_where_a_step_is_whole():
    accelerator = fresh_accelerator(accumulation=2)
    model = model_of("llama")
    own = plain_sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (1 + step))
    model, own, schedule = accelerator.prepare(model, own, schedule)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(**stacked(samples(2))).loss)
            own.step()
            schedule.step()
            own.zero_grad()
    assert model.iteration == 2 and schedule.get_last_lr() == pytest.approx([RATE / 3])


def test_a_scheduler_that_is_not_prepared_steps_where_the_script_steps_it(recwarn):
    accelerator = fresh_accelerator()
    model = model_of("llama")
    own = plain_sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (1 + step))
    model, own = accelerator.prepare(model, own)
    accelerator.backward(model(**stacked(samples(2))).loss)
    own.step()
    schedule.step()
    assert own.param_groups[0]["lr"] == pytest.approx(RATE / 2)
    assert not [warning for warning in recwarn if "optimizer.step()" in str(warning.message)]


def test_checkpoints_that_accelerate_names_have_the_schedule_too(tmp_path):
    naming = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    rates = []
    for loads in (False, True):
        accelerator = fresh_accelerator()
        accelerator.project_configuration = naming
        model = model_of("llama")
        own = plain_sgd(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (1 + step))
        model, own, schedule = accelerator.prepare(model, own, schedule)
        if loads:
            accelerator.load_state()
        else:
            accelerator.backward(model(**stacked(samples(2))).loss)
            own.step()
            schedule.step()
            accelerator.save_state()
        rates.append((schedule.get_last_lr(), own.param_groups[0]["lr"], model.iteration))
    assert rates[0] == rates[1]


def test_indexed_data_are_three_iterators(corpus):
    accelerator = fresh_accelerator(
        num_micro_batches=2, train_iters=4, eval_iters=1, megatron_dataset_flag=True
    )
    model = model_of("llama")
    own = plain_sgd(model)
    data = MegatronLMDummyDataLoader(data_path=corpus, split="80,20,0", seq_length=16, micro_batch_size=2)
    model, own, train, valid, test = accelerator.prepare(model, own, data, data, data)
    batch = next(train)
    assert batch["input_ids"].shape == (2 * 2, 16) and test is None
    assert torch.equal(batch["input_ids"][:, 1:], batch["shift_labels"][:, :-1])
    assert not torch.equal(batch["input_ids"], next(train)["input_ids"])
    assert next(valid)["input_ids"].shape == (4, 16)
    tokens = {name: value % 96 for name, value in batch.items()}
    wanted = model_of("llama")(input_ids=tokens["input_ids"]).logits
    wanted = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), tokens["shift_labels"].flatten())
    close(model(**tokens).loss.detach(), wanted.detach())


def test_rows_that_fill_up_the_last_micro_batch_do_not_count():
    rows = torch.arange(15).view(5, 3)
    mask = torch.ones(5, 3)
    batch = Batch(rows, rows, mask, rows, None, torch.arange(5))
    parts = split_micro_batches(batch, 2, multiple=2)
    assert [part.loss_mask.sum(1).tolist() for part in parts] == [[3, 3, 3, 3], [3, 0, 0, 0]]
    assert torch.equal(torch.cat([part.input_ids for part in parts])[:5], rows)
