"""Damage made byte by byte: it is named with its file, and all ranks use the newest whole step instead."""

import json
import os
import pickle
import re
import shutil
import sys
import warnings
from pathlib import Path

import pytest
from default_cases import by_default, cases_that_run
from storage_job import ZERO1, run_config, save_steps, started

from megalith.checkpoint.files import file_record
from megalith.checkpoint.manifest import content_checksum
from megalith.errors import CheckpointError
from megalith.training.resume import load_run


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> Path:
    """A run of two ranks with the steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(save_steps, run_config(folder, ZERO1), 2, size=2)
    return folder


def load(config) -> tuple[int, list[str]]:
    """The step that was loaded, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = started(config)
    return trainer.step, [
        str(warning.message) for warning in caught if "newest intact checkpoint" in str(warning.message)
    ]


def refused(config) -> str:
    """Why nothing could be loaded."""
    with pytest.raises(CheckpointError) as error:
        started(config)
    return str(error.value)


def damaged(saved: Path, tmp_path: Path, damage) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    damage(folder / "checkpoints" / "step_00000002")
    return folder


def flip(name: str, at: float):
    def damage(step: Path) -> None:
        content = bytearray((step / name).read_bytes())
        content[int(at * (len(content) - 1))] ^= 4
        (step / name).write_bytes(content)

    return damage


def truncate(step: Path) -> None:
    os.truncate(step / "optimizer-00000-000.safetensors", 5000)


def swap(step: Path) -> None:
    ours, theirs = (step / f"model-0000{rank}-000.safetensors" for rank in (0, 1))
    ours.rename(step / "between")
    theirs.rename(ours)
    (step / "between").rename(theirs)


def of_another_step(step: Path) -> None:
    name = "model-00001-000.safetensors"
    shutil.copy(step.with_name("step_00000001") / name, step / name)


def whole_step_before(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.with_name("step_00000001"), step)


DAMAGES = {
    "a bit of a header": (flip("model-00001-000.safetensors", 0.0), "model-00001-000"),
    "a bit in the middle": (flip("optimizer-00001-000.safetensors", 0.5), "optimizer-00001-000"),
    "the last bit": (flip("optimizer-00000-000.safetensors", 1.0), "optimizer-00000-000"),
    "truncated": (truncate, "optimizer-00000-000"),
    "deleted": (lambda step: (step / "model-00000-000.safetensors").unlink(), "model-00000-000"),
    "two ranks' files swapped": (swap, "model-0000"),
    "a file of the step before": (of_another_step, "model-00001-000"),
    "all files of the step before": (whole_step_before, "manifest.json"),
    "the manifest": (flip("manifest.json", 0.7), "manifest.json"),
    "no manifest": (lambda step: (step / "manifest.json").unlink(), "manifest.json"),
}


def load_and_refuse(whole_run, damaged_step) -> tuple[tuple[int, list[str]], str]:
    return load(whole_run), refused(damaged_step)


@pytest.fixture(scope="module")
def outcomes(pool, saved, request, tmp_path_factory) -> dict[str, list]:
    """What the ranks load of a damaged run, and why they refuse its damaged step, by the damage."""
    cases = {}
    for name in cases_that_run(request, DAMAGES, "name"):
        damage, _ = DAMAGES[name]
        folder = damaged(saved, tmp_path_factory.mktemp("damaged"), damage)
        step = folder / "checkpoints" / "step_00000002"
        cases[name] = [run_config(folder / "out", ZERO1, load=path) for path in (folder, step)]
    return pool.run_cases(load_and_refuse, cases, size=2)


@pytest.mark.parametrize(
    "name",
    by_default(
        DAMAGES, "a bit of a header", "truncated", "deleted", "two ranks' files swapped", "the manifest"
    ),
)
@pytest.mark.fault(6)
def test_all_ranks_leave_a_damaged_step_for_the_one_before_and_name_the_file(outcomes, name):
    (first, sentence), (second, other) = outcomes[name]
    assert (first[0], second) == (1, (1, []))
    (told,) = first[1]
    file = DAMAGES[name][1]
    assert re.search(rf"using .*step_00000001.*skipped.*step_00000002.*{file}", told)
    assert sentence == other and file in sentence


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize(
    "name", ["manifest.json", "model-00000-000.safetensors", "optimizer-00001-000.safetensors"]
)
@pytest.mark.fault(21)
def test_a_pickle_in_the_place_of_a_file_is_refused_and_does_not_run(saved, tmp_path, name):
    def plant(step: Path) -> None:
        (step / name).write_bytes(pickle.dumps(Bomb(tmp_path / "it ran")))
        if name != "manifest.json":  # with the checksums that belong to it
            content = json.loads((step / "manifest.json").read_text())
            del content["checksum"]
            content["files"][name] = file_record(step / name).model_dump()
            text = json.dumps({"checksum": content_checksum(content), **content})
            (step / "manifest.json").write_text(text)

    step = damaged(saved, tmp_path, plant) / "checkpoints" / "step_00000002"
    assert name in refused(run_config(tmp_path / "out", load=step))
    assert not (tmp_path / "it ran").exists()


LOOKED_UP: list[str] = []
WATCHED: list[bool] = []


def load_watched(config) -> list[str]:
    """What pickles looked up while a checkpoint was loaded."""
    if not WATCHED:  # a hook stays to the end of the process
        sys.addaudithook(
            lambda event, found: (
                LOOKED_UP.append(str(found)) if event == "pickle.find_class" and WATCHED[-1] else None
            )
        )
    trainer, _ = started(config)  # what torch unpickles at its first start is not ours
    WATCHED.append(True)
    trainer.loaded_from = load_run(trainer)
    WATCHED.append(False)
    assert trainer.step == 2
    return LOOKED_UP


@pytest.mark.fault(21)
def test_loading_unpickles_nothing_on_any_rank(pool, saved, tmp_path):
    assert pool.run(load_watched, run_config(tmp_path, ZERO1, load=saved), size=2) == [[], []]
