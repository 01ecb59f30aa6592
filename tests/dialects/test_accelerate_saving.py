"""Every way in which a script saves its trained model leaves the weights of now, whichever process writes them."""

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers.utils.hub
from accelerate_job import check, fresh_accelerator, model_of, one_step, plain_sgd, samples, stacked
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from megalith.errors import ConfigError


def of_transformers(accelerator, prepared, folder):
    """The lines of Accelerate's examples and their variants, each into a folder that from_pretrained reads."""
    model, main = accelerator.unwrap_model(prepared), accelerator.is_main_process
    state = accelerator.get_state_dict(prepared)
    model.save_pretrained(folder / "examples", is_main_process=main, save_function=accelerator.save)
    model.save_pretrained(folder / "state_dict", is_main_process=main, state_dict=state)
    model.save_pretrained(folder / "shards", is_main_process=main, max_shard_size="20KB")
    model.save_pretrained(folder / "every_rank")
    if main:
        model.save_pretrained(folder / "main")
        copy.deepcopy(model).save_pretrained(folder / "copy")
        model.push_to_hub(str(folder / "pushed"))
    if accelerator.process_index == 0:
        model.save_pretrained(folder / "first")
    accelerator.save_model(prepared, folder / "save_model")
    accelerator.save_model(model, folder / "save_unwrapped")
    if main:
        model.config.save_pretrained(folder / "save_unwrapped")
    return ["examples", "state_dict", "shards", "every_rank", "main", "copy", "pushed", "first", "save_model",
            "save_unwrapped"]  # fmt: skip


def of_torch(accelerator, prepared, folder):
    """State dicts and whole modules: the state that each file gives back."""
    model, state = accelerator.unwrap_model(prepared), accelerator.get_state_dict(prepared)
    if accelerator.is_main_process:
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / "state.bin")
        torch.save(model.state_dict(), folder / "unwrapped.bin")
        torch.save(model, folder / "whole.bin")
    accelerator.wait_for_everyone()
    accelerator.save(state, folder / "accelerate.bin")
    accelerator.save(state, folder / "accelerate.safetensors", safe_serialization=True)
    accelerator.save_model(prepared, folder / "pickled", safe_serialization=False)
    accelerator.wait_for_everyone()
    files = "state.bin", "unwrapped.bin", "accelerate.bin", "pickled/pytorch_model.bin"
    found = {name: torch.load(folder / name, weights_only=True) for name in files}
    whole = torch.load(folder / "whole.bin", weights_only=False)
    assert all(type(one) is torch.nn.Parameter for one in whole.parameters())
    return found | {"safetensors": load_file(folder / "accelerate.safetensors"), "whole": whole.state_dict()}


def every_way(folder, layout):
    """What every rank checks: all ranks see all files."""
    accelerator = fresh_accelerator(gradient_clipping=0.0, **layout)
    module = model_of("llama")
    model, own = accelerator.prepare(module, plain_sgd(module))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    model.train()
    accelerator.backward(model(**stacked(samples(4))).loss * 1e-5)
    own.step()
    wanted = accelerator.get_state_dict(model)
    assert (wanted["lm_head.weight"] - model_of("llama").lm_head.weight).norm() > 1e-3  # it has trained
    if accelerator.is_main_process:
        for one in (tokenizer, module.config, module.generation_config):
            one.save_pretrained(folder / "others")
    names = of_transformers(accelerator, model, folder)
    states = of_torch(accelerator, model, folder / "torch")
    accelerator.wait_for_everyone()
    assert AutoConfig.from_pretrained(folder / "others").vocab_size == module.config.vocab_size
    assert PreTrainedTokenizerFast.from_pretrained(folder / "others").get_vocab() == {"a": 0}
    for name in names:
        states[name] = AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
    for name, state in states.items():
        assert state.keys() == wanted.keys(), name
        assert all(torch.equal(state[key], wanted[key]) for key in wanted), name


@pytest.fixture
def hub(monkeypatch):
    """Hugging Face's hub as folders: what would be sent."""
    api = SimpleNamespace(create_repo=lambda name, **options: SimpleNamespace(repo_id=name))
    card = SimpleNamespace(save=lambda path: None)
    monkeypatch.setattr(transformers.utils.hub, "hf_api", lambda: api, raising=False)
    monkeypatch.setattr(transformers.utils.hub, "create_repo", api.create_repo, raising=False)
    monkeypatch.setattr(transformers.utils.hub, "create_and_tag_model_card", lambda *args, **options: card)
    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files",
                        lambda self, folder, name, *args, **options: shutil.copytree(folder, name))  # fmt: skip


def on_ranks(folder, layout):
    with pytest.MonkeyPatch.context() as patch:
        hub.__wrapped__(patch)
        every_way(folder, layout)


def test_one_process_saves_in_every_way(hub, tmp_path):
    every_way(tmp_path, {})


def test_two_processes_save_in_every_way(pool, tmp_path):
    pool.run(on_ranks, tmp_path, dict(tp_degree=2), size=2)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [dict(tp_degree=2, pp_degree=2), dict(pp_degree=2), dict(use_custom_fsdp=True)]
)
def test_four_processes_save_in_every_way(pool, tmp_path, layout):
    pool.run(on_ranks, tmp_path, layout, size=4)


def test_weights_from_before_a_step_are_not_saved_as_those_of_now(tmp_path):
    """A script that unwraps once and saves at the end would lose what it has trained in between."""
    accelerator, model, own, batch = one_step()
    module = accelerator.unwrap_model(model)
    before, kept = copy.deepcopy(module), accelerator.get_state_dict(model)
    module.save_pretrained(tmp_path / "before")
    accelerator.backward(model(**batch).loss)
    own.step()
    for save in (lambda: module.save_pretrained(tmp_path / "after"), module.state_dict,
                 lambda: accelerator.save_model(module, tmp_path / "after")):  # fmt: skip
        with pytest.raises(
            ConfigError, match=r"older than the last optimizer step.*unwrap_model\(model\) again, on every"
        ):
            save()
    check(([], before.state_dict()), ([], kept))  # a copy stays what it is
    assert accelerator.unwrap_model(model) is module
    module.save_pretrained(tmp_path / "after")
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    with pytest.raises(ConfigError, match="or load_state"):
        module.state_dict()
