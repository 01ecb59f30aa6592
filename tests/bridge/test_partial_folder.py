"""A folder takes its name whole: a kill at any moment leaves the old or the new, and nobody's own is removed."""

import os
import signal
import sys
from pathlib import Path

import pytest
from default_cases import by_default

from megalith import io
from megalith.bridge.partial import MARK, PartialFolder
from megalith.errors import CheckpointError

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "exchange")


def replace(out: Path, content: str) -> None:
    folder = PartialFolder(out)
    folder.begin()
    (folder.path / "config.json").write_text(content)
    folder.commit()


def killed(work, at: int) -> bool:
    """Does `work` in a child that is killed at its `at`-th event of the file system; whether it was."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    seen, exchange = [], io.exchange

    def event(name: str = "", *_: object) -> None:
        if name in EVENTS:
            seen.append(name)
            if len(seen) > at:
                os.kill(os.getpid(), signal.SIGKILL)

    def exchanged(one: Path, other: Path) -> bool:
        done = exchange(one, other)
        event("exchange")
        return done

    try:
        io.exchange = exchanged
        sys.addaudithook(lambda name, arguments: event(name))
        work()
    finally:
        os._exit(0)


@pytest.mark.parametrize("can_exchange", by_default([True, False], False))
def test_a_kill_at_any_moment_loses_nothing_and_the_next_conversion_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(io, "exchange", lambda one, other: False)
    absent = []
    for at in range(100):
        out = tmp_path / str(at) / "hf_model"
        replace(out, "old")
        was_killed = killed(lambda: replace(out, "new"), at)  # noqa: B023
        if out.exists():
            assert (out / "config.json").read_text() in ("old", "new")
        else:  # between two renames, where the kernel cannot exchange names
            assert [path.read_text() for path in out.parent.glob("*/config.json")] in (
                ["old", "new"],
                ["new", "old"],
            )
            absent.append(at)
        folder = PartialFolder(out)
        folder.begin()
        assert (out / "config.json").read_text() in ("old", "new")
        folder.abandon()
        replace(out, "third")
        assert [path.name for path in out.parent.iterdir()] == ["hf_model"]
        assert [path.name for path in out.iterdir()] == ["config.json"] and (
            out / "config.json"
        ).read_text() == "third"
        if not was_killed:
            break
    assert at > 10 and len(absent) == (0 if can_exchange else 1), (at, absent)


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_what_is_not_known_is_left_and_named(tmp_path: Path, what: str) -> None:
    theirs = tmp_path / "out.partial"
    if what == "folder":
        theirs.mkdir()
        (theirs / "thesis.txt").write_text("mine")
    elif what == "file":
        theirs.write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        theirs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"out\.partial exists but was not created by a conversion"):
        PartialFolder(tmp_path / "out").begin()
    assert theirs.is_symlink() or (theirs / "thesis.txt" if theirs.is_dir() else theirs).read_text() == "mine"


def test_a_folder_named_replaced_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced" / "thesis.txt").write_text("mine")
    replace(tmp_path / "out", "one")
    replace(tmp_path / "out", "two")
    monkeypatch.setattr(io, "exchange", lambda one, other: False)
    folder = PartialFolder(tmp_path / "out")
    folder.begin()
    with pytest.raises(CheckpointError, match=r"out\.replaced already exists"):
        folder.commit()
    folder.abandon()
    assert (tmp_path / "out.replaced" / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "out" / "config.json").read_text() == "two" and not folder.path.exists()


def test_two_conversions_to_one_place_and_a_link_in_it(tmp_path: Path) -> None:
    first, second = PartialFolder(tmp_path / "out"), PartialFolder(tmp_path / "out")
    first.begin()
    with pytest.raises(CheckpointError, match="is being written by another process"):
        second.begin()
    second.abandon()
    assert (first.path / MARK).exists()
    first.commit()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(CheckpointError, match="link is a symbolic link"):
        PartialFolder(tmp_path / "link").begin()
