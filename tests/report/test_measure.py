"""One measured step: the algebra of spans on a GPU's events, and real waits between processes."""

import random

import pytest
from layout_job import step_with_a_slow_rank
from torch.autograd import DeviceType

from megalith.config import LogConfig, RunConfig
from megalith.parallel.pipeline.executor import PASS
from megalith.planner.flops import flops_per_token
from megalith.report.layout_report import step_to_measure
from megalith.report.measured_step import (
    MARK,
    StepTimes,
    device_times,
    move_final_wait_to_bubble,
    subtract,
    total_length,
    union,
)
from megalith.report.report import flops_by_length

MS = 1_000_000


class Event:
    """A profiler's event, milliseconds."""

    def __init__(self, name, start, end, stream=7, device=True, titled=False):
        self._name, self._start, self._end = name, start * MS, end * MS
        self._stream, self._titled = stream, titled
        self._device = DeviceType.CUDA if device else DeviceType.CPU

    def name(self):
        return self._name

    def start_ns(self):
        return self._start

    def end_ns(self):
        return self._end

    def device_type(self):
        return self._device

    def device_resource_id(self):
        return self._stream

    def is_user_annotation(self):
        return self._titled


STEP = Event(MARK, 0, 100, device=False, titled=True)


def test_kernels_hide_communication_and_what_is_left_is_exposed():
    times = device_times(
        [
            STEP,
            Event("gemm", 10, 40),
            Event("elementwise", 30, 50),
            Event("ncclDevKernel_AllReduce_Sum_f32", 35, 70, stream=20),
            Event("gemm of the step before", -20, -10),
            Event("aten::mm", 0, 100, device=False),
        ]
    )
    assert times == StepTimes(step=100, compute=40, communication=20, bubble=0, idle=40)


def test_a_wait_for_what_is_copied_from_another_gpu_is_communication():
    times = device_times(
        [
            STEP,
            Event("gemm", 0, 20),
            Event("Memcpy PtoP (Device -> Device)", 10, 15, stream=20),
            Event("Memcpy PtoP (Device -> Device)", 30, 40, stream=20),  # its flag was waited for from 20 on
            Event("Memcpy DtoD (Device -> Device)", 40, 42, stream=20),
            Event("gemm", 45, 60),  # the host was late
            Event("Memcpy DtoD (Device -> Device)", 60, 70),
            Event("Memcpy PtoP (Device -> Device)", 80, 90, stream=20),
        ]
    )
    assert times == StepTimes(step=100, compute=45, communication=42, bubble=0, idle=13)


def test_sends_and_receives_of_the_pipeline_are_its_bubble_and_those_of_an_exchange_are_not():
    times = device_times(
        [
            STEP,
            Event("ncclDevKernel_SendRecv(args)", 0, 30, stream=21),
            Event("nccl:recv 1<-0", 0, 30, stream=21, titled=True),
            Event("gemm", 20, 60),
            Event("ncclDevKernel_SendRecv(args)", 60, 75, stream=22),  # an all-to-all of context parallelism
            Event("nccl:all_to_all", 60, 75, stream=22, titled=True),
            Event("ncclDevKernel_SendRecv(args)", 60, 95, stream=21),
            Event("nccl:send 1->0", 60, 95, stream=21, titled=True),
            Event(PASS, 0, 90, titled=True),
        ]
    )
    assert times == StepTimes(step=100, compute=40, communication=15, bubble=40, idle=5, pipeline_end=90)


def test_wait_for_the_last_stage_to_finish_is_bubble():
    first = StepTimes(100, 80, 5, 15, 0, pipeline_end=95)
    last = StepTimes(100, 60, 30, 10, 0, pipeline_end=75)
    assert move_final_wait_to_bubble([first, last]) == [
        first,
        StepTimes(100, 60, 10, 30, 0, pipeline_end=75),
    ]
    alone = StepTimes(100, 60, 40, 0, 0)
    assert move_final_wait_to_bubble([alone]) == [alone]


def test_unions_and_differences_of_spans_are_those_of_sets():
    generator = random.Random(0)
    for _ in range(200):
        a, b = (
            [
                (s, s + generator.randint(1, 9))
                for s in generator.choices(range(60), k=generator.randint(0, 8))
            ]
            for _ in range(2)
        )
        in_a, in_b = ({t for s, e in spans for t in range(s, e)} for spans in (a, b))
        assert total_length(union(a)) == len(in_a)
        assert total_length(subtract(union(a), union(b))) == len(in_a - in_b)


def test_rank_that_waits_in_a_collective_says_so_and_the_slow_one_computes(pool):
    slow, waiting = pool.run(step_with_a_slow_rank, 0.3, size=2)
    assert slow.compute > 0.8 * 300
    assert waiting.communication > 0.8 * 300 > 5 * waiting.compute
    for times in (slow, waiting):
        assert times.step == pytest.approx(times.compute + times.communication)


def test_step_that_the_profiler_traces_is_not_measured():
    assert step_to_measure(LogConfig(), first_step=1) == 5
    assert step_to_measure(LogConfig(), first_step=101) == 105
    assert step_to_measure(LogConfig(profile=True, profile_step_start=3, profile_step_end=6), 1) == 7
    assert step_to_measure(LogConfig(layout_report=False), 1) is None


def test_a_tokens_flops_by_the_length_of_its_sequence_are_those_of_sequences_of_that_length():
    """Between two lengths too: packed rows of 100 and 300 tokens cost what the two sequences do."""
    config = RunConfig.load(None, ["model.preset=llama3-8b", "data.seq_length=4096"])
    flops = flops_by_length(config)
    of = {n: flops_per_token(config.model, n).causal for n in (1, 100, 300, 4096)}
    assert {n: flops(n) for n in of} == pytest.approx(of)
    mean = (100**2 + 300**2) / 400
    assert 400 * flops(mean) == pytest.approx(100 * of[100] + 300 * of[300])
