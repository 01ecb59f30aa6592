"""The parity job with every activation, however small, worth offloading."""

from megalith.config import RunConfig
from megalith.parallel.memory import activation_offload as offload
from megalith.parity.job import Outcome, run_job


def run_offloading(config: RunConfig) -> Outcome:
    """`run_job`; asserts that what the configuration offloads has been copied to the host."""
    smallest, kept = offload.SMALLEST, offload._SavedStorage
    copies = 0

    class Counted(kept):
        def __init__(self, *args):
            nonlocal copies
            copies += 1
            super().__init__(*args)

    offload.SMALLEST, offload._SavedStorage = 1, Counted
    try:
        outcome = run_job(config)
    finally:
        offload.SMALLEST, offload._SavedStorage = smallest, kept
    assert (copies > 0) == (config.parallel.cpu_offloading_num_layers > 0)
    return outcome
