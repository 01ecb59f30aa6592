"""Contract of FSDP2's private state."""

import pytest
import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megalith.compat import fsdp


@pytest.fixture
def module(single_process_group) -> nn.Module:
    return fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))


def test_sharded_parameters_are_the_modules_dtensors(module):
    parameters = fsdp.sharded_parameters(fsdp.fsdp_state(module))
    assert [id(x) for x in parameters] == [id(x) for x in module.parameters()]
    assert all(isinstance(x, DTensor) for x in parameters)


def test_end_backward_reduces_gradients_that_were_accumulated_outside_of_a_backward_pass(module):
    module.set_requires_gradient_sync(False)
    module(torch.ones(1, 3)).sum().backward()
    assert module.weight.grad is None
    module.set_requires_gradient_sync(True)
    fsdp.end_backward(module)
    assert module.weight.grad.to_local().tolist() == [[1.0] * 3] * 2


def test_a_cpu_has_no_reduce_scatter_stream(module):
    assert fsdp.reduce_scatter_stream(module) is None
    module(torch.ones(1, 3)).sum().backward()
    assert fsdp.reduce_scatter_stream(module) is None


def test_parameter_records_hold_shards_gathered_tensors_and_gradients(module):
    records = list(fsdp.parameter_records(module))
    assert [id(record.sharded_param) for record in records] == [id(x) for x in module.parameters()]
    assert all(fsdp.unsharded_parameter(record) is None for record in records)
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(False)
    module(torch.ones(1, 3)).sum().backward()
    weight = records[0]
    assert fsdp.unsharded_parameter(weight).shape == (2, 3)
    assert all(isinstance(x, torch.Tensor) for x in weight.all_gather_outputs)
    gradients = [fsdp.unsharded_parameter(weight).grad, weight.unsharded_accumulated_grad]
    assert [x.tolist() for x in gradients if x is not None] == [[[1.0] * 3] * 2]
