"""Every value that is read from a stranger's folder, replaced by what it should not be: a sentence, soon."""

import argparse
import json
import pickle
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from default_cases import in_full
from hostile import VALUES, problems, spoiled
from megatron_checkpoint import arguments, core_state, forget_megatron, write_legacy, write_torch_dist
from models.reference import CASES, random_reference
from peft_formula import random_adapters, save

from megalith.bridge.families import family_of
from megalith.bridge.family import COUNTS, LAYER_COUNTS, LISTS, NUMBERS, OBJECTS
from megalith.bridge.folder import SourceFolder, list_tensors
from megalith.bridge.importer import import_hf, open_hf_folder
from megalith.bridge.load import model_of
from megalith.bridge.match import match
from megalith.bridge.megatron.megatron_importer import open_megatron
from megalith.bridge.megatron.table import GPT
from megalith.bridge.origin import read_origin
from megalith.bridge.peft.peft_reader import PeftFolder
from megalith.config import ModelConfig
from megalith.config.rules.model_rules import check_model
from megalith.errors import CheckpointError, ConfigError
from megalith.models.transformer import Transformer

MORE = (*LAYER_COUNTS, *COUNTS, *NUMBERS, *OBJECTS[:2], *list(LISTS)[:3], "dtype", "torch_dtype")


STRIDE = 16  # all families have the usual keys, which together they have with every value
SOME_VALUES = [pytest.param(name, STRIDE, id=name) for name in CASES]
EVERY_VALUE = [in_full(name, 1, id=f"{name}, every value") for name in CASES]


@pytest.mark.filterwarnings("ignore:config.json gives model")  # two keys of one setting, one of them spoiled
@pytest.mark.parametrize(("name", "stride"), [*SOME_VALUES, *EVERY_VALUE])
def test_every_value_of_a_config_json(name: str, stride: int, hf_folder) -> None:
    source = SourceFolder(hf_folder(name))
    config, tensors = source.config, source.tensors
    seen: set[str] = set()

    def read(content: dict) -> None:
        family = family_of(content, "the test")
        model = family.read_config(content)
        check_model(model)
        said = repr(vars(model))
        if said not in seen and len(seen) < 40:  # another model than before
            seen.add(said)
            source.config, source.tensors = content, dict(tensors)
            match(source, family, model, allow=True)

    more = MORE if name in ("llama", "deepseek-v3") else ()
    cases = spoiled(config, more, stride, first=list(CASES).index(name))
    count, refused, found = problems(cases, read)
    assert not found, "\n".join(found[:20])
    assert count > 500 / stride and refused > count / 3


def test_what_a_model_would_take_is_found_before_it_is_taken(hf_folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_folder("llama"), tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())

    def read(changes: dict) -> None:
        (folder / "config.json").write_text(json.dumps(config | changes))
        for reads in (
            open_hf_folder,
            model_of,
            lambda path: import_hf(path, tmp_path / "out", show_progress=False),
        ):
            with pytest.raises((ConfigError, CheckpointError)):
                reads(str(folder))
        assert not (tmp_path / "out").exists()

    cases = [
        {"hidden_size": 10**9},
        {"hidden_size": 10**9, "head_dim": 16},
        {"num_hidden_layers": 10**7},
        {"num_hidden_layers": 9_999},
        {"vocab_size": 2**31 - 1},
        {"intermediate_size": 2**31 - 1},
        {"rope_scaling": [1], "rope_parameters": None},
        {"rope_theta": -1, "rope_parameters": None},
        {"architectures": {}, "model_type": []},
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**9},
        {"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 10**9},
    ]
    _, _, found = problems(((str(case), case) for case in cases), read)
    assert not found, "\n".join(found)


