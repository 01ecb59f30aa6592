"""Temporary folders of fetched files: a process that is killed leaves its folder only until the next one makes its."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forked import Forked
from ranks import until

from megalith.temporary_folders import TemporaryFolder

PREFIX = "megalith_test_"
FETCH = f"""
import sys
import tempfile
import time
from megalith.temporary_folders import TemporaryFolder
tempfile.tempdir = sys.argv[1]
folder = TemporaryFolder({PREFIX!r})
(folder.path / "weights").write_bytes(b"x" * 1000)
print("fetched", flush=True)
time.sleep(1000)
"""


@contextmanager
def fetching(folder: Path, name: str) -> Iterator[Forked]:
    """Yield a process that has fetched a file into a temporary folder below `folder`."""
    log = folder.with_name(name)
    process = Forked(["-c", FETCH, folder], log)
    try:
        until(lambda: "fetched" in log.read_text() or process.returncode is not None, "the file")
        assert process.returncode is None, log.read_text()
        yield process
    finally:
        process.kill()


def test_the_folder_of_a_killed_process_is_deleted_and_that_of_a_running_one_stays(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (folder / f"{PREFIX}other").mkdir()  # of another program
    with fetching(folder, "killed") as killed:
        (left,) = folder.glob(f"{PREFIX}*/weights")
        with fetching(folder, "running"):
            assert left.exists()
            (kept,) = set(folder.glob(f"{PREFIX}*/weights")) - {left}
            killed.kill()
            killed.wait()
            mine = TemporaryFolder(PREFIX)
            assert not left.parent.exists() and kept.exists() and (folder / f"{PREFIX}other").exists()
            again = TemporaryFolder(PREFIX)  # of this process
            assert mine.path.exists()
            for each in (mine, again):
                each.remove()
            assert set(folder.glob(f"{PREFIX}*")) == {kept.parent, folder / f"{PREFIX}other"}
