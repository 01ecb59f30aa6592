"""Small mistakes in calls of the Python API, each answered by a sentence that says what to write instead."""

import functools

import pytest
import torch

import megalith
from megalith.errors import ConfigError, MegalithError
from megalith.rl import train_distilled, train_dpo

TREE = {
    "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32},
    "data": {"mock": True, "seq_length": 8},
    "optim": {"lr": 1e-3},
    "train": {"train_iters": 1, "micro_batch_size": 2, "global_batch_size": 2},
    "runtime": {"device": "cpu", "compile": False},
}


@pytest.mark.parametrize("function", ["train", "grpo", "plan", "parallelize", "train_dpo", "train_distilled"])
def test_a_function_of_a_configuration_refuses_a_files_name_and_a_dict(function):
    call = {
        "plan": functools.partial(megalith.plan, gpus=8),
        "parallelize": lambda config: megalith.parallelize(
            config, megalith.Mesh.alone(), torch.device("cpu")
        ),
        "train_dpo": train_dpo,
        "train_distilled": train_distilled,
    }.get(function) or getattr(megalith, function)
    with pytest.raises(
        ConfigError, match=r"takes a RunConfig, not str 'run.yaml'; .*RunConfig.load\('run.yaml'\)"
    ):
        call("run.yaml")
    with pytest.raises(
        ConfigError, match=r"takes a RunConfig, not a dict; pass megalith.RunConfig.from_tree"
    ):
        call(TREE)


def test_a_configuration_is_loaded_from_a_file_and_made_of_a_dict():
    with pytest.raises(
        ConfigError, match=r"RunConfig.from_tree takes a dict of sections, not str 'run.yaml'"
    ):
        megalith.RunConfig.from_tree("run.yaml")
    with pytest.raises(ConfigError, match=r"RunConfig.load takes the path of a run file, not a dict"):
        megalith.RunConfig.load(TREE)


def test_an_assignment_names_with_settings():
    config = megalith.RunConfig.from_tree(TREE)
    with pytest.raises(ConfigError, match=r'use config = config.with_settings\({"optim.lr": 3}\)'):
        config.optim.lr = 3
    with pytest.raises(ConfigError, match=r'with_settings\({"model.hidden": 3}\)'):
        config.model.hidden = 3
    with pytest.raises(ConfigError, match="optim cannot be assigned"):
        config.optim = megalith.OptimConfig(lr=3)
    assert config.with_settings({"optim.lr": 3}).optim.lr == 3 and config.optim.lr == 1e-3


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "muon", "lion"])
def test_a_built_in_optimizer_is_not_replaced(name):
    with pytest.raises(
        ConfigError, match=f"the optimizer '{name}' is built in .* register yours under another name"
    ):
        megalith.register_optimizer(name)


def test_exported_names_are_listed_for_completion():
    assert set(dir(megalith)) >= {*megalith.__all__, "__version__"}


class Vector(megalith.Loss):
    def __call__(self, logprobs, entropy, batch):
        return -logprobs * batch.loss_mask


class Number(megalith.Loss):
    def __call__(self, logprobs, entropy, batch):
        return 3.0


class Weights(megalith.CrossEntropy):
    def weights(self, batch):
        return batch.loss_mask.sum(1)


class Divisors(megalith.CrossEntropy):
    def denominator(self, batch):
        return batch.loss_mask.sum(1)


class OfTokens(megalith.Loss):
    def tokens(self, batch):
        return {"mask": batch.loss_mask}

    def token_losses(self, logprobs, entropy, tokens):
        return -(logprobs * tokens["mask"]).sum()


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (
            Vector(),
            r"Vector.__call__ returned a tensor of shape \[2, 8\]; return a tensor of shape \[\]: the sum over",
        ),
        (Number(), r"Number.__call__ returned 3.0; return a tensor of shape \[\]: the sum over the micro"),
        (Weights(), r"Weights.weights returned a tensor of shape \[2\]; return a tensor of shape \[2, 8\]"),
        (Divisors(), r"Divisors.denominator returned a tensor of shape \[2\]; .* shape \[\], or a number"),
        (
            OfTokens(),
            r"token_losses returned a tensor of shape \[\] .* shape \[16\]; return one loss per token",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_loss_of_the_wrong_shape_is_named(loss, sentence):
    model = megalith.parallelize(
        megalith.RunConfig.from_tree(TREE), megalith.Mesh.alone(), torch.device("cpu")
    )
    tokens = torch.randint(32, (2, 9))
    batch = megalith.Batch(
        tokens[:, :-1], tokens[:, 1:], torch.ones(2, 8), torch.arange(8).expand(2, 8), None, torch.arange(2)
    )
    with pytest.raises(MegalithError, match=sentence):
        model.backward([batch], loss)
