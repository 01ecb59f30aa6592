"""What a loop over Accelerate may do with a prepared model, beside plain PyTorch's answer."""

import copy
import itertools
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate_job import (
    BATCH,
    STEPS,
    check,
    checked,
    close,
    forget_accelerator,
    fresh_accelerator,
    gradients,
    model_of,
    one_step,
    plain_sgd,
    prepared,
    reference,
    samples,
    stacked,
    train,
)
from default_cases import by_default
from test_accelerate_loaders import replicas
from test_accelerate_process import exchanged, tracked
from test_accelerate_steps import with_own_loss
from test_accelerate_training import cases_of
from torch import nn
from torch.utils.data import DataLoader

from megalith.dialects.accelerate.train_steps import mean_loss
from megalith.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate" / "train.py"
MERGES = EXAMPLE.with_name("merge_megatron_checkpoint.py")


def padded(where, first=0):
    """Samples whose first tokens count, with padding at sides, in the middle ("holes"), or of labels that count too."""
    ids = stacked(samples(first + BATCH))["input_ids"][first:]
    mask = torch.ones_like(ids)
    for row in range(BATCH):
        count = (first + row) % 5
        if where in ("left", "both"):
            mask[row, :count] = 0
        if where in ("right", "both", "counted"):
            mask[row, 16 - (4 - count) :] = 0
        if where == "holes":
            mask[row, 3 + count : 5 + count] = 0
            mask[row, : row % 2] = 0
    labels = ids.clone() if where == "counted" else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


WHERE = ("left", "right", "both", "holes", "counted")


def packed():
    batch = stacked(samples(BATCH))
    batch["position_ids"] = torch.cat([torch.arange(7), torch.arange(9)]).expand(BATCH, 16)
    batch["labels"][:, 7] = -100
    return batch


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("make", [*(partial(padded, where) for where in WHERE), packed])
def test_masks_and_positions_mean_what_they_mean_to_transformers(kind, make):
    batch, plain = make(), model_of(kind)
    _, model, _, _ = one_step(kind, num_micro_batches=2, return_logits=True)
    model.eval()
    with torch.no_grad():
        found, wanted = model(**batch), plain(**batch, use_cache=False)  # with one it packs nothing
    close(found.loss, wanted.loss)
    seen = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones(BATCH, 16, dtype=bool)
    close(found.logits[seen], wanted.logits[seen])


def padded_gradient(kind, where, layout, wanted):
    """Of half the batch a replica, by num_items_in_batch as the Trainer gives it."""
    accelerator, model, _, _ = one_step(kind, **layout)
    replica, replicas = accelerator._replica
    mine = {name: part.chunk(replicas)[replica] for name, part in padded(where).items()}
    loss = model(**mine, num_items_in_batch=torch.tensor(50)).loss
    accelerator.backward(loss)
    close(loss.detach(), wanted[0])
    close(accelerator.clip_grad_norm_(model.parameters(), 1e9), wanted[1])


def of_transformers(kind, where):
    plain = model_of(kind)
    loss = plain(**padded(where), num_items_in_batch=torch.tensor(50)).loss
    loss.backward()
    return loss.detach(), nn.utils.clip_grad_norm_(plain.parameters(), 1e9)


@pytest.mark.parametrize(
    ("kind", "where"),
    by_default(
        itertools.product(["gpt2", "llama", "mixtral", "opt"], WHERE),
        *(("llama", where) for where in WHERE),
        *((kind, "both") for kind in ("gpt2", "mixtral", "opt")),
    ),
)
def test_padding_has_transformers_loss_and_gradient(kind, where):
    padded_gradient(kind, where, dict(num_micro_batches=2), of_transformers(kind, where))


PADDED_LAYOUTS = {
    "TP2 + SP": dict(tp_degree=2, sequence_parallelism=True),
    "PP2": dict(pp_degree=2, num_micro_batches=2),
    "DP2": {},
    "CP2": dict(context_parallel_size=2),
    "CP2, all-to-all": dict(context_parallel_size=2, other_megatron_args={"cp_comm_type": "a2a"}),
}


