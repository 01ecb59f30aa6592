"""Hugging Face → Megalith → Hugging Face: the same bits under the same names, and a model that computes the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from default_cases import by_default
from models.reference import CASES, MECHANISMS, VOCAB, first_of_each_kind, random_reference
from safetensors.torch import load_file, save_file

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.families import family_of
from megalith.bridge.folder import SourceFolder
from megalith.bridge.importer import import_hf
from megalith.bridge.verify import certify, same_bits
from megalith.checkpoint import RunRecord, StepWriter
from megalith.config import RunConfig
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.errors import CheckpointError, ConfigError
from megalith.generation.sampling import generate
from megalith.models.init import initialize
from megalith.models.transformer import Transformer

Folder = Callable[[str], Path]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def with_joined_convolutions(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join OLMo Hybrid's convolutions, which transformers cuts elsewhere than the published file."""
    for name in [name for name in tensors if name.endswith(".linear_attn.q_conv1d.weight")]:
        parts = [tensors.pop(name.replace(".q_", f".{part}_")) for part in "qkv"]
        tensors[name.replace(".q_", ".")] = torch.cat(parts)
    return tensors


def assert_same_tensors(folder: Path, other: Path) -> None:
    a, b = with_joined_convolutions(tensors_of(folder)), with_joined_convolutions(tensors_of(other))
    # transformers writes Kimi-Linear's first MLP under another name than the published file.
    source = SourceFolder(folder)
    for old, new in family_of(source.config, str(folder)).renamed.items():
        a = {name.removesuffix(old) + new if name.endswith(old) else name: value for name, value in a.items()}
    assert a.keys() == b.keys()
    assert [name for name in a if not same_bits(a[name], b[name])] == []


@pytest.mark.parametrize("name", by_default(CASES, *first_of_each_kind()))
def test_there_and_back_is_bitwise_with_the_same_names_and_configuration(
    name: str, hf_folder: Folder, tmp_path: Path
) -> None:
    source = hf_folder(name)
    import_hf(source, tmp_path / "run")
    out = export_hf(tmp_path / "run", tmp_path / "hf").path
    assert_same_tensors(source, out)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((out / file).read_text()) == json.loads((source / file).read_text())


def test_named_chat_templates_are_kept(hf_folder: Folder, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(hf_folder("llama"), source)
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, [])).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}'
    )
    templates = source / "additional_chat_templates"
    templates.mkdir()
    for name in ("tool_use", "rag"):
        (templates / f"{name}.jinja").write_text(name)
    import_hf(source, tmp_path / "run")
    out = export_hf(tmp_path / "run", tmp_path / "hf").path
    files = sorted(file.relative_to(out).as_posix() for file in out.glob("*/*"))
    assert files == ["additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"]
    assert all((out / name).read_text() == Path(name).stem for name in files)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.get_chat_template("rag") == "rag"


