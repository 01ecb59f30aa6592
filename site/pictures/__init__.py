"""The pictures of the documentation's concept pages, drawn from what the program itself says.

`make pictures` writes docs/images/; a test keeps them as they would be drawn today.
"""

from logo import logo

from pictures.holdings import checkpoint, context, data, expert, pipeline, ranks, tensor
from pictures.loops import fp8, grpo
from pictures.order import moves
from pictures.terminals import chat, first_hour, plan, run
from pictures.times import axes, schedules, step, zero

PICTURES = {
    "logo": logo,
    "axes": axes,
    "ranks": ranks,
    "moves": moves,
    "tensor": tensor,
    "context": context,
    "pipeline": pipeline,
    "schedules": schedules,
    "expert": expert,
    "data": data,
    "zero": zero,
    "step": step,
    "fp8": fp8,
    "grpo": grpo,
    "checkpoint": checkpoint,
    "terminal_run": run,
    "terminal_plan": plan,
    "terminal_chat": chat,
    "terminal_first_hour": first_hour,
}
"""By the file's name in docs/images/."""
