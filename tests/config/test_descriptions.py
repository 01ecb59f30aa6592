"""Schema, reference page and help say what the fields are, all of them, and the page in docs/ is the current one."""

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from megalith.config import RunConfig
from megalith.config.aliases import ALIASES
from megalith.config.base import NOT_YET
from megalith.config.describe import help_text, json_schema, reference_page
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError

ROOT = Path(__file__).parents[2]

GOOD = """
model: {preset: gpt2, num_layers: 2, rope_scaling: null, disable_bias_linear: true, norm_epsilon: 1.0e-6}
parallel: {use_distributed_optimizer: true, recompute_activations: true, num_layers_per_virtual_pipeline_stage: 1,
           dp_comm_overlap_bucket_size: 1000, overlap_grad_reduce: true}
data: {data_path: [0.7, a, 0.3, {path: b}], split: "99,1,0"}
optim: {lr: 0.001, lr_decay_style: WSD}
train: {train_iters: 10, bf16: true, rampup_batch_size: [1, 1, 8], seq_length: 64, lr: 0.001, split: "1"}
checkpoint: {save: runs/a, ckpt_format: torch_dist, no_save_rng: true}
runtime: {compile: auto, device: "cuda:1"}
log: {}
"""

BAD = [
    "modle: {}",
    "model: {num_layer: 2}",
    "model: {num_layers: 0}",
    "model: {num_layers: two}",
    "model: {hidden_dropout: 1.0}",
    "model: {rope_scaling: {factr: 2}}",
    "model: {normalization: BatchNorm}",
    "optim: {adam_beta1: 1.0}",
    "optim: {lr: -1}",
    "train: {bf16: 16}",
    "train: {seq_length: 0}",
    "train: {rampup_batch_size: [1, 2]}",
    "train: {seed: 4294967296}",
    "parallel: {num_layers_per_virtual_pipeline_stage: x}",
    "checkpoint: {ckpt_format: zip}",
    "data: {split: 100}",
    "model: 5",
]


SCHEMA = jsonschema.Draft202012Validator(json_schema())


def test_the_schema_is_a_schema_and_takes_good_files_and_published_examples():
    SCHEMA.check_schema(SCHEMA.schema)
    SCHEMA.validate(yaml.safe_load(GOOD))
    SCHEMA.validate({})
    files = [path for path in (ROOT / "examples").rglob("*.yaml") if path.parent.name != "oumi"]
    assert len(files) > 12
    for path in files:
        SCHEMA.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        RunConfig.load(path)


def test_the_schema_takes_what_a_run_saves_of_itself():
    config = RunConfig.from_tree({"model": {"preset": "llama3.1-8b"}, "train": {"train_iters": 3}})
    SCHEMA.validate(yaml.safe_load(config.to_yaml()))


@pytest.mark.parametrize("text", BAD)
def test_the_schema_refuses_what_loading_refuses(text):
    from megalith.errors import ConfigError

    content = yaml.safe_load(text)
    with pytest.raises(jsonschema.ValidationError):
        SCHEMA.validate(content)
    with pytest.raises(ConfigError):
        RunConfig.from_tree(content)


def fields(model=RunConfig, prefix=""):
    for name, field in model.model_fields.items():
        inner = field.annotation if hasattr(field.annotation, "model_fields") else None
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from fields(inner, f"{prefix}{name}.")


def test_every_field_has_a_sentence_in_help_page_and_schema():
    page, text, schema = reference_page(), help_text(), json_schema()
    for path, field in fields():
        section, name = path.split(".", 1)
        assert field.description and field.description.endswith("."), path
        if path in refused():
            continue
        assert f"--{path} " in text, path
        assert f"| `{name}` |" in page, path
        definition = schema["$defs"][RunConfig.model_fields[section].annotation.__name__]
        assert definition["properties"][name]["description"] == field.description
    for spelling in ALIASES:
        assert f"--{spelling}:" in text and f"| `{spelling}` |" in page


def refused() -> list[str]:
    """The settings that are names alone: what they ask for is refused, or belongs to what is."""
    return [path for path, field in fields() if NOT_YET in field.metadata]


def test_what_every_run_refuses_is_not_described_as_if_it_were_there():
    assert refused() == ["train.fp8_param_gather"]
    page, text, properties = (
        reference_page(),
        help_text(),
        json_schema()["$defs"]["TrainConfig"]["properties"],
    )
    described, not_yet = page.split("## Not yet")
    for path in refused():
        assert path not in text
        assert f"| `{path.split('.')[1]}` |" not in described and f"| `{path}` |" in not_yet
        assert properties[path.split(".")[1]].keys() == {"const", "description"}
    message = "train.fp8_param_gather is true, but gathering weights in FP8 is not implemented; remove train.fp8_par"
    config = RunConfig.from_tree(
        {
            "model": {"preset": "llama3.1-8b"},
            "data": {"mock": True, "seq_length": 64},
            "optim": {"lr": 1e-4},
            "train": {"train_iters": 3, "fp8_format": "hybrid", "fp8_param_gather": True},
        }
    )
    with pytest.raises(ConfigError, match=message):
        check_training(config, 1)


def test_the_page_is_a_well_formed_set_of_tables():
    for line in reference_page().splitlines():
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", line)) - 1
            assert cells in (2, 4), line


def test_defaults_are_written_exactly():
    assert "| `initial_loss_scale` | float | `65536` |" in reference_page()
    assert "| `adam_eps` | float | `1e-08` |" in reference_page()


def test_the_page_in_docs_is_the_current_one():
    saved = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert saved == reference_page(), "run: megalith config reference > docs/configuration.md"
