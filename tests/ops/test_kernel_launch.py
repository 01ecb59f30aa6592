"""What was compiled for a launch serves the next one with the same numbers and constants, and no other."""

import pytest
import torch

from megalith.ops.fused.launch import Launcher


class Kernel:
    """A kernel as Triton has it: called with a grid and arguments, and what that compiled likewise."""

    def __init__(self):
        self.compiled: list[tuple] = []
        self.again: list[tuple] = []

    def __getitem__(self, grid):
        def launch(*args, num_warps):
            self.compiled.append((grid, args, num_warps))
            return Again(self, len(self.compiled))

        return launch


class Again:
    def __init__(self, kernel: Kernel, number: int):
        self._kernel, self._number = kernel, number

    def __getitem__(self, grid):
        return lambda *args: self._kernel.again.append((self._number, grid, args))


memory = torch.zeros(64)
x, y = memory[:16], memory[16:32]
FIRST = ((1, 1, 1), (x, y), (7,), (0.5,), (True, 32), 4)


@pytest.mark.parametrize(
    "second",
    [FIRST, ((2, 3, 1), (y, x), (7,), (0.25,), (True, 32), 4)],
    ids=["the same", "other tensors, floats and grid"],
)
def test_what_was_compiled_is_launched_again(second):
    kernel = Kernel()
    launch = Launcher(kernel)
    launch(*FIRST)
    launch(*second)
    grid, tensors, numbers, floats, constants, _ = second
    assert kernel.compiled == [((1, 1, 1), (x, y, 7, 0.5, True, 32), 4)]
    [(number, found, args)] = kernel.again
    assert (number, found) == (1, grid)
    assert all(a is b for a, b in zip(args, (*tensors, *numbers, *floats, *constants), strict=True))


@pytest.mark.parametrize(
    "second",
    [
        ((1, 1, 1), (x, y), (8,), (0.5,), (True, 32), 4),
        ((1, 1, 1), (x, y), (7,), (0.5,), (False, 32), 4),
        ((1, 1, 1), (x, y), (7,), (0.5,), (True, 32), 8),
        ((1, 1, 1), (x, y.bfloat16()), (7,), (0.5,), (True, 32), 4),
        ((1, 1, 1), (x, memory[17:33]), (7,), (0.5,), (True, 32), 4),
    ],
    ids=["number", "constant", "warps", "type", "address"],
)
def test_triton_itself_sees_what_it_may_have_compiled_nothing_for(second):
    kernel = Kernel()
    launch = Launcher(kernel)
    for call in (second, FIRST, second, FIRST):
        launch(*call)
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in second[1])
    assert len(kernel.compiled) == (2 if aligned else 3) and len(kernel.again) == 4 - len(kernel.compiled)
