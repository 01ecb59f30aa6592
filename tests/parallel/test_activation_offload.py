"""Layers that keep their activations in host memory: the same gradients, and the device's memory free in between."""

import gc
import itertools
import weakref

import pytest
import torch
from default_cases import by_default

from megalith.config import ModelConfig, ParallelConfig, RunConfig
from megalith.config.presets import PRESETS
from megalith.config.rules.notes import offload_notes
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer
from megalith.parallel.memory import activation_offload as offload
from megalith.parallel.memory.activation_offload import apply_activation_offload
from megalith.parallel.memory.recompute import apply_recompute

VOCAB, LAYERS = 61, 4
RECOMPUTE = {
    "nothing recomputed": {},
    "layers": dict(recompute_granularity="full"),
    "units of three": dict(recompute_granularity="full", recompute_num_layers=3),
    "the first three": dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=3),
    "attention's core": dict(recompute_granularity="selective"),
    "modules": dict(recompute_granularity="selective", recompute_modules=["mlp", "layernorm"]),
}


@pytest.fixture(autouse=True)
def no_tensor_is_too_small(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 1)


@pytest.fixture
def kept(monkeypatch) -> list[offload._SavedStorage]:
    """Every storage that is copied to the host, in order."""
    made = []

    class Watched(offload._SavedStorage):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(offload, "_SavedStorage", Watched)
    return made


def build(
    family: str = "tiny-gpt", layers: int = LAYERS, dtype=torch.float32, compiled=False, **parallel
) -> Transformer:
    shape = dict(num_layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=32)
    drops = dict(hidden_dropout=0.1, attention_dropout=0.0 if compiled else 0.1)
    config = ModelConfig(**{**PRESETS[family], **shape, **drops})
    settings = ParallelConfig(cpu_offloading_num_layers=layers, **parallel)
    model = Transformer(config, seed=3, compute_dtype=dtype).train()
    initialize(model, config, seed=5)
    apply_recompute(model, settings)
    if compiled:
        for layer in model.layers.values():
            layer.compile(fullgraph=True, backend="aot_eager")
    apply_activation_offload(model, settings)
    return model


def loss_of(model: Transformer, seed: int = 0) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (2, 17), generator=torch.Generator().manual_seed(seed))
    documents = torch.tensor([[7, 16], [16, 16]], dtype=torch.int32)
    return model(ids[:, :-1], labels=ids[:, 1:], token_inputs=TokenInputs(document_ends=documents))


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(model: Transformer, other: Transformer) -> None:
    theirs = gradients(other)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, theirs[name]), name


@pytest.mark.parametrize("layers", by_default([1, 3, 4], 3))
@pytest.mark.parametrize("recompute", RECOMPUTE.values(), ids=RECOMPUTE)
@pytest.mark.parametrize("family", ["tiny-gpt", "tiny-qwen"])
def test_gradients_are_bitwise_those_without_offloading(family, recompute, layers, kept):
    plain, model = build(family, 0), build(family, layers, **recompute)
    for one in (plain, model):
        loss_of(one).backward()
    assert_same_gradients(model, plain)
    assert kept


def test_of_layers_that_are_recomputed_their_inputs_alone_go_to_the_host(kept):
    """The model's last layer's too."""
    loss_of(build(**RECOMPUTE["layers"])).backward()
    assert [len(one.on_host) for one in kept] == [4 * 2 * 16 * 64] * LAYERS


@pytest.mark.full
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE["modules"]])
def test_compiled_layers_too(recompute, kept):
    plain, model = (build(layers=n, dtype=torch.bfloat16, compiled=True, **recompute) for n in (0, 2))
    for one in (plain, model):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        loss_of(one).backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # for all layers
    assert_same_gradients(model, plain)
    assert kept


def test_micro_batches_in_flight_keep_apart():
    plain, model = build(layers=0), build(layers=LAYERS)
    for one in (plain, model):
        losses = [loss_of(one, seed) for seed in range(3)]
        for loss in losses:  # the first one first, as a pipeline does
            loss.backward()
    assert_same_gradients(model, plain)


def test_the_backward_pass_can_be_run_twice():
    plain, model = build(layers=0), build(layers=2)
    for one in (plain, model):
        loss = loss_of(one)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, plain)


