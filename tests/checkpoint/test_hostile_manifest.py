"""Every value of a manifest replaced by what it should not be: a sentence, soon, and no memory for it."""

import json

import pytest
from default_cases import by_default
from hostile import problems, spoiled

from megalith.bridge.load import config_of
from megalith.checkpoint import RunRecord, StepWriter, open_checkpoint
from megalith.checkpoint.manifest import content_checksum
from megalith.checkpoint.open import step_problems
from megalith.checkpoint.steps import next_save_number, save_order
from megalith.config import RunConfig
from megalith.errors import CheckpointError
from megalith.models.transformer import Transformer
from megalith.training.loading import load


@pytest.fixture
def step(tmp_path):
    """A step of a small model, and a function that gives it another manifest with the checksum that this has."""
    config = RunConfig.from_tree({"model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
                                            "vocab_size": 128, "max_position_embeddings": 8}})  # fmt: skip
    record = RunRecord(step=1, consumed_samples=3, config=config.to_tree(), loss_scale={"scale": 2.0})
    with StepWriter(tmp_path / "checkpoints", record) as writer:
        for name, tensor in Transformer(config.model).state_dict().items():
            if name != "output_layer.weight":
                writer.add("model", name, tensor)
    file = writer.folder / "manifest.json"
    content = json.loads(file.read_text())
    del content["checksum"]

    def rewrite(changed: object) -> None:
        checksum = content_checksum(changed)
        file.write_text(
            json.dumps({"checksum": checksum, **changed} if isinstance(changed, dict) else changed)
        )

    return writer.folder, content, rewrite


@pytest.mark.parametrize("stride", by_default([3, 1], 3))
def test_every_value_of_a_manifest(step, stride):
    folder, content, rewrite = step
    small = dict(content)
    small["tensors"] = {"model": dict(list(content["tensors"]["model"].items())[:1])}
    small["config"] = {"train": {"seed": 1}}
    small |= {"left_out": [[1, 2]], "abandoned": [[1, 2]], "tokenizer": {"fingerprint": "a", "vocab_size": 3}}

    def read(changed: object) -> None:
        rewrite(changed)
        save_order(folder, unreadable=1)
        next_save_number(folder.parent)
        for problem in step_problems(folder):
            raise CheckpointError(problem)
        open_checkpoint(folder, parts=None)

    names = ("a\0b", "a\ud800", "a\nb", "/x", "..", "a/../b", "\x1b[2J", "a" * 5000)
    files = ({name: {"bytes": 1, "sha256": "a"}} for name in names)
    cases = [
        *spoiled(small, (), stride),
        *((f"files {named}"[:80], small | {"files": named}) for named in files),
    ]
    count, refused, found = problems(iter(cases), read)
    assert not found, "\n".join(found[:20])
    assert count > 700 / stride and refused > count / 2


@pytest.mark.parametrize("stride", by_default([3, 1], 3))
def test_every_setting_of_a_manifests_model(step, stride):
    folder, content, rewrite = step
    model = content["config"]["model"]

    def read(changed: dict) -> None:
        rewrite(content | {"config": changed})
        config_of(open_checkpoint(folder, ("model",)))

    rewrite(content)
    load(folder)
    names = ["num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"]
    names += [
        "rope_scaling",
        "num_experts",
        "window_size",
        "kv_channels",
        "ffn_hidden_size",
        "mtp_num_layers",
    ]
    few = {name: model[name] for name in (*names, "moe_layer_freq")}
    cases = [(name, {"model": model | changed}) for name, changed in spoiled(few, (), stride)]
    cases += [*spoiled({"model": {}, "lora": {}, "train": {}}), ("nothing", {})]
    cases += [(f"lora {rank}", {"model": model, "lora": {"rank": rank}}) for rank in (1, 10**9, -1)]
    count, refused, found = problems(iter(cases), read)
    assert not found, "\n".join(found[:20])
    assert count > 400 / stride and refused > count / 2


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({}, "model.num_layers is not set"),
        ({"hidden_size": 10**9}, "manifest.json: a model of these sizes cannot be built"),
        ({"hidden_size": 10**6}, "do not match its model config: .*needed .128, 1000000"),
        ({"num_layers": 10**7}, "num_layers is 10000000"),
        ({"num_layers": 9_999}, "9,999 layers, but lists"),
        ({"vocab_size": 10**9}, "needed .1000000000, 16"),
    ],
)
def test_a_configuration_of_another_model_is_refused_before_a_model_is_made(step, model, told):
    folder, content, rewrite = step
    rewrite(content | {"config": {"model": content["config"]["model"] | model if model else {}}})

    def read(_: object) -> None:
        with pytest.raises(CheckpointError, match=told):
            load(folder)

    assert not problems(iter([("", None)]), read)[2]
