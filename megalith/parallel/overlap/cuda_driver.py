"""Copies between addresses and flags between GPUs, by CUDA's driver and runtime.

A flag is an int32 in device memory, of this GPU or of one that it reaches over NVLink. A stream sets it to a number
when all work before it is done, or waits until it has that number or a later one; numbers may wrap around. Neither
takes an SM. A kernel that synchronizes with other ranks would wait for the matmul that occupies all of them.

Streams are passed as handles and addresses are device addresses. Raises TrainingError with the driver's answer if it
refuses a call, and if the package cuda-bindings is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from megalith.errors import TrainingError


class StridedRows(NamedTuple):
    """`height` rows of `width`, which stand apart by one pitch at the source and by another at the target. All is in
    bytes; source and target are where the first row begins, in something whose address comes later."""

    source: int
    source_pitch: int
    target: int
    target_pitch: int
    width: int
    height: int


def copy(source: int, target: int, size: int, stream: int) -> None:
    """Copies `size` bytes from one address to another."""
    _, cuda = _bindings()
    (status,) = cuda.cudaMemcpyAsync(
        target, source, size, cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice, stream
    )
    if int(status):
        raise _refusal(status, f"copying {size:,} bytes from another GPU")


def copy_rows(rows: StridedRows, source: int, target: int, stream: int) -> None:
    """Copies rows from what begins at address `source` to what begins at `target`."""
    _, cuda = _bindings()
    (status,) = cuda.cudaMemcpy2DAsync(
        target + rows.target,
        rows.target_pitch,
        source + rows.source,
        rows.source_pitch,
        rows.width,
        rows.height,
        cuda.cudaMemcpyKind.cudaMemcpyDefault,
        stream,
    )
    if int(status):
        raise _refusal(status, f"copying {rows.height:,} rows of {rows.width:,} bytes from another GPU")


class Flags:
    """Flags, by their addresses, that a stream raises and others that it then awaits: at most 255, in one call.

    The call is made ready here, once; with all its flags it takes the host as long as one for a single flag.
    """

    def __init__(self, raised: Sequence[int] = (), awaited: Sequence[int] = ()):
        self._cuda, _ = _bindings()
        kinds = self._cuda.CUstreamBatchMemOpType
        raising = [self._step(kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, "writeValue", flag) for flag in raised]
        awaiting = [self._step(kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32, "waitValue", flag) for flag in awaited]
        self._steps, self._values = zip(*raising, *awaiting, strict=True)

    def _step(self, kind: Any, name: str, address: int) -> tuple[Any, Any]:
        """What the driver is to do, and the part of it that has the number."""
        step = self._cuda.CUstreamBatchMemOpParams()
        step.operation, value = kind, getattr(step, name)
        # By the default of a write all that stands before it in the stream is seen with it, by a wait's numbers are
        # compared by a difference of int32 that is ≥ 0.
        value.address, value.flags = self._cuda.CUdeviceptr(address), 0
        return step, value

    def __call__(self, number: int, stream: int) -> None:
        """When all that stands before in the stream is done, the raised ones have this number; the stream goes on when
        the awaited ones have it or a later one."""
        number = self._cuda.cuuint32_t(number % 2**32)
        for value in self._values:
            value.value = number
        (status,) = self._cuda.cuStreamBatchMemOp(stream, len(self._steps), self._steps, 0)
        if int(status):
            raise _refusal(status, "raising and awaiting flags of GPUs")


@cache
def _bindings() -> tuple[Any, Any]:
    """CUDA's driver and its runtime."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise TrainingError(
            "parallel.symmetric_memory_groups needs the package cuda-bindings, which torch's builds for CUDA bring "
            "along on Linux: install it, or leave the setting out"
        ) from error
    return driver, runtime


def _refusal(status: Any, doing: str) -> TrainingError:
    return TrainingError(
        f"CUDA answered {status.name} ({int(status)}) to {doing}; "
        "leave out parallel.symmetric_memory_groups, whose collectives need that"
    )
