"""Modules trained in full beside adapters: PEFT's formula and files, merged, resumed, and with the base's values in a
reference."""

from functools import partial
from pathlib import Path

import pytest
import torch
from adapter_runs import (
    ExportedRun,
    check_engine,
    check_plan,
    check_resume,
    check_there_and_back,
    difference,
    run_config,
    stored_tensors,
)
from default_cases import by_default, in_full
from models.reference import CASES, VOCAB, first_of_each_kind, random_reference
from peft_formula import PREFIX, random_adapters, save
from safetensors.torch import load_file

import megalith
from megalith.bridge.adapters.adapter_folder import load_adapter_pairs
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.adapters.open_adapters import fingerprint_of
from megalith.bridge.families import family_of
from megalith.bridge.importer import import_hf
from megalith.bridge.peft.peft_modules import modules_to_save, resolve_saved_modules
from megalith.errors import CheckpointError, ConfigError
from megalith.parity.job import start
from megalith.rl.auxiliary_models.reference import without_adapters
from megalith.rl.engines.weight_stream import WeightStream
from megalith.rl.from_trl.tuning_trainers import SFTTrainer
from megalith.training.build import prepare

# case: modules with adapters, modules_to_save, and what an export calls these
SAVED = {
    "llama": (["q_proj", "down_proj"], ["embed_tokens", "lm_head"], ["embed_tokens", "lm_head"]),
    "gemma": (  # tied
        ["q_proj"],
        ["lm_head", "norm"],
        ["embed_tokens", "input_layernorm", "norm", "post_attention_layernorm"],
    ),
    "gpt2": (["c_attn"], ["wte", "wpe", "final_layernorm"], ["ln_f", "wpe", "wte"]),
    "phi": (["q_proj"], ["lm_head"], ["lm_head"]),  # with a bias
    "mixtral": (["q_proj"], ["router", "model.norm"], ["gate", "model.norm"]),
    "gpt-oss": (["o_proj"], ["mlp.router"], ["router"]),  # with a bias
    "qwen2-moe, a dense layer": (["q_proj"], ["gate"], ["gate", "shared_expert_gate"]),
    "gemma2": (["q_proj"], ["post_attention_layernorm"], ["post_attention_layernorm"]),
    "glm4": (["o_proj"], ["post_attention_layernorm"], ["post_attention_layernorm"]),  # another norm of ours
}
IDS = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))  # without padding tokens


def lora_of(name: str) -> dict:
    targets, modules, _ = SAVED[name]
    return {"rank": 2, "alpha": 3.0, "targets": targets, "modules_to_save": modules}


@pytest.mark.parametrize("name", by_default(SAVED, "llama", "gemma", "mixtral", "glm4"))
def test_a_run_trains_what_peft_trains_and_writes_what_peft_writes(
    hf_folder, tmp_path: Path, name: str
) -> None:
    run = ExportedRun(name, hf_folder(name), lora_of(name), IDS, tmp_path)
    assert run.settings["modules_to_save"] == SAVED[name][2]
    assert run.error < 6e-7
    trained = {parameter for name, parameter in run.model.named_parameters() if name in run.model.saved_names}
    assert trained and all(parameter.requires_grad for parameter in trained)
    gradients = load_file(run.peft / "adapter_model.safetensors")
    gradients = {key.removeprefix(PREFIX): key for key in gradients if ".lora_" not in key}
    norms = sorted(parameter.grad.norm().item() for parameter in trained)
    parameters = run.reference.named_parameters()
    expected = {id(each): each.grad.norm().item() for key, each in parameters if key in gradients}
    assert norms == pytest.approx(sorted(expected.values()), rel=2e-6)
    run.check_merged(IDS)


@pytest.mark.parametrize("name", by_default(SAVED, "gemma"))
def test_a_folder_goes_into_a_run_and_back_bitwise(hf_folder, tmp_path: Path, name: str) -> None:
    base = hf_folder(name)
    step = check_there_and_back(base, lora_of(name), tmp_path)
    bases = [base] if name != "gemma" else [base, import_hf(base, tmp_path / "base", show_progress=False)]
    for number, each in enumerate(bases):
        merge(tmp_path / "peft", tmp_path / f"merged{number}", base=str(each), show_progress=False)
        with torch.no_grad():
            trained = megalith.load(step)(IDS)
            assert difference(megalith.load(tmp_path / f"merged{number}")(IDS), trained) < 1e-6


