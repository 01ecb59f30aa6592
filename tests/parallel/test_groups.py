"""Layers called several at a time: the same model under the same names, and one compiled code for groups alike."""

import pytest
import torch
from torch._dynamo.utils import counters

from megalith.config import ModelConfig
from megalith.models.init import initialize
from megalith.models.multi_token import future_of
from megalith.models.transformer import Transformer
from megalith.parallel.groups import apply_groups, units

TINY = dict(num_layers=5, hidden_size=32, num_attention_heads=4, vocab_size=67, max_position_embeddings=16)
DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)


def build(size: int, **changes) -> Transformer:
    config = ModelConfig(**TINY, **changes)
    model = Transformer(config, seed=3).train()
    initialize(model, config, seed=5)
    apply_groups(model, size)
    return model


def trained(model: Transformer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of some tokens, and its gradients by name."""
    ids = torch.randint(0, TINY["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(0))
    labels, future = ids[:, 1:], None
    if layers := len(model.config.further_layers):
        future = future_of(labels, torch.ones(labels.shape), None, layers)
    loss = model(ids[:, :-1], labels=labels, future=future)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("changes", [DROPOUT, DROPOUT | {"mtp_num_layers": 2}], ids=["", "multi-token"])
def test_names_and_gradients_are_those_of_layers_one_by_one(changes):
    (loss, plain), (grouped_loss, grouped) = trained(build(1, **changes)), trained(build(2, **changes))
    assert torch.equal(loss, grouped_loss)
    assert list(plain) == list(grouped)
    assert [name for name in plain if not torch.equal(plain[name], grouped[name])] == []


def test_a_last_group_has_what_is_left_and_further_layers_stand_alone():
    sizes = [len(group.layers) for group in units(build(2, mtp_num_layers=2))]
    assert sizes == [2, 2, 1, 1, 1]
    assert units(model := build(1)) == list(model.layers.values())


@pytest.mark.parametrize("size, codes", [(1, 1), (2, 2), (5, 1)])  # 2: of two layers, and of the last alone
def test_groups_of_as_many_layers_share_one_compiled_code(size, codes):
    model = build(size, hidden_dropout=0.1, attention_dropout=0.0)
    torch._dynamo.reset()
    counters.clear()
    for unit in units(model):
        unit.compile(fullgraph=True, backend="aot_eager")
    trained(model)
    assert counters["stats"]["unique_graphs"] == codes
    torch._dynamo.reset()
