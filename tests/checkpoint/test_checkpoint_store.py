"""Checkpoints in an object store, here the memory of one process: whole or not there, checked when they are read."""

import errno
import gc
import json
import re
import sys

import fsspec
import pytest

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.partial import new_folder
from megalith.checkpoint import Saver, list_steps, open_checkpoint, open_existing
from megalith.checkpoint.fingerprint import differences, tensor_digests
from megalith.checkpoint.open import FETCHED, step_problems
from megalith.checkpoint.read import TOKENIZER
from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.io import make_folder
from megalith.launch.lock import OutputLock
from megalith.remote import StorePath, open_location


def empty_memory() -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty bucket; what is fetched of it stands in tmp_path/fetched."""
    empty_memory()
    make_folder(tmp_path / "fetched")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "fetched"))
    yield open_location("memory://bucket/run")
    empty_memory()


@pytest.fixture
def break_at(monkeypatch):
    """`break_at(n)` has the n-th call that changes the store raise, and all that follow, as the network's end does."""

    def break_at(number: int, error: type[BaseException] = OSError) -> list[str]:
        done: list[str] = []
        for name in ("write", "create", "send", "unlink", "remove"):
            real = getattr(StorePath, name)

            def call(self, *args, _real=real, _name=name, **named):
                done.append(f"{_name} {self.name}")
                if len(done) > number:
                    raise error("the network is gone")
                return _real(self, *args, **named)

            monkeypatch.setattr(StorePath, name, call)
        return done

    yield break_at


def files(url: StorePath) -> list[str]:
    """The objects below a place, what a save draws written as `*`."""
    return sorted({re.sub(r"(^|(?<=/))[0-9a-f]{8}(?=/)", "*", name) for name in url.sizes()})


def write_tokenizer(folder):
    (folder / "t.json").write_text("{}")


def test_a_run_is_saved_kept_listed_and_loaded_as_in_a_folder(store, tiny_run, tmp_path):
    run = tiny_run()
    for _ in range(3):
        saved = run.train(1).save(store, keep_last=2, write_tokenizer=write_tokenizer)
    assert str(saved) == "memory://bucket/run/checkpoints/step_00000003" and list(
        list_steps(saved.parent)
    ) == [2, 3]
    assert (saved.parent / "latest").read_bytes() == b"step_00000003\n"
    step = ["*/model-00000-000.safetensors", "*/optimizer-00000-000.safetensors", "*/tokenizer/t.json"]
    assert files(saved) == [*step, "manifest.json"]
    for path in ("memory://bucket/run", saved.parent, str(saved)):
        checkpoint = open_checkpoint(path)
        assert checkpoint.folder == saved and tiny_run(seed=5).load(checkpoint).equals(run)
    assert [file.name for file in checkpoint.tokenizer_folder.iterdir()] == ["t.json"]
    if sys.version_info >= (3, 13):  # its contextlib leaves cycles
        gc.collect()
    assert len(list((tmp_path / "fetched").glob(f"{FETCHED}*"))) == 1  # the others are done with
    del checkpoint
    assert not list((tmp_path / "fetched").glob(f"{FETCHED}*"))
    assert open_checkpoint("memory://bucket/other") is None
    with pytest.raises(
        CheckpointError, match=r"no checkpoint memory://.*step_00000001; .* has the steps 2, 3"
    ):
        open_checkpoint(saved.parent / "step_00000001")


