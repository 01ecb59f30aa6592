"""Flags by which ranks tell each other how far they are, and what is told where GPUs or a package fall short; the
collectives themselves are tested on GPUs."""

import sys
from unittest import mock

import pytest
import torch

from megalith.errors import TrainingError
from megalith.parallel.overlap import copy_engine, cuda_driver

CALLS = ("cudaMemcpyAsync", "cudaMemcpy2DAsync", "cuStreamBatchMemOp")


def test_gpus_that_share_no_memory_are_told_with_the_way_out():
    failing = mock.Mock(side_effect=RuntimeError("no peer access"))
    with (
        mock.patch.object(copy_engine.torch.cuda, "current_device", return_value=1),
        mock.patch.object(copy_engine.torch.cuda, "synchronize"),
        mock.patch.multiple(copy_engine.symmetric, allocate=mock.MagicMock(), rendezvous=failing),
        pytest.raises(TrainingError) as raised,
    ):
        copy_engine.Slot(2048, "tp")
    message = str(raised.value)
    assert message.startswith(
        "cuda:1 cannot share 2,048 bytes with the other ranks of its axis (no peer access), but "
    )
    assert (
        "parallel.symmetric_memory_groups" in message
        and "remove the axis from parallel.symmetric_memory_groups" in message
    )


def test_a_full_memory_is_not_taken_for_gpus_apart(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        copy_engine.symmetric, "allocate", mock.Mock(side_effect=torch.OutOfMemoryError("2 GiB"))
    )
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        copy_engine.Slot(2**31, "tp")


def test_memory_that_pytorch_keeps_free_is_given_back_before_slots_are_made(monkeypatch):
    calls = mock.Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", calls.synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", calls.empty_cache)
    monkeypatch.setattr(copy_engine, "Slot", calls.slot)
    slots = copy_engine._Slots("tp")
    for size in (100, 50, 100, 101):
        slots.next(size)
    made = [mock.call.synchronize(), mock.call.empty_cache()]
    assert calls.mock_calls == [
        call for size in (100, 101) for call in (*made, *[mock.call.slot(size, "tp")] * copy_engine.SLOTS)
    ]


class Flags:
    """What streams would do: flags by address, who has raised each, and whether one that is awaited is there."""

    def __init__(self):
        self.numbers: dict[int, int] = {}
        self.writers: dict[int, set[int]] = {}
        self.writer = None
        self.missing: list[int] = []

    def make(self, raised=(), awaited=()):
        """In the place of copy_engine.Flags."""

        def call(number: int, stream: int) -> None:
            for address in raised:
                self.numbers[address] = number
                self.writers.setdefault(address, set()).add(self.writer)
            self.missing += [address for address in awaited if self.numbers.get(address, 0) < number]

        return call


def slots_of(ranks: int, monkeypatch) -> tuple[list[copy_engine.Slot], Flags]:
    """One slot as each of its ranks sees it, in one process."""
    flags, memories = Flags(), []
    monkeypatch.setattr(copy_engine, "Flags", flags.make)
    for name, value in (("current_device", 0), ("synchronize", None), ("Event", mock.Mock())):
        monkeypatch.setattr(torch.cuda, name, mock.Mock(return_value=value))

    def allocate(size, device):
        if len(memories) < ranks:
            memories.append(torch.empty(size, dtype=torch.uint8))
        return memories[-1]

    def rendezvous(memory, group):
        return mock.Mock(
            rank=int(group), world_size=ranks, get_buffer=lambda rank, shape, dtype: memories[rank]
        )

    monkeypatch.setattr(copy_engine.symmetric, "allocate", allocate)
    monkeypatch.setattr(copy_engine.symmetric, "rendezvous", rendezvous)
    for _ in range(ranks):
        allocate(100 + 2 * copy_engine.FLAG * copy_engine.MAX_RANKS, "cpu")
    return [copy_engine.Slot(100, str(rank)) for rank in range(ranks)], flags


