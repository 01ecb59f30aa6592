"""A second model of a run, in the run's layout and precision: a reference, teacher, reward model or critic."""

from __future__ import annotations

import torch

from megalith.bridge.load import load_initial_weights, stored_dtypes, with_init_from
from megalith.config import RunConfig
from megalith.errors import ConfigError, DataError
from megalith.parallel.mesh import Mesh
from megalith.parallel.parallel_model import ParallelModel
from megalith.training.build import build_model, resolve_config, vocabulary_rows

TRAINED_MODEL_SETTINGS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
            "recompute_saves_attention", "distribute_saved_activations", "cpu_offloading_num_layers",
            "tp_comm_overlap", "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split", "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers")  # fmt: skip
"""Settings of section `parallel` that concern the backward pass or the trained model's own layers."""


def frozen_config(config: RunConfig, path: str, setting: str, is_critic: bool = False) -> RunConfig:
    """Return a configuration for the model in `path`, with the layout of the run `config`.

    Args:
        config: the run.
        path: a run, a Hugging Face folder or a Megatron-LM checkpoint.
        setting: the setting that names `path`, for errors.
        is_critic: True if the model is a critic: it gets an output layer that scores tokens, and it is trained.

    Raises:
        ConfigError: the model cannot be built.
    """
    parallel = config.parallel
    names = parallel.model_fields_set - set(() if is_critic else TRAINED_MODEL_SETTINGS)
    tree = {
        "model": {
            "init_from": path,
            "make_vocab_size_divisible_by": config.model.make_vocab_size_divisible_by,
            **({"score_head": True} if is_critic else {}),
        },
        "parallel": {name: getattr(parallel, name) for name in names},
        "data": {"seq_length": config.data.seq_length},
        "train": {
            name: getattr(config.train, name)
            for name in ("micro_batch_size", "global_batch_size", "precision", "seed")
        },
        "checkpoint": {"trust": config.checkpoint.trust},
        "runtime": {"compile": config.runtime.compile, "device": config.runtime.device},
    }
    try:
        return resolve_config(with_init_from(RunConfig.from_tree(tree)), None)
    except (ConfigError, DataError) as error:
        raise ConfigError(f"{setting} {path}: {error}") from error


def load_frozen(config: RunConfig, mesh: Mesh, device: torch.device) -> ParallelModel:
    """Load a model that is not trained. Its matrices have the compute dtype if that is exact, and are fp32 otherwise.

    `config` is that of the model (`frozen_config`). Collective over all ranks.
    """
    model = build_model(config, mesh, device, stored_dtypes(config), frozen=True)
    _load_weights(config, model, mesh)
    model.parameters.store_frozen(model.chunks[0].compute_dtype, mesh.world)
    return model


def load_trained(config: RunConfig, mesh: Mesh, device: torch.device) -> ParallelModel:
    """Build a second model to be trained, and load its weights if `config` contains a path to some.

    Collective over all ranks.
    """
    model = build_model(config, mesh, device)
    _load_weights(config, model, mesh)
    return model


def _load_weights(config: RunConfig, model: ParallelModel, mesh: Mesh) -> None:
    if config.model.init_from is not None:
        load_initial_weights(
            config.model.init_from,
            model.chunks,
            vocabulary_rows(config),
            config.train.seed,
            mesh.world,
            config.checkpoint.trust,
        )
