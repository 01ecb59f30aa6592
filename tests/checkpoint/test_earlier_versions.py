"""Checkpoints and run files of earlier commits resume with the losses that those commits computed.

stored/COMMIT has the checkpoint that `megalith train run.yaml` of the commit wrote after step 3. LOSSES are those of
steps 4 to 6 of the same commit.
"""

import shutil
from pathlib import Path

import pytest
from trained_runs import losses

import megalith

STORED = Path(__file__).parent / "stored"
LOSSES = {
    "a180be70": (4.1247639656066895, 4.1111345291137695, 4.118001937866211),  # 2026-11-22
    "15ab2f8f": (4.1247639656066895, 4.1111345291137695, 4.118001937866211),  # 2026-11-23
    "b392010e": (4.1247639656066895, 4.1111345291137695, 4.118001937866211),  # 2026-11-27
}


@pytest.mark.parametrize("commit", LOSSES)
def test_a_stored_checkpoint_resumes_with_the_losses_of_its_commit(tmp_path, commit):
    shutil.copytree(STORED / commit, tmp_path / "run")
    settings = ["--checkpoint.load", str(tmp_path / "run"), "--train.output_dir", str(tmp_path / "resumed")]
    result = megalith.train(megalith.RunConfig.load(STORED / "run.yaml", settings))
    assert result.step == 6
    assert losses(tmp_path / "resumed") == pytest.approx(LOSSES[commit], rel=2e-6)


def test_every_stored_checkpoint_is_tested():
    assert {path.name for path in STORED.iterdir() if path.is_dir()} == set(LOSSES)