@pytest.mark.parametrize("name", by_default(PADDED_LAYOUTS, "CP2"))
def test_padding_has_transformers_loss_and_gradient_in_two_processes(pool, name):
    cases = {
        where: ("llama", where, PADDED_LAYOUTS[name], of_transformers("llama", where))
        for where in WHERE
        if "CP2" not in name or where not in ("holes", "counted")
    }
    pool.run_cases(padded_gradient, cases, size=2)


def holes_are_refused():
    _, model, _, _ = one_step(context_parallel_size=2)
    for where in ("holes", "counted"):
        with pytest.raises(ConfigError, match=r"zeros between.*context_parallel_size is 2.*labels of −100"):
            model(**padded(where))


def test_holes_in_a_mask_are_refused_under_context_parallelism(pool):
    pool.run(holes_are_refused, size=2)


@pytest.mark.parametrize("where", WHERE)
def test_padding_in_a_train_step_of_the_scripts_own_has_transformers_loss(where):
    _, model, _, _ = one_step(custom_loss_function=mean_loss)
    if where in ("holes", "counted"):
        with pytest.raises(ConfigError, match=r"zeros between .*custom train steps.*labels of −100"):
            model(**padded(where))
    else:
        close(model(**padded(where)).loss.detach(), model_of("llama")(**padded(where)).loss.detach())


@pytest.mark.parametrize("loss_function", [None, mean_loss])
def test_token_types_that_are_all_0_are_ignored_where_the_model_has_none(capsys, loss_function):
    _, model, _, batch = one_step(custom_loss_function=loss_function)
    wanted = model(**batch).loss
    for _ in range(2):
        assert torch.equal(model(**batch, token_type_ids=torch.zeros_like(batch["input_ids"])).loss, wanted)
    assert capsys.readouterr().out.count("note: the batch has token_type_ids, all 0") == 1
    with pytest.raises(ConfigError, match=r"not all 0.*model_input_names=\["):
        model(**batch, token_type_ids=torch.ones_like(batch["input_ids"]))
    _, model, _, batch = one_step("gpt2")
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel adds embeddings.*model_input_names=\["):
        model(**batch, token_type_ids=torch.zeros_like(batch["input_ids"]))


def test_what_a_script_makes_of_the_loss_is_its_gradient():
    """loss · 0.5 and the sum of two calls; a loss without a backward pass does not count."""
    accelerator, model, own, batch = one_step()
    model(**batch)  # dropped
    half = model(**batch).loss * 0.5
    accelerator.backward(half)
    both = model(**batch).loss + 2 * model(**batch).loss
    accelerator.backward(both)
    own.step()
    plain = model_of("llama")
    (plain(**batch).loss * 3.5).backward()
    found = gradients(accelerator, model)
    for name, parameter in plain.named_parameters():
        close(found[name], parameter.grad)


def test_a_second_backward_pass_and_one_from_logits_are_refused():
    accelerator, model, _, batch = one_step(return_logits=True)
    outputs = model(**batch)
    accelerator.backward(outputs.loss)
    with pytest.raises(ConfigError, match="its gradients were used; call the model again"):
        outputs.loss.backward()
    with pytest.raises(ConfigError, match="custom_loss_function"):
        nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["input_ids"].flatten()).backward()
    with pytest.raises(ConfigError, match=r"needs a loss, not None.*labels"):
        accelerator.backward(model(input_ids=batch["input_ids"]).loss)
    model.eval()
    with pytest.raises(ConfigError, match=r"call train\(\)"):
        model(**batch).loss.backward()


OF_BEFORE = {
    "the prepared": lambda accelerator, model, before: model.parameters(),
    "the one before": lambda accelerator, model, before: before[0].parameters(),
    "a list from before": lambda accelerator, model, before: before[1],
    "the unwrapped": lambda accelerator, model, before: accelerator.unwrap_model(model).parameters(),
}


