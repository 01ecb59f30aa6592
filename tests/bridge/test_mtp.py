"""Layers of multi-token prediction go to Hugging Face's files and back, and compute what transformers computes."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from default_cases import in_full
from models.reference import CASES
from safetensors.torch import load_file, save_file

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.families import FAMILIES as FAMILY_TABLE
from megalith.bridge.importer import import_hf
from megalith.bridge.verify import same_bits
from megalith.checkpoint import RunRecord, StepWriter
from megalith.config import RunConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.transformer import Transformer

FAMILIES = ["deepseek-v3", "glm4-moe"]
IDS = torch.randint(0, 151, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def folder(request, tmp_path: Path) -> Path:
    """A random model with one MTP layer, exported."""
    tree = CASES[request.param][1] | {"mtp_num_layers": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = RunConfig.from_tree({"model": tree, "train": {"precision": "fp32"}})
    model = Transformer(config.model)
    torch.manual_seed(0)
    record = RunRecord(step=0, consumed_samples=0, config=config.to_tree())
    with StepWriter(tmp_path / "made/checkpoints", record) as writer:
        for name, value in model.state_dict().items():
            rows = 151 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else len(value)
            writer.add("model", name, torch.randn(value.shape)[:rows] * 0.1)
    return export_hf(tmp_path / "made", tmp_path / "hf", show_progress=False).path


def published(kind: type, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers find the MTP layer by its number, of which it knows only the published models'."""
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{layers}.*"])


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
@torch.no_grad()
def test_an_mtp_layer_computes_what_transformers_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    published(kind, 3, monkeypatch)
    main = kind.from_pretrained(folder, attn_implementation="eager").eval()
    further = transformers.modeling_layers.MtpModel.from_pretrained(main).eval()
    model = megalith.load(folder)
    assert model.config.mtp_num_layers == 1
    hidden = main.model(IDS).last_hidden_state
    places = torch.arange(1, IDS.shape[1])[None]
    mask = torch.full((1, 1, 23, 23), float("-inf")).triu(1)
    rotary = further.rotary_emb(hidden[:, :-1], position_ids=places)
    expected = further.layers[0](
        main.get_input_embeddings()(IDS[:, 1:]), hidden[:, :-1], position_embeddings=rotary, attention_mask=mask,
        position_ids=places, cache=None,
    )  # fmt: skip
    context = model.context(IDS[:, :-1].contiguous(), None)
    context.mtp_embeddings = model.embed(IDS[:, 1:].contiguous(), context)
    found = model.layers["3"](hidden[:, :-1], context)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("folder", ["nemotron-h, experts", in_full("nemotron-h")], indirect=True)
@torch.no_grad()
def test_an_mtp_layer_of_nemotron_h_is_two_layers_of_transformers(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    main = transformers.NemotronHForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    has_experts = "moe" in main.config.layer_types
    kinds = json.loads((folder / "config.json").read_text())["mtp_layers_block_type"]
    assert kinds == ["full_attention", "moe" if has_experts else "mlp"]

    def part(name: str) -> torch.Tensor:
        return tensors[f"mtp.layers.{name}.weight"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], part(name), main.config.layer_norm_epsilon)

    hidden = main.model(IDS).last_hidden_state[:, :-1]
    embedded = main.get_input_embeddings()(IDS[:, 1:])
    x = torch.cat([norm(embedded, "0.enorm"), norm(hidden, "0.hnorm")], -1) @ part("0.eh_proj").T
    mask = torch.full((1, 1, 23, 23), float("-inf")).triu(1)
    for number, kind in enumerate(kinds):
        prefix = f"mtp.layers.{number}."
        block = copy.deepcopy(main.model.layers[main.config.layer_types.index(kind)])
        state = {
            name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
        }
        for matrix in ("up_proj", "down_proj") if kind == "moe" else ():
            names = [f"mixer.experts.{n}.{matrix}.weight" for n in range(main.config.n_routed_experts)]
            state[f"mixer.experts.{matrix}"] = torch.stack([state.pop(name) for name in names])
        result = block.load_state_dict(state, strict=False)
        assert result.missing_keys == []
        x = block(x, attention_mask=mask)
    expected = norm(x, "1.final_layernorm")
    model = megalith.load(folder)
    context = model.context(IDS[:, :-1].contiguous(), None)
    context.mtp_embeddings = model.embed(IDS[:, 1:].contiguous(), context)
    found = model.layers[str(model.config.num_layers)](hidden, context)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    import_hf(folder, tmp_path / "run", show_progress=False)
    out = export_hf(tmp_path / "run", tmp_path / "out", show_progress=False).path
    after = load_file(out / "model.safetensors")
    assert tensors.keys() == after.keys() and all(same_bits(tensors[name], after[name]) for name in after)
    assert (out / "config.json").read_text() == (folder / "config.json").read_text()