KINDS = first_of_each_kind()


@pytest.mark.parametrize(
    "names", [KINDS, in_full(sorted(CASES.keys() - set(KINDS)))], ids=["kinds", "others"]
)
def test_names_mean_in_every_family_what_peft_would_match_and_an_export_names_the_same(names) -> None:
    for name in names:
        family = family_of(config := CASES[name][0]().to_dict(), name)
        model = family.read_config(config)
        for modules in (["embed_tokens", "lm_head"], ["norm"], ["gate"], ["router"], ["final_layernorm"]):
            try:
                paths = resolve_saved_modules(modules, family, model)
            except ConfigError as error:
                if name.startswith("dbrx") and modules == [
                    "norm"
                ]:  # PEFT would save norm_attn_norm, attention too
                    assert "selects layers.*.self_attention.linear_proj" in str(error)
                    continue
                assert any(
                    each in str(error) for each in ("does not have", "has a bias", "in newer versions")
                )
                continue
            assert resolve_saved_modules(paths, family, model) == paths
            groups = family.groups(model)
            saved = [group.name for group in groups if megalith_path(group.name) in paths]
            ends = modules_to_save(family, groups, saved)
            assert resolve_saved_modules(ends, family, model) == paths, name


def megalith_path(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split(".")[:-1])


@pytest.mark.parametrize("quantize", ["none", in_full("int8")])
def test_a_run_resumes_bitwise_and_its_checkpoints_hold_what_is_trained(
    hf_folder, tmp_path: Path, quantize: str
) -> None:
    lora = lora_of("gemma") | {"dropout": 0.1, "quantize_base": quantize}
    other = {"lora.modules_to_save": ["embed_tokens"]}
    message = r"lora.modules_to_save \['embedding.word_embeddings'"
    step = check_resume(hf_folder("gemma"), lora, other, message, tmp_path)
    names = [name for name in stored_tensors(step) if ".adapter." not in name]
    assert len(names) == 1 + 2 * 3 + 1 and "embedding.word_embeddings.weight" in names


def test_an_engine_receives_what_is_trained_and_generates_as_the_model(hf_folder, tmp_path: Path) -> None:
    check_engine(run_config(hf_folder("gemma"), tmp_path / "run", lora_of("gemma")))


def test_a_reference_has_the_base_s_values(hf_folder, tmp_path: Path) -> None:
    run = start(run_config(hf_folder("gemma"), tmp_path / "run", lora_of("gemma")))
    base = megalith.load(hf_folder("gemma")).state_dict()
    saved = {
        name: x
        for name, x in run.model.chunks[0].state_dict().items()
        if name in run.model.chunks[0].saved_names
    }
    with torch.no_grad():
        for values in saved.values():
            values.add_(0.1)
    trained = {name: values.clone() for name, values in saved.items()}
    for _ in range(2):  # the second time from the copy
        with without_adapters(run):
            assert all(torch.equal(values, base[name]) for name, values in saved.items())
        assert all(torch.equal(values, trained[name]) for name, values in saved.items())


def test_the_plan_counts_what_is_trained(hf_folder, tmp_path: Path) -> None:
    check_plan(run_config(hf_folder("gemma"), tmp_path / "run", lora_of("gemma")))


def test_servers_do_not_get_such_modules_with_adapters(hf_folder, tmp_path: Path) -> None:
    config = run_config(hf_folder("gemma"), tmp_path / "run", lora_of("gemma"))
    stream = WeightStream(start(config).model, prepare(config, 1).config)
    assert "which vLLM and SGLang do not load with adapters" in stream.lora_obstacle
    step = megalith.train(config).checkpoint
    base = megalith.load(hf_folder("gemma"))
    with pytest.raises(ConfigError, match=r"trained in full .* merge it into the base"):
        load_adapter_pairs(step, hf_folder("gemma"), base.config, fingerprint_of(base))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["q_proj"], "only embeddings, the output matrix, norms and routers can be trained in full"),
        (["mlp"], "only embeddings, the output matrix, norms and routers can be trained in full"),
        (["gate_inp"], "has 'gate_inp', which this model does not have; known: "),
        (["final_layernom"], "did you mean 'final_layernorm'"),
    ],
)
def test_what_cannot_be_trained_in_full_is_named(
    hf_folder, tmp_path: Path, names: list, message: str
) -> None:
    lora = lora_of("llama") | {"modules_to_save": names}
    with pytest.raises(ConfigError, match=message):
        prepare(run_config(hf_folder("llama"), tmp_path / "run", lora), 1)


