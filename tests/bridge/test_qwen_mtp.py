"""The MTP layer of Qwen3-Next's and Qwen3.5's files: in and out, as in transformers, and trained in layouts."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from models.reference import CASES
from safetensors.torch import load_file, save_file

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.importer import import_hf, open_hf_folder
from megalith.bridge.verify import same_bits
from megalith.checkpoint import RunRecord, StepWriter
from megalith.config import RunConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.launch.pool import Pool
from megalith.models.transformer import Transformer
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import run_job

FAMILIES = {
    "qwen3-next, two heads of values to one of keys": ("num_nextn_predict_layers", "Qwen3NextForCausalLM"),
    "qwen3.5": ("mtp_num_hidden_layers", "Qwen3_5ForCausalLM"),
    "qwen3.5-moe": ("mtp_num_hidden_layers", "Qwen3_5MoeForCausalLM"),
}
IDS = torch.randint(0, 151, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory):
    """make_folder(case): the folder of a random model with an MTP layer; made once."""
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            made[case] = _export_random(case, tmp_path_factory.mktemp("qwen"))
        return made[case]

    return make


def _export_random(case: str, root: Path) -> Path:
    # transformers takes the norms of its MTP layer from the last layer, which has attention in the published models.
    tree = CASES[case][1] | {"mtp_num_layers": 1, "linear_attention_freq": [1, 1, 0]}
    tree |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = RunConfig.from_tree({"model": tree, "train": {"precision": "fp32"}})
    generator = torch.Generator().manual_seed(5)
    record = RunRecord(step=0, consumed_samples=0, config=config.to_tree())
    with StepWriter(root / "made/checkpoints", record) as writer:
        for name, value in Transformer(config.model).state_dict().items():
            rows = 151 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else len(value)
            writer.add("model", name, torch.randn(value.shape, generator=generator)[:rows] * 0.1)
    return export_hf(root / "made", root / "hf", family=FAMILIES[case][1], show_progress=False).path


@pytest.mark.parametrize("case", FAMILIES)
@torch.no_grad()
def test_the_layer_computes_what_transformers_does(make_folder, case: str) -> None:
    folder = make_folder(case)
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    main = kind.from_pretrained(folder, attn_implementation="eager").eval()
    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    further = transformers.modeling_layers.MtpModel.from_pretrained(main).eval()
    model = megalith.load(folder)
    assert model.config.mtp_num_layers == 1
    hidden = main.model(IDS).last_hidden_state
    places = torch.arange(1, IDS.shape[1])[None]
    expected = further.layers[0](
        main.get_input_embeddings()(IDS[:, 1:]), hidden[:, :-1], cache=None, position_ids=places,
        position_embeddings=further.rotary_emb(hidden[:, :-1], position_ids=places),
        attention_mask=torch.full((1, 1, 23, 23), float("-inf")).triu(1),
    )  # fmt: skip
    context = model.context(IDS[:, :-1].contiguous(), None)
    context.mtp_embeddings = model.embed(IDS[:, 1:].contiguous(), context)
    result = model.layers["3"](hidden[:, :-1], context)
    assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("case", FAMILIES)
def test_the_layer_returns_bitwise_whether_config_json_mentions_it_or_not(
    make_folder, case: str, tmp_path: Path
) -> None:
    before, key = load_file(make_folder(case) / "model.safetensors"), FAMILIES[case][0]
    assert {name.split(".")[1] for name in before if name.startswith("mtp.")} == {
        "fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers"
    }  # fmt: skip
    for stated in (True, False):
        source = tmp_path / f"hf-{stated}"
        source.mkdir()
        config = json.loads((make_folder(case) / "config.json").read_text())
        assert config[key] == 1
        if not stated:
            del config[key]
        (source / "config.json").write_text(json.dumps(config))
        save_file(before, source / "model.safetensors", {"format": "pt"})
        import_hf(source, tmp_path / f"run-{stated}", show_progress=False)
        out = export_hf(tmp_path / f"run-{stated}", tmp_path / f"out-{stated}", show_progress=False).path
        after = load_file(out / "model.safetensors")
        assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
        assert json.loads((out / "config.json").read_text())[key] == 1


def test_a_layer_that_config_json_rules_out_is_not_read(make_folder, tmp_path: Path) -> None:
    source = _copy(make_folder("qwen3.5"), tmp_path / "none", mtp_num_hidden_layers=0)
    with pytest.warns(UserWarning, match=r"the MTP layers are ignored \(mtp\."):
        assert open_hf_folder(source).groups[0].model.mtp_num_layers is None
    two = _copy(make_folder("qwen3.5"), tmp_path / "two", mtp_num_hidden_layers=2)
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers 2; layers of multi-token prediction share"):
        open_hf_folder(two)
    own = _copy(make_folder("qwen3.5"), tmp_path / "own", mtp_use_dedicated_embeddings=True)
    with pytest.raises(
        ConfigError, match="mtp_use_dedicated_embeddings true, but in Megalith MTP layers share the"
    ):
        open_hf_folder(own)


def _copy(folder: Path, to: Path, **changes: object) -> Path:
    to.mkdir()
    config = json.loads((folder / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(config))
    (to / "model.safetensors").symlink_to(folder / "model.safetensors")
    return to


def test_files_with_all_experts_in_one_tensor_are_read(make_folder, tmp_path: Path) -> None:
    tensors = load_file(make_folder("qwen3.5-moe") / "model.safetensors")
    fused = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    for prefix in ("model.layers.0", "model.layers.1", "model.layers.2", "mtp.layers.0"):
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.mlp.experts.{n}.{part}_proj.weight"] for n in range(8)])
            for part in ("gate", "up", "down")
        )
        fused[f"{prefix}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[f"{prefix}.mlp.experts.down_proj"] = down
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text((make_folder("qwen3.5-moe") / "config.json").read_text())
    save_file(fused, source / "model.safetensors", {"format": "pt"})
    expected, result = megalith.load(make_folder("qwen3.5-moe")), megalith.load(source)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), result.parameters(), strict=True))
    fused["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(8, 3, 5)
    save_file(fused, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: mtp\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight"):
        open_hf_folder(source)


def test_a_multimodal_model_gives_the_layer_and_gets_it_back(make_folder, tmp_path: Path) -> None:
    """The folder of the wrapper: the language model and the MTP layer under its names, and a vision tower."""
    text = load_file(make_folder("qwen3.5") / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in text.items()}
    tensors |= {"model.visual.patch_embed.weight": torch.ones(3)}
    source = tmp_path / "hf"
    source.mkdir()
    config = json.loads((make_folder("qwen3.5") / "config.json").read_text())
    wrapper = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": config,
    }
    wrapper |= {"tie_word_embeddings": config["tie_word_embeddings"]}
    (source / "config.json").write_text(json.dumps(wrapper))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="only the language model"):
        import_hf(source, tmp_path / "run", show_progress=False)
    out = export_hf(tmp_path / "run", tmp_path / "out", multimodal=source, show_progress=False).path
    after = load_file(out / "model.safetensors")
    assert after.keys() == tensors.keys() and all(same_bits(after[name], tensors[name]) for name in after)
    assert json.loads((out / "config.json").read_text()) == wrapper
    # A checkpoint without the layer, as older imports made: the export keeps the folder's.
    plain = _copy(make_folder("qwen3.5"), tmp_path / "plain", mtp_num_hidden_layers=0)
    with pytest.warns(UserWarning, match="the MTP layers are ignored"):
        import_hf(plain, tmp_path / "without", show_progress=False)
    kept = export_hf(tmp_path / "without", tmp_path / "kept", multimodal=source, show_progress=False).path
    after = load_file(kept / "model.safetensors")
    assert after.keys() == tensors.keys() and all(same_bits(after[name], tensors[name]) for name in after)


def run_config(folder: Path, layout: str | None) -> RunConfig:
    parallel = LAYOUTS[layout].parallel if layout else {}
    split = {"decoder_first_pipeline_num_layers": 1} if layout and layout.startswith("pp2") else {}
    return RunConfig.from_tree(
        {
            "model": {"init_from": str(folder), "hidden_dropout": 0.1, "mtp_loss_scaling_factor": 0.7},
            "parallel": parallel | split,
            "data": {"mock": True, "seq_length": 32, "num_workers": 0},
            "optim": {"lr": 3e-3, "clip_grad": 0.5},
            "train": {"train_iters": 2, "micro_batch_size": 2, "global_batch_size": 4, "eval_iters": 1},
            "runtime": {"device": "cpu", "compile": False},
        }
    )


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("qwen3.5", "tp2-sp"),
        pytest.param("qwen3.5", "cp2", marks=pytest.mark.full),
        ("qwen3.5", "pp2"),
        pytest.param("qwen3.5", "dp2-zero3", marks=pytest.mark.full),
        ("qwen3.5-moe", "ep2"),
        pytest.param("qwen3.5-moe", "tp2-sp-ep2", marks=pytest.mark.full),
        pytest.param("qwen3.5-moe", "pp2-ep2", marks=pytest.mark.full),
        pytest.param("qwen3.5-moe", "cp2-ep2", marks=pytest.mark.full),
        pytest.param("qwen3-next, two heads of values to one of keys", "tp2-sp-ep2", marks=pytest.mark.full),
        pytest.param("qwen3-next, two heads of values to one of keys", "cp2-ep2", marks=pytest.mark.full),
    ],
)
def test_the_layer_trains_in_a_layout_as_in_one_process(
    pool: Pool, make_folder, case: str, layout: str
) -> None:
    folder = make_folder(case)
    one = run_job(run_config(folder, None))
    errors = compare(pool.run(run_job, run_config(folder, layout), size=LAYOUTS[layout].processes), one)
    assert errors.within(), errors
    assert one.gradients["layers.3.join.linear_join.weight"].abs().max() > 1e-5
