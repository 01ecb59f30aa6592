"""Contract of the names of torch's tracer that the package uses."""

from types import SimpleNamespace

import pytest
import torch

from megalith.compat import dynamo


@pytest.fixture(autouse=True)
def fresh_compiler():
    limit = torch._dynamo.config.recompile_limit
    torch.compiler.reset()
    yield
    torch._dynamo.config.recompile_limit = limit
    torch.compiler.reset()


@pytest.fixture
def graphs() -> list[torch.fx.GraphModule]:
    return []


@pytest.fixture
def compiled(graphs):
    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph.forward

    return lambda function, **options: torch.compile(function, backend=backend, **options)


def test_disable_tracing_breaks_the_graph(compiled, graphs):
    eager = dynamo.disable_tracing(lambda x: x + torch.compiler.is_compiling())
    assert compiled(lambda x: eager(x * 2) * 3)(torch.ones(2)).tolist() == [6.0, 6.0]
    assert len(graphs) == 2


@pytest.mark.parametrize("is_imported", [True, False])
def test_is_tracer_imported_looks_for_the_module(monkeypatch, is_imported):
    modules = {"torch._dynamo": torch._dynamo} if is_imported else {"torch": torch}
    monkeypatch.setattr(dynamo, "sys", SimpleNamespace(modules=modules))
    assert dynamo.is_tracer_imported() is is_imported


def test_the_result_of_a_constant_function_is_not_traced(compiled, graphs):
    @dynamo.mark_constant
    def two() -> int:
        return int(torch.full((), 2.0).item())  # would break the graph

    assert compiled(lambda x: x * two(), fullgraph=True)(torch.ones(1)).item() == 2.0
    assert len(graphs) == 1


def test_a_dynamic_dimension_takes_any_size_without_a_new_graph(compiled, graphs):
    function = compiled(lambda x: x * 2)
    for rows in (3, 5, 7):
        x = torch.ones(rows, 2)
        dynamo.maybe_mark_dynamic(x, 0)
        function(x)
    assert len(graphs) == 1


def test_a_raised_recompile_limit_is_torchs_and_never_lowered():
    dynamo.raise_recompile_limit(1000)
    dynamo.raise_recompile_limit(3)
    assert torch._dynamo.config.recompile_limit == 1000
