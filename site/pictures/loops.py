"""Values in an FP8 matmul and in GRPO's loop, computed by Megalith's own functions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megalith.config import RlConfig
from megalith.models.linear import Linear
from megalith.ops.fp8.recipes import CurrentScaling, Fp8Gemm
from megalith.ops.gemm import Operand
from megalith.parallel.seams import plug
from megalith.rl.advantages.advantages import compute_advantages
from megalith.rl.reward_functions.arithmetic import arithmetic
from megalith.rl.rollouts.prompts import Prompt
from pictures.svg import Picture

FORMATS = {
    torch.float32: ("r3", "fp32"),
    torch.bfloat16: ("r0", "bf16"),
    torch.float8_e4m3fn: ("r1", "E4M3"),
    torch.float8_e5m2: ("r4", "E5M2"),
}


class RecordingGemm(Fp8Gemm):
    """Notes the dtypes of what each matmul takes and gives, and of what is cast and saved."""

    def __init__(self):
        super().__init__(CurrentScaling("hybrid"), torch.bfloat16)
        self.cast: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        self.matmuls: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {}
        self.saved: set[str] = set()

    def inputs(self, x: Tensor, saves: bool, sharded: bool = False) -> tuple[Operand, Operand]:
        codes, saved = super().inputs(x, saves, sharded)
        self._note("x", x, codes, saved)
        return codes, saved

    def weights(self, weight: Tensor, trains: bool) -> tuple[Operand, Operand]:
        codes, saved = super().weights(weight, trains)
        self._note("weight", weight, codes, saved)
        return codes, saved

    def gradients(self, grad: Tensor, has_wgrad: bool) -> tuple[Operand, Operand]:
        codes, by_column = super().gradients(grad, has_wgrad)
        self.cast["grad"] = grad.dtype, codes[0].dtype
        return codes, by_column

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        return self._noted("forward", x, weight, super().forward(x, weight, bias))

    def dgrad(self, grad: Operand, weight: Operand) -> Tensor:
        return self._noted("dgrad", grad, weight, super().dgrad(grad, weight))

    def wgrad(self, grad: Operand, x: Operand) -> Tensor:
        return self._noted("wgrad", grad, x, super().wgrad(grad, x))

    def _note(self, name: str, tensor: Tensor, codes: Operand, saved: Operand) -> None:
        self.cast[name] = tensor.dtype, codes[0].dtype
        if saved and saved[0].dtype == codes[0].dtype:
            self.saved.add(name)

    def _noted(self, name: str, a: Operand, b: Operand, result: Tensor) -> Tensor:
        self.matmuls[name] = a[0].dtype, b[0].dtype, result.dtype
        return result


def fp8() -> str:
    """A linear, forward and backward, with the default recipe's formats."""
    linear, gemm = Linear(32, 48, bias=False), RecordingGemm()
    plug(linear, "gemm", gemm)
    torch.nn.init.ones_(linear.weight)
    x = torch.ones(16, 32, dtype=torch.bfloat16, requires_grad=True)
    linear(x).sum().backward()
    picture = Picture("FP8: which tensor of a linear is cast to which format, and which matmul takes it")
    picture.text(0, 14, "A linear in FP8 (fp8_format: hybrid)", "h")
    picture.text(0, 40, "casts, each with its scale")
    names = {"x": "input x", "weight": "weight", "grad": "gradient of y"}
    for place, (name, words) in enumerate(names.items()):
        y = 50 + 34 * place
        given, codes = gemm.cast[name]
        picture.text(0, y + 17, words, "s")
        where = 90
        if name == "weight":
            _chip(picture, where, y, linear.weight.dtype)
            picture.arrow((where + 48, y + 12), (where + 72, y + 12))
        where += 74
        _chip(picture, where, y, given)
        picture.arrow((where + 48, y + 12), (where + 72, y + 12))
        _chip(picture, where + 74, y, codes)
        if name in gemm.saved:
            picture.text(where + 132, y + 17, "saved for the backward pass", "s")
    y = 176.0
    picture.text(0, y, "the three matmuls")
    operands = {"forward": ("x", "weight", "y"), "dgrad": ("grad", "weight", "gradient of x"),
                "wgrad": ("grad", "x", "gradient of weight")}  # fmt: skip
    for name, words in operands.items():
        y += 12
        picture.text(0, y + 22, name)
        for place, (word, dtype) in enumerate(zip(words, gemm.matmuls[name])):
            _chip(picture, 70 + 96 * place, y, dtype, word if place < 2 else "", width=80)
        picture.text(160.5 - 2.5, y + 22, "·", "m")
        picture.arrow((246 + 2, y + 18), (260, y + 18))
        picture.text(346, y + 22, words[2] + ("," if name == "wgrad" else ""), "s")
        if name == "wgrad":
            picture.text(346, y + 37, f"added up in {FORMATS[linear.weight.grad.dtype][1]}", "s")
        y += 34
    return picture.svg()


