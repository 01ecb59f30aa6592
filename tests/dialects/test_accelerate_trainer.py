"""transformers' Trainer on Megalith beside the Trainer itself."""

import os

import pytest
import torch
from accelerate_job import check, model_of, samples
from transformers import Trainer, TrainingArguments

from megalith.accelerate import MegalithTrainer, MegatronLMPlugin
from megalith.errors import ConfigError


def arguments(folder, batch=2, **more):
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=batch, gradient_accumulation_steps=2,
        learning_rate=1e-3, weight_decay=0.1, adam_epsilon=1e-4, logging_steps=1, report_to=[], disable_tqdm=True,
        lr_scheduler_type="cosine", num_train_epochs=1, **{"save_strategy": "no", **more},
    )  # fmt: skip


BEST_ALONE = dict(
    load_best_model_at_end=True,
    save_only_model=True,
    save_strategy="steps",
    save_steps=1,
    eval_strategy="steps",
    eval_steps=1,
)


def reset():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain(folder, data=None):
    reset()
    trainer = Trainer(model_of("llama"), arguments(folder, 4), train_dataset=data or samples(24))
    trainer.train()
    return losses_of(trainer), trainer.model.state_dict(), trainer.evaluate(samples(6))["eval_loss"]


def left_padded():
    """Samples whose first tokens count: padding predicts them, and num_items_in_batch has them."""
    data = samples(24)
    for number, sample in enumerate(data):
        sample["attention_mask"] = (torch.arange(16) >= number % 7).long()
        sample["labels"] = sample["input_ids"].masked_fill(sample["attention_mask"] == 0, -100)
    return data


def ours(folder, wanted, batch, plugin, data=None):
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))  # as torchrun says it
    reset()
    options = dict(train_dataset=data or samples(24), megatron_lm_plugin=MegatronLMPlugin(**plugin))
    trainer = MegalithTrainer(model_of("llama"), arguments(folder, batch), **options)
    trainer.train()
    assert (
        trainer.get_total_train_batch_size(trainer.args) == 4 * 2
    )  # in every layout, so its samples a second
    evaluated = trainer.evaluate(samples(6))["eval_loss"]
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    check((losses_of(trainer), weights), wanted[:2])
    assert evaluated == pytest.approx(wanted[2], rel=1e-5)
    trainer.save_model(str(folder / "model"))
    again = type(model_of("llama")).from_pretrained(folder / "model")
    check(([], again.state_dict()), ([], wanted[1]))


def test_the_trainer_gives_its_own_losses_and_weights(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    wanted = plain(tmp_path)
    ours(tmp_path, wanted, 4, {})


def test_left_padded_samples_have_the_trainers_losses_and_weights(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    ours(tmp_path, plain(tmp_path, left_padded()), 4, {}, left_padded())


def test_a_resumed_run_is_the_same_run(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    wanted = plain(tmp_path)
    for resumed in (False, True):
        reset()
        saving = arguments(tmp_path, 4, save_strategy="steps", save_steps=2)
        trainer = MegalithTrainer(model_of("llama"), saving, train_dataset=samples(24))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumed else None)
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        check(([], weights), ([], wanted[1]))
    assert trainer.state.global_step == 3 and trainer.model_wrapped.iteration == 3


def judged(kind, folder, batch=4, **more):
    """Losses and metrics, and weights, of a run whose "best" model is the worst, that of the first step."""

    def metrics(found):
        return {"mean": float(abs(found.predictions).mean()), "labels": float(found.label_ids.mean())}

    reset()
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
    each = dict(save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)
    trainer = kind(
        model_of("llama"), arguments(folder, batch, **best, **each), train_dataset=samples(16),
        eval_dataset=samples(8), compute_metrics=metrics, **more,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    last = {name: value for name, value in trainer.evaluate().items() if name in MEASURED}
    seen = [entry[name] for entry in trainer.state.log_history for name in MEASURED if name in entry]
    model = trainer.model_wrapped
    return (
        seen,
        last,
        trainer.accelerator.get_state_dict(model) if "megatron_lm_plugin" in more else model.state_dict(),
    )


MEASURED = ("eval_loss", "eval_mean", "eval_labels")


def our_best(folder, wanted, batch, plugin):
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    seen, last, weights = judged(
        MegalithTrainer, folder, batch, megatron_lm_plugin=MegatronLMPlugin(**plugin)
    )
    assert seen == pytest.approx(wanted[0], rel=1e-5) and last == pytest.approx(wanted[1], rel=1e-5)
    check(([], weights), ([], wanted[2]))


def test_metrics_see_logits_and_the_best_model_is_loaded_at_the_end(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    our_best(tmp_path / "ours", judged(Trainer, tmp_path / "theirs"), 4, {})


def test_a_failed_save_leaves_no_whole_weights_in_memory(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    reset()
    trainer = MegalithTrainer(model_of("llama"), arguments(tmp_path), train_dataset=samples(8))
    trainer.train()

    def full(*args, **options):
        raise OSError("no space left")

    monkeypatch.setattr(trainer, "_save", full)
    with pytest.raises(OSError, match="no space"):
        trainer.save_model(str(tmp_path / "model"))
    assert all(parameter.is_meta for parameter in trainer.model.parameters())


@pytest.mark.parametrize("given, own, message", [
    (dict(label_smoothing_factor=0.1), {}, "label_smoothing_factor is 0.1, which"),
    ({}, dict(compute_loss_func=lambda *args, **options: None), "compute_loss_func is set, which"),
    (BEST_ALONE, {}, "leave save_only_model out"),
    (dict(neftune_noise_alpha=5.0), {}, "neftune_noise_alpha is 5.0, which is not supported: it hooks"),
    (dict(average_tokens_across_devices=False), {}, "average_tokens_across_devices is False, which is not supported"),
    (dict(bf16_full_eval=True), {}, "bf16_full_eval is True, which is not supported"),
])  # fmt: skip
def test_what_needs_another_model_or_gradients_of_logits_or_a_checkpoint_that_is_not_kept_is_refused(
    tmp_path, monkeypatch, given, own, message
):
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    reset()
    with pytest.raises(ConfigError, match=message):
        MegalithTrainer(model_of("llama"), arguments(tmp_path, **given), eval_dataset=samples(8), **own)


def test_pipelines_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="one at a time"):
        MegalithTrainer(model_of("llama"), megatron_lm_plugin=MegatronLMPlugin(pp_degree=2))


@pytest.mark.full
@pytest.mark.parametrize("batch, plugin", [(4, dict(tp_degree=2, sequence_parallelism=True)), (2, {})])
def test_in_two_processes(pool, tmp_path, monkeypatch, batch, plugin):
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    wanted = plain(tmp_path)
    wanted = wanted[0], {name: value.clone() for name, value in wanted[1].items()}, wanted[2]
    pool.run(ours, tmp_path, wanted, batch, plugin, size=2)
    pool.run(our_best, tmp_path / "best", judged(Trainer, tmp_path / "theirs"), batch, plugin, size=2)
    assert torch.is_tensor(wanted[1]["lm_head.weight"])