@pytest.mark.parametrize("whose", OF_BEFORE)
def test_clipping_by_the_script_is_torchs_and_takes_the_place_of_the_plugins(whose):
    accelerator, module = fresh_accelerator(gradient_clipping=1e-3), model_of("llama")
    before = module, list(module.parameters())
    model, own = accelerator.prepare(module, plain_sgd(module))
    batch = stacked(samples(BATCH))
    accelerator.backward(model(**batch).loss)
    given = list(OF_BEFORE[whose](accelerator, model, before))
    with pytest.raises(
        ConfigError, match=r"grad is not available for a parameter of .*accelerator\.clip_grad_norm_"
    ):
        nn.utils.clip_grad_norm_(given, 0.25)
    norm = accelerator.clip_grad_norm_(given, 0.25)
    own.step()
    plain = model_of("llama")
    plain(**batch).loss.backward()
    close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.25))
    found = gradients(accelerator, model)
    for name, parameter in plain.named_parameters():
        close(found[name], parameter.grad)
    assert all(parameter.grad is None for parameter in accelerator.unwrap_model(model).parameters())


def test_clipping_others_than_what_is_trained_is_refused():
    accelerator, model, _, batch = one_step()
    accelerator.backward(model(**batch).loss)
    some, others = list(model.parameters())[1:], list(model_of("llama").parameters())
    for given, message in (
        (some, "but 1 of the model's .*embed_tokens"),
        (others, "trained parameters are not among the 39"),
        ([], "the 0"),
    ):
        for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
            with pytest.raises(ConfigError, match=f"{message}.*pass model.parameters"):
                clip(given, 1.0)


def test_a_model_and_an_optimizer_from_before_prepare_forget_and_step_what_is_trained_or_are_refused():
    accelerator, module = fresh_accelerator(gradient_clipping=0.0), model_of("llama")
    before = plain_sgd(module)
    model, _ = accelerator.prepare(module, before)
    batch = stacked(samples(BATCH))
    for ask in (module.zero_grad, lambda: module(**batch), module.state_dict, lambda: copy.deepcopy(module)):
        with pytest.raises(ConfigError, match=r"sharded over the ranks"):
            ask()
    for weight, step in ((2.0, before.zero_grad), (3.0, before.step)):
        (model(**batch).loss * weight).backward()
        step()
    plain = model_of("llama")
    (plain(**batch).loss * 3).backward()
    found = gradients(accelerator, model)
    for name, parameter in plain.named_parameters():
        close(found[name], parameter.grad)


def test_zero_grad_forgets_and_a_step_without_gradients_changes_nothing():
    accelerator, model, own, batch = one_step()
    accelerator.backward(model(**batch).loss)
    own.zero_grad()
    own.step()
    assert all(not change.any() for change in gradients(accelerator, model).values())


@pytest.mark.parametrize("make", [
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-4),
])  # fmt: skip
def test_sgd_with_momentum_and_adam_with_l2(make):
    accelerator, plain = fresh_accelerator(gradient_clipping=0.0), model_of("gpt2")
    model = model_of("gpt2")
    loader = DataLoader(samples(STEPS * BATCH), batch_size=BATCH)
    theirs, (model, own, turns) = make(plain), accelerator.prepare(model, make(model), loader)
    model.train()
    for batch in turns:
        for one, optimizer in ((plain, theirs), (model, own)):
            optimizer.zero_grad()
            one(**batch).loss.backward()
            optimizer.step()
    found = accelerator.get_state_dict(model)
    for name, weight in plain.state_dict().items():
        close(found[name], weight)


