"""Contract of Inductor's settings, choices and graph passes."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from megalith.compat import torch_inductor
from megalith.compat.torch_inductor import ReductionHint, V, config, ir

functorch = torch._functorch.config


@pytest.fixture(autouse=True)
def settings():
    names = ("activation_memory_budget", "autograd_cache_allow_custom_autograd_functions")
    before = {name: getattr(functorch, name) for name in names}
    functions = config.unsafe_marked_cacheable_functions
    yield
    for name, value in before.items():
        setattr(functorch, name, value)
    config.unsafe_marked_cacheable_functions = functions


def test_settings_are_torchs():
    torch_inductor.set_activation_budget(0.5)
    torch_inductor.cache_custom_autograd_functions()
    torch_inductor.cache_functions({"package.function": "key"})
    assert functorch.activation_memory_budget == 0.5
    assert functorch.autograd_cache_allow_custom_autograd_functions is True
    assert config.unsafe_marked_cacheable_functions == {"package.function": "key"}


def test_kernel_choices_are_static_methods_with_these_arguments():
    choices = torch_inductor.KernelChoices
    parameters = {
        "should_use_persistent_reduction": ["features", "cooperative_reduction"],
        "can_fuse_horizontal": ["scheduler", "node1", "node2", "shared_data_score"],
    }
    for name, expected in parameters.items():
        assert isinstance(inspect.getattr_static(choices, name), staticmethod)
        assert [*inspect.signature(getattr(choices, name)).parameters] == expected


def test_set_kernel_choices_replaces_inductors():
    choices, before = torch_inductor.KernelChoices(), V.choices
    torch_inductor.set_kernel_choices(choices)
    try:
        assert V.choices is choices
    finally:
        torch_inductor.set_kernel_choices(before)


def test_kernel_features_have_a_reduction_hint_and_size():
    features = torch_inductor.KernelFeatures
    assert "reduction_numel" in inspect.signature(features).parameters and callable(
        features.get_reduction_hint
    )


def test_reduces_rows_up_to_a_width(monkeypatch):
    graph = SimpleNamespace(sizevars=SimpleNamespace(statically_known_leq=lambda size, limit: size <= limit))
    for hint, width, expected in (
        (ReductionHint.INNER, 8, True),
        (ReductionHint.INNER, 9, False),
        (ReductionHint.OUTER, 8, False),
    ):
        features = SimpleNamespace(get_reduction_hint=lambda hint=hint: hint, reduction_numel=width)
        with V.set_graph_handler(graph):
            assert torch_inductor.reduces_rows(features, 8) is expected


def test_the_post_grad_pass_is_the_one_of_the_options():
    class Pass(torch_inductor.GraphPass):
        def __call__(self, graph):
            pass

        def uuid(self):
            return torch_inductor.hash_files((__file__,))

    order = Pass()
    assert torch_inductor.post_grad_pass() is None
    with config.patch(post_grad_custom_post_pass=order):
        assert torch_inductor.post_grad_pass() is order
    assert isinstance(order.uuid(), bytes)


def test_waits_before_a_node_are_its_ancestors_of_that_kind():
    wait, other = object.__new__(ir._WaitKernel), object()
    nodes = {"wait": SimpleNamespace(node=wait), "other": SimpleNamespace(node=other)}
    node = SimpleNamespace(ancestors={"wait", "other"})
    assert torch_inductor.waits_before(SimpleNamespace(name_to_node=nodes), node) == {"wait"}
