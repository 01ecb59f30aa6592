"""Copies between device addresses, and flags that synchronize GPUs, by CUDA's driver and runtime.

A flag is an int32 in device memory, of this GPU or of one that it reaches over NVLink. A stream sets a flag to a number
after all work queued before, or waits until the flag has that number or a later one; numbers may wrap around. Neither
operation takes an SM. A kernel that synchronizes with other ranks would wait for the matmul that occupies all SMs.

Streams are passed as handles and addresses are device addresses. Raises TrainingError with the driver's answer if the
driver refuses a call, and if the package cuda-bindings is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from megalith.errors import TrainingError


class StridedRows(NamedTuple):
    """A two-dimensional copy of `height` rows of `width` bytes, with separate pitches for source and target.

    All sizes are in bytes. source and target are offsets of the first row from addresses that are passed later.
    """

    source: int
    source_pitch: int
    target: int
    target_pitch: int
    width: int
    height: int


def copy(source: int, target: int, size: int, stream: int) -> None:
    """Copy `size` bytes from one address to another."""
    _, cuda = _bindings()
    (status,) = cuda.cudaMemcpyAsync(
        target, source, size, cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice, stream
    )
    if int(status):
        raise _driver_error(status, f"copying {size:,} bytes from another GPU")


def copy_rows(rows: StridedRows, source: int, target: int, stream: int) -> None:
    """Enqueue a copy of strided rows on `stream`. `source` and `target` are base addresses."""
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
        raise _driver_error(status, f"copying {rows.height:,} rows of {rows.width:,} bytes from another GPU")


class Flags:
    """Sets some flags, then waits for others, on a stream: at most 255 flags in one driver call.

    The call is prepared once, when the object is created. It then takes the host as long as a call for a single flag.

    Args:
        raised: addresses of the flags to set.
        awaited: addresses of the flags to wait for.
    """

    def __init__(self, raised: Sequence[int] = (), awaited: Sequence[int] = ()):
        self._cuda, _ = _bindings()
        kinds = self._cuda.CUstreamBatchMemOpType
        raising = [self._step(kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, "writeValue", flag) for flag in raised]
        awaiting = [self._step(kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32, "waitValue", flag) for flag in awaited]
        self._steps, self._values = zip(*raising, *awaiting, strict=True)

    def _step(self, kind: Any, name: str, address: int) -> tuple[Any, Any]:
        """Return the driver's parameters for one flag operation, and the field of them that takes the flag's value."""
        step = self._cuda.CUstreamBatchMemOpParams()
        step.operation, value = kind, getattr(step, name)
        # By default, a write comes after all work queued before it, and a wait is over once the int32 difference is ≥
        # 0.
        value.address, value.flags = self._cuda.CUdeviceptr(address), 0
        return step, value

    def __call__(self, number: int, stream: int) -> None:
        """Set the flags in `raised` to `number` after the work queued on the stream. Then make the stream wait for the
        flags in `awaited`.
        """
        number = self._cuda.cuuint32_t(number % 2**32)
        for value in self._values:
            value.value = number
        (status,) = self._cuda.cuStreamBatchMemOp(stream, len(self._steps), self._steps, 0)
        if int(status):
            raise _driver_error(status, "raising and awaiting flags of GPUs")


@cache
def _bindings() -> tuple[Any, Any]:
    """Return the bindings of CUDA's driver and runtime."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise TrainingError(
            "parallel.symmetric_memory_groups needs the package cuda-bindings, which torch's CUDA builds include on "
            "Linux; install it, or leave parallel.symmetric_memory_groups out"
        ) from error
    return driver, runtime


def _driver_error(status: Any, doing: str) -> TrainingError:
    return TrainingError(
        f"{doing} failed with CUDA's status {status.name} ({int(status)}); leave out "
        "parallel.symmetric_memory_groups, whose collectives need it"
    )