def header_of(file: Path) -> tuple[dict, bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def test_every_value_of_a_safetensors_header(hf_folder, tmp_path: Path) -> None:
    header, data = header_of(hf_folder("llama") / "model.safetensors")
    few = {name: header[name] for name in list(header)[:3]} | {"__metadata__": header.get("__metadata__")}
    file = tmp_path / "a.safetensors"

    def read(content: object) -> None:
        write(json.dumps(content).encode())

    def write(text: bytes) -> None:
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        for stored in list_tensors(file).values():
            stored.read().sum()

    count, refused, found = problems(spoiled(few), read)
    assert not found, "\n".join(found[:20])
    assert count > 300 and refused > count / 2
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    far = {"dtype": "F32", "shape": [1], "data_offsets": [10**9, 10**9 + 4]}
    texts = [
        json.dumps({"a": one})[:-1].encode() + b', "a": ' + json.dumps(far).encode() + b"}",
        json.dumps({"a": far})[:-1].encode() + b', "a": ' + json.dumps(one).encode() + b"}",
        b"[" * 100_000,
        b"[]",
        b"\xff",
        b'{"a": ' * 100_000,
    ]
    _, refused, found = problems(((repr(text[:40]), text) for text in texts), write)
    assert not found and refused == len(texts), found


def test_every_value_of_an_adapter_config(hf_folder, tmp_path: Path) -> None:
    reference = random_reference(CASES["llama"][0]())
    folder = save(random_adapters(reference, ["q_proj", "v_proj"], 4), tmp_path / "peft", 8.0)
    config = json.loads((folder / "adapter_config.json").read_text())
    tree = {"architectures": ["LlamaForCausalLM"]} | json.loads(reference.config.to_json_string())
    family = family_of(tree, "the test")
    model = family.read_config(tree)
    PeftFolder(folder, family, model)

    def read(content: object) -> None:
        (folder / "adapter_config.json").write_text(json.dumps(content))
        PeftFolder(folder, family, model)

    count, refused, found = problems(spoiled(config, ("lora_dropout", "use_rslora", "use_dora")), read)
    assert not found, "\n".join(found[:20])
    assert count > 200 and refused > count / 3


def test_every_value_of_an_index_and_of_the_small_files(hf_folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_folder("llama"), tmp_path / "hf"))
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    where = dict.fromkeys(list_tensors(folder / "part.safetensors"), "part.safetensors")

    def read_index(content: object) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        SourceFolder(folder)

    def read_small(content: object) -> None:
        (folder / "hugging_face_dtypes.json").write_text(json.dumps(content))
        read_origin(folder)

    small = dict(list(where.items())[:2])
    cases = [*spoiled({"metadata": {"total_size": 1}, "weight_map": small}), *((repr(v), v) for v in VALUES)]
    assert not problems(iter(cases), read_index)[2]
    cases = [*spoiled({"model.norm.weight": "float16"}), *((repr(v), v) for v in VALUES)]
    assert not problems(iter(cases), read_small)[2]


@pytest.fixture(scope="module")
def megatron_model() -> Transformer:
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=120, max_position_embeddings=16,
        position_embedding_type="rope", swiglu=True, normalization="RMSNorm", add_bias_linear=False,
    )  # fmt: skip
    return Transformer(config)


@pytest.mark.parametrize("form", [pytest.param("torch_dist", marks=pytest.mark.full), "legacy"])
def test_every_argument_of_a_megatron_folder(form: str, megatron_model, tmp_path: Path) -> None:
    args = arguments(megatron_model.config)
    state = core_state(megatron_model, te=True)
    if form == "torch_dist":
        write_torch_dist(tmp_path, state, args)
        file = tmp_path / "iter_0000005" / "common.pt"
    else:
        write_legacy(tmp_path, state, args, 1, 1, 1)
        file = tmp_path / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    forget_megatron()
    kept = {
        key: value for key, value in vars(args).items() if type(value) in (int, float, bool, str, type(None))
    }
    whole = {} if form == "torch_dist" else {"model": dict(state), "checkpoint_version": 3.0}
    folder = tmp_path / "iter_0000005"

    def read(content: dict) -> None:
        torch.save({"args": argparse.Namespace(**content), **whole}, file)
        open_megatron(folder, True)

    more = ("rope_scaling_factor", "use_rope_scaling", "rotary_seq_len_interpolation_factor", "window_size")
    if form == "torch_dist":  # the arguments are read alike
        count, refused, found = problems(spoiled(kept, more), read)
        assert not found, "\n".join(found[:20])
        assert count > 500 and refused > count / 5

    def read_whole(content: object) -> None:
        torch.save(content, file)
        open_megatron(folder, True)

    first = dict(list(state.items())[:3])
    cases = [*spoiled({"args": 1, "model": first}), *((repr(v), v) for v in VALUES)]
    cases += [
        (f"args and {name}", content | {"args": args_of(kept)}) for name, content in spoiled({"model": first})
    ]
    _, refused, found = problems(iter(cases), read_whole)
    assert not found, "\n".join(found[:20])
    assert refused > len(cases) / 2


