"""Contract of symmetric memory. What needs GPUs runs in tests/gpu; here are the names and their arguments."""

import inspect

import pytest
import torch
from torch.distributed import Work
from torch.distributed import _symmetric_memory as torch_memory

from megalith.compat import symmetric_memory, torch_operators


def test_allocate_passes_size_dtype_and_device(monkeypatch):
    called = {}
    monkeypatch.setattr(torch_memory, "empty", lambda *size, **options: called.update(size=size, **options))
    symmetric_memory.allocate(64, torch.device("cuda", 0))
    assert called == dict(size=(64,), dtype=torch.uint8, device=torch.device("cuda", 0))


def test_rendezvous_takes_a_tensor_and_a_groups_name():
    assert [*inspect.signature(torch_memory.rendezvous).parameters][:2] == ["tensor", "group"]
    handle = torch._C._distributed_c10d._SymmetricMemory
    assert all(hasattr(handle, name) for name in ("rank", "world_size", "get_buffer"))


def test_wait_tensor_waits_for_registered_work(single_process_group):
    class Counted(Work):
        waits = 0

        def wait(self, *_) -> bool:
            Counted.waits += 1
            return True

    x = torch.ones(2)
    symmetric_memory.register_work(x, Counted())
    torch_operators.functional_collectives.wait_tensor(x)
    torch_operators.functional_collectives.wait_tensor(x)
    assert Counted.waits == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_current_stream_handle_is_the_streams():
    assert symmetric_memory.current_stream_handle(0) == torch.cuda.current_stream(0).cuda_stream
