"""Measure one rank's step of a layout on one GPU: `python -m benchmarks.mirrored_rank qwen3-30b-a3b --layout ep2`.

Runs rank 0 of `megalith train` in the layout, in one process. The other ranks are simulated as copies of rank 0: an
all-gather returns copies of the rank's own shard, a sum adds equal values, and an all-to-all returns what a rank with
the same data would send. The copies are made on the device, on the stream of the collective. Kernels, launches, host
waits and memory (with ZeRO's shards) are therefore those of the real rank. Network transfers, their overlap, and
waiting for other ranks are missing. Losses are meaningless.

`--variant` compares dispatchers of experts: `read`, an all-to-all whose sizes the host reads; `static`, an all-to-all
with buffers of fixed size; `allgather`, with buffers of fixed size; and `allgather-read`. For the last step, under the
profiler, it prints the same breakdown as `megalith bench`. Idle is the time in which the device waits for the host.

With `read`, a mirrored rank numbers its rows like rank 0, so only the first half of the received rows can be told
apart. One more kernel replaces the other half by copies of row 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.bench import training_speed
from megalith.bench.bench_options import add_result_options
from megalith.bench.workloads import LAYOUTS, WORKLOADS

try:
    from torch._C._distributed_c10d import _create_work_from_future
except ImportError as error:
    raise SystemExit(f"this torch has no process groups in Python: {error}") from error

VARIANTS = {
    "read": {"moe_token_dispatcher_type": "alltoall", "moe_static_dispatch": False},
    "static": {"moe_token_dispatcher_type": "alltoall", "moe_static_dispatch": True},
    "allgather": {"moe_token_dispatcher_type": "allgather", "moe_static_dispatch": True},
    "allgather-read": {"moe_token_dispatcher_type": "allgather", "moe_static_dispatch": False},
    "auto": {},
}


class MirrorGroup(dist.ProcessGroup):
    """A process group of which this process is one rank, and all others do as it does."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._own, self._size = rank, size

    def getBackendName(self) -> str:
        return "mirror"

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._own

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def allreduce(self, tensors: Sequence[Tensor], opts=None) -> dist.Work:
        for tensor in tensors:
            self._summed(tensor, tensor, opts)
        return _done(tensors)

    allreduce_coalesced = reduce = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts=None) -> dist.Work:
        return _done(tensors)

    def barrier(self, opts=None) -> dist.Work:
        return _done([])

    def allgather(self, outputs, inputs, opts=None) -> dist.Work:
        for given, parts in zip(inputs, outputs):
            self._copied(parts, given)
        return _done(outputs)

    gather = allgather

    def all_gather_single(self, output: Tensor, given: Tensor, opts=None) -> dist.Work:
        self._copied(output.view(self._size, *given.shape).unbind(), given)
        return _done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs, inputs, opts=None) -> dist.Work:
        for output, given in zip(outputs, inputs):
            self.all_gather_single(output, given)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs, inputs, opts=None) -> dist.Work:
        for output, parts in zip(outputs, inputs):
            self._summed(output, parts[self._own], opts)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts=None) -> dist.Work:
        self._summed(output, given.view(self._size, *output.shape)[self._own], opts)
        return _done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None) -> dist.Work:
        for output, given in zip(outputs, inputs):
            self.reduce_scatter_single(output, given, opts)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def scatter(self, outputs, inputs, opts=None) -> dist.Work:
        for output, parts in zip(outputs, inputs):
            output.copy_(parts[self._own])
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], opts=None
    ) -> dist.Work:
        into = output.split(received) if received else output.chunk(self._size)
        parts = given.split(sent) if sent else given.chunk(self._size)
        for part in into:
            self._fill(part, parts[self._own], given)
        return _done([output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs, inputs, opts=None) -> dist.Work:
        for output in outputs:
            output.copy_(inputs[self._own])
        return _done(outputs)

    def _copied(self, parts: Sequence[Tensor], given: Tensor) -> None:
        for part in parts:
            if part.data_ptr() != given.data_ptr():  # an all-gather in place
                part.copy_(given.view_as(part))

    def _summed(self, output: Tensor, given: Tensor, opts) -> None:
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            torch.mul(given.view_as(output), self._size, out=output)
        elif output.data_ptr() != given.data_ptr():
            output.copy_(given.view_as(output))

    def _fill(self, output: Tensor, part: Tensor, given: Tensor) -> None:
        """With `part`; a rank with other experts may send another number of rows: then with the first ones, over and
        over."""
        source = part if len(part) == len(output) else given[: len(output)]
        if len(source) < len(output):
            output.zero_()
        output[: len(source)].copy_(source)


def all_gather_of_any_group(x: Tensor, size: int, group: str) -> Tensor:
    """megalith.comm.collectives.begin_group_all_gather, by the operator that knows groups in Python on a CPU too."""
    return torch.ops._c10d_functional.all_gather_into_tensor(x, size, group)


def _done(tensors) -> dist.Work:
    future = torch.futures.Future()
    future.set_result(list(tensors))
    return _create_work_from_future(future)


def init_mirror(size: int, rank: int = 0) -> None:
    """Makes this process `rank` of `size` that are alike."""
    dist.Backend.register_backend("mirror", _mirror_group, devices=["cpu", "cuda"])
    dist.init_process_group("mirror", store=dist.HashStore(), rank=rank, world_size=size)


def _mirror_group(store: dist.Store, rank: int, size: int, timeout) -> MirrorGroup:
    return MirrorGroup(rank, size)


def with_rows_for_all(row: Tensor, rows: int) -> Tensor:
    """megalith.ops.permute.inverse, in which a place that no element goes to has the first one."""
    held = torch.zeros(rows, dtype=torch.int32, device=row.device)
    return held.scatter(0, row, torch.arange(len(row), dtype=torch.int32, device=row.device)).long()


def worker(arguments: Sequence[str]) -> None:
    """`megalith train`, of which this process is rank 0 and the only one."""
    from megalith.cli.main import main as megalith
    from megalith.comm import collectives
    from megalith.launch.launcher import this_process
    from megalith.parallel.context import ring
    from megalith.parallel.expert import dispatch_buffer
    from megalith.training import training_job

    def join(device: torch.device, *args, **kwargs):
        if not dist.is_initialized():
            init_mirror(int(os.environ["WORLD_SIZE"]))
        return this_process()

    with (
        mock.patch.object(training_job, "init_distributed", join),
        mock.patch.object(dispatch_buffer, "inverse", with_rows_for_all),
        mock.patch.object(collectives, "begin_group_all_gather", all_gather_of_any_group),
        mock.patch.object(ring, "begin_group_all_gather", all_gather_of_any_group),
    ):
        sys.exit(megalith(list(arguments)))


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return worker(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--layout", choices=LAYOUTS, default="ep2")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=["read", "static", "allgather"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--batch", type=int, help="sequences per step, of all ranks")
    add_result_options(parser)
    args = parser.parse_args()
    args.losses, args.kernels = False, True
    given, failed = list(args.set), False
    for variant in args.variant:
        args.set = [*given, *(f"parallel.{name}={value}" for name, value in VARIANTS[variant].items())]
        with mirrored():
            result = training_speed.measure(args, args.layout, {"mock": True})
        training_speed.show(args, f"{args.layout} {variant}, mirrored", result)
        failed |= "failed" in result
    sys.exit(failed)


@contextmanager
def mirrored() -> Iterator[None]:
    """In it, training_speed's runs are rank 0's own, among ranks that mirror it."""
    run_logged = training_speed.run_logged

    def alone(command: list[str], file: Path) -> tuple[int, str]:
        at = command.index("--nproc")
        size, command = command[at + 1], [*command[:at], *command[at + 2 :]]
        ranks = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # nobody asks there
        ours = [sys.executable, "-m", "benchmarks.mirrored_rank", "--worker"]
        with mock.patch.dict(os.environ, ranks | address):
            return run_logged([*ours, *command[command.index("train") :]], file)

    with mock.patch.object(training_speed, "run_logged", alone):
        yield


if __name__ == "__main__":
    main()