@pytest.mark.filterwarnings("ignore:config.json gives model")
@pytest.mark.parametrize("latent", [False, True])
def test_every_argument_of_yarn_in_a_megatron_checkpoint(latent: bool) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096 if latent else 16}
    sizes = dict(
        multi_latent_attention=True, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
    )
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=120, max_position_embeddings=64,
        position_embedding_type="rope", rope_scaling=yarn, **(sizes if latent else {}),
    )  # fmt: skip
    args = GPT.write_config(config)
    assert GPT.read_config(args).rope_scaling is not None
    words = ("rope", "rotary", "yarn", "mscale", "beta", "original")
    kept = {key: value for key, value in args.items() if any(word in key for word in words)}
    more = ("mscale", "mscale_all_dim", "rotary_seq_len_interpolation_factor")
    cases = ((name, {**args, **content}) for name, content in spoiled(kept, more))
    count, refused, found = problems(cases, GPT.read_config)
    assert not found, "\n".join(found[:20])
    assert count > 200 and refused > count / 3


def args_of(kept: dict) -> argparse.Namespace:
    return argparse.Namespace(**kept)


def test_every_value_of_torch_dists_metadata(megatron_model, tmp_path: Path) -> None:
    write_torch_dist(tmp_path, core_state(megatron_model, te=True), arguments(megatron_model.config))
    forget_megatron()
    folder = tmp_path / "iter_0000005"
    file = folder / ".metadata"
    content = file.read_bytes()

    def spoil(place: str, value: object) -> None:
        metadata = pickle.loads(content)
        name = next(n for n in metadata.state_dict_metadata if n.startswith("decoder.layers."))
        entry = metadata.state_dict_metadata[name]
        index = next(i for i in metadata.storage_data if i.fqn == name)
        info = metadata.storage_data[index]
        changes = {
            "size": lambda: setattr(entry, "size", value),
            "sizes": lambda: setattr(entry.chunks[0], "sizes", value),
            "offsets": lambda: setattr(entry.chunks[0], "offsets", value),
            "chunks": lambda: setattr(entry, "chunks", value),
            "properties": lambda: setattr(entry, "properties", value),
            "dtype": lambda: setattr(entry.properties, "dtype", value),
            "path": lambda: setattr(info, "relative_path", value),
            "offset": lambda: setattr(info, "offset", value),
            "length": lambda: setattr(info, "length", value),
            "names": lambda: setattr(metadata, "state_dict_metadata", value),
            "places": lambda: setattr(metadata, "storage_data", value),
            "both sizes": lambda: (setattr(entry, "size", value), setattr(entry.chunks[0], "sizes", value)),
        }
        changes[place]()
        file.write_bytes(pickle.dumps(metadata))
        for name, stored in open_megatron(folder, True).source.tensors.items():
            if name.startswith("layers."):
                stored.read()
        fit = open_megatron(folder, True)
        for group in fit.groups:
            fit.read(group, 1)

    more = (torch.Size([10**9, 32]), (10**9, 32, 32), [-1, 32], (2**40, 0), ("a",), SimpleNamespace())
    parts = (
        "size",
        "sizes",
        "offsets",
        "chunks",
        "properties",
        "dtype",
        "path",
        "offset",
        "length",
        "names",
        "places",
    )
    cases = ((f"{part} = {v!r}", (part, v)) for part in (*parts, "both sizes") for v in (*VALUES, *more))
    count, refused, found = problems(cases, lambda case: spoil(*case))
    assert not found, "\n".join(found[:20])
    assert refused > count / 2