def test_parameters_and_what_all_layers_share_stay_and_views_go_once(kept, monkeypatch):
    model = build("tiny-qwen", layers=2)
    contexts = []
    inner = model.context
    monkeypatch.setattr(
        model,
        "context",
        lambda *args, **arguments: contexts.append(inner(*args, **arguments)) or contexts[-1],
    )
    loss = loss_of(model)
    (context,) = contexts
    staying = {tensor.data_ptr() for tensor in (*model.parameters(), *context.rotary, context.documents)}
    sources = [one.on_device.data_ptr() for one in kept if one.on_device is not None]
    assert not staying & set(sources)
    packed_twice = [one for one in kept if one.uses > 1]
    assert packed_twice  # such as query, key and value, which are views of one product
    loss.backward()
    assert all(one.uses == 0 for one in kept)


def test_the_devices_memory_is_free_one_layer_later_and_back_one_layer_earlier(monkeypatch):
    units, events = [], []

    class Watched(offload._OffloadUnit):
        def __init__(self, *args):
            super().__init__(*args)
            self.number = len(units)
            units.append(weakref.ref(self))
            events.append(f"forward {self.number}")

        def release(self):
            super().release()
            events.append(f"release {self.number}")
            assert all(kept.on_device is None for kept in self._storages.values())

        def fetch(self):
            super().fetch()
            events.append(f"fetch {self.number}")
            assert all(kept.on_device is not None for kept in self._storages.values() if kept.uses)

    monkeypatch.setattr(offload, "_OffloadUnit", Watched)
    model = build(layers=3)
    for number, layer in model.layers.items():
        done = layer.mlp.linear_fc2.weight  # whose gradient is a layer's first
        done.register_post_accumulate_grad_hook(lambda _, n=number: events.append(f"backward {n}"))
    loss = loss_of(model)
    assert events == ["forward 0", "forward 1", "release 0", "forward 2", "release 1", "release 2"]
    assert all(kept.on_device is None for unit in units for kept in unit()._storages.values())
    events.clear()
    loss.backward()
    assert events == [
        "fetch 2", "backward 3", "fetch 1", "backward 2", "fetch 0", "backward 1", "backward 0",
    ]  # fmt: skip
    gc.collect()
    assert all(unit() is None for unit in units)  # the host's memory is free too, while the loss lives
    assert loss.grad_fn is not None


def test_recomputed_layers_send_their_input_alone(kept):
    sizes = {}
    for name in ("nothing recomputed", "layers", "units of three"):
        kept.clear()
        loss_of(build(layers=3, **RECOMPUTE[name]))
        sizes[name] = sum(len(one.on_host) for one in kept)
    hidden = 2 * 16 * PRESETS["tiny-gpt"]["hidden_size"] * 4  # bytes of [batch, seq, hidden]
    assert sizes["layers"] == 3 * hidden
    assert sizes["units of three"] == hidden
    assert sizes["nothing recomputed"] > 10 * hidden


def test_small_tensors_stay(kept, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 2**20)
    loss_of(build(layers=2)).backward()
    assert kept == []


def test_evaluation_copies_nothing(kept):
    model = build(layers=2).eval()
    with torch.no_grad():
        loss = loss_of(model)
    assert kept == []
    assert torch.equal(loss, loss_of(build(layers=0).eval()))


def test_more_layers_leave_less_on_the_device(kept):
    host = []
    for layers in range(LAYERS + 1):
        kept.clear()
        loss_of(build(layers=layers))
        host.append(sum(len(one.on_host) for one in kept))
    assert host[0] == 0
    assert all(less < more for less, more in itertools.pairwise(host))


def run_config(**settings) -> RunConfig:
    model = dict(preset="tiny-gpt", vocab_size=VOCAB)
    train = dict(train_iters=1, micro_batch_size=1, global_batch_size=4)
    optim = dict(lr=1e-3, optimizer_cpu_offload=True)
    tree = {section: {} for section in RunConfig.model_fields}
    tree |= dict(
        model=model, data=dict(mock=True, seq_length=16), optim=optim, train=train, parallel=settings
    )
    return RunConfig.from_tree(tree)


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (dict(cpu_offloading_num_layers=99), r"99 is more than model\.num_layers \d+; lower parallel"),
        (
            dict(
                cpu_offloading_num_layers=1,
                pipeline_schedule="zero_bubble",
                data_parallel_sharding_strategy="optim",
            ),
            r"cpu_offloading_num_layers is 1, but pipeline_schedule zero_bubble keeps .*; set cpu_off\w+ to 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_training(run_config(**settings))


def test_a_run_on_a_cpu_is_told_that_offloading_saves_nothing_there():
    config = run_config(cpu_offloading_num_layers=1)
    check_training(config)
    assert [note.split()[0] for note in offload_notes(config, "cpu")] == [
        "optim.optimizer_cpu_offload",
        "parallel.cpu_offloading_num_layers",
    ]
    assert offload_notes(config, "cuda") == []
