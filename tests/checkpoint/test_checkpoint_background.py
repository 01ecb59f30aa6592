"""Saving in the background: what is saved is the moment of the call, one save at a time, told when it is over."""

import threading

import pytest
import torch

import megalith
from megalith.checkpoint import Saver, list_steps, open_checkpoint, saver
from megalith.checkpoint.fingerprint import tensor_digests
from megalith.checkpoint.staging import Staging
from megalith.config import RunConfig
from megalith.errors import CheckpointError


@pytest.fixture
def held(monkeypatch):
    """Background saves wait for this event before they write."""
    event, write = threading.Event(), saver.write_step

    def write_later(*arguments):
        assert event.wait(30)
        write(*arguments)

    monkeypatch.setattr(saver, "write_step", write_later)
    yield event
    event.set()


def background(run, folder, **options) -> Saver:
    return Saver(folder / "checkpoints", unpadded_rows=run.rows, background=True, **options)


@pytest.mark.fault(8)
def test_weights_that_change_after_the_call_are_saved_as_they_were(tiny_run, tmp_path, held):
    run = tiny_run().train(2)
    saving = background(run, tmp_path)
    saving.save(run.record(), run.model, run.optimizer)
    run.train(1)
    for tensor in run.tensors().values():
        tensor.fill_(torch.nan)
    held.set()
    (saved,) = saving.completed_saves(wait=True)
    assert saved.error is None and saved.stalled < saved.seconds
    assert "training waited" in str(saved)
    assert tiny_run(seed=4).load(open_checkpoint(tmp_path)).equals(tiny_run().train(2))