# models/test_against_transformers.py has the logits of every family by default.
@pytest.mark.parametrize("name", by_default(CASES, *MECHANISMS[::2]))
def test_both_load_as_the_same_function_and_generate_the_same_text(
    name: str, hf_folder: Folder, tmp_path: Path
) -> None:
    source = hf_folder(name)
    import_hf(source, tmp_path / "run")
    reference = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids).logits
        for path in (source, tmp_path / "run"):
            model = megalith.load(path)
            assert (model(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()
    prompt = ids[:1, :5]
    reference.generation_config.eos_token_id = None  # an end is a token like any other
    text = reference.generate(prompt, max_new_tokens=4, do_sample=False)  # test_generate.py has longer ones
    assert generate(model, prompt.tolist(), max_new_tokens=4, temperature=0) == text.tolist()


def test_another_epsilon_of_latents_than_that_of_transformers_is_told(tmp_path: Path) -> None:
    config = CASES["deepseek-v2, as lite"][0]()
    config.rms_norm_eps = 1e-5
    random_reference(config).save_pretrained(tmp_path / "hf")
    with pytest.warns(UserWarning, match="layernorm_epsilon 1e-05 here, as in Megatron-LM and vLLM"):
        import_hf(tmp_path / "hf", tmp_path / "run")
    notes = export_hf(tmp_path / "run", tmp_path / "out").notes
    assert "transformers uses 1e-06" in " ".join(notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_bitwise_and_is_computed_in(dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_reference(CASES["llama"][0]()).to(dtype)
    model.save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run")
    assert megalith.load(tmp_path / "run").compute_dtype == dtype
    assert megalith.load(tmp_path / "hf").compute_dtype == dtype
    assert_same_tensors(tmp_path / "hf", export_hf(tmp_path / "run", tmp_path / "out").path)


def test_tensors_of_several_types_keep_theirs(tmp_path: Path) -> None:
    model = random_reference(CASES["llama"][0]()).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() * 1.001
    save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"whose type differs from config.json: model.norm.weight \(F32, not BF16"
    ):
        import_hf(tmp_path / "hf", tmp_path / "run")
    import_hf(tmp_path / "hf", tmp_path / "run", allow=True)
    assert_same_tensors(tmp_path / "hf", export_hf(tmp_path / "run", tmp_path / "out").path)


def test_shards_are_read_and_written_with_an_index(hf_folder: Folder, tmp_path: Path) -> None:
    random_reference(CASES["qwen3"][0]()).save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    import_hf(tmp_path / "hf", tmp_path / "run")
    out = export_hf(tmp_path / "run", tmp_path / "out", shard_bytes=60_000).path
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 3
    assert_same_tensors(tmp_path / "hf", out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert same_bits(model.state_dict()["lm_head.weight"], tensors_of(out)["lm_head.weight"])


def test_pickled_shards_are_read_as_tensors(hf_folder: Folder, tmp_path: Path) -> None:
    tensors = tensors_of(hf_folder("gpt2"))
    half = len(tensors) // 2
    where = {name: f"pytorch_model-{1 + (i >= half)}.bin" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        held = {name: value for name, value in tensors.items() if where[name] == file}
        torch.save(held, tmp_path / file, _use_new_zipfile_serialization=file.endswith("1.bin"))
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_bytes((hf_folder("gpt2") / "config.json").read_bytes())
    import_hf(tmp_path, tmp_path / "run")
    assert_same_tensors(hf_folder("gpt2"), export_hf(tmp_path / "run", tmp_path / "out").path)


def test_a_bare_model_without_prefix_and_with_masks_is_read(hf_folder: Folder, tmp_path: Path) -> None:
    tensors = {
        name.removeprefix("transformer."): value for name, value in tensors_of(hf_folder("gpt2")).items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril().bool()
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((hf_folder("gpt2") / "config.json").read_bytes())
    import_hf(tmp_path, tmp_path / "run")
    assert_same_tensors(hf_folder("gpt2"), export_hf(tmp_path / "run", tmp_path / "out").path)


def test_a_stored_copy_of_a_tied_embedding_is_checked_and_left_out(hf_folder: Folder, tmp_path: Path) -> None:
    tensors = tensors_of(hf_folder("qwen2, tied"))
    (tmp_path / "config.json").write_bytes((hf_folder("qwen2, tied") / "config.json").read_bytes())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    import_hf(tmp_path, tmp_path / "run")
    assert_same_tensors(hf_folder("qwen2, tied"), export_hf(tmp_path / "run", tmp_path / "out").path)
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        import_hf(tmp_path, tmp_path / "other")


def test_sizes_of_no_published_model_work(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=36, intermediate_size=50, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=3, head_dim=10, max_position_embeddings=77,
    )  # fmt: skip
    model = random_reference(config)
    model.resize_token_embeddings(141)
    model.save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run")
    assert_same_tensors(tmp_path / "hf", export_hf(tmp_path / "run", tmp_path / "out").path)


@pytest.mark.parametrize(
    ("preset", "architecture"),
    [("tiny-gpt", "GPT2LMHeadModel"), ("tiny-llama", "LlamaForCausalLM"), ("tiny-qwen", "Qwen3ForCausalLM")],
)
def test_a_model_of_our_own_is_written_in_the_family_that_fits(
    preset: str, architecture: str, tmp_path: Path
) -> None:
    out = export_hf(own_run(tmp_path, preset=preset), tmp_path / "hf")
    assert out.notes[0] == f"written as {architecture}, the first family that can express this model"
    model = transformers.AutoModelForCausalLM.from_pretrained(out.path, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out.path)
    ids = torch.tensor([tokenizer("def main(): return 1")["input_ids"]])
    assert ids.tolist()[0] == megalith.training.loading.load_with_tokenizer(tmp_path / "run")[1].encode(
        "def main(): return 1"
    )
    assert tokenizer.eos_token == "<|endoftext|>" and model.config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        ours, theirs = megalith.load(tmp_path / "run")(ids), model(ids).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_a_model_that_no_family_can_say_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = own_run(tmp_path, preset="tiny-gpt", qk_layernorm=True)
    with pytest.raises(ConfigError, match="no model family of transformers can represent this model"):
        export_hf(run, tmp_path / "hf")
    assert not list(tmp_path.glob("hf*"))


def test_a_family_and_a_type_can_be_asked_for(tmp_path: Path) -> None:
    run = own_run(tmp_path, preset="tiny-llama")
    out = export_hf(run, tmp_path / "hf", family="mistral", dtype="bfloat16").path
    assert json.loads((out / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    assert {value.dtype for value in tensors_of(out).values()} == {torch.bfloat16}
    with pytest.raises(
        ConfigError,
        match=r"GPT2LMHeadModel cannot express this model: it has num_query_groups 2, not 4; position_emb",
    ):
        export_hf(run, tmp_path / "other", family="gpt2")


def test_the_certificate_says_what_was_compared(hf_folder: Folder, tmp_path: Path) -> None:
    step = import_hf(hf_folder("qwen3"), tmp_path / "run")
    certificate = json.loads(certify(step, hf_folder("qwen3"), tmp_path / "run").read_text())
    assert certificate["passed"] and certificate["tensors"]["different"] == []
    assert certificate["tensors"]["compared"] == len(tensors_of(hf_folder("qwen3")))
    assert certificate["logits"]["against"] == "transformers"
    assert 0 < certificate["logits"]["largest_difference"] <= certificate["logits"]["bound"]


def test_a_certificate_of_a_family_that_shares_a_class_compares_with_transformers(
    hf_folder: Folder, tmp_path: Path
) -> None:
    step = import_hf(hf_folder("exaone, biases"), tmp_path / "run")
    certificate = json.loads(certify(step, hf_folder("exaone, biases"), tmp_path / "run").read_text())
    assert certificate["passed"] and certificate["logits"]["against"] == "transformers"


def test_the_certificate_of_another_model_names_its_tensors_and_is_refused(
    hf_folder: Folder, tmp_path: Path
) -> None:
    step = import_hf(hf_folder("llama"), tmp_path / "run")
    other = export_hf(step, tmp_path / "hf").path
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="are not the same model"):
        certify(step, other, other)
    certificate = json.loads((tmp_path / "hf.certificate.json").read_text())
    assert not certificate["passed"] and not certificate["logits"]["within_bound"]
    assert certificate["tensors"]["different"] == [
        "model.layers.1.mlp.up_proj.weight",
        "layers.1.mlp.linear_fc1.weight",
    ]


def own_run(folder: Path, **model: object) -> Path:
    """A run folder with initial weights and a tokenizer trained here."""
    text = folder / "text.jsonl"
    text.write_text(json.dumps({"text": "def main(): return 1\n" * 30}) + "\n")
    train_tokenizer([text], 280, folder / "tokenizer.json", ["text"])
    tokenizer = build_tokenizer("HuggingFaceTokenizer", folder / "tokenizer.json")
    tree = {"model": {"vocab_size": tokenizer.vocab_size + 3, "max_position_embeddings": 64, **model}}
    config = RunConfig.from_tree(tree)
    transformer = Transformer(config.model)
    initialize(transformer, config.model, seed=3)
    record = RunRecord(step=7, consumed_samples=0, config=config.to_tree())
    with StepWriter(folder / "run/checkpoints", record, write_tokenizer=tokenizer.save) as writer:
        for name, value in transformer.state_dict().items():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                value = value[: config.model.vocab_size]
            writer.add("model", name, value)
    return folder / "run"