def test_ranks_wait_for_what_is_given_and_for_what_is_fetched(monkeypatch):
    slots, flags = slots_of(3, monkeypatch)

    def everyone(step: str) -> int:
        """How many flags were missing when all ranks took a step, one after the other."""
        flags.missing.clear()
        for flags.writer, slot in enumerate(slots):
            getattr(slot, step)(mock.Mock())
        return len(flags.missing)

    for _ in range(3):
        assert everyone("begin") == 0
        assert (
            everyone("synchronize") == 2 + 1
        )  # the first has to wait for two, the second for one, the last for none
        assert everyone("end") == 0
    everyone("begin"), everyone("synchronize")
    assert everyone("begin") == 3 * 2  # nobody has fetched
    assert len(flags.numbers) == 2 * 3 * 2
    assert all(len(writers) == 1 for writers in flags.writers.values())


def test_without_cuda_bindings_the_package_and_the_way_out_are_named():
    cuda_driver._bindings.cache_clear()
    with mock.patch.dict(sys.modules, {"cuda.bindings": None}), pytest.raises(TrainingError) as raised:
        cuda_driver.Flags([64])
    assert "parallel.symmetric_memory_groups" in str(raised.value)
    assert "install it, or leave parallel.symmetric_memory_groups out" in str(raised.value)


def test_all_flags_of_a_step_go_in_one_call_those_that_are_raised_first():
    cuda = mock.MagicMock(cuuint32_t=int, CUdeviceptr=int)
    cuda.CUstreamBatchMemOpParams = mock.Mock  # a new one for each flag
    kinds = cuda.CUstreamBatchMemOpType
    calls = []

    def launch(stream, count, steps, flags):
        parts = {kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32: "writeValue"}
        parts[kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32] = "waitValue"
        named = [(parts[step.operation], getattr(step, parts[step.operation])) for step in steps]
        assert (count, flags) == (len(steps), 0) and all(value.flags == 0 for _, value in named)
        calls.append((stream, [(name, value.address, value.value) for name, value in named]))
        return (0,)

    cuda.cuStreamBatchMemOp = launch
    with mock.patch.object(cuda_driver, "_bindings", lambda: (cuda, None)):
        flags = cuda_driver.Flags([64, 128], [192])
        flags(7, 1)
        flags(2**32 + 8, 2)
    assert calls == [
        (stream, [("writeValue", 64, number), ("writeValue", 128, number), ("waitValue", 192, number)])
        for stream, number in ((1, 7), (2, 8))
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda: cuda_driver.copy(0, 0, 8, 0),
        lambda: cuda_driver.copy_rows(cuda_driver.StridedRows(0, 8, 0, 8, 8, 3), 0, 0, 0),
        lambda: cuda_driver.Flags([64])(1, 0),
    ],
    ids=["copy", "rows", "flags"],
)
def test_what_the_driver_refuses_is_told(call):
    status = mock.MagicMock(__int__=lambda self: 1)
    status.name = "CUDA_ERROR_INVALID_VALUE"
    answering = mock.Mock(**{f"{name}.return_value": (status,) for name in CALLS})
    with (
        mock.patch.object(cuda_driver, "_bindings", lambda: (answering, answering)),
        pytest.raises(
            TrainingError, match=r"GPUs? failed .* CUDA_ERROR_INVALID_VALUE \(1\); leave out parallel"
        ),
    ):
        call()


def test_a_stream_is_looked_up_once_for_its_handle(monkeypatch):
    asked = mock.Mock(side_effect=lambda device: object())
    handles = {0: 17, 1: 18}
    monkeypatch.setattr(torch.cuda, "current_stream", asked)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", handles.__getitem__, raising=False)
    copy_engine._stream_of.cache_clear()
    first, other = copy_engine._current_stream(0), copy_engine._current_stream(1)
    assert copy_engine._current_stream(0) is first is not other
    handles[0] = 19
    assert copy_engine._current_stream(0) not in (first, other)
    assert asked.call_args_list == [mock.call(device) for device in (0, 1, 0)]
    copy_engine._stream_of.cache_clear()
