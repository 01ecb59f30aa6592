"""Saving from a GPU in the background: the moment of the call, from page-locked memory, while kernels go on."""

import torch
from torch import nn

from megalith.checkpoint import RunRecord, Saver, load_model, open_checkpoint
from megalith.checkpoint.staging import Staging

LATE = 2_000_000  # cycles: about a millisecond


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(512, 512) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(512, 3).bfloat16()).cuda()


def test_what_kernels_still_compute_at_the_call_is_saved_and_what_they_do_after_is_not(tmp_path):
    trained, expected = model(0), model(0)
    saver = Saver(tmp_path, background=True)
    for step in (1, 2):  # the second save reuses the memory of the first
        torch.cuda._sleep(20 * LATE)
        for parameter, wanted in zip(trained.parameters(), expected.parameters()):
            parameter.data.add_(step)
            wanted.data.add_(step)
        saver.save(RunRecord(step=step, consumed_samples=0, config={}), trained, None)
        kept = [parameter.detach().clone() for parameter in trained.parameters()]
        for parameter in trained.parameters():
            parameter.data.fill_(torch.nan)
        (saved,) = saver.completed_saves(wait=True)
        assert saved.error is None
        loaded = model(1)
        load_model(open_checkpoint(tmp_path, ("model",)), loaded)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), expected.parameters()))
        for parameter, value in zip(trained.parameters(), kept):
            parameter.data.copy_(value)


def test_copies_are_page_locked_and_their_memory_is_used_again():
    tensors = [torch.randn(1000, device="cuda"), torch.randn(7, 9).cuda().t(), torch.randn(5)]
    staging = Staging(slab=2**12)
    first = [part for copy in staging.copy(tensors) for part in copy.byte_chunks()]
    assert all(part.is_pinned() for part in first)
    addresses = [part.data_ptr() for copy in staging.copy(tensors) for part in copy.byte_chunks()]
    assert addresses == [part.data_ptr() for part in first]
