"""Megatron-LM's checkpoints, written by its published names, give the model that they were written from."""

import argparse
import io
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from megatron_checkpoint import (
    Bomb,
    arguments,
    bomb,
    core_state,
    forget_megatron,
    write_legacy,
    write_torch_dist,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import megalith
from megalith.bridge.megatron.megatron_exporter import convert
from megalith.bridge.megatron.megatron_importer import import_megatron, open_megatron
from megalith.bridge.megatron.table import GPT
from megalith.bridge.verify import same_bits
from megalith.cli.main import main
from megalith.config import ModelConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.init import initialize
from megalith.models.transformer import Transformer

SHAPE = dict(num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=151, max_position_embeddings=64)
MODELS = {
    "gpt": ModelConfig(**SHAPE),
    "llama": ModelConfig(
        **SHAPE, ffn_hidden_size=48, num_query_groups=2, kv_channels=12, position_embedding_type="rope", swiglu=True,
        normalization="RMSNorm", add_bias_linear=False, qk_layernorm=True, untie_embeddings_and_output_weights=True,
    ),
}  # fmt: skip


def random_model(name: str) -> Transformer:
    model = Transformer(MODELS[name])
    initialize(model, MODELS[name], seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms too
                parameter.normal_(generator=generator)
    return model.eval()


def assert_same_model(run: Path, model: Transformer) -> None:
    loaded, expected = megalith.load(run), model.state_dict()
    assert [name for name, value in loaded.state_dict().items() if not same_bits(value, expected[name])] == []
    ids = torch.randint(0, 151, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(ids), model(ids))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("te", [True, False], ids=["transformer engine", "local"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_torch_dist(name: str, te: bool, prefix: str, tmp_path: Path) -> None:
    model = random_model(name)
    state = {
        prefix + key: value for key, value in core_state(model, te).items()
    }  # with a prefix, layers are apart
    write_torch_dist(tmp_path / "megatron", state, arguments(model.config))
    forget_megatron()
    import_megatron(tmp_path / "megatron", tmp_path / "run", trust=True, vocab_size=151, show_progress=False)
    assert_same_model(tmp_path / "run", model)


def test_pieces_of_several_ranks_are_put_together(pool, tmp_path: Path) -> None:
    model = random_model("llama")
    write_torch_dist(tmp_path / "megatron", core_state(model, True), arguments(model.config))
    pool.run(resave_in_pieces, tmp_path / "megatron/iter_0000005", size=2)
    forget_megatron()
    import_megatron(tmp_path / "megatron", tmp_path / "run", trust=True, vocab_size=151, show_progress=False)
    assert_same_model(tmp_path / "run", model)


def resave_in_pieces(folder: Path) -> None:
    """Every matrix of the checkpoint, loaded and saved by two ranks that hold its halves."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size) for name, entry in metadata.items() if hasattr(entry, "size")}
    dcp.load(state, checkpoint_id=folder)
    cut = {
        name: distribute_tensor(value, mesh, [Shard(value.ndim - 1 if "proj" in name else 0)])
        for name, value in state.items()
    }
    torch.distributed.barrier()
    dcp.save(cut, storage_writer=dcp.FileSystemWriter(folder, overwrite=True))


@pytest.mark.fault(21)
def test_pickles_are_read_only_when_trusted_and_even_then_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    model = random_model("gpt")
    write_torch_dist(tmp_path / "megatron", core_state(model, True), arguments(model.config))
    forget_megatron()
    folder = tmp_path / "megatron/iter_0000005"
    assert main(["import-megatron", str(tmp_path / "nowhere"), str(tmp_path / "run")]) == 4
    assert "there is no folder" in capsys.readouterr().err
    assert main(["import-megatron", str(tmp_path / "megatron"), str(tmp_path / "run")]) == 4
    assert "pass --trust" in capsys.readouterr().err
    zipped = io.BytesIO()
    torch.save({"args": Bomb()}, zipped)
    for file, content in (("common.pt", bomb()), ("common.pt", zipped.getvalue()), (".metadata", bomb())):
        (folder / file).write_bytes(content)
        with pytest.raises(
            CheckpointError, match=r"it names .*open, which is not allowed\), and no code in it was run"
        ):
            import_megatron(tmp_path / "megatron", tmp_path / "run", trust=True)
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "run").exists()


def test_what_cannot_be_built_or_is_missing_is_named(tmp_path: Path) -> None:
    model = random_model("llama")
    state = core_state(model, True)
    hybrid = arguments(model.config)
    hybrid.hybrid_layer_pattern = "M*M*"
    write_torch_dist(tmp_path / "hybrid", state, hybrid)
    write_torch_dist(
        tmp_path / "missing", {k: v for k, v in state.items() if "proj" not in k}, arguments(model.config)
    )
    write_legacy(tmp_path / "legacy", state, arguments(model.config), 2, 2, 1)
    forget_megatron()
    with pytest.raises(ConfigError, match=r"its args have hybrid_layer_pattern 'M\*M\*'"):
        import_megatron(tmp_path / "hybrid", tmp_path / "run", trust=True)
    with pytest.raises(
        CheckpointError,
        match=r"does not match its record of arguments; missing: decoder.layers.0.self_attention.linear_p",
    ):
        import_megatron(tmp_path / "missing", tmp_path / "run", trust=True)
    (tmp_path / "legacy/iter_0000005/mp_rank_01_001/model_optim_rng.pt").unlink()
    (tmp_path / "legacy/iter_0000005/mp_rank_01_001").rmdir()
    with pytest.raises(
        CheckpointError, match=r"has 3 of 2 × 2 × 1 \(tensor × pipeline × expert\) rank folders"
    ):
        import_megatron(tmp_path / "legacy", tmp_path / "run", trust=True)
    next((tmp_path / "missing/iter_0000005").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"\.distcp, which contains embedding\.\S+, is missing; copy"):
        import_megatron(tmp_path / "missing", tmp_path / "run", trust=True)


def test_both_spellings_of_a_norm_are_read_and_neither_is_guessed(tmp_path: Path) -> None:
    model = random_model("llama")
    args = arguments(model.config)
    del args.norm_epsilon, args.apply_layernorm_1p
    args.layernorm_epsilon, args.layernorm_zero_centered_gamma = 1e-3, True  # core 0.20's
    write_torch_dist(tmp_path / "new", core_state(model, True), args)
    read = open_megatron(tmp_path / "new", trust=True).groups[0].model
    assert (read.layernorm_epsilon, read.layernorm_zero_centered_gamma) == (1e-3, True)
    for number, (name, message) in enumerate(
        (
            ("layernorm_epsilon", "its args have no norm_epsilon"),
            ("layernorm_zero_centered_gamma", "its args have no apply_layernorm_1p"),
            ("bias_gelu_fusion", "its args have no bias_gelu_fusion, which affect"),
            ("rotary_base", "its args have no rotary_base"),
        )
    ):
        fewer = argparse.Namespace(**{key: value for key, value in vars(args).items() if key != name})
        write_torch_dist(tmp_path / str(number), core_state(model, True), fewer)
        with pytest.raises(ConfigError, match=message):
            import_megatron(tmp_path / str(number), tmp_path / "run", trust=True)
    forget_megatron()


@pytest.mark.parametrize(
    ("others", "size"),
    [
        ({"vocab_size": 151}, 151),
        ({"vocab_size": None}, 256),
        ({"vocab_size": 128, "tokenizer_type": "Llama2Tokenizer"}, 256),  # the tokenizer has at least 129
        ({"vocab_size": 300}, 256),
        ({"vocab_size": 128, "tensor_model_parallel_size": 2}, 128),
        ({"vocab_size": 128, "tokenizer_type": "NullTokenizer"}, 129),
        ({"vocab_size": 256, "tokenizer_type": "NullTokenizer", "null_tokenizer_eod_id": None}, 256),
    ],
)
def test_no_row_of_the_vocabulary_is_taken_for_padding(
    others: dict[str, object], size: int, tmp_path: Path
) -> None:
    args = argparse.Namespace(
        **(vars(arguments(MODELS["llama"])) | {"make_vocab_size_divisible_by": 128} | others)
    )
    write_torch_dist(tmp_path / "megatron", core_state(random_model("llama"), True), args)
    forget_megatron()
    assert open_megatron(tmp_path / "megatron", trust=True).groups[0].model.vocab_size == size


def test_formats_that_only_look_like_megatrons_are_named(tmp_path: Path) -> None:
    state, args = core_state(random_model("llama"), True), arguments(MODELS["llama"])
    for name in ("bridge", "zarr"):
        write_torch_dist(tmp_path / name, state, args)
    forget_megatron()
    (tmp_path / "bridge/iter_0000005/run_config.yaml").write_text("model: {}")
    (tmp_path / "zarr/iter_0000005/metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match=r"written by Megatron-Bridge or NeMo, .* megalith import-hf"):
        import_megatron(tmp_path / "bridge", tmp_path / "run", trust=True)
    with pytest.raises(CheckpointError, match=r"in zarr's format, .* --ckpt-format torch_dist"):
        import_megatron(tmp_path / "zarr", tmp_path / "run", trust=True)


def test_arguments_without_the_effect_of_megatron_are_named(tmp_path: Path) -> None:
    args, state = arguments(MODELS["llama"]), core_state(random_model("llama"), True)
    args.vocab_size, args.tokenizer_type = 151, "HuggingFaceTokenizer"
    write_torch_dist(tmp_path / "converted", state, args)  # its padding has one value
    generator = torch.Generator().manual_seed(7)
    state["embedding.word_embeddings.weight"][151:].normal_(generator=generator)
    args.num_experts, args.moe_input_jitter_eps = 4, 0.01
    write_torch_dist(tmp_path / "trained", state, args)
    forget_megatron()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_megatron(tmp_path / "converted", trust=True)
    with pytest.warns() as caught, pytest.raises(ConfigError, match="moe_router_topk"):
        open_megatron(tmp_path / "trained", trust=True)
    said = " ".join(str(warning.message) for warning in caught)
    assert "rows 151 to 255 of the vocabulary are left out as padding" in said
    assert "moe_input_jitter_eps 0.01, noise on the router" in said


def test_routing_that_megalith_lacks_is_refused_and_balancing_is_named() -> None:
    experts = {
        "num_experts": 4,
        "moe_router_topk": 1,
        "moe_router_topk_limited_devices": None,
        "vocab_size": 151,
    }
    args = vars(arguments(MODELS["gpt"])) | experts
    forget_megatron()
    with pytest.raises(ConfigError, match="has moe_router_topk_limited_devices 2"):
        GPT.read_config(args | {"moe_router_topk_limited_devices": 2})
    for kind, weight in (("global_aux_loss", 0.01), (["aux_loss", "seq_aux_loss"], [0.01, 0.1])):
        others = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": weight}
        with pytest.warns(UserWarning, match="training would continue without a load-balancing loss"):
            model = GPT.read_config(args | others)
        assert model.moe_aux_loss_coeff == 0
    GPT.read_config(args | {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.0})


@pytest.mark.parametrize(
    ("others", "activation"),
    [
        ({}, "gelu"),
        ({"openai_gelu": True}, "gelu"),
        ({"use_te_activation_func": True}, "gelu_tanh"),
        ({"use_te_activation_func": True, "transformer_impl": "local"}, "gelu"),
        ({"use_transformer_engine_op_fuser": True}, "gelu_tanh"),
        ({"add_bias_linear": True}, "gelu"),
        ({"add_bias_linear": True, "bias_gelu_fusion": True}, "gelu_tanh"),
    ],
)
def test_gelu_is_as_megatron_core_computes_it(others: dict[str, object], activation: str) -> None:
    args = vars(arguments(MODELS["gpt"])) | {
        "add_bias_linear": False,
        "bias_gelu_fusion": False,
        "vocab_size": 151,
    }
    model = GPT.read_config(args | others)
    assert model.mlp_activation == activation
    forget_megatron()
    assert GPT.read_config(args | others | GPT.write_config(model)).mlp_activation == activation


@pytest.mark.parametrize("te", [True, False], ids=["transformer engine", "local"])
def test_common_state_among_the_shards(te: bool, tmp_path: Path) -> None:
    """The form of core 0.19 and later: no common.pt, and plans in .metadata."""
    model = random_model("llama")
    args = arguments(model.config)
    write_torch_dist(tmp_path / "megatron", core_state(model, te), args)
    folder = tmp_path / "megatron/iter_0000005"
    common = torch.load(folder / "common.pt", weights_only=False)
    (folder / "common.pt").unlink()
    resave_with_common_state(folder, common)
    forget_megatron()
    with pytest.raises(CheckpointError, match=r"refers to .*AttnBackend.*pass --trust"):
        import_megatron(tmp_path / "megatron", tmp_path / "run")
    import_megatron(tmp_path / "megatron", tmp_path / "run", trust=True, vocab_size=151, show_progress=False)
    assert_same_model(tmp_path / "run", model)
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="ends before common_state/shard_0_1 does"):
        import_megatron(tmp_path / "megatron", tmp_path / "again", trust=True)


def resave_with_common_state(folder: Path, common: dict[str, object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    torch.save([common], stored := io.BytesIO())
    file = folder / "__0_0.distcp"
    info = _StorageInfo(file.name, file.stat().st_size, len(stored.getvalue()))
    file.write_bytes(file.read_bytes() + stored.getvalue())
    metadata.storage_data[MetadataIndex("common_state/shard_0_1")] = info
    metadata.state_dict_metadata["common_state/shard_0_1"] = BytesStorageMetadata()
    item = WriteItem(MetadataIndex("common_state/shard_0_1"), WriteItemType.BYTE_IO)
    metadata.all_local_plans = [SavePlan([item], planner_data={"x": 1})]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", ["common.pt", "model_optim_rng.pt"])
def test_a_torchscript_archive_is_refused_before_it_runs(name: str, tmp_path: Path) -> None:
    """torch.load hands such a file to torch.jit.load, where `__setstate__` runs."""
    target = tmp_path / "precious"
    target.write_text("precious")
    model = random_model("gpt")
    if name == "common.pt":
        write_torch_dist(tmp_path / "megatron", core_state(model, True), arguments(model.config))
    else:
        write_legacy(tmp_path / "megatron", core_state(model, True), arguments(model.config), 1, 1, 1)
    forget_megatron()
    (path,) = tmp_path.rglob(name)
    torch.jit.script(Overwrites(str(target))).save(str(path))
    with pytest.raises(CheckpointError, match=r"torchscript checkpoint\), and no code in it was run"):
        import_megatron(tmp_path / "megatron", tmp_path / "run", trust=True)
    assert target.read_text() == "precious"
    torch.jit.load(str(path))  # the archive does what it is refused for
    assert target.read_text() == "overwrit"


class Overwrites(torch.nn.Module):
    """Overwrites a file where torch.jit loads it."""

    def __init__(self, target: str):
        super().__init__()
        self.text, self.target = torch.tensor(list(b"overwrit"), dtype=torch.uint8), target

    def forward(self, x: int):
        return x

    @torch.jit.export
    def __getstate__(self):
        return (self.text, self.target, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, str, bool]):
        self.text, self.target, self.training = state
        opened = torch.from_file(self.target, True, self.text.numel(), dtype=torch.uint8)
        opened.copy_(self.text)
        self.text = opened


def test_metadata_changes_no_class_that_it_names(tmp_path: Path) -> None:
    """A pickle may set attributes of what it names: of a stand-in, never of a class of torch's."""
    write_torch_dist(tmp_path / "megatron", core_state(random_model("gpt"), True), arguments(MODELS["gpt"]))
    forget_megatron()
    spoil = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x03\x00\x00\x00badK\x01s\x86b."
    (tmp_path / "megatron/iter_0000005/.metadata").write_bytes(spoil)
    with pytest.raises(CheckpointError, match="no code in it was run"):
        import_megatron(tmp_path / "megatron", tmp_path / "run", trust=True)
    assert not hasattr(Metadata, "bad")


def test_what_is_missing_of_a_megatron_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = random_model("llama")
    state = core_state(model, True)
    write_legacy(tmp_path / "legacy", state, arguments(model.config), 1, 1, 1)
    write_torch_dist(tmp_path / "dist", state, arguments(model.config))
    forget_megatron()
    latest = Path("legacy/latest_checkpointed_iteration.txt")
    Path("empty").mkdir()
    (file,) = Path("legacy").rglob("model_optim_rng.pt")
    for spoil, folder, message in (
        (
            lambda: latest.write_text("700"),
            "legacy",
            "points to iter_0000700, which is missing .found: iter_0000005",
        ),
        (
            latest.unlink,
            "legacy",
            "has no latest_checkpointed_iteration.txt, .*; pass one of its folders: iter_0000005",
        ),
        (file.unlink, "legacy/iter_0000005", r"model_optim_rng.pt is missing; copy"),
        (lambda: None, "empty", "empty has nothing to convert"),
        (Path("dist/iter_0000005/common.pt").unlink, "dist", "common.pt is missing; copy"),
        (Path("dist/iter_0000005/.metadata").unlink, "dist", "no .metadata, which is written last"),
    ):
        spoil()
        with pytest.raises(CheckpointError, match=message):
            convert(folder, "out", "hf", "megatron", trust=True)
    assert not Path("out").exists()
