"""A step of a hand-made trace shared out among its parts."""

import pytest

from megalith.bench import step_breakdown

GRAPH = "## Call CompiledFxGraph f1 ##"


class Trace:
    """Events of a host thread, on which everything happens at once, and of two streams."""

    def __init__(self):
        self.events = [self.host("user_annotation", "step 7", 0, 1000)]

    @staticmethod
    def host(cat: str, name: str, start: float, duration: float, correlation: int | None = None) -> dict:
        args = {} if correlation is None else {"correlation": correlation}
        return {"cat": cat, "name": name, "tid": 1, "ts": start, "dur": duration, "args": args}

    def launch(
        self, at: float, around: list[str], kernel: str, start: float, duration: float, stream: int = 7
    ):
        number = len(self.events)
        for depth, name in enumerate(around):
            self.events.append(self.host("cpu_op", name, at - 0.5 + depth / 10, 1 - depth / 5))
        self.events.append(self.host("cuda_runtime", "cudaLaunchKernel", at, 0.1, number))
        self.events.append(
            {"cat": "kernel", "name": kernel, "tid": stream, "ts": start, "dur": duration}
            | {"args": {"correlation": number}}
        )


@pytest.fixture
def trace() -> Trace:
    trace = Trace()
    trace.events.append(trace.host("cuda_runtime", "cudaLaunchKernel", -5, 0.1, 999))  # of the step before
    trace.events.append(
        {"cat": "kernel", "name": "late", "tid": 7, "ts": 1, "dur": 90, "args": {"correlation": 999}}
    )
    trace.launch(10, [GRAPH], "nvjet_projection", 100, 10)
    trace.launch(12, [GRAPH, "aten::sdpa"], "cudnn_sm90_flash_fprop_wgmma", 110, 40)
    trace.launch(14, ["_TakeRows", "aten::index_select"], "vectorized_gather_kernel", 150, 5)
    trace.launch(16, ["_BeginAllToAll"], "ncclDevKernel_SendRecv", 160, 40, stream=19)
    trace.launch(18, ["_Prepare", "aten::to"], "copy_kernel", 165, 10)
    trace.launch(20, ["_GroupedLinearBackward", "aten::bmm"], "nvjet_product", 205, 20)
    trace.launch(22, ["torch::autograd::AccumulateGrad"], "elementwise_kernel", 225, 5)
    trace.launch(24, ["Optimizer.step#AdamW.step"], "_adamw", 230, 30)
    trace.launch(26, [], "copy for a checkpoint", 300, 400)
    return trace


def test_every_moment_of_the_step_belongs_to_one_part(trace):
    parts = step_breakdown.step_parts(step_breakdown.kernels_of(trace.events), trace.events)
    assert parts == {
        step_breakdown.ATTENTION: 50,
        step_breakdown.DISPATCH: 5,
        step_breakdown.IDLE: 5 + 5,  # before the exchange, and behind it
        step_breakdown.EXCHANGE: 5 + 25,  # but for the cast beside it
        step_breakdown.EXPERTS: 10 + 20,
        "gradients added up": 5,
        "optimizer and norm of the gradient": 30,
    }
    assert sum(parts.values()) == 260 - 100


def test_the_table_has_the_largest_part_first(trace):
    lines = step_breakdown.table(trace.events).splitlines()
    assert lines[0].split() == ["0.05", "ms", "31.2%", *step_breakdown.ATTENTION.split()]
    assert len(lines) == 7 and step_breakdown.table([]) == ""
