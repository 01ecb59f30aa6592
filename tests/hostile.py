"""Values that a stranger's file may hold where something else is meant, and a bound on what reading them may cost."""

import contextlib
import copy
import pickle
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

from megalith.errors import MegalithError

SECONDS, BYTES = 2.0, 2**30  # of processor time, which a busy machine does not stretch
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 10**7, 2**31, 10**9, 2**62, 10**30, 0.5, -1.5, 1e300, float("nan"), float("inf"), "", "x",
    "\0", "\ud800", "../x", "1e9", [], [1], ["x"], [None], [[]], [-1, 10**9], {}, {"a": 1}, {"rope_type": []},
    {"rope_type": "yarn", "factor": 0}, {"rope_type": "longrope", "factor": "x"}, {"rope_type": "llama3", "factor": -1},
    {"type": "linear", "factor": float("inf")}, {"full_attention": 3, "sliding_attention": []},
)  # fmt: skip


def places(tree: Any, depth: int = 3) -> Iterator[tuple]:
    """The path of every value in a JSON tree: of a list's, the first two."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:2]) if isinstance(tree, list) else ()
    for key, value in items if depth else ():
        yield (key,)
        yield from ((key, *path) for path in places(value, depth - 1))


def spoiled(
    tree: Any, more: tuple[str, ...] = (), stride: int = 1, first: int = 0
) -> Iterator[tuple[str, Any]]:
    """`tree` with one of its values, or one under a key of `more`, replaced by each of VALUES or left out.

    With a stride, by every stride-th of VALUES alone, counted from `first` at the first value of the tree and from one
    further at each next value. `stride` trees of the same keys with other `first` have every value under every key.
    """
    whole = pickle.dumps(tree)  # copied so in a fifth of deepcopy's time
    for number, path in enumerate(dict.fromkeys([*places(tree), *((key,) for key in more)])):
        for value in (*VALUES, ...)[(number + first) % stride :: stride]:
            changed = pickle.loads(whole)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            if value is ...:
                if path[-1] not in inner:
                    continue
                del inner[path[-1]]
            else:
                inner[path[-1]] = copy.deepcopy(value)
            yield f"{'.'.join(map(str, path))} = {value!r}", changed


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """No more than BYTES above what the process has."""
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def problems(cases: Iterator[tuple[str, Any]], read: Callable[[Any], object]) -> tuple[int, int, list[str]]:
    """How many cases there were, how many were refused, and those that were neither read nor refused as they should."""
    count, refused, found = 0, 0, []
    with little_memory():
        for name, content in cases:
            count += 1
            start = time.process_time()
            try:
                read(content)
            except MegalithError:
                refused += 1
            except BaseException as error:  # a panic in Rust is no Exception
                found.append(f"{name}: {type(error).__name__}: {error}")
            if (seconds := time.process_time() - start) > SECONDS:
                found.append(f"{name}: {seconds:.1f} s")
    return count, refused, found
