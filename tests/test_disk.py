"""Folders on the disk: the entry of a new one is synced in the folder above it."""

import os
from pathlib import Path

import pytest

from megalith.checkpoint.store import StepFolder
from megalith.disk import make_folder
from megalith.runtime.lock import OutputLock


@pytest.fixture
def synced(monkeypatch) -> list[Path]:
    """The folders and files that were synced."""
    paths, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_every_new_folder_is_synced_in_the_one_above_it(tmp_path, synced):
    make_folder(tmp_path / "a" / "b")
    assert sorted(synced) == [tmp_path, tmp_path / "a"]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_a_runs_output_folder_and_its_checkpoints_are(tmp_path, synced):
    with OutputLock(tmp_path / "runs" / "one"):
        assert sorted(synced) == [tmp_path, tmp_path / "runs"]
        StepFolder(tmp_path / "runs" / "one" / "checkpoints", 1).begin()
        assert synced[2:] == [tmp_path / "runs" / "one"]


def test_a_folder_that_may_be_written_but_not_opened_gets_one_too(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(f"{folder} may not be opened")

    monkeypatch.setattr("megalith.disk.sync_folder", refuse)
    make_folder(tmp_path / "shared" / "mine")
    assert (tmp_path / "shared" / "mine").is_dir()
