"""Jobs of the layout tests, which run on every rank of the pool."""

from __future__ import annotations

import contextlib
import io
import itertools
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megalith.comm.collectives import Axis
from megalith.config import ParallelConfig, RunConfig
from megalith.config.presets import PRESETS
from megalith.config.rules.auto_settings import resolve_auto
from megalith.errors import TrainingError
from megalith.hardware import pick_device
from megalith.launch.launcher import this_process
from megalith.local_shards import local
from megalith.parallel.data.fsdp_reduce_scatter import ReduceScatter
from megalith.parallel.mesh import build_mesh
from megalith.planner.layout import build_layout
from megalith.planner.topology import gather_rank_locations
from megalith.report.measured_step import StepMeasurement, StepTimes
from megalith.report.model_memory import model_bytes
from megalith.training.build import prepare
from megalith.training.process import detect_machine, prepare_process
from megalith.training.run_state import Run
from megalith.training.trainer import Trainer


def configuration(output: Path | str, **sections) -> RunConfig:
    tree = {
        "model": dict(num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=120, hidden_dropout=0.0,
                      attention_dropout=0.0),
        "data": dict(mock=True, seq_length=32, num_workers=0),
        "optim": dict(lr=1e-3),
        "train": dict(train_iters=6, micro_batch_size=2, global_batch_size=16, eval_iters=0, output_dir=str(output)),
        "runtime": dict(device="cpu"),
    }  # fmt: skip
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return RunConfig.from_tree(tree)


def large(world_size: int, micro_batch_size: int = 8, **parallel):
    """Return the layout of GPT-2-large in bf16."""
    config = RunConfig.from_tree(
        {
            "model": dict(PRESETS["gpt2-large"]),
            "data": dict(mock=True, seq_length=1024),
            "optim": dict(lr=1e-4),
            "train": dict(
                train_iters=10, micro_batch_size=micro_batch_size, global_batch_size=64, precision="bf16"
            ),
            "parallel": parallel,
        }
    )
    return build_layout(config, world_size)


def build(config: RunConfig) -> Run:
    size = dist.get_world_size()
    config, tokenizer, _ = prepare(config, size)
    device = pick_device(config.runtime.device, dist.get_rank())
    mesh = build_mesh(config.parallel, size, device.type, has_experts=config.model.num_experts is not None)
    return Run(config, tokenizer, mesh, device)


def printed_by_run(config: RunConfig) -> str:
    """Train with the fastest settings; return this rank's standard output."""
    Path(config.train.output_dir).mkdir(exist_ok=True)
    device = pick_device(config.runtime.device, dist.get_rank())
    config, chosen = resolve_auto(config, detect_machine(config, device))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print("\n".join(chosen), end="")
        Trainer(build(config)).train()
    return out.getvalue()


def weights_expected_and_held(config: RunConfig) -> tuple[int, int, int, int]:
    """Return bytes of weights, expected and measured, and of the optimizer's moments, expected and measured."""
    run = build(config)
    layout = build_layout(run.config, dist.get_world_size())
    memory = layout.stage_of(this_process().rank).memory
    moments = sum(
        value.nbytes
        for state in run.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )
    return memory.weights, model_bytes(run.model.chunks).weights, memory.optimizer, moments


def held_after_backward(config: RunConfig) -> tuple[int, int, int]:
    """Return bytes of weights, gathered copies and gradients after a backward pass."""
    run = build(config)
    with run.data.train_loader(0, 0, run.device) as batches:
        run.model.backward([next(batches)], loss_scale=run.loss_scale.scale)
    held = model_bytes(run.model.chunks)
    return held.weights, held.gathered, held.gradients


def gradients_of_late_exchanges(config: RunConfig, own_stream: bool) -> tuple[float, list[int]]:
    """Run steps of one, two and one micro-batches with delayed gradient exchanges.

    Before the last step, a step raises an exception in the forward pass of its second micro-batch.

    Args:
        own_stream: allocate all gradients on FSDP2's stream.

    Returns:
        The fraction of the gradients' bytes in memory of the compute stream, and two checksums per step.
    """
    device = prepare_process(config, dist.get_rank())
    config, _ = resolve_auto(config, detect_machine(config, device))
    run, sums, inside, total = build(config), [], 0, 0

    def late(collective):
        def call(*arguments, **how):
            torch.cuda._sleep(20_000_000)  # cycles: 10 ms
            return collective(*arguments, **how)

        return call

    exchanges = "all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_single"
    kept = mock.patch.object(ReduceScatter, "_becomes_gradient", lambda reduction: False)
    with (
        kept if own_stream else contextlib.nullcontext(),
        mock.patch.multiple(
            dist, **{name: late(getattr(dist, name)) for name in exchanges if hasattr(dist, name)}
        ),
        run.data.train_loader(0, 0, run.device) as batches,
    ):
        for micro_batches in 1, 2, 1:
            run.gradients([next(batches) for _ in range(micro_batches)])
            more, part, whole = _bits_and_places(run)
            sums, inside, total = sums + more, inside + part, total + whole
            run.model.parameters.clear_gradients()
            if micro_batches == 2:
                passes = itertools.chain([run.model._forward], itertools.repeat(_refuse))
                forward = mock.patch.object(
                    run.model, "_forward", lambda *part, passes=passes: next(passes)(*part)
                )
                with forward, contextlib.suppress(TrainingError):
                    run.gradients([next(batches) for _ in range(2)])
                run.model.parameters.clear_gradients()
    return inside / total, sums


def _bits_and_places(run: Run) -> tuple[list[int], int, int]:
    """Return two checksums of all gradients, their bytes in memory of the current stream, and all their bytes."""
    stream = torch.cuda.current_stream().cuda_stream
    segments = [
        range(each["address"], each["address"] + each["total_size"])
        for each in torch.cuda.memory_snapshot()
        if each["stream"] == stream
    ]
    sums, inside, total = torch.zeros(2, dtype=torch.int64, device=run.device), 0, 0
    for chunk in run.model.chunks:
        for grad in (local(parameter.grad) for parameter in chunk.parameters()):
            total += grad.nbytes
            inside += grad.nbytes * any(grad.data_ptr() in segment for segment in segments)
            bits = grad.flatten().view(torch.int32).long()
            indices = torch.arange(1, len(bits) + 1, device=run.device)
            sums += torch.stack([bits.sum(), (bits * indices).sum()])
    return sums.tolist(), inside, total


def _refuse(*part) -> None:
    raise TrainingError("a loss that fails")


def step_with_a_slow_rank(seconds: float) -> StepTimes:
    """Measure a step in which rank 0 computes for `seconds` and rank 1 waits for it in an all-reduce."""
    import time

    world = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, dist.group.WORLD.group_name)
    measure = StepMeasurement(torch.device("cpu"), world)
    measure.start()
    x = torch.ones(64, 64)
    began = time.perf_counter()
    while dist.get_rank() == 0 and time.perf_counter() - began < seconds:
        x = x @ x / 64
    dist.all_reduce(x)
    return measure.stop()


def links_between(device_type: str) -> dict[int, str]:
    """Return the links to this rank's tensor-parallel peers."""
    parallel = ParallelConfig(tensor_model_parallel_size=dist.get_world_size())
    mesh = build_mesh(parallel, dist.get_world_size(), device_type)
    locations = gather_rank_locations(mesh, pick_device(device_type, dist.get_rank()))
    return locations[dist.get_rank()].links
