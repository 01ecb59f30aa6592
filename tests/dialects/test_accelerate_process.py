"""What an Accelerator does for a script beside the model: what processes exchange, print, keep and end with."""

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from accelerate_job import fresh_accelerator, samples
from torch.utils.data import DataLoader

from megalith.accelerate import (
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
)
from megalith.errors import ConfigError


def exchanged(accelerator):
    """What processes exchange, among replicas: `accelerator` may have a model, or not yet. test_accelerate_loop.py has
    the processes."""
    replica, replicas = accelerator._replica
    rank = torch.tensor(accelerator.process_index)
    both = list(range(replicas))
    own = {
        "loss": torch.tensor([float(replica)]),
        "more": (torch.tensor(replica), [torch.full((1, 2), replica)]),
    }
    found = accelerator.gather(own)
    assert found["loss"].tolist() == found["more"][0].tolist() == both
    assert found["more"][1][0].tolist() == [[one, one] for one in both]
    assert accelerator.gather_for_metrics(own["loss"]).tolist() == both
    assert accelerator.gather_for_metrics([replica, "a"]) == [one for n in both for one in (n, "a")]
    assert gather_across_data_parallel_groups(rank + 1).shape == (replicas,)
    mean = sum(both) / replicas
    assert avg_losses_across_data_parallel_group([own["loss"][0]]) == mean
    for kind, wanted in (("sum", sum(both)), ("mean", mean), ("max", max(both)), ("none", replica)):
        for dtype in (torch.int64, torch.float32):
            reduced = accelerator.reduce({"n": torch.tensor([replica], dtype=dtype)}, kind, scale=2.0)["n"]
            assert reduced.tolist() == [wanted]
            assert reduced.dtype == (torch.float32 if kind == "mean" else dtype)
    with pytest.raises(ConfigError, match="'avg'; there are sum, mean"):
        accelerator.reduce(rank, "avg")
    ragged = {"ids": torch.ones(2, 3 + accelerator.process_index, dtype=torch.int64)}
    padded = accelerator.pad_across_processes(ragged, dim=1, pad_index=-100)["ids"]
    assert (
        padded.shape == (2, 2 + accelerator.num_processes)
        and int((padded == 1).sum()) == ragged["ids"].numel()
    )
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as share:
        assert share == (["a", "b", "c"] if replicas == 1 else [["a", "b"], ["c", "c"]][replica])


def test_processes_exchange_numbers_before_a_model_is_prepared():
    exchanged(fresh_accelerator())


@pytest.mark.parametrize("given, told", [
    ([torch.ones(1), "a"], "a Tensor"), ([{1: "a"}], "a dictionary with the key 1"), ([(b"a",)], "a bytes"),
])  # fmt: skip
def test_objects_that_json_would_not_give_back_are_refused(given, told):
    with pytest.raises(ConfigError, match=f"gather_for_metrics was given {told}, but"):
        fresh_accelerator().gather_for_metrics(given, use_gather_object=True)


@pytest.mark.parametrize("option, told", [
    (dict(split_batches=True), r"divide the dataloader's batch_size by 1 replicas × num_micro_batches 2 = 2"),
    (dict(use_stateful_dataloader=True), "accelerator.skip_first_batches"),
])  # fmt: skip
def test_options_of_dataloaders_that_would_mean_another_batch_or_place_are_refused(option, told):
    options = DataLoaderConfiguration(**option)
    accelerator = fresh_accelerator(num_micro_batches=2, dataloader_config=options)
    with pytest.raises(ConfigError, match=told):
        accelerator.prepare(DataLoader(samples(4), batch_size=2))


@pytest.mark.parametrize(
    "option", [dict(even_batches=False), dict(dispatch_batches=True), dict(non_blocking=True)]
)
def test_options_of_dataloaders_that_ask_for_what_is_so_change_nothing(option):
    """Turns are always as many on every replica, with what fills them up masked; every rank reads."""
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(**option))
    loader = accelerator.prepare(DataLoader(samples(6), batch_size=4))
    with accelerator.join_uneven_inputs([], even_batches=False):
        assert [(batch["labels"] != -100).any(1).tolist() for batch in loader] == [
            [True] * 4,
            [True, True, False, False],
        ]
