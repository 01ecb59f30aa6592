"""What is set for the whole process before a run."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.planner.topology import NVLINK, PCIE
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


@pytest.mark.full
@pytest.mark.skipif(
    find_spec("triton") is not None,
    reason="where Triton is, torch.library.triton_op imports torch._dynamo for each operator that it registers",
)
@pytest.mark.processes
def test_importing_the_trainer_imports_no_compiler():
    compiler = "{'torch._dynamo', 'torch._inductor'}"
    code = f"import sys, megalith.training.training_job; sys.exit(bool({compiler} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


DENSE = dict(model=dict(num_layers=2), train=dict(fp8_format="hybrid", precision="bf16"))
BLOCKS = dict(DENSE, train=dict(fp8_format="e4m3", fp8_recipe="blockwise", precision="bf16"))
EXPERTS = dict(DENSE, model=dict(num_layers=2, num_experts=4))
IN_FP16 = dict(EXPERTS, train=dict(fp8_format="hybrid", precision="fp16"))


@pytest.mark.parametrize(
    ("tree", "capability", "triton", "words"),
    [
        ({}, (7, 5), False, None),
        (DENSE, (8, 0), True, "compute capability 8.0, and FP8 matmuls require 8.9"),
        (DENSE, (8, 9), True, None),
        (DENSE, (9, 0), False, "need Triton, which is not installed"),
        (BLOCKS, (8, 9), True, "compute capability 8.9, and only 9.0 supports scales per block of 128"),
        (BLOCKS, (10, 0), True, "compute capability 10.0, and only 9.0"),
        (BLOCKS, (9, 0), True, None),
        (
            EXPERTS,
            (8, 9),
            True,
            "needs a GPU of compute capability 9.0 and train.precision bf16, but this GPU has 8.9",
        ),
        (IN_FP16, (9, 0), True, "this GPU has 9.0 and train.precision is fp16"),
        (EXPERTS, (9, 0), True, None),
    ],
)
def test_a_gpu_that_cannot_train_in_fp8_is_refused_with_its_capability(
    monkeypatch, tree, capability, triton, words
):
    monkeypatch.setattr(process, "pick_device", lambda request, local_rank: torch.device("cuda", local_rank))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(process.kernels, "AVAILABLE", triton)
    config = RunConfig.from_tree({**tree, "runtime": {"compile": False}})
    if words is None:
        process.prepare_process(config, 0)
    else:
        with pytest.raises(ConfigError, match=words):
            process.prepare_process(config, 0)


@pytest.mark.parametrize(
    ("packages", "gpus", "links", "words"),
    [
        ((), 2, {1: NVLINK}, "cuda-bindings is not installed"),
        (("cuda",), 2, {1: NVLINK}, "cuda-bindings is not installed"),
        (("cuda", "cuda.bindings"), 1, {}, "sees one GPU only"),
        (("cuda", "cuda.bindings"), 2, {}, "neither NVML nor nvidia-smi"),
        (("cuda", "cuda.bindings"), 2, {1: PCIE}, "no NVLink"),
        (("cuda", "cuda.bindings"), 2, {1: NVLINK}, ""),
    ],
)
def test_what_keeps_copy_engines_from_other_gpus_is_named(
    monkeypatch, tmp_path, packages, gpus, links, words
):
    for name in packages:
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir()
        (folder / "__init__.py").touch()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=n))
    monkeypatch.setattr(process, "read_links", lambda own, others: links)
    found = process.OBSTACLES[process._obstacle_of_nvlink(torch.device("cuda", 0))]
    assert words in found and bool(words) == bool(found)
    for name in packages:
        sys.modules.pop(name, None)