@pytest.mark.parametrize("change", [
    {"mtp_layers_block_type": ["linear_attention", "moe"]}, {"mtp_hybrid_override_pattern": "M-"},
    {"mtp_hybrid_override_pattern": "*-"}, {"mtp_layers_block_type": ["attention", "moe"] * 2},
])  # fmt: skip
def test_other_mtp_layers_of_nemotron_h_are_refused(change: dict) -> None:
    tree = CASES["nemotron-h, experts"][0]().to_dict() | {"num_nextn_predict_layers": 1}
    family = FAMILY_TABLE["NemotronHForCausalLM"]
    older = {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*E"}
    assert family.read_config(tree).mtp_num_layers == family.read_config(tree | older).mtp_num_layers == 1
    with pytest.raises(
        ConfigError, match=r"multi-token prediction with .* only with full_attention and moe; set"
    ):
        family.read_config(tree | {"mtp_layers_block_type": None} | change)


@pytest.mark.parametrize("folder", FAMILIES[:1], indirect=True)
def test_mtp_layers_return_bitwise_with_their_copies_and_train(folder: Path, tmp_path: Path) -> None:
    import_hf(folder, tmp_path / "run", show_progress=False)
    out = export_hf(tmp_path / "run", tmp_path / "out", show_progress=False).path
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
    assert same_bits(after["model.layers.3.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert same_bits(after["model.layers.3.shared_head.head.weight"], after["lm_head.weight"])
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    trained = megalith.train(
        RunConfig.from_tree(
            {
                "model": {"init_from": str(folder)},
                "data": {"mock": True, "seq_length": 16, "num_workers": 0},
                "optim": {"lr": 1e-2},
                "train": {"train_iters": 2, "micro_batch_size": 2, "global_batch_size": 2, "eval_iters": 0,
                          "output_dir": str(tmp_path / "trained")},
                "runtime": {"device": "cpu", "compile": False},
            }
        )
    ).checkpoint  # fmt: skip
    again = export_hf(trained, tmp_path / "again", show_progress=False).path
    moved = load_file(again / "model.safetensors")
    assert moved.keys() == before.keys()
    assert not torch.equal(moved["model.layers.3.eh_proj.weight"], before["model.layers.3.eh_proj.weight"])


@pytest.mark.parametrize("folder", FAMILIES[:1], indirect=True)
def test_files_without_mtp_layers_or_with_another_embedding_are_reported(
    folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    other = dict(tensors)
    other["model.layers.3.embed_tokens.weight"] = other["model.embed_tokens.weight"] + 1
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers\.3\.embed_tokens\.weight differs from model\.embed_tokens\.weight"
    ):
        import_hf(folder, tmp_path / "run", show_progress=False)
    without = {name: value for name, value in tensors.items() if ".layers.3." not in name}
    save_file(without, folder / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="has 1 MTP layers, but the weights have none"):
        import_hf(folder, tmp_path / "run", show_progress=False)
    out = export_hf(tmp_path / "run", tmp_path / "out", show_progress=False).path
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_unread_mtp_layers_are_named(hf_folder, tmp_path: Path) -> None:
    source = shutil.copytree(hf_folder("exaone-moe"), tmp_path / "hf")
    tensors = load_file(source / "model.safetensors") | {"mtp.fc.weight": torch.ones(3)}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.warns(
        UserWarning, match=r"the MTP layers are ignored \(mtp\.fc\.weight\); an export will not have them"
    ):
        import_hf(source, tmp_path / "run", show_progress=False)
