"""A prepared model as an object: its weights back, what it has of the script's own, and what is refused."""

import copy

import pytest
import torch
from accelerate_job import (
    BATCH,
    STEPS,
    adamw,
    check,
    close,
    cosine,
    fresh_accelerator,
    gradients,
    model_of,
    one_step,
    plain_sgd,
    reference,
    samples,
    stacked,
    train,
)
from torch import nn
from torch.utils.data import DataLoader

from megalith.errors import ConfigError


# The second's files have constants too, the third's other names and convolutions than its state dict.
@pytest.mark.parametrize("kind", ["mixtral", "apertus", "olmo hybrid"])
def test_the_weights_go_back_into_the_scripts_model_and_files(kind, tmp_path):
    accelerator, model, own, batch = one_step(kind)
    accelerator.backward(model(**batch).loss)
    own.step()
    module = accelerator.unwrap_model(model)
    assert type(module) is type(model_of(kind))
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
        with pytest.raises(
            ConfigError, match=rf"and {len(given) - 1} more positional arguments.*call model\(\*\*batch\)"
        ):
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


def test_a_model_that_has_run_is_prepared_though_its_graph_is_alive():
    accelerator, module, batch = (
        fresh_accelerator(gradient_clipping=0.0),
        model_of("gpt2"),
        stacked(samples(4)),
    )
    before = module(**batch).loss
    model, _ = accelerator.prepare(module, plain_sgd(module))
    model.train()
    accelerator.backward(model(**batch).loss)
    for given in (model.parameters(), module.parameters()):
        with pytest.raises(ConfigError, match="grad is not available for a parameter"):
            nn.utils.clip_grad_norm_(given, 1.0)
    norm, plain = accelerator.clip_grad_norm_(module.parameters(), 1.0), model_of("gpt2")
    plain(**batch).loss.backward()
    close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    close(before.detach(), model(**batch).loss.detach())


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ConfigError, match=r"none of the optimizer's .* belongs to the model"):
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
    with pytest.raises(
        ConfigError, match=r"grad is not available for a parameter.*accelerator\.clip_grad_norm_"
    ):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    asked = [lambda: one.grad, lambda: setattr(one, "grad", None), lambda: one.data, lambda: one + 1,
             lambda: one.norm(), lambda: model.requires_grad_(False), lambda: one.copy_(one)]  # fmt: skip
    for ask in asked:
        with pytest.raises(ConfigError, match="sharded over the ranks"):
            ask()
    for name in ("state_dict", "half", "bfloat16", "double"):
        with pytest.raises(ConfigError, match=f"{name} is not available for the prepared model"):
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
        with pytest.raises(ConfigError, match=r"to accelerator\.prepare before its first step"):
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
    with pytest.raises(ConfigError, match=f"{name} is true, but .* only loss and logits"):
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
