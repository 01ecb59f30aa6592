"""A layer's matmuls and collectives, in the order in which one rank issues them.

A small model makes one pass with a process group that has no other ranks, so the results of its collectives are
meaningless. Matmuls are recorded at the seam `gemm`, collectives as torch dispatches them.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.config import RunConfig
from megalith.data.batch import BoundaryRules, make_batch
from megalith.models.linear import Linear
from megalith.models.transformer import layers_of
from megalith.ops.gemm import Gemm, Operand
from megalith.parallel.mesh import build_mesh
from megalith.parallel.seams import plug
from megalith.training.build import build_model
from megalith.training.precheck import fake_process_group
from pictures.holdings import LLAMA, WORLD
from pictures.svg import Picture

COLLECTIVES = {  # by the operator's name: colour, words
    "reduce_scatter": ("r1", "reduce-scatter"),
    "all_?gather": ("r0", "all-gather"),
    "all_?to_?all": ("r3", "all-to-all"),
    "all_?reduce": ("r4", "all-reduce"),
}
BEGINS = "a layer's {} pass begins"
LAYOUTS = {
    "TP 4 with SP": dict(tensor_model_parallel_size=WORLD, sequence_parallel=True),
    "CP 4, a2a": dict(context_parallel_size=WORLD, cp_comm_type="a2a"),
    "DP 4, no_shard": {},
    "DP 4, optim_grads_params": dict(
        data_parallel_sharding_strategy="optim_grads_params", fsdp_unsharded_layers=0
    ),
}


class NotingGemm(Gemm):
    """Notes its matmuls under the name of their linear."""

    def __init__(self, name: str, noted: list[str]):
        self.name, self.noted = name, noted

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        self.noted.append(self.name)
        return super().forward(x, weight, bias)

    def dgrad(self, grad: Operand, weight: Operand) -> Tensor:
        self.noted.append(f"{self.name} dgrad")
        return super().dgrad(grad, weight)

    def wgrad(self, grad: Operand, x: Operand) -> Tensor:
        self.noted.append(f"{self.name} wgrad")
        return super().wgrad(grad, x)


class NotingCollectives(TorchDispatchMode):
    def __init__(self, noted: list[str]):
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        for pattern, (_, words) in COLLECTIVES.items():
            if "c10d" in str(operator) and re.search(pattern, str(operator)):
                self.noted.append(words)
        return operator(*args, **(kwargs or {}))


def passes(parallel: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the operations of the forward and the backward pass of the middle one of three layers."""
    config = RunConfig.from_tree(
        {
            "model": dict(num_layers=3, hidden_dropout=0.0, attention_dropout=0.0) | LLAMA,
            "data": dict(mock=True, seq_length=64),
            "parallel": parallel,
            "train": dict(train_iters=1, micro_batch_size=1, global_batch_size=WORLD),
            "runtime": dict(compile=False),
        }
    )
    noted: list[str] = []
    with fake_process_group(WORLD, 0):
        mesh = build_mesh(config.parallel, WORLD, "cpu")
        model = build_model(config, mesh, torch.device("cpu"))
        for layer in layers_of(model.chunks[0]).values():
            _mark(layer, noted)
        samples = np.arange(config.data.seq_length + 1)[None]
        with NotingCollectives(noted):
            model.backward([make_batch(samples, np.arange(1), BoundaryRules())])
    return tuple(_second(noted, BEGINS.format(way)) for way in ("forward", "backward"))


def _mark(layer: torch.nn.Module, noted: list[str]) -> None:
    def note(way: str):
        return lambda *_: noted.append(BEGINS.format(way))

    layer.register_forward_pre_hook(note("forward"), prepend=True)
    layer.register_full_backward_pre_hook(note("backward"), prepend=True)
    for name, module in layer.named_modules():
        if isinstance(module, Linear):
            plug(module, "gemm", NotingGemm(name.rpartition("_")[2], noted))


def _second(noted: list[str], mark: str) -> list[str]:
    """Return the operations between the second and the third mark."""
    first, last = [place for place, each in enumerate(noted) if each == mark][1:]
    return noted[first + 1 : last]


def moves() -> str:
    picture = Picture("A layer's matmuls and collectives in order, by axis, as one rank issues them")
    picture.text(0, 14, "A layer's pass on one rank, in order", "h")
    picture.legend(
        24, ("grey", "forward, dgrad"), ("r5", "wgrad"), ("r3", "all-to-all"), ("r4", "all-reduce")
    )
    picture.legend(42, ("r0", "all-gather"), ("r1", "reduce-scatter"))
    colours = {words: colour for colour, words in COLLECTIVES.values()}
    y = 80.0
    for label, parallel in LAYOUTS.items():
        picture.text(0, y, label)
        for way, issued in zip(("forward", "backward"), passes(parallel)):
            picture.text(0, y + 20, way, "s")
            x = 58.0
            for each in issued:
                wide = 20 if each in colours else 32
                colour = colours.get(each) or ("r5" if each.endswith("wgrad") else "grey")
                picture.box(colour, x, y + 6, wide - 1, 20)
                if each not in colours:
                    picture.text(x + wide / 2, y + 19, each.split()[0], "t m on")
                x += wide
            y += 24
        y += 28
    return picture.svg()
