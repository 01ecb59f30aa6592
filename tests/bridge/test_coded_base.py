"""A base in codes: taken unchanged from folders that have them, and the same when loaded, merged and planned."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from models.reference import VOCAB, random_reference
from safetensors.torch import load_file, save_file

import megalith
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.exporter import export_hf
from megalith.bridge.importer import import_hf
from megalith.bridge.quantize_base import CodedBase, _fill
from megalith.config import RunConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.generation.sync import engine_for, sync
from megalith.models.coded_weight import CodedWeight
from megalith.ops.weight_codes import NF4, decode, dynamic_map, encode
from megalith.parallel.coded_base import coded_weights
from megalith.parity.job import start
from megalith.planner.counts import MetaModel
from megalith.planner.layout import build_layout
from megalith.planner.rates import rates_of
from megalith.planner.step_time import step_time
from megalith.training.build import prepare

IDS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
QKV = "layers.0.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    sizes = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192)
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=1, vocab_size=VOCAB, max_position_embeddings=64
    )
    random_reference(config).save_pretrained(folder / "base")
    return folder / "base"


def config(base: Path, output: Path, form: str, **settings: int) -> RunConfig:
    train = {"train_iters": 2, "micro_batch_size": 2, "global_batch_size": 2, "eval_iters": 0}
    tree = {
        "model": {"init_from": str(base)},
        "lora": {"rank": 2, "quantize_base": form},
        "data": {"mock": True, "seq_length": 16},
        "optim": {"lr": 1e-2, "weight_decay": 0.0},
        "train": train | {"output_dir": str(output)},
    }
    return RunConfig.from_tree(tree).with_settings(settings)


def bitsandbytes_folder(base: Path, out: Path, double: bool, kind: str = "nf4") -> Path:
    """The folder as transformers saves it with load_in_4bit."""
    out.mkdir()
    content, tensors = json.loads((base / "config.json").read_bytes()), {}
    for name, values in load_file(base / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = values
            continue
        values = values + 0.01  # other weights than the base's
        coded = encode("nf4", values, torch.arange(len(values)))
        absmax = values.reshape(-1, 64).abs().amax(1)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(values.shape)}
        tensors |= {name: coded.codes.reshape(-1, 1), f"{name}.quant_map": torch.tensor(NF4)}
        tensors[f"{name}.absmax"] = absmax
        if double:
            tensors |= {
                f"{name}.absmax": coded.scales.flatten(),
                f"{name}.nested_absmax": coded.table[:, 0].contiguous(),
                f"{name}.nested_quant_map": dynamic_map(),
            }
            mean = coded.table[0, 1].item()
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": mean}
        packed = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = packed
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(content | {"quantization_config": quantization}))
    return out


@pytest.mark.parametrize("double", [True, False], ids=["double quantization", "single"])
def test_the_codes_of_bitsandbytes_are_taken_as_they_are(base: Path, tmp_path: Path, double: bool) -> None:
    folder = bitsandbytes_folder(base, tmp_path / "quantized", double)
    coded = CodedBase(config(folder, tmp_path / "run", "nf4"))
    dense = coded.read(QKV, 0, 256)
    assert torch.equal(
        coded.decoded(QKV, torch.zeros_like(dense)), dense
    )  # not from the values that are given
    stored = load_file(base / "model.safetensors")["model.layers.0.self_attn.v_proj.weight"] + 0.01
    assert (dense.view(2, 4, 32, 128)[:, 3].reshape(64, 128) - stored).norm() < 0.12 * stored.norm()
    with torch.no_grad():
        import_hf(folder, tmp_path / "dense", show_progress=False)
        assert torch.equal(dict(megalith.load(tmp_path / "dense").named_parameters())[QKV], dense)


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_the_codes_of_an_export_in_one_byte_are_taken_as_they_are(
    base: Path, tmp_path: Path, form: str
) -> None:
    import_hf(base, tmp_path / "run", show_progress=False)
    export_hf(tmp_path / "run", tmp_path / "small", quantize=form, show_progress=False)
    coded = CodedBase(config(tmp_path / "small", tmp_path / "again", form))
    dense = coded.read(QKV, 0, 256)
    decoded = decode(form, coded.codes(QKV, torch.zeros_like(dense)), coded._match.source.dtype)
    assert torch.equal(decoded.float(), dense) and dense.norm() > 0


def test_a_run_is_loaded_and_merged_with_the_base_that_it_was_trained_on(base: Path, tmp_path: Path) -> None:
    settings = config(base, tmp_path / "run", "nf4")
    step = megalith.train(settings).checkpoint
    with torch.no_grad():
        trained = megalith.load(step)(IDS)
        plain = megalith.load(base)(IDS)
        merge(tmp_path / "run", tmp_path / "merged", show_progress=False)
        torch.testing.assert_close(megalith.load(tmp_path / "merged")(IDS), trained, rtol=1e-4, atol=1e-5)
    assert (trained - plain).norm() > 0.01 * plain.norm()
    resumed = settings.with_settings({"checkpoint.load": str(tmp_path / "run"), "lora.quantize_base": "fp8"})
    with pytest.raises(CheckpointError, match=r"saved with lora.quantize_base nf4, but this run has fp8"):
        megalith.train(resumed.with_settings({"train.train_iters": 3}))


def test_an_engine_receives_the_decoded_base_once_and_then_the_adapters_alone(
    base: Path, tmp_path: Path
) -> None:
    model = start(config(base, tmp_path / "run", "nf4")).model
    engine = engine_for(model, max_rows=1, max_tokens=8)
    decoded = coded_weights(model.chunks[0])[QKV].decoded()
    assert torch.equal(engine.shards[QKV].values, decoded)
    trained = [(name, p) for name, p in model.chunks[0].named_parameters() if p.requires_grad]
    with torch.no_grad():
        for _, parameter in trained:
            parameter.add_(1.0)
    report = sync(engine, model)
    assert report.bytes == sum(parameter.nbytes for _, parameter in trained)
    assert all(torch.equal(engine.shards[name].values, parameter) for name, parameter in trained)
    assert torch.equal(engine.shards[QKV].values, decoded)
    engine.load((name, torch.zeros(shard.shape)) for name, shard in engine.shards.items())
    sync(engine, model)  # other weights were loaded in between
    assert torch.equal(engine.shards[QKV].values, decoded)


@pytest.mark.parametrize(("form", "rows"), [("int8", 128), ("mxfp4", 128), ("nf4", 256), ("fp8", 256)])
def test_a_rank_reads_only_the_rows_of_its_shard_if_they_are_coded_alone(
    base: Path, tmp_path: Path, monkeypatch, form: str, rows: int
) -> None:
    coded, counts = CodedBase(config(base, tmp_path / "run", form)), []
    read = coded.read
    monkeypatch.setattr(coded, "read", lambda *args: counts.append(args[2]) or read(*args))
    weight = CodedWeight(form, (256, 128), (128, 128), (128, 0), torch.float32)
    _fill(weight, coded, QKV)
    assert counts == [rows]
    assert torch.equal(weight.all_rows(), coded.full(QKV)[128:])


def test_the_plan_adds_the_time_of_decoding(base: Path, tmp_path: Path) -> None:
    seconds = {}
    for form in ("none", "int8", "nf4"):
        run = prepare(config(base, tmp_path / "run", form, **{"train.precision": "bf16"}), 1).config
        meta = MetaModel(run.model, run.lora)
        seconds[form] = step_time(run, meta, 1, rates_of("H200"), 8).parts["elementwise"]
    assert seconds["none"] < seconds["nf4"] and seconds["int8"] < seconds["nf4"]


@pytest.mark.parametrize("form", ["int8", "fp8", "nf4", "mxfp4"])
def test_the_plan_counts_the_bytes_that_a_run_has(base: Path, tmp_path: Path, form: str) -> None:
    settings = config(base, tmp_path / "run", form)
    run = start(settings)
    weights = coded_weights(run.model.chunks[0]).values()
    held = sum(part.nbytes for each in weights for part in each.parts[:-1])
    held += sum(parameter.nbytes for parameter in run.model.chunks[0].parameters())
    assert build_layout(run.config, 1).stages[0].memory.weights == pytest.approx(held, rel=1e-4)


def test_what_cannot_be_coded_or_read_is_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="FP4"):
        CodedBase(config(bitsandbytes_folder(base, tmp_path / "fp4", True, "fp4"), tmp_path / "run", "nf4"))
    content = json.loads((base / "config.json").read_bytes())
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    random_reference(transformers.LlamaConfig(**content | sizes)).save_pretrained(tmp_path / "odd")
    with pytest.raises(ConfigError, match="linear_qkv has 96 columns; choose int8 or fp8"):
        start(config(tmp_path / "odd", tmp_path / "run", "nf4"))
    with pytest.raises(ConfigError, match="a quantized base is multiplied in"):
        start(config(base, tmp_path / "run", "nf4").with_settings({"train.fp8_format": "hybrid"}))