def test_what_a_task_keeps_is_in_the_step_and_goes_with_it(store, tiny_run, tmp_path, capsys):
    """Into a folder by `reshard`, where a byte that is changed is found."""
    run = tiny_run().train(1)
    with Saver(store / "checkpoints", unpadded_rows=run.rows, background=True) as saver:
        saver.save(run.record(), run.model, run.optimizer, task_files={"queue.json.zst": b"ahead"})
    opened = open_checkpoint(store)
    assert {name: path.read_bytes() for name, path in opened.task_files.items()} == {
        "queue.json.zst": b"ahead"
    }
    assert main(["checkpoint", "reshard", str(store), str(tmp_path / "out"), "--files", "1"]) == 0
    copied = open_checkpoint(tmp_path / "out").task_files["queue.json.zst"]
    assert copied == tmp_path / "out" / "checkpoints" / "step_00000001" / "task" / "queue.json.zst"
    copied.write_bytes(b"aheaD")
    assert main(["checkpoint", "verify", str(tmp_path / "out")]) == 4
    assert "queue.json.zst" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"queue\.json\.zst"):
        open_checkpoint(copied.parents[1])


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_ends_at_any_moment_leaves_what_was_whole_and_no_load_takes_it(
    store, tiny_run, break_at, monkeypatch, background
):
    """The next step, then the same step anew. An end is one with nothing behind it: no tidying up."""
    old = tiny_run().train(2)
    for steps_more in (1, 0):
        new = tiny_run(seed=1).train(2 + steps_more)
        for number in range(100):
            empty_memory()
            old.save(store)
            with monkeypatch.context():
                done = break_at(number)
                with Saver(
                    store / "checkpoints", unpadded_rows=new.rows, keep_last=1, background=background
                ) as saver:
                    saver.save(new.record(), new.model, new.optimizer)
                    (saved,) = saver.completed_saves(wait=True)
                monkeypatch.undo()
            found = tiny_run(seed=9).load(open_checkpoint(store))
            assert found.equals(old if "write manifest.json" not in done[:number] else new), (number, done)
            assert (saved.error is None) == ("write latest" in done[:number]), (number, done)
            if saved.error is not None:
                assert re.search(
                    r"memory://.* could not be saved: the network is gone; earlier steps are intact. Check",
                    str(saved.error),
                )
            new.save(store, keep_last=1)
            assert tiny_run(seed=9).load(open_checkpoint(store)).equals(new)
            parts = ["*/model-00000-000.safetensors", "*/optimizer-00000-000.safetensors", "manifest.json"]
            assert files(store) == [
                "checkpoints/latest",
                *(f"checkpoints/step_0000000{new.step}/{p}" for p in parts),
            ]
            if len(done) <= number:
                break
        assert number > 4


@pytest.mark.parametrize("taken", ["latest", "manifest.json"])
def test_a_save_whose_last_answer_is_lost_keeps_the_files_of_what_may_be_a_whole_step(
    store, tiny_run, monkeypatch, taken
):
    """The store has taken the object and its receipt does not come; every other call is answered."""
    write, run = StorePath.write, tiny_run().train(1)

    def lose(self, content):
        write(self, content)
        if self.name == taken:
            raise OSError(5, "no receipt", str(self))

    monkeypatch.setattr(StorePath, "write", lose)
    with pytest.raises(CheckpointError, match="could not be saved: no receipt"):
        run.save(store)
    assert tiny_run(seed=9).load(open_checkpoint(store)).equals(run)


def test_a_step_loses_its_manifest_before_its_first_file(store, tiny_run, break_at):
    run = tiny_run().train(1)
    run.save(store)
    done = break_at(10**6)
    run.train(1).save(store, keep_last=1)
    deleted = [call for call in done if call.startswith(("unlink", "remove"))]
    assert deleted == ["unlink manifest.json", "remove step_00000001"]


