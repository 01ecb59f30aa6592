"""The script's dataloaders once they are prepared: order, shares, filler, streams, and turns that are left out."""

import accelerate
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from accelerate_job import (
    close,
    fresh_accelerator,
    model_of,
    samples,
    stacked,
)
from test_accelerate_process import exchanged
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import BatchEncoding

from megalith.accelerate import skip_first_batches
from megalith.dialects.accelerate.replica_loader import (
    ReplicaBatches,
    ReplicaSharding,
    host_copy,
    prepare_loader,
)
from megalith.errors import ConfigError


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("dataset", [list, Stream])
def test_the_last_batch_is_filled_up_with_samples_that_do_not_count(dataset):
    rows, losses = samples(11), []
    accelerator = fresh_accelerator(num_micro_batches=2)
    collated = DataLoader(dataset(rows), batch_size=2, collate_fn=lambda rows: BatchEncoding(stacked(rows)))
    model, loader = accelerator.prepare(
        model_of("llama"), collated
    )  # no dict, as tokenizers' batches are none
    model.eval()
    seen, plain = [], model_of("llama")
    for batch in loader:
        with torch.no_grad():
            losses.append(model(**batch).loss)
        seen.append(accelerator.gather_for_metrics(batch["input_ids"]))
        assert len(batch["input_ids"]) == 4
    assert torch.equal(torch.cat(seen), stacked(rows)["input_ids"])
    wanted = [plain(**stacked(rows[at : at + 4])).loss for at in (0, 4, 8)]
    close(torch.stack(losses), torch.stack(wanted))


@pytest.mark.parametrize("micro_batches, replicas", [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2)])
def test_the_filler_of_every_replica_is_what_follows_the_last_sample(micro_batches, replicas):
    for total in range(1, 26):
        seen, padded = [], []
        for replica in range(replicas):
            share = ReplicaSharding(micro_batches, replicas, replica, torch.device("cpu"))
            batches = ReplicaBatches(BatchSampler(range(total), 2, drop_last=False), share, drop_last=False)
            turns = list(batches)
            padded.append(turns)
            filler = [batches.padding(total, is_last=turn is turns[-1]) for turn in turns]
            seen.append([turn[: len(turn) - count] for turn, count in zip(turns, filler)])
        assert [sample for turn in zip(*seen) for part in turn for sample in part] == list(range(total))
        read = [sample for turn in zip(*padded) for part in turn for sample in part]
        first = range(min(total, 2 * micro_batches * replicas))
        assert read[total:] == [first[i % len(first)] for i in range(len(read) - total)]


def test_what_the_model_reads_on_the_host_is_not_copied_back_from_the_device_unless_it_was_changed():
    share = ReplicaSharding(micro_batches=1, replicas=1, replica=0, device=torch.device("meta"))
    rows = samples(2)
    loader = prepare_loader(DataLoader(rows, batch_size=2), share)
    (batch,) = loader
    assert batch["labels"].is_meta and torch.equal(
        host_copy(batch["labels"], loader), stacked(rows)["labels"]
    )
    batch["labels"].add_(1)
    with pytest.raises(NotImplementedError, match="meta"):  # there is nothing to copy
        host_copy(batch["labels"], loader)


def test_the_loaders_order_is_the_scripts_and_turns_can_be_left_out():
    def loader():
        return DataLoader(range(20), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))

    accelerator = fresh_accelerator(num_micro_batches=3)
    turns = accelerator.prepare(loader())
    wanted = torch.cat(list(loader()))
    assert torch.equal(torch.cat(list(turns))[:20], wanted) and len(turns) == 4
    rest = accelerator.skip_first_batches(accelerator.prepare(loader()), 2)
    assert torch.equal(torch.cat(list(rest))[:8], wanted[12:]) and len(rest) == 2


@pytest.mark.parametrize("dataset", [list, Stream])
@pytest.mark.parametrize("whose", ["the accelerator's", "the plain", "Accelerate's own"])
def test_turns_can_be_left_out_in_a_later_epoch_and_the_rest_is_filled_up_as_the_whole(dataset, whose):
    """Accelerate's own function, of a script that is not patched, has no streams of ours."""
    rows, found = samples(11), []
    accelerator = fresh_accelerator(
        num_micro_batches=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    skips = {"the accelerator's": accelerator.skip_first_batches, "the plain": skip_first_batches}
    skip = skips.get(whose, accelerate.skip_first_batches)
    given = dataset(rows)
    model, loader = accelerator.prepare(
        model_of("llama"), DataLoader(given, batch_size=2, shuffle=dataset is list)
    )
    model.eval()
    list(loader)  # the first epoch
    for turns in (loader, skip(loader, 1), skip(loader, 2)):
        with torch.no_grad():
            found.append([model(**batch).loss for batch in turns])
    assert [len(losses) for losses in found] == [3, 2, 1]
    close(torch.stack(found[1]), torch.stack(found[0][1:]))
    close(torch.stack(found[2]), torch.stack(found[0][2:]))


def replicas(folder):
    """Two replicas share out an incomplete last batch: the loss is that of its samples, and metrics are theirs."""
    rows, plain = samples(11), model_of("llama")
    accelerator = fresh_accelerator()
    exchanged(accelerator)
    model, loader = accelerator.prepare(model_of("llama"), DataLoader(rows, batch_size=4))
    exchanged(accelerator)
    model.eval()
    with torch.no_grad():
        found = [model(**batch).loss for batch in loader]
        wanted = [plain(**stacked(rows[at : at + 8])).loss for at in (0, 8)]
    close(torch.stack(found), torch.stack(wanted))
    stream = accelerator.prepare(DataLoader(Stream(rows), batch_size=4))
    with torch.no_grad():
        close(torch.stack([model(**batch).loss for batch in stream]), torch.stack(wanted))
    rest = accelerator.skip_first_batches(stream, 1)
    with torch.no_grad():
        close(torch.stack([model(**batch).loss for batch in rest]), torch.stack(wanted[1:]))
    other = Stream(rows[accelerator.process_index :])
    with pytest.raises(ConfigError, match="yields other samples on rank 1 than on rank 0"):
        next(iter(accelerator.prepare(DataLoader(other, batch_size=4))))
    for turns in (loader, stream):
        seen = [accelerator.gather_for_metrics(batch["input_ids"]) for batch in turns]
        assert torch.equal(torch.cat(seen), stacked(rows)["input_ids"])


@pytest.mark.parametrize("option, message", [
    (dict(split_batches=True), r"divide the dataloader's batch_size by 1 replicas × num_micro_batches 2 = 2"),
    (dict(use_stateful_dataloader=True), "accelerator.skip_first_batches"),
])  # fmt: skip
def test_options_of_dataloaders_that_would_mean_another_batch_or_place_are_refused(option, message):
    options = DataLoaderConfiguration(**option)
    accelerator = fresh_accelerator(num_micro_batches=2, dataloader_config=options)
    with pytest.raises(ConfigError, match=message):
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
