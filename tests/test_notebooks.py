"""The notebooks' sources in examples/notebooks run from their first cell to the last, with fewer steps."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
SHORTER = {"first_model": ("STEPS = 60", "STEPS = 2"), "plan_a_cluster": ("", "")}


@pytest.mark.parametrize("name", SHORTER)
def test_a_notebook_runs(name, capsys):
    long, short = SHORTER[name]
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert long in source and "# %%" in source
    exec(compile(source.replace(long, short) if long else source, name, "exec"), {"__name__": "notebook"})
    assert {"first_model": "loss after 2 steps", "plan_a_cluster": "GB"}[name] in capsys.readouterr().out


def test_every_notebook_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SHORTER)