def test_parameters_that_are_one_tensor_here_cannot_have_two_decays():
    model = model_of("llama")
    queries = [p for name, p in model.named_parameters() if "q_proj" in name]
    others = [p for name, p in model.named_parameters() if "q_proj" not in name]
    groups = [{"params": queries, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    with pytest.raises(ConfigError, match="in one tensor; put them in one group"):
        fresh_accelerator().prepare(model, torch.optim.AdamW(groups))


def test_frozen_parameters_stay_and_others_train():
    accelerator, model = fresh_accelerator(gradient_clipping=0.0), model_of("llama")
    model.model.embed_tokens.requires_grad_(False)
    model, own = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model.train()
    accelerator.backward(model(**stacked(samples(4))).loss)
    own.step()
    moved = {name for name, change in gradients(accelerator, model).items() if change.any()}
    assert "model.embed_tokens.weight" not in moved and "lm_head.weight" in moved


def test_a_gradient_with_nan_is_skipped_and_said_so():
    accelerator, model, own, batch = one_step()
    accelerator.backward(model(**batch).loss * float("nan"))
    own.step()
    assert accelerator.optimizer_step_was_skipped
    assert all(not change.any() for change in gradients(accelerator, model).values())
    accelerator.backward(model(**batch).loss)
    own.step()
    assert not accelerator.optimizer_step_was_skipped


def test_without_the_plugin_it_is_accelerates_own(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    from accelerate.state import AcceleratorState, GradientState

    from megalith.accelerate import Accelerator

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    linear, accelerator = nn.Linear(3, 1), Accelerator(cpu=True)
    plain = copy.deepcopy(linear)
    model, own = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    for one, backward, optimizer in (
        (model, accelerator.backward, own),
        (plain, torch.Tensor.backward, torch.optim.SGD(plain.parameters(), lr=0.1)),
    ):
        backward(one(torch.ones(2, 3)).sum())
        optimizer.step()
    assert torch.equal(model.weight, plain.weight)


def saved(folder, layout, other, **more):
    """Trains STEPS turns in one layout and saves, and as many in another that loads; compares with no save."""
    half = samples(2 * STEPS * BATCH)
    accelerator = fresh_accelerator(**layout, legacy_bin=True)
    first = prepared(accelerator, "llama", half[: STEPS * BATCH])
    losses = train(accelerator, first)
    accelerator.save_state(folder)
    parts = [folder / f"{name}_tp_{tp}_pp_0.bin" for name in ("pytorch_model", "optimizer") for tp in (0, 1)]
    shards = [torch.load(part, weights_only=True) for part in parts]
    assert shards[0]["output_layer.weight"].shape[0] * 2 == first[0].run.model.padded_vocab_size
    assert "optim.output_layer.weight.exp_avg" in shards[2]
    again = fresh_accelerator(**other)
    second = prepared(again, "llama", half[STEPS * BATCH :])
    again.load_state(folder)
    assert second[0].iteration == STEPS
    losses += train(again, second)
    check((losses, again.get_state_dict(second[0])), more["wanted"])


def together(wanted, folder, cases):
    """What every rank of two checks."""
    for case in cases.values():
        checked(*case)
    with_own_loss()
    tracked()
    accelerator = fresh_accelerator(tp_degree=2, sequence_parallelism=True, return_logits=True)
    exchanged(accelerator)
    model, _, loader, _ = prepared(accelerator, "llama", samples(BATCH))
    batch, plain = next(iter(loader)), model_of("llama")
    outputs = model(**batch)
    close(outputs.logits, plain(**batch).logits)
    accelerator.backward(outputs.loss)
    plain(**batch).loss.backward()
    close(
        accelerator.clip_grad_norm_(model.parameters(), 1.0),
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0),
    )
    exchanged(accelerator)
    if accelerator.process_index == 0:
        accelerator.set_trigger()
    assert [accelerator.check_trigger() for _ in range(2)] == [True, False]  # on both
    assert accelerator.is_main_process == (accelerator.process_index == 1)
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            (folder / "first").write_text("here")
        assert (folder / "first").exists()
    saved(folder / "state", dict(tp_degree=2, sequence_parallelism=True), dict(pp_degree=2), wanted=wanted)
    replicas(folder)
    forget_accelerator()
    losses = runpy.run_path(str(EXAMPLE))["train"](tp=2, steps=12)
    assert losses[-1] < losses[0] - 0.5, losses


@pytest.mark.full
def test_two_processes(pool, tmp_path, monkeypatch):
    """One job: importing transformers takes a rank as long as five cases."""
    wanted = reference("llama", steps=2 * STEPS)
    pool.run(together, wanted, tmp_path, cases_of(2, every=False), size=2)
    words = ["--checkpoint-dir", str(tmp_path / "state"), "--output", str(tmp_path / "pytorch_model.bin")]
    monkeypatch.setattr(sys, "argv", [str(MERGES), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(MERGES), run_name="__main__")
    assert not ended.value.code
    wanted = reference("llama", data=samples(2 * STEPS * BATCH))[1]
    merged = type(model_of("llama")).from_pretrained(tmp_path)  # by its config.json
    check(([], merged.state_dict()), ([], wanted))
