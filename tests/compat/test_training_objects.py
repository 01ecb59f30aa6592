"""Contract of private attributes of tensors, modules, samplers and optimizers."""

import warnings

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import RandomSampler

from megalith.compat import training_objects


def test_the_version_of_a_tensor_counts_changes_in_place():
    x = torch.zeros(2)
    before = training_objects.tensor_version(x)
    x.add_(1)
    assert training_objects.tensor_version(x) > before


def test_non_persistent_buffers_are_those_outside_of_the_state_dict():
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("dropped", torch.zeros(1), persistent=False)
    assert training_objects.non_persistent_buffers(module) == {"dropped"}


def test_requested_samples_are_those_that_a_sampler_was_created_with():
    assert training_objects.requested_samples(RandomSampler(range(5))) is None
    assert training_objects.requested_samples(RandomSampler(range(5), num_samples=3)) == 3


def test_fused_adam_supports_amp_scaling_and_plain_sgd_does_not():
    weight = nn.Parameter(torch.zeros(2))
    assert training_objects.supports_amp_scaling(torch.optim.AdamW([weight], fused=True))
    assert not training_objects.supports_amp_scaling(torch.optim.SGD([weight]))


def test_schedulers_neither_wrap_a_marked_step_nor_warn_of_its_order():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)

    @training_objects.mark_counting_step
    def step():
        training_objects.mark_stepped(optimizer)

    optimizer.step = step
    scheduler = LambdaLR(optimizer, lambda number: 0.5)
    assert optimizer.step is step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()


def test_a_recomputation_is_in_the_backward_pass_and_the_first_pass_is_not():
    seen = []

    def run(x):
        seen.append(training_objects.in_backward_pass())
        return x.sin().cos()

    x = torch.ones(2, requires_grad=True)
    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert seen == [False, True] and not training_objects.in_backward_pass()