def test_a_run_that_saves_in_the_background_leaves_the_same_steps(tmp_path):
    def train(name: str, async_save: bool):
        model = {"preset": "tiny-gpt", "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 67}
        tree = {
            "model": model,
            "data": {"mock": True, "seq_length": 16, "num_workers": 0},
            "optim": {"lr": 1e-2},
            "train": {
                "train_iters": 5,
                "global_batch_size": 2,
                "eval_iters": 0,
                "output_dir": str(tmp_path / name),
            },
            "checkpoint": {"save_interval": 1, "async_save": async_save},
        }
        return megalith.train(RunConfig.from_tree(tree)).checkpoint.parent

    at_once, later = train("at once", False), train("later", True)
    assert list(list_steps(later)) == [1, 2, 3, 4, 5]
    for step, folder in list_steps(at_once).items():
        a, b = open_checkpoint(folder), open_checkpoint(list_steps(later)[step])
        for part in ("model", "optimizer"):
            assert list(tensor_digests(a, part)) == list(tensor_digests(b, part))


def test_nothing_points_to_a_step_that_is_not_on_the_disk(tiny_run, tmp_path, held):
    run = tiny_run().train(1)
    held.set()
    run.save(tmp_path)
    held.clear()
    run.train(1)
    saving = background(run, tmp_path, keep_last=1)
    saving.save(run.record(), run.model, run.optimizer)
    assert saving.completed_saves() == [] and saving.last is None
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000001\n"
    assert open_checkpoint(tmp_path).manifest.step == 1
    held.set()
    assert [saved.folder.name for saved in saving.completed_saves(wait=True)] == ["step_00000002"]
    assert saving.last.moment == (2, 6)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000002"]


def test_the_next_save_waits_for_the_one_in_flight(tiny_run, tmp_path, held):
    run = tiny_run().train(1)
    saving = background(run, tmp_path)
    saving.save(run.record(), run.model, run.optimizer)
    run.train(1)
    threading.Timer(0.05, held.set).start()
    saving.save(run.record(), run.model, run.optimizer)
    assert held.is_set() and saving.last is not None
    folders = [saved.folder.name for saved in saving.completed_saves(wait=True)]
    assert folders == ["step_00000001", "step_00000002"]
    assert tiny_run(seed=4).load(open_checkpoint(tmp_path)).equals(run)


def test_a_save_that_fails_is_told_and_the_next_one_succeeds(tiny_run, tmp_path):
    run = tiny_run().train(1)
    (tmp_path / "checkpoints").write_text("in the way")
    saving = background(run, tmp_path)
    saving.save(run.record(), run.model, run.optimizer)
    (failed,) = saving.completed_saves(wait=True)
    assert isinstance(failed.error, CheckpointError)
    assert "step_00000001 could not be saved" in str(failed) and saving.last is failed
    (tmp_path / "checkpoints").unlink()
    saving.save(run.record(), run.model, run.optimizer)
    (saved,) = saving.completed_saves(wait=True)
    assert saved.error is None and open_checkpoint(tmp_path).folder == saved.folder


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_ends_after_so_many_failed_saves_in_a_row(run, monkeypatch, in_background):
    steps, write = [], saver.write_step

    def refuses(step, record, *rest):
        steps.append(record.step)
        if record.step != 3:  # it mends once, and the count begins anew
            raise CheckpointError("the disk is full")
        return write(step, record, *rest)

    monkeypatch.setattr(saver, "write_step", refuses)
    checkpoint = {"save_interval": 1, "async_save": in_background}  # max_failed_saves is 3
    with pytest.raises(
        CheckpointError, match=r"3 consecutive saves have failed .*max_failed_saves.*the disk is full"
    ):
        run(checkpoint=checkpoint, train={"train_iters": 12, "eval_iters": 0})
    assert steps == [1, 2, 3, 4, 5, 6]


def test_no_memory_for_the_copy_is_a_save_that_failed(tiny_run, tmp_path, monkeypatch):
    def no_memory(self, tensors):
        raise MemoryError("cannot allocate 96 GB")

    run = tiny_run().train(1)
    saving = background(run, tmp_path)
    monkeypatch.setattr(Staging, "copy", no_memory)
    saving.save(run.record(), run.model, run.optimizer)
    (failed,) = saving.completed_saves(wait=True)
    assert "MemoryError: cannot allocate 96 GB" in str(failed.error)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_is_no_fault_of_the_disk_is_raised_where_training_is(tiny_run, tmp_path, monkeypatch):
    def broken(*arguments):
        raise ConnectionAbortedError("rank 1 is lost")

    run = tiny_run().train(1)
    saving = background(run, tmp_path)
    monkeypatch.setattr(saver, "write_step", broken)
    saving.save(run.record(), run.model, run.optimizer)
    with pytest.raises(ConnectionAbortedError, match="rank 1 is lost"):
        saving.completed_saves(wait=True)


@pytest.mark.parametrize("error", [None, ValueError])
def test_leaving_training_lets_the_save_in_flight_end(tiny_run, tmp_path, held, error):
    run = tiny_run().train(1)
    saving = background(run, tmp_path)
    threading.Timer(0.05, held.set).start()
    try:
        with saving:
            saving.save(run.record(), run.model, run.optimizer)
            if error:
                raise error
    except ValueError:
        pass
    assert open_checkpoint(tmp_path).manifest.step == 1


def test_copies_use_the_same_memory_again_and_may_lie_in_several_slabs():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (5, 0, 40, 1, 17)]
    tensors += [torch.randn(6, 4, generator=generator).t(), torch.tensor(True), torch.arange(3)]
    staging = Staging(slab=64)
    for _ in range(2):
        copies = staging.copy(tensors)
        addresses = [part.data_ptr() for copy in copies for part in copy.byte_chunks()]
        for tensor, copy in zip(tensors, copies):
            data = torch.cat([torch.empty(0, dtype=torch.uint8), *copy.byte_chunks()])
            assert (copy.dtype, copy.shape) == (tensor.dtype, tuple(tensor.shape))
            assert torch.equal(data.view(tensor.dtype).view(tensor.shape), tensor)
        tensors = [tensor * 2 if tensor.dtype != torch.bool else tensor for tensor in tensors]
    assert [part.data_ptr() for copy in staging.copy(tensors) for part in copy.byte_chunks()] == addresses
    assert len(copies[2].byte_chunks()) > 1
