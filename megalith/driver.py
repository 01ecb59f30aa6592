"""What copy engines need of CUDA's driver and torch does not offer: strided copies, and flags between GPUs.

A flag is an int32 in device memory, of this GPU or of one that it reaches over NVLink. A stream raises it to a number
when all before it is done, or goes on when it has that number or a later one; numbers may wrap around. Neither takes
a multiprocessor, where a kernel that meets the others' would wait for the product that runs on all of them.

A stream is its handle, addresses are those of the device. Raises TrainingError with the driver's answer where it
refuses, and where the package cuda-bindings is missing.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from megalith.errors import TrainingError


class Rows(NamedTuple):
    """`height` rows of `width`, which stand apart by one pitch at the source and by another at the target. All is in
    bytes; source and target are where the first row begins, in something whose address comes later."""

    source: int
    source_pitch: int
    target: int
    target_pitch: int
    width: int
    height: int


def copy_rows(rows: Rows, source: int, target: int, stream: int) -> None:
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
    _check(status, f"copying {rows.height:,} rows of {rows.width:,} bytes from another GPU")


def raise_flag(address: int, number: int, stream: int) -> None:
    """When all that stands before it in the stream is done, the flag has this number."""
    cuda, _ = _bindings()
    (status,) = cuda.cuStreamWriteValue32(stream, address, number % 2**32, 0)
    _check(status, "raising a flag of another GPU")


def await_flag(address: int, number: int, stream: int) -> None:
    """The stream goes on when the flag has this number or a later one."""
    cuda, _ = _bindings()
    (status,) = cuda.cuStreamWaitValue32(
        stream, address, number % 2**32, 0
    )  # 0: by a difference of int32 that is ≥ 0
    _check(status, "waiting for a flag")


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


def _check(status: Any, doing: str) -> None:
    if int(status):
        raise TrainingError(
            f"CUDA answered {status.name} ({int(status)}) to {doing}; "
            "leave out parallel.symmetric_memory_groups, whose collectives need that"
        )
