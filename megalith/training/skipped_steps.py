"""Count of steps that were skipped because of fp16 overflow. Learning-rate schedules exclude them."""

from __future__ import annotations

import torch
from torch import Tensor


class SkippedSteps:
    """Counts skipped steps and their samples without waiting for the device.

    The flag that says whether a step was skipped is copied to the host in the background. It is read when the count is
    next needed: for the learning rate of the next step, after that step's forward and backward passes have been queued.
    """

    def __init__(self, steps: int = 0, samples: int = 0):
        self._steps, self._samples = steps, samples
        self._pending: tuple[Tensor, torch.cuda.Event | None, int] | None = None

    def add(self, skipped: Tensor, samples: int) -> None:
        """Count a step of `samples` samples as skipped if the flag `skipped`, a 0-d tensor on the device, is
        not zero.
        """
        self._read()
        if skipped.device.type == "cuda":
            flag = torch.empty((), dtype=skipped.dtype, pin_memory=True)
            flag.copy_(skipped, non_blocking=True)
            self._pending = flag, torch.cuda.current_stream().record_event(), samples
        else:
            self._pending = skipped.clone(), None, samples

    @property
    def steps(self) -> int:
        self._read()
        return self._steps

    @property
    def samples(self) -> int:
        self._read()
        return self._samples

    def _read(self) -> None:
        if self._pending is None:
            return
        flag, copied, samples = self._pending
        if copied is not None:
            copied.synchronize()
        if flag.item():
            self._steps += 1
            self._samples += samples
        self._pending = None
