"""Damaged and hostile folders: refused by a sentence that names what is wrong, with nothing left behind."""

import io
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.bridge.exporter import export_hf
from megalith.bridge.importer import import_hf
from megalith.cli.main import main
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.errors import CheckpointError, ConfigError, DataError
from megalith.launch.lock import OutputLock
from megalith.parallel.shards import LocalShard

Change = Callable[[dict], object]


@pytest.fixture
def folder(hf_folder, tmp_path: Path) -> Path:
    """A whole Hugging Face folder to damage."""
    return Path(shutil.copytree(hf_folder("llama"), tmp_path / "hf"))


def with_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def with_tensors(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def in_shards(folder: Path) -> dict[str, str]:
    """Splits the weights into two shards with an index; returns its weight_map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"part{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in ("part0.safetensors", "part1.safetensors"):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    write_index(folder, where)
    return where


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refused(folder: Path, kind: type[Exception] = CheckpointError, **options: bool) -> str:
    """The sentence with which an import is refused; it must leave nothing."""
    out = folder.parent / "run"
    with pytest.raises(kind) as error:
        import_hf(folder, out, show_progress=False, **options)
    assert not out.exists()
    return str(error.value)


def test_an_unknown_architecture_is_told_with_the_known_ones(folder: Path) -> None:
    with_config(folder, architectures=["RwkvForCausalLM"])
    text = refused(folder, ConfigError)
    assert f"{folder} names the architecture RwkvForCausalLM" in text and "Qwen3ForCausalLM" in text
    assert "did you mean" not in text


def test_a_config_that_cannot_be_built_names_its_folder(folder: Path) -> None:
    with_config(folder, hidden_act="gelu")
    assert f"{folder}: config.json has hidden_act 'gelu'" in refused(folder, ConfigError)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": ' * 100_000])
def test_a_config_that_is_no_json_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refused(folder)


def test_a_folder_without_config_or_weights_and_a_file(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights; it needs one of model.safetensors.index.json" in refused(folder)
    (folder / "config.json").unlink()
    assert "config.json is missing" in refused(folder)
    (folder / "weights.safetensors").touch()
    assert "copy the model's config.json and its tokenizer's files into" in refused(folder)
    (folder / "__0_0.distcp").touch()
    assert "a checkpoint of torch.distributed.checkpoint: convert it" in refused(folder)
    (tmp_path / "file").touch()
    assert "is a file; pass the folder" in refused(tmp_path / "file")


def test_a_path_that_is_nowhere(tmp_path: Path) -> None:
    assert "there is no file or folder" in refused(tmp_path / "no/such/folder", DataError)


def test_a_missing_shard_is_named(folder: Path) -> None:
    in_shards(folder)
    (folder / "part1.safetensors").unlink()
    assert f"{folder / 'part1.safetensors'} is missing" in refused(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/part.safetensors", "..", ""])
@pytest.mark.fault(23)
def test_an_index_that_leads_outside_the_folder(folder: Path, name: str) -> None:
    where = in_shards(folder)
    write_index(folder, where | {"model.norm.weight": name})
    assert f"names the file {name!r}, which is outside its folder" in refused(folder)


def test_a_folder_with_two_models_or_an_adapter_is_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    in_shards(folder)
    (folder / "model.safetensors").write_bytes(whole)
    assert "has model.safetensors and model.safetensors.index.json, which lists other files" in refused(
        folder
    )
    (folder / "model.safetensors.index.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    assert "has a model and an adapter (adapter_config.json)" in refused(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"model.norm.weight": 3}])
def test_an_index_of_another_form(folder: Path, weight_map: object) -> None:
    in_shards(folder)
    write_index(folder, weight_map)
    assert "has no weight_map of tensors to files" in refused(folder)


def test_an_index_with_a_tensor_that_its_shard_lacks(folder: Path) -> None:
    where = in_shards(folder)
    write_index(folder, where | {"model.other.weight": "part0.safetensors"})
    assert "part0.safetensors lacks tensors that the index lists: model.other.weight" in refused(folder)


@pytest.mark.parametrize("damage", ["cut", "huge header", "no header"])
@pytest.mark.fault(22)
def test_a_damaged_safetensors_file(folder: Path, damage: str) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(
        {"cut": content[:-100], "huge header": b"\xff" * 8 + content[8:], "no header": b"\0" * 40}[damage]
    )
    assert f"{path} cannot be read as safetensors" in refused(folder)


def test_a_shape_that_differs_from_the_config_names_the_tensor(folder: Path) -> None:
    with_config(folder, intermediate_size=96)
    text = refused(folder, allow=True)
    assert "model.layers.0.mlp.gate_proj.weight (stored [112, 64], needed [96, 64])" in text


def test_a_type_that_differs_from_the_config_names_the_tensor(folder: Path) -> None:
    with_tensors(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bfloat16()}))
    assert "whose type differs from config.json: model.norm.weight (BF16, not F32)" in refused(folder)


def test_quantized_weights_are_refused(folder: Path) -> None:
    with_tensors(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}))
    assert "model.norm.weight (I8); if they are quantized, the format is not supported" in refused(
        folder, allow=True
    )


def test_missing_and_extra_tensors_are_listed_and_can_be_allowed(folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.vision.weight"] = torch.ones(3)

    with_tensors(folder, change)
    text = refused(folder)
    assert "missing: model.layers.1.self_attn.k_proj.weight; not of this model: model.vision.weight" in text
    import_hf(folder, tmp_path / "run", allow=True)
    out = export_hf(tmp_path / "run", tmp_path / "out").path
    again, before = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    assert "model.layers.1.self_attn.k_proj.weight" in again and "model.vision.weight" not in again
    started_anew = {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"}
    assert {name for name in before.keys() & again.keys() if not torch.equal(before[name], again[name])} == (
        started_anew - {"model.layers.1.self_attn.k_proj.weight"}
    )


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def saved(content: object, zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        saved({"a": Bomb()}, zipped=True),
        saved({"a": Bomb()}, zipped=False),
        pickle.dumps(Bomb(), protocol=2),
        saved([1, 2], zipped=True),
        saved({"a": 1}, zipped=True),
        b"text",
        b"",
    ],
)
@pytest.mark.fault(21)
def test_a_pickle_that_is_more_than_tensors_is_never_run(
    folder: Path, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert "pytorch_model.bin" in refused(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_tokenizer_with_more_entries_than_the_embedding(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "def main(): return 1\n" * 30}) + "\n")
    train_tokenizer([tmp_path / "text.jsonl"], 280, folder / "tokenizer.json", ["text"])
    assert "entries, but the embedding has 151 rows" in refused(folder)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_of_an_import(folder: Path) -> None:
    with files_of_at_most(100_000):
        assert "could not be saved" in refused(folder)


def test_a_full_disk_leaves_nothing_of_an_export_and_what_was_there_stays(
    folder: Path, tmp_path: Path
) -> None:
    import_hf(folder, tmp_path / "run", show_progress=False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").touch()
    with (
        files_of_at_most(100_000),
        pytest.raises(CheckpointError, match="could not be written: File too large"),
    ):
        export_hf(tmp_path / "run", tmp_path / "out", replace=True, show_progress=False)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"] and (tmp_path / "out/old").exists()


def test_what_is_there_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    import_hf(folder, tmp_path / "run", show_progress=False)
    with pytest.raises(CheckpointError, match="already exists"):
        import_hf(folder, tmp_path / "run")
    with pytest.raises(CheckpointError, match="already exists"):
        export_hf(tmp_path / "run", folder)


def test_a_folder_where_another_process_is_at_work_is_refused_and_an_import_is_at_work_in_its_own(
    folder: Path, tmp_path: Path
) -> None:
    with OutputLock(tmp_path / "run"):
        with pytest.raises(ConfigError, match=f"run is in use by process {os.getpid()}"):
            import_hf(folder, tmp_path / "run")
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]

    def change(name: str, shard: LocalShard) -> torch.Tensor:
        with pytest.raises(ConfigError, match="out is in use by process"):
            OutputLock(tmp_path / "out")
        return shard.values

    import_hf(folder, tmp_path / "out", change=change, show_progress=False)
    OutputLock(tmp_path / "out").release()


def test_the_commands_convert_and_tell_mistakes_in_a_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert main(["import-hf", str(folder), run, "--verify"]) == 0
    assert main(["export-hf", run, out, "--verify", "--shard-gb", "0.0001"]) == 0
    printed = capsys.readouterr()
    assert f"wrote {run}/checkpoints/step_00000000" in printed.out
    assert f"verified: {out}.certificate.json" in printed.out
    assert printed.err == "no tokenizer was written: the checkpoint has none\n"
    assert main(["export-hf", run, out]) == 4
    assert "already exists" in capsys.readouterr().err
    assert main(["export-hf", str(tmp_path / "nothing"), out]) == 4
    with_config(folder, architectures=["RwkvForCausalLM"])
    assert main(["import-hf", str(folder), str(tmp_path / "other")]) == 2


def test_a_shard_name_of_thousands_of_characters(folder: Path) -> None:
    in_shards(folder)
    write_index(folder, {"lm_head.weight": "x" * 5_000})
    assert "has a file name of 5,000 characters (xxx" in refused(folder)
