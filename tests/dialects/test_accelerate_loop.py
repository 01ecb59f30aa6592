"""What a loop over Accelerate may do with a prepared model, beside plain PyTorch's answer."""

import copy

import accelerate
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from accelerate_job import (
    BATCH,
    RATE,
    STEPS,
    adamw,
    check,
    checked,
    close,
    cosine,
    fresh_accelerator,
    model_of,
    plain_sgd,
    prepared,
    reference,
    samples,
    stacked,
    train,
)
from test_accelerate_process import exchanged, tracked
from test_accelerate_steps import with_own_loss
from test_accelerate_training import cases_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchEncoding

from megalith.accelerate import skip_first_batches
from megalith.cli.main import main
from megalith.dialects.accelerate.replica_loader import Share, host_copy, prepare_loader
from megalith.errors import ConfigError


def one_step(kind="llama", optimizer="sgd", data=None, **plugin):
    """Accelerator, model and optimizer of one process, and the batch of a step."""
    plugin = {"gradient_clipping": 0.0, **plugin}
    accelerator = fresh_accelerator(**plugin)
    model, own, loader, _ = prepared(accelerator, kind, data or samples(BATCH), optimizer)
    model.train()
    return accelerator, model, own, next(iter(loader))


def gradients(accelerator, model, kind="llama"):
    """By one step of SGD."""
    before, after = model_of(kind).state_dict(), accelerator.get_state_dict(model)
    return {name: (before[name] - after[name]) / RATE for name in before}


def padded(side):
    batch = stacked(samples(BATCH))
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for row in range(BATCH):
        where = slice(0, row % 5) if side == "left" else slice(16 - row % 5, 16)
        batch["attention_mask"][row, where] = 0
        batch["labels"][row, where] = -100
        batch["labels"][row, row % 5] = -100  # transformers has padding predict it
    return batch


def packed():
    batch = stacked(samples(BATCH))
    batch["position_ids"] = torch.cat([torch.arange(7), torch.arange(9)]).expand(BATCH, 16)
    batch["labels"][:, 7] = -100
    return batch


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("make", [lambda: padded("left"), lambda: padded("right"), packed])
def test_masks_and_positions_mean_what_they_mean_to_transformers(kind, make):
    batch, plain = make(), model_of(kind)
    _, model, _, _ = one_step(kind, num_micro_batches=2, return_logits=True)
    model.eval()
    with torch.no_grad():
        found, wanted = model(**batch), plain(**batch, use_cache=False)  # with one it packs nothing
    close(found.loss, wanted.loss)
    seen = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones(BATCH, 16, dtype=bool)
    close(found.logits[seen], wanted.logits[seen])


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
    with pytest.raises(ConfigError, match="gradients are used up"):
        outputs.loss.backward()
    with pytest.raises(ConfigError, match="custom_loss_function"):
        nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["input_ids"].flatten()).backward()
    with pytest.raises(ConfigError, match=r"given None and no loss.*labels"):
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
    with pytest.raises(ConfigError, match=r"grad of a parameter of .*accelerator\.clip_grad_norm_"):
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
    for given, told in (
        (some, "1 are not among the .*embed_tokens"),
        (others, "39 are not among the 39"),
        ([], "the 0"),
    ):
        for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
            with pytest.raises(ConfigError, match=f"trained parameters .*{told}.*give model.parameters"):
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
    with pytest.raises(ConfigError, match="put them in one group"):
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


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("dataset", [list, Stream])
def test_the_last_batch_is_filled_up_with_samples_that_do_not_count(dataset):
    rows, losses = samples(11), []
    accelerator = fresh_accelerator(num_micro_batches=2)
    collated = DataLoader(dataset(rows), batch_size=2, collate_fn=lambda rows: BatchEncoding(stacked(rows)))
    model, loader = accelerator.prepare(
        model_of("llama"), collated
    )  # no dict, as tokenizers' batches are none
    model.eval()
    seen, plain = [], model_of("llama")
    for batch in loader:
        with torch.no_grad():
            losses.append(model(**batch).loss)
        seen.append(accelerator.gather_for_metrics(batch["input_ids"]))
        assert len(batch["input_ids"]) == 4
    assert torch.equal(torch.cat(seen), stacked(rows)["input_ids"])
    wanted = [plain(**stacked(rows[at : at + 4])).loss for at in (0, 4, 8)]
    close(torch.stack(losses), torch.stack(wanted))


