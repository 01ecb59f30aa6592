"""Every damage is found and named before a tensor is touched, and the step before is used."""

import json
import os
import shutil
import struct

import pytest
import torch

from megalith.checkpoint import open_checkpoint
from megalith.checkpoint.files import file_record, write_safetensors
from megalith.checkpoint.manifest import content_checksum
from megalith.cli.main import main
from megalith.errors import CheckpointError

FILES = ["model-00000-000.safetensors", "optimizer-00000-000.safetensors", "manifest.json"]


def flip_first_bit(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 64
    path.write_bytes(content)


def flip_middle_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 2
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def append(path):
    path.write_bytes(path.read_bytes() + b"x")


def delete(path):
    path.unlink()


DAMAGES = [flip_first_bit, flip_middle_bit, flip_last_bit, truncate, empty, append, delete]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.fault(6)
def test_damage_is_named_and_the_step_before_is_used(tiny_run, tmp_path, name, damage):
    run = tiny_run()
    older, newer = (run.train(1).save(tmp_path) for _ in range(2))
    damage(newer / name)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_checkpoint(newer)
    with pytest.warns(UserWarning, match=rf"using .*step_00000001.*skipped.*step_00000002.*{name}"):
        checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.folder == older
    assert tiny_run(seed=3).load(checkpoint).equals(tiny_run().train(1))


@pytest.mark.fault(6)
def test_a_file_of_another_step_is_found(tiny_run, tmp_path):
    run = tiny_run()
    older, newer = (run.train(1).save(tmp_path) for _ in range(2))
    shutil.copy(older / "model-00000-000.safetensors", newer / "model-00000-000.safetensors")
    with pytest.raises(CheckpointError, match=r"step_00000002/model-00000-000\.safetensors is damaged"):
        open_checkpoint(newer)


def test_when_no_step_is_whole_nothing_is_started_afresh(tiny_run, tmp_path):
    run = tiny_run()
    for _ in range(2):
        truncate(run.train(1).save(tmp_path) / "model-00000-000.safetensors")
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is intact: .*step_00000002.*step_00000001"):
        open_checkpoint(tmp_path)


def test_damage_to_what_is_not_asked_for_does_not_matter(tiny_run, tmp_path):
    folder = tiny_run().train(1).save(tmp_path)
    delete(folder / "optimizer-00000-000.safetensors")
    assert open_checkpoint(tmp_path, parts=["model"]).folder == folder


def rewrite_manifest(folder, change):
    """Changes the manifest as someone would who knows how its checksum is made."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["checksum"]
    change(content)
    (folder / "manifest.json").write_text(json.dumps({"checksum": content_checksum(content), **content}))


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../secret", "..\\secret", "a//b", ".", ""]
)
@pytest.mark.fault(23)
def test_names_that_leave_the_folder_are_refused(tiny_run, tmp_path, name):
    folder = tiny_run().save(tmp_path)
    rewrite_manifest(folder, lambda content: content["files"].update({name: {"bytes": 1, "sha256": "0"}}))
    with pytest.raises(CheckpointError, match="not a plain path inside the checkpoint"):
        open_checkpoint(folder)


@pytest.mark.parametrize("link", ["model-00000-000.safetensors", "tokenizer"])
@pytest.mark.fault(23)
def test_symbolic_links_are_refused(tiny_run, tmp_path, link):
    folder = tiny_run().save(tmp_path, write_tokenizer=lambda path: (path / "a.json").write_text("{}"))
    (folder / link).rename(tmp_path / "elsewhere")
    (folder / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{link}.* is a symbolic link"):
        open_checkpoint(folder)


def test_what_is_no_file_is_refused_and_not_waited_for(tiny_run, tmp_path):
    folder = tiny_run().save(tmp_path)
    (folder / "model-00000-000.safetensors").unlink()
    os.mkfifo(folder / "model-00000-000.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00000-000\.safetensors is not a file"):
        open_checkpoint(folder)


def test_a_newer_format_is_refused_and_not_passed_over(tiny_run, tmp_path):
    run = tiny_run()
    run.train(1).save(tmp_path)
    rewrite_manifest(run.train(1).save(tmp_path), lambda content: content.update(format_version=3))
    with pytest.raises(CheckpointError, match="format version 3, but this version of Megalith reads 2"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("step"),
        lambda content: content.update(step=-1),
        lambda content: content.update(step="2"),
        lambda content: content.update(surprise=1),
        lambda content: content["files"].pop("model-00000-000.safetensors"),
        lambda content: content["tensors"]["model"].update(x={"dtype": "F32", "shape": [-1], "pieces": []}),
        lambda content: content["tensors"]["model"].update(x={"dtype": "F32", "shape": [1], "pieces": []}),
        lambda content: content["tensors"]["model"]["norm.weight"]["pieces"].append(
            content["tensors"]["model"]["norm.bias"]["pieces"][0]
        ),
        lambda content: content["tensors"]["model"]["norm.weight"]["pieces"][0].update(offset=[1]),
        lambda content: content["tensors"]["model"]["norm.weight"]["pieces"][0].update(file="../model"),
        lambda content: content["tensors"].update({"../../elsewhere": content["tensors"].pop("optimizer")}),
    ],
)
def test_manifests_with_other_content_are_refused(tiny_run, tmp_path, change):
    folder = tiny_run().save(tmp_path)
    rewrite_manifest(folder, change)
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a valid manifest"):
        open_checkpoint(folder)


def test_a_manifest_that_is_not_that_of_its_checksum_is_refused(tiny_run, tmp_path):
    path = tiny_run().save(tmp_path) / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"step": content["step"] + 1}))
    with pytest.raises(CheckpointError, match="its content does not match its checksum"):
        open_checkpoint(path.parent)


@pytest.mark.parametrize("text", ["[]", "null", "{}", "[" * 100_000, '{"checksum": 1}', "\xff"])
def test_manifests_that_are_no_manifests_are_refused(tiny_run, tmp_path, text):
    folder = tiny_run().save(tmp_path)
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_checkpoint(folder)


def replace_weights(folder, content):
    """Puts in a model file that the manifest's checksum agrees with."""
    path = folder / "model-00000-000.safetensors"
    path.write_bytes(content) if isinstance(content, bytes) else write_safetensors(path, content)
    record = file_record(path).model_dump()
    rewrite_manifest(
        folder, lambda manifest: manifest["files"].update({"model-00000-000.safetensors": record})
    )


def header(text):
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**62),
        header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,999]}}') + bytes(8),
        header(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}'
        )
        + bytes(12),
        b"PK\x03\x04 not safetensors at all",
        {"a": torch.zeros(3)},
        {
            "embedding.weight": torch.zeros(12, 4),
            "expert_bias": torch.zeros(3),
            "norm.weight": torch.zeros(4),
            "norm.bias": torch.zeros(4),
        },
        {
            "embedding.weight": torch.zeros(13, 4).half(),
            "expert_bias": torch.zeros(3),
            "norm.weight": torch.zeros(4),
            "norm.bias": torch.zeros(4),
        },
    ],
    ids=["huge header", "past the end", "overlap", "no header", "other names", "other shape", "other type"],
)
@pytest.mark.fault(22)
def test_safetensors_that_contradict_the_manifest_are_refused(tiny_run, tmp_path, content):
    run = tiny_run()
    folder = run.save(tmp_path)
    replace_weights(folder, content)
    with pytest.raises(CheckpointError, match=r"model-00000-000\.safetensors"):
        run.load(open_checkpoint(folder))


def test_a_type_that_is_not_known_is_a_sentence_in_every_command(tiny_run, tmp_path, capsys):
    folder = tiny_run().save(tmp_path / "run")
    rewrite_manifest(folder, lambda content: content["tensors"]["model"]["norm.bias"].update(dtype="F8_E5M2"))
    for words in (
        ["verify", folder],
        ["hash", folder, "--part", "optimizer"],
        ["diff", folder, folder],
        ["reshard", folder, tmp_path / "out", "--files", 1],
        ["merge", folder, tmp_path / "out.safetensors"],
    ):
        assert main(["checkpoint", *map(str, words)]) == 4
        printed = capsys.readouterr()
        said = "step_00000000/manifest.json gives the model's tensor norm.bias the dtype 'F8_E5M2', but this version"
        assert said in printed.out + printed.err


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("config.json", "import-hf"),
        ("latest_checkpointed_iteration.txt", "import-megatron"),
        ("mp_rank_00", "import-megatron"),
        ("__0_0.distcp", "import-megatron"),
    ],
)
def test_weights_of_others_are_told_with_the_command_that_reads_them(tmp_path, name, command):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"megalith {command} {tmp_path} RUN"):
        open_checkpoint(tmp_path)
