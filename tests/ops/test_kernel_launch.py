"""What was compiled for a launch serves the next one with the same numbers and constants, and no other."""

import importlib.util
import sys
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

import megalith.ops
from megalith.ops.kernels.kernel_launch import Launcher


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


@pytest.mark.parametrize("betas", [(0.0, 0.95), (0.9, 0.0), (0.9, 0.999)])
def test_adams_kernel_is_given_what_makes_its_bias_corrections(monkeypatch, betas):
    for name in ("triton", "triton.language", "triton.language.extra"):
        module = ModuleType(name)
        module.jit, module.language, module.libdevice = (lambda function: function), ModuleType(name), None
        monkeypatch.setitem(sys.modules, name, module)
    path = f"{megalith.ops.__path__[0]}/kernels/adam_kernel.py"
    spec = importlib.util.spec_from_file_location("adam_kernel", path)
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    kernel._launch = Mock()
    kernel.adamw_(*[torch.zeros(8)] * 4, *[torch.ones(())] * 3, 1e-3, betas, 1e-8, 0.1)
    *decays, log1, log2, _ = kernel._launch.call_args.args[4]
    for beta, given, log in zip(betas, decays, (log1, log2)):
        ages = torch.tensor([1.0, 2.0, 1000.0])
        assert given == beta
        torch.testing.assert_close(-torch.expm1(ages * log), 1 - (beta ** ages.double()).float())