def test_what_the_model_reads_on_the_host_is_not_copied_back_from_the_device_unless_it_was_changed():
    share = Share(micro_batches=1, replicas=1, replica=0, device=torch.device("meta"))
    rows = samples(2)
    loader = prepare_loader(DataLoader(rows, batch_size=2), share)
    (batch,) = loader
    assert batch["labels"].is_meta and torch.equal(
        host_copy(batch["labels"], loader), stacked(rows)["labels"]
    )
    batch["labels"].add_(1)
    with pytest.raises(NotImplementedError, match="meta"):  # there is nothing to copy
        host_copy(batch["labels"], loader)


def test_the_loaders_order_is_the_scripts_and_turns_can_be_left_out():
    def loader():
        return DataLoader(range(20), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))

    accelerator = fresh_accelerator(num_micro_batches=3)
    turns = accelerator.prepare(loader())
    wanted = torch.cat(list(loader()))
    assert torch.equal(torch.cat(list(turns))[:20], wanted) and len(turns) == 4
    rest = accelerator.skip_first_batches(accelerator.prepare(loader()), 2)
    assert torch.equal(torch.cat(list(rest))[:8], wanted[12:]) and len(rest) == 2


@pytest.mark.parametrize("dataset", [list, Stream])
@pytest.mark.parametrize("whose", ["the accelerator's", "the plain", "Accelerate's own"])
def test_turns_can_be_left_out_in_a_later_epoch_and_the_rest_is_filled_up_as_the_whole(dataset, whose):
    """Accelerate's own function, of a script that is not patched, has no streams of ours."""
    rows, found = samples(11), []
    accelerator = fresh_accelerator(
        num_micro_batches=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    skips = {"the accelerator's": accelerator.skip_first_batches, "the plain": skip_first_batches}
    skip = skips.get(whose, accelerate.skip_first_batches)
    given = dataset(rows)
    model, loader = accelerator.prepare(
        model_of("llama"), DataLoader(given, batch_size=2, shuffle=dataset is list)
    )
    model.eval()
    list(loader)  # the first epoch
    for turns in (loader, skip(loader, 1), skip(loader, 2)):
        with torch.no_grad():
            found.append([model(**batch).loss for batch in turns])
    assert [len(losses) for losses in found] == [3, 2, 1]
    close(torch.stack(found[1]), torch.stack(found[0][1:]))
    close(torch.stack(found[2]), torch.stack(found[0][2:]))


def test_the_weights_go_back_into_the_scripts_model_and_files(tmp_path):
    accelerator, model, own, batch = one_step("mixtral")
    accelerator.backward(model(**batch).loss)
    own.step()
    module = accelerator.unwrap_model(model)
    assert type(module) is type(model_of("mixtral"))
    accelerator.save_model(model, tmp_path / "model")
    module.save_pretrained(tmp_path / "published")
    again = type(module).from_pretrained(tmp_path / "published").eval()
    model.eval()
    with torch.no_grad():
        wanted = model(**batch).loss
        for one in (module.eval(), again):
            close(one(**batch).loss, wanted)
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored.keys() == module.state_dict().keys()
    assert (tmp_path / "model" / "config.json").exists()


def test_a_model_without_weights_gets_those_of_a_checkpoint(tmp_path):
    accelerator, model, own, batch = one_step("mixtral")
    accelerator.backward(model(**batch).loss)
    own.step()
    for _ in range(2):  # the second time into the same folder
        accelerator.save_state(tmp_path / "state")
    wanted = accelerator.get_state_dict(model)
    accelerator = fresh_accelerator()
    with torch.device("meta"):
        empty = model_of("mixtral")
    model, _ = accelerator.prepare(empty, plain_sgd(empty))
    accelerator.load_state(tmp_path / "state")
    check(([], accelerator.get_state_dict(model)), ([], wanted))


def test_bf16_and_a_model_that_is_bf16():
    for precision, kind in (("bf16", torch.float32), ("no", torch.bfloat16)):
        accelerator = fresh_accelerator(precision=precision)
        model = model_of("llama").to(kind)
        model, own = accelerator.prepare(model, adamw(model))
        assert model.run.train.precision == "bf16"
        model.train()
        loss = model(**stacked(samples(4))).loss
        accelerator.backward(loss)
        own.step()
        close(loss.detach(), model_of("llama")(**stacked(samples(4))).loss.detach(), 1e-2)
        assert next(accelerator.unwrap_model(model).parameters()).dtype == kind


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


def replicas(folder):
    """Two replicas share out an incomplete last batch: the loss is that of its samples, and metrics are theirs."""
    rows, plain = samples(11), model_of("llama")
    accelerator = fresh_accelerator()
    exchanged(accelerator)
    model, loader = accelerator.prepare(model_of("llama"), DataLoader(rows, batch_size=4))
    exchanged(accelerator)
    model.eval()
    with torch.no_grad():
        found = [model(**batch).loss for batch in loader]
        wanted = [plain(**stacked(rows[at : at + 8])).loss for at in (0, 8)]
    close(torch.stack(found), torch.stack(wanted))
    stream = accelerator.prepare(DataLoader(Stream(rows), batch_size=4))
    with torch.no_grad():
        close(torch.stack([model(**batch).loss for batch in stream]), torch.stack(wanted))
    rest = accelerator.skip_first_batches(stream, 1)
    with torch.no_grad():
        close(torch.stack([model(**batch).loss for batch in rest]), torch.stack(wanted[1:]))
    other = Stream(rows[accelerator.process_index :])
    with pytest.raises(ConfigError, match="gives rank 1 other samples than rank 0"):
        next(iter(accelerator.prepare(DataLoader(other, batch_size=4))))
    for turns in (loader, stream):
        seen = [accelerator.gather_for_metrics(batch["input_ids"]) for batch in turns]
        assert torch.equal(torch.cat(seen), stacked(rows)["input_ids"])


def test_two_processes(pool, tmp_path):
    """One job: importing transformers takes a rank as long as five cases."""
    wanted = reference("llama", steps=2 * STEPS)
    pool.run(together, wanted, tmp_path, cases_of(2, every=False), size=2)
    assert (
        main(["checkpoint", "merge", "--hf", str(tmp_path / "state"), str(tmp_path / "pytorch_model.bin")])
        == 0
    )
    wanted = reference("llama", data=samples(2 * STEPS * BATCH))[1]
    merged = type(model_of("llama")).from_pretrained(tmp_path)  # by its config.json
    check(([], merged.state_dict()), ([], wanted))


class Wrapper(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.config = base, base.config


def test_what_is_not_the_prepared_models_is_said_with_the_way_out():
    _, model, _, batch = one_step()
    for name in ("generate", "gradient_checkpointing_enable", "save_pretrained", "dtype"):
        assert not hasattr(model, name)
        with pytest.raises(
            ConfigError, match=rf"has no {name}.*LlamaForCausalLM.*unwrap_model\(model\)\.{name}"
        ):
            getattr(model, name)
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        _ = model.no_such
    for given in ((batch["input_ids"], batch["labels"]), (batch,)):
        with pytest.raises(ConfigError, match=rf"{len(given)} arguments without names.*model\(\*\*batch\)"):
            model(*given)


def test_the_prepared_models_zero_grad_forgets():
    accelerator, model, own, batch = one_step()
    accelerator.backward(model(**batch).loss)
    model.zero_grad()
    own.step()
    assert all(not change.any() for change in gradients(accelerator, model).values())


@pytest.mark.parametrize("wrap", [Wrapper, torch.compile])
def test_a_wrapper_is_refused_with_what_it_wraps(wrap):
    with pytest.raises(ConfigError, match=r"wrapper of LlamaForCausalLM.*merge_and_unload"):
        fresh_accelerator().prepare(wrap(model_of("llama")))


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ConfigError, match=r"none of the optimizer's .* is one of the model's"):
        fresh_accelerator().prepare(model_of("llama"), adamw(model_of("llama")))


def test_a_prepared_models_parameters_are_the_scripts_without_values_or_gradients():
    plain, (_, model, _, batch) = model_of("gpt2"), one_step("gpt2")
    found = dict(model.named_parameters())
    assert {name: (p.shape, p.dtype, p.numel(), p.requires_grad, p.device) for name, p in found.items()} == {
        name: (p.shape, p.dtype, p.numel(), p.requires_grad, p.device) for name, p in plain.named_parameters()
    }
    assert len(dict(model.named_parameters(remove_duplicate=False))) == len(found) + 1  # the tied embedding
    model(**batch).loss.backward()
    one = next(model.parameters())
    with pytest.raises(ConfigError, match=r"grad of a parameter.*accelerator\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    asked = [lambda: one.grad, lambda: setattr(one, "grad", None), lambda: one.data, lambda: one + 1,
             lambda: one.norm(), lambda: model.requires_grad_(False), lambda: one.copy_(one)]  # fmt: skip
    for ask in asked:
        with pytest.raises(ConfigError, match="sharded over the ranks"):
            ask()
    for name in ("state_dict", "half", "bfloat16", "double"):
        with pytest.raises(ConfigError, match=f"prepared model's {name} would reach no weights"):
            getattr(model, name)()
    with pytest.raises(ConfigError, match=r"deepcopy .*unwrap_model"):
        copy.deepcopy(model)


def test_an_optimizer_made_of_the_prepared_models_parameters_trains_once_it_is_prepared():
    wanted = reference("gpt2")
    accelerator = fresh_accelerator(gradient_clipping=1.0)
    loader = DataLoader(samples(STEPS * BATCH), batch_size=BATCH)
    model, loader = accelerator.prepare(model_of("gpt2"), loader)
    own = adamw(model)
    for step in (own.step, own.zero_grad):
        with pytest.raises(ConfigError, match=r"to accelerator\.prepare before it steps"):
            step()
    schedule = cosine(own)
    own, schedule = accelerator.prepare(own, schedule)
    objects = model, own, loader, schedule
    assert accelerator.prepare(*objects) == objects  # they stay as they are
    check((train(accelerator, objects), accelerator.get_state_dict(model)), wanted)
    with pytest.raises(ConfigError, match="a second optimizer"):
        accelerator.prepare(adamw(model))


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions", "output_router_logits"])
def test_further_outputs_are_refused(name):
    _, model, _, batch = one_step()
    with pytest.raises(ConfigError, match=f"{name} is true, but .* loss and logits alone"):
        model(**batch, **{name: True})
    model(**batch, **{name: False})


def test_gradient_checkpointing_of_the_scripts_model_is_recomputation():
    found = []
    for given in ({}, {"recompute_activations": True}):
        model = model_of("llama")
        model.gradient_checkpointing_enable()
        found.append(fresh_accelerator(**given).prepare(model, adamw(model))[0].run.parallel)
    assert [one.recompute_granularity for one in found] == ["full", "selective"]
    assert (found[0].recompute_method, found[0].recompute_num_layers) == ("uniform", 1)