def folder_with(tmp_path: Path, name: str, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    adapters = random_adapters(random_reference(CASES[name][0]()), ["q_proj"], rank=3)
    return save(adapters | tensors, tmp_path / "given", 5.0, target_modules=["q_proj"], **config)


def test_a_tied_matrix_that_peft_trained_apart_is_refused(hf_folder, tmp_path: Path) -> None:
    values = torch.randn(VOCAB, 64)
    embedding = {f"{PREFIX}model.embed_tokens.weight": values}
    head = {f"{PREFIX}lm_head.weight": values + 1}
    message = "the base ties the output matrix to the embedding; train them in PEFT with ensure_weight_tying"
    for number, tensors in enumerate((embedding, head, embedding | head)):
        given = folder_with(
            tmp_path / str(number), "gemma", tensors, modules_to_save=["embed_tokens", "lm_head"]
        )
        with pytest.raises(CheckpointError, match=message):
            merge(given, tmp_path / "merged", base=str(hf_folder("gemma")), show_progress=False)


def test_a_peft_config_has_to_tie_what_the_model_ties(hf_folder, tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    peft = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    args = {"output_dir": str(tmp_path / "run"), "max_steps": 1}
    build = partial(SFTTrainer, str(hf_folder("gemma")), args, records, settings={"data.seq_length": 16})
    with pytest.raises(ConfigError, match="without ensure_weight_tying PEFT would train a copy"):
        build(peft_config=peft)
    assert build(peft_config=peft | {"ensure_weight_tying": True}).config.lora.modules_to_save == ["lm_head"]
    assert build(peft_config=peft | {"modules_to_save": ["norm"]}).config.lora.modules_to_save == ["norm"]


def test_embeddings_that_peft_saved_without_training_them_are_merged_but_not_trained(
    hf_folder, tmp_path: Path
) -> None:
    """What PEFT writes with save_embedding_layers: the same tensors, and no modules_to_save."""
    reference = random_reference(CASES["llama"][0]())
    tensors = {
        f"{PREFIX}model.embed_tokens.weight": torch.randn_like(reference.model.embed_tokens.weight),
        f"{PREFIX}lm_head.weight": torch.randn_like(reference.lm_head.weight),
    }
    given = folder_with(tmp_path, "llama", tensors)
    merge(given, tmp_path / "merged", base=str(hf_folder("llama")), show_progress=False)
    state = megalith.load(tmp_path / "merged").state_dict()
    assert torch.equal(state["output_layer.weight"][:VOCAB], tensors[f"{PREFIX}lm_head.weight"])
    loaded = run_config(hf_folder("llama"), tmp_path / "run", {"load": str(given)})
    with pytest.raises(ConfigError, match=r"PEFT saved .save_embedding_layers. but did not train"):
        prepare(loaded, 1)
    named = loaded.with_settings({"lora.modules_to_save": ["lm_head", "embed_tokens"]})
    assert prepare(named, 1).config.lora.modules_to_save == ["embedding.word_embeddings", "output_layer"]


def test_a_resized_vocabulary_names_the_way_out(hf_folder, tmp_path: Path) -> None:
    tensors = {f"{PREFIX}model.embed_tokens.weight": torch.randn(VOCAB + 4, 64)}
    given = folder_with(tmp_path, "llama", tensors, modules_to_save=["embed_tokens"])
    with pytest.raises(CheckpointError, match=rf"resize_token_embeddings\({VOCAB + 4}\)"):
        merge(given, tmp_path / "merged", base=str(hf_folder("llama")), show_progress=False)
