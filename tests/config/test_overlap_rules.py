"""What tp_comm_overlap and copy engines ask of a run, each refusal with its numbers and the way out."""

import re

import pytest
from gpt2_runs import run

from megalith.config.rules.auto_settings import Machine, resolve_auto
from megalith.config.rules.notes import host_notes, overlap_notes
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError

TP2 = {"tensor_model_parallel_size": 2, "tp_comm_overlap": True}
A2A = {"context_parallel_size": 2, "cp_comm_type": "a2a", "tp_comm_overlap": True}


@pytest.mark.parametrize("parallel", [TP2, TP2 | {"sequence_parallel": True}, A2A, TP2 | A2A])
def test_tensor_parallelism_and_the_exchange_of_heads_are_hidden(parallel):
    check_training(run(parallel), world_size=4)


@pytest.mark.parametrize(
    "config, sentence",
    [
        (run({"tp_comm_overlap": True}), "tensor_model_parallel_size 1 and context_parallel_size 1"),
        (run(A2A | {"context_parallel_size": 1}), "context_parallel_size 1 with cp_comm_type a2a have none"),
        (run(A2A | {"cp_comm_type": "p2p"}), "context_parallel_size 2 with cp_comm_type p2p have none"),
        (run(TP2, micro_batch_size=3), "train.micro_batch_size is 3; make train.micro_batch_size even"),
        (run(TP2, num_experts=4, add_bias_linear=False), "model.num_experts is 4"),
        (
            run(TP2 | {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero_bubble"}),
            "pipeline_schedule zero_bubble .* choose another schedule",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(config, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_training(config, world_size=4)


def test_an_exchange_that_auto_has_yet_to_choose_is_judged_when_it_is_chosen():
    config = run({"context_parallel_size": 2, "tp_comm_overlap": True})
    check_training(config, world_size=4)
    assert resolve_auto(config, Machine(2))[0].parallel.cp_comm_type == "a2a"
    with pytest.raises(ConfigError, match=r"context_parallel_size 2 with cp_comm_type p2p have none"):
        resolve_auto(config, Machine(1))


def test_copy_engines_for_gradients_are_noted_and_change_nothing():
    config = run({"symmetric_memory_groups": ["dp"]})
    check_training(config, world_size=4)
    (note,) = overlap_notes(config, compiled=True)
    assert "NCCL reduces gradients as fast" in note and not config.parallel.copy_engine_axes


def test_without_compilation_a_note_says_that_nothing_is_hidden():
    assert overlap_notes(run(TP2), compiled=True) == overlap_notes(run({}), compiled=False) == []
    (note,) = overlap_notes(run(TP2), compiled=False)
    assert "hides nothing without runtime.compile" in note


ENGINES = {"symmetric_memory_groups": ["tp", "cp"]}


@pytest.mark.parametrize(
    "parallel, sentence",
    [
        (
            A2A | {"cp_comm_type": "p2p"},
            "but cp_comm_type p2p exchanges none; set .* to a2a",
        ),
        (A2A | {"cp_comm_type": "all_gather"}, "cp_comm_type all_gather exchanges none"),
    ],
)
def test_a_note_says_where_copy_engines_have_nothing_to_move(parallel, sentence):
    (note,) = overlap_notes(run(parallel | ENGINES), compiled=True)
    assert re.search(sentence, note)


@pytest.mark.parametrize(
    "parallel", [{}, TP2, TP2 | {"sequence_parallel": True}, A2A, A2A | {"cp_comm_type": "a2a+p2p"}]
)
def test_there_is_no_note_where_copy_engines_have_something_to_move_or_an_axis_one_rank(parallel):
    assert overlap_notes(run(parallel | ENGINES), compiled=True) == []


def test_a_slow_host_is_noted_and_changes_no_choice():
    machine = dict(ranks_per_host=8, compiled=True, nvlink=True, ranks=8)
    slow, fast = Machine(**machine, launch=9.8), Machine(**machine, launch=5.6)
    overlapped = run(TP2)
    assert host_notes(overlapped, fast) == []
    (note,) = host_notes(overlapped, slow)
    assert "takes 9.8 µs to launch a kernel" in note and note.endswith(
        "compare parallel.tp_comm_overlap false"
    )
    (note,) = host_notes(run({}), slow)
    assert "tp_comm_overlap" not in note
    assert resolve_auto(run({"tensor_model_parallel_size": 2}), slow) == resolve_auto(
        run({"tensor_model_parallel_size": 2}), fast
    )
