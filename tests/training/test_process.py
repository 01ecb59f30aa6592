"""What is set for the whole process before a run."""

import os
import subprocess
import sys

import pytest
import torch

from megalith.config import RunConfig
from megalith.training import process

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("groups", "before", "seen"),
    [(["tp"], None, "32"), ("auto", None, "32"), (["tp"], "1", "1"), ([], None, None)],
    ids=str,
)
def test_copy_engines_get_more_queues_before_cuda_is_asked_for_devices(monkeypatch, groups, before, seen):
    monkeypatch.setenv(QUEUES, before or "")
    if before is None:
        monkeypatch.delenv(QUEUES)
    asked = []

    def pick_device(request: str, local_rank: int) -> torch.device:
        asked.append((request, local_rank, os.environ.get(QUEUES)))
        return torch.device("cpu")

    monkeypatch.setattr(process, "pick_device", pick_device)
    config = RunConfig.from_tree(
        {"parallel": {"symmetric_memory_groups": groups}, "runtime": {"device": "cpu"}}
    )
    assert process.prepare_process(config, 3) == torch.device("cpu")
    assert asked == [("cpu", 3, seen)]


def test_importing_the_trainer_imports_no_compiler():
    compiler = "{'torch._dynamo', 'torch._inductor'}"
    code = f"import sys, megalith.training.trainer; sys.exit(bool({compiler} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