def _chip(
    picture: Picture, x: float, y: float, dtype: torch.dtype, word: str = "", width: float = 46
) -> None:
    colour, name = FORMATS[dtype]
    if word:
        picture.labelled(colour, x, y, width, 36, word, name)
    else:
        picture.labelled(colour, x, y, width, 36 if width > 46 else 24, name)


QUESTION, ANSWER = "17 + 25 =", 42
COMPLETIONS = ("42", "32", "The sum is 42", "52")


def grpo() -> str:
    """One prompt's group through the loop, judged by a reward that has a name."""
    rl = RlConfig(num_generations=len(COMPLETIONS), max_completion_length=16)
    prompt = Prompt(0, [], QUESTION, columns={"answer": ANSWER})
    rewards = [arithmetic(text, prompt, [], rl.max_completion_length) for text in COMPLETIONS]
    lengths = np.array([[len(text) for text in COMPLETIONS]])
    found = compute_advantages(rl, np.array(rewards)[None, :, None], lengths)
    picture = Picture(
        "GRPO's loop: prompts, completions, rewards, advantages, steps, weights back to the engine"
    )
    picture.text(0, 14, "GRPO's loop, with one prompt of a batch", "h")
    wide, middle = 400, 200
    picture.labelled("grey", 0, 26, wide, 30, f"prompt: {QUESTION}")
    picture.arrow((middle, 56), (middle, 72))
    top = 74
    picture.labelled("r0", 0, top, wide, 40, "engine: the policy's weights, with a KV cache",
                     f"samples {rl.num_generations} completions and their log-probabilities")  # fmt: skip
    picture.arrow((middle, 114), (middle, 128))
    y = 142.0
    for x, words in ((0, "completion"), (180, "reward: arithmetic"), (310, "advantage")):
        picture.text(x, y, words, "s")
    for text, reward, value in zip(COMPLETIONS, found.rewards[0], found.values[0]):
        y += 25
        picture.labelled("r0", 0, y - 17, 170, 22, text)
        picture.labelled("r2" if reward else "grey", 180, y - 17, 120, 22, f"{reward:g}")
        picture.labelled("r2" if value > 0 else "r4", 310, y - 17, 90, 22, f"{value:+.2f}")
    y = picture.lines(y + 24, "advantage = (reward − mean of the group) / its deviation", kind="s")
    picture.arrow((middle, y - 10), (middle, y + 6))
    picture.labelled("r1", 0, y + 8, wide, 40, "trainer: mini-batches through the layout, as in any run",
                     "likelier where the advantage is above 0, else less likely")  # fmt: skip
    low = y + 28
    picture.arrow((wide, low), (470, low), (470, top + 20), (wide + 2, top + 20))
    for place, words in enumerate(("sync:", "weights", "back")):
        picture.text(438, 190 + 15 * place, words, "s m")
    return picture.svg()