DAMAGES = {
    "is damaged: its content does not match the SHA-256": lambda data: bytes([data[0] ^ 1]) + data[1:],
    r"is damaged: it has \d+ bytes, but \d+ in its manifest": lambda data: data[:-1],
    "is missing, but listed in the manifest": lambda data: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", ["model", "optimizer", "t.json"])
@pytest.mark.fault(6)
def test_a_damaged_object_is_named_and_the_step_before_is_used(store, tiny_run, damage, part, monkeypatch):
    run = tiny_run()
    older, newer = (run.train(1).save(store, write_tokenizer=write_tokenizer) for _ in range(2))
    name = next(name for name in newer.sizes() if part in name)
    content = DAMAGES[damage]((newer / name).read_bytes())
    (newer / name).unlink() if content is None else (newer / name).write(content)
    if "bytes" in damage:  # not even fetched
        fetch = StorePath.fetch
        monkeypatch.setattr(StorePath, "fetch", lambda self, file: self != newer / name and fetch(self, file))
    with pytest.raises(CheckpointError, match=rf"memory://.*{part}.* {damage}"):
        open_checkpoint(newer)
    assert damage.split()[1] in step_problems(newer)[0]
    with pytest.warns(UserWarning, match=r"using memory://.*step_00000001.*skipped.*step_00000002"):
        checkpoint = open_checkpoint(store)
    assert checkpoint.folder == older and tiny_run(seed=3).load(checkpoint).equals(tiny_run().train(1))


def test_a_manifest_that_is_too_large_is_not_read(store, tiny_run, monkeypatch):
    saved = tiny_run().train(1).save(store)
    monkeypatch.setattr("megalith.checkpoint.manifest.MAX_MANIFEST", 100)
    monkeypatch.setattr(StorePath, "read_bytes", lambda self: pytest.fail("it was read"))
    with pytest.raises(
        CheckpointError, match=r"manifest.json is damaged \(it has [\d,]+ bytes, and such a file at most"
    ):
        open_checkpoint(saved)


def test_a_store_that_does_not_answer_is_no_reason_to_go_back(store, tiny_run, monkeypatch):
    """The newest step may be whole: that is for a person to see."""
    run = tiny_run()
    for _ in range(2):
        run.train(1).save(store)
    fetch = StorePath.fetch
    for name, refuses in (("fetch", "model-"), ("read_bytes", "manifest"), ("iterdir", "checkpoints")):
        real = getattr(StorePath, name)

        def call(self, *args, _real=real, _refuses=refuses):
            if "step_00000001" not in str(self) and _refuses in self.name:
                raise OSError(5, "no route to host", str(self))
            return _real(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(StorePath, name, call)
            with pytest.raises(
                CheckpointError, match=r"cannot be fetched: no route to host.*; check the URL"
            ):
                open_checkpoint(store)
    assert StorePath.fetch is fetch


def test_what_is_not_installed_or_not_known_is_told_with_the_way_out(monkeypatch):
    monkeypatch.setattr("megalith.remote.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"s3://bucket/run needs s3fs, which is not installed: pip install .*remote"
    ):
        open_checkpoint("s3://bucket/run")
    for url in ("https://host/run", "s3://", "simplecache::s3://bucket/run"):
        with pytest.raises(ConfigError, match="is not a supported URL; use one of file://, s3://, gs://"):
            open_checkpoint(url)


def test_a_file_url_is_a_folder_like_any_other(tiny_run, tmp_path):
    tiny_run().train(1).save(open_location(f"file://{tmp_path}/a%20run"))
    assert open_checkpoint(f"file://{tmp_path}/a%20run").folder.parent.parent == tmp_path / "a run"
    assert (tmp_path / "a run" / "checkpoints" / "step_00000001" / "manifest.json").is_file()


def test_every_command_takes_urls(store, tiny_run, tmp_path, capsys):
    run = tiny_run()
    for _ in range(2):
        saved = run.train(1).save(store, write_tokenizer=write_tokenizer)
    run.save(tmp_path / "here")

    def command(*words) -> str:
        assert main(["checkpoint", *map(str, words)]) == 0
        return capsys.readouterr().out

    assert [line.split()[0] for line in command("list", store).splitlines()[1:]] == [
        "step_00000001",
        "step_00000002",
    ]
    assert command("verify", store) == "step_00000001 intact\nstep_00000002 intact\n"
    assert command("hash", store) == command("hash", tmp_path / "here")
    command("reshard", store, "memory://bucket/two", "--files", 2)
    assert "0 tensors differ" in command("diff", "memory://bucket/two", tmp_path / "here")
    assert any(f"/{TOKENIZER}/t.json" in name for name in (store.parent / "two").sizes())
    command("merge", saved, tmp_path / "merged.safetensors")


def test_a_run_saves_goes_on_and_exports_by_url(run, store, tmp_path, capsys, break_at, monkeypatch):
    save = {"checkpoint": {"save": str(store), "save_interval": 2, "keep_last": 2}}
    plain = run("plain", checkpoint={"save_interval": 2})
    first = run("first", **save, train={"exit_interval": 4})
    assert str(first.checkpoint) == f"{store}/checkpoints/step_00000004"
    assert f"resume with checkpoint.load={store}" in capsys.readouterr().out
    assert not (tmp_path / "first" / "checkpoints").exists()
    with pytest.raises(ConfigError, match=r"holds another run \(metrics.jsonl"):
        run("first", **save)
    with pytest.raises(
        ConfigError, match=r"memory://bucket/run holds another run \(2 checkpoints.*checkpoint.save to"
    ):
        run("second", **save)
    save["checkpoint"]["load"] = str(store)
    again = run("first", **save)
    ours, theirs = open_existing(again.checkpoint, None), open_existing(plain.checkpoint, None)
    assert not [d for part in ("model", "optimizer") for d in differences(ours, theirs, part)]
    assert dict(tensor_digests(ours, "model")) == dict(tensor_digests(theirs, "model"))
    megalith.load(str(store))
    (store.parent / "hf" / "model.safetensors.index.json").write("of the model that was there before")
    assert main(["export-hf", str(store), "memory://bucket/hf"]) == CheckpointError.exit_code
    export_hf(str(store), "memory://bucket/hf", replace=True, show_progress=False)
    assert main(["import-hf", "memory://bucket/hf", "memory://bucket/back"]) == 0
    back = open_existing("memory://bucket/back")
    assert dict(tensor_digests(back, "model")) == dict(tensor_digests(ours, "model"))


def test_a_folder_whose_upload_fails_leaves_nothing(store, tmp_path, monkeypatch):
    send = StorePath.send

    def fail_last(path, file):
        if path.name == "config.json":
            raise OSError(errno.EIO, "the network is gone")
        send(path, file)

    monkeypatch.setattr(StorePath, "send", fail_last)
    message = (
        "run could not be written: the network is gone; the partial output was removed: check the bucket"
    )
    with pytest.raises(CheckpointError, match=message), new_folder(store) as folder:
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(name)
    assert not store.exists() and not list((tmp_path / "fetched").iterdir())
    monkeypatch.undo()
    with new_folder(store) as folder:
        (folder / "config.json").write_text("{}")
    assert list(store.sizes()) == ["config.json"]


def test_training_goes_on_when_the_store_is_gone_and_only_the_last_save_is_an_error(
    run, store, break_at, capsys
):
    break_at(6)  # within the save of step 4
    with pytest.raises(CheckpointError, match=r"step_00000008 could not be saved: the network is gone"):
        run("run", checkpoint={"save": str(store), "save_interval": 2, "async_save": True})
    printed = capsys.readouterr().out
    assert "saved memory://bucket/run/checkpoints/step_00000002" in printed
    assert (
        "warning: the checkpoint memory://bucket/run/checkpoints/step_00000004 could not be saved" in printed
    )
    assert open_checkpoint(store).manifest.step == 2


def test_settings_of_a_url_and_of_a_folder():
    tree = {"checkpoint": {"save": "s3://b/run"}, "train": {"output_dir": "here"}}
    config = RunConfig.from_tree(json.loads(json.dumps(tree)))
    assert (config.checkpoint.save, config.train.output_dir, config.run_folder) == (
        "s3://b/run",
        "here",
        "s3://b/run",
    )
    assert RunConfig.from_tree(config.to_tree()).run_folder == "s3://b/run"
    assert RunConfig.from_tree({"checkpoint": {"save": "here"}}).run_folder == "here"
    with pytest.raises(
        ConfigError, match=r"train\.output_dir is s3://b/run, but .* checkpoint\.save to the URL"
    ):
        OutputLock("s3://b/run")
