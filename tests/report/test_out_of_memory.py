"""A full memory: the error names rank, stage, what was asked for, what holds it, and what would help."""

import pytest
import torch
from layout_job import configuration, held_after_backward, large

import megalith
from megalith.errors import TrainingError
from megalith.models.transformer import Transformer
from megalith.planner.counts import count_parameters
from megalith.report.out_of_memory import describe_request, find_remedies, out_of_memory

TORCHS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.10 GiB of which 1.20 GiB "
    "is free. Process 7 has 77.90 GiB memory in use."
)


def test_what_was_asked_for_is_read_from_torchs_words():
    asked = describe_request(torch.OutOfMemoryError(TORCHS))
    assert asked == "2.50 GiB were requested, 1.20 GiB of 79.10 GiB were free"
    assert describe_request(torch.OutOfMemoryError("no room\nat all. more")) == "no room at all"


@pytest.mark.parametrize(
    "reserved, others",
    [(76e9, ""), (0.5e9, "About 78 GB of this GPU's memory are outside PyTorch's allocator")],
)
def test_memory_outside_of_the_allocator_is_stated(reserved, others, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(1e9), int(79.5e9)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(reserved))
    error = out_of_memory(torch.OutOfMemoryError(TORCHS), large(1).config, 1, 0, torch.device("cuda:0"))
    assert others in str(error) and ("outside PyTorch's" in str(error)) == bool(others)


def test_error_names_rank_stage_and_remedies():
    layout = large(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    error = out_of_memory(torch.OutOfMemoryError(TORCHS), layout.config, 4, 1, torch.device("cpu"))
    text = str(error)
    assert text.startswith(
        "out of memory on cpu of rank 1 (pp 0, dp 0, cp 0, tp 1; stage 0 of 2, layers E 0–17): "
    )
    assert "2.50 GiB were requested" in text
    assert "parallel.sequence_parallel true (−" in text


def test_remedies_come_best_first_and_only_those_that_the_trainer_takes():
    remedies = [words for words, _ in find_remedies(large(2, 32), 0)]
    assert remedies[0] == "parallel.data_parallel_sharding_strategy optim"  # it costs no time
    assert remedies[1] == "parallel.recompute_granularity full"
    assert "train.micro_batch_size 16" in [words for words, _ in find_remedies(large(1, 32), 0)]
    saved = [bytes_saved for _, bytes_saved in find_remedies(large(2, 32), 0)][1:]
    assert saved == sorted(saved, reverse=True)
    assert not any("context" in words for words in [w for w, _ in find_remedies(large(1), 0)])  # one device


def test_run_out_of_memory_says_what_its_tensors_hold(tmp_path, monkeypatch):
    forward, calls = Transformer.forward, []

    def failing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError(TORCHS)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Transformer, "forward", failing)
    with pytest.raises(TrainingError, match="out of memory on cpu of rank 0") as raised:
        megalith.train(configuration(tmp_path / "run", model=dict(hidden_size=64)))
    text = str(raised.value)
    assert all(name in text for name in ("It holds weights 0.8", "gradients 0.8", "optimizer 1."))
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("strategy, shards", [("no_shard", 1), ("optim", 2), ("optim_grads_params", 2)])
def test_state_is_counted_through_every_sharding(pool, tmp_path, strategy, shards):
    config = configuration(tmp_path, parallel=dict(data_parallel_sharding_strategy=strategy))
    model = config.model.model_copy(update={"max_position_embeddings": 32})
    whole = 4 * count_parameters(model).total
    for weights, _, gradients in pool.run(held_after_backward, config, size=2):
        assert weights == pytest.approx(whole / shards, rel=0.02)
        assert gradients == pytest.approx(whole / shards, rel=0.02)
