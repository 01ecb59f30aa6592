"""The notebooks' sources in examples/notebooks run from their first cell to the last, with fewer steps.

`make notebooks` runs them unchanged as notebooks, by nbclient (tests/notebook_trials.py).
"""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
FEWER_STEPS = {  # notebook: the line that sets its length, here, and text that it prints
    "first_model": ("STEPS = 60", "STEPS = 2", "loss after 2 steps"),
    "plan_a_cluster": ("", "", "GB"),
    "finetune_and_chat": ("EPOCHS = 15", "EPOCHS = 1", "A: "),
    "grpo_reward": ("STEPS = 40", "STEPS = 2", "at step 2"),
    "inside_a_layout": ("", "", "layout: 16 ranks = pipeline 2 × data 2 × context 2 × tensor 2"),
}
QUICK = (
    "first_model",
    "plan_a_cluster",
    "grpo_reward",
)  # the others run in `make test-all` and `make notebooks`


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in FEWER_STEPS]
)
def test_a_notebook_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    long, short, printed = FEWER_STEPS[name]
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert long in source and "# %%" in source
    exec(compile(source.replace(long, short) if long else source, name, "exec"), {"__name__": "notebook"})
    assert printed in capsys.readouterr().out


def test_every_notebook_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(FEWER_STEPS)
