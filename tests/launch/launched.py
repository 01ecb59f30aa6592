"""A worker for test_launch.py: `launched.py FOLDER WHAT` leaves a file for its rank and does WHAT."""

import atexit
import gc
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
from sockets import listening
from torch.distributed import init_device_mesh

from megalith.errors import DataError
from megalith.launch.failure import report
from megalith.launch.launcher import end_distributed, init_distributed

HELD = SimpleNamespace()  # to the end of the interpreter, as a script's model


def main() -> int:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    if what == "die early" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        process = init_distributed(torch.device("cpu"), timeout=timedelta(minutes=10))
        seen = {"world_size": process.world_size, "threads": torch.get_num_threads(), "pid": os.getpid()}
        seen["listening"] = listening(os.getpid()) + listening(os.getppid())
        seen["interface"] = os.environ.get("GLOO_SOCKET_IFNAME")
        (folder / f"rank{process.rank}.json").write_text(json.dumps(seen))
        total = torch.tensor(float(process.rank))
        torch.distributed.all_reduce(total)
        if process.rank == 1 and what == "raise":
            raise ZeroDivisionError("the reason that matters")
        if process.rank == 1 and what == "sentence":
            raise DataError("token id 70000 is above the vocabulary")
        if process.rank == 1 and what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if process.rank == 1 and what == "crash":
            os.abort()
        torch.distributed.all_reduce(total)
        print(f"the sum is {total.item()}")
        gc.disable()
        if what == "leave":
            HELD.group, HELD.mesh = torch.distributed.group.WORLD, init_device_mesh("cpu", (2,))
            return 0
        held = [torch.distributed.group.WORLD]
        held.append(held)  # as a model is: in a cycle, which no collection of the young finds
        end_distributed()
    except DataError as error:
        return report(error)
    return 0


def threads() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


if __name__ == "__main__":
    code = main()
    atexit._run_exitfuncs()  # a fork ends without
    if not code:
        Path(sys.argv[1], f"threads{os.environ['RANK']}.json").write_text(json.dumps(threads()))
    sys.exit(code)
