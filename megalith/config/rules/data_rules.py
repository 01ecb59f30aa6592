"""Rules on the data of a run."""

from __future__ import annotations

from megalith.config.data import DataConfig
from megalith.config.rl import RlConfig
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def check_data(config: RunConfig) -> None:
    """Raise ConfigError for data settings that are missing or contradict each other."""
    _check_data(config.data, config.rl)
    _check_indexed_data(config)
    _check_balance(config)
    _check_fill_in_middle(config.data)


def _check_data(data: DataConfig, rl: RlConfig) -> None:
    parts = {name: getattr(data, name) for name in ("train_data_path", "valid_data_path", "test_data_path")}
    part_paths = [f"data.{name}" for name, path in parts.items() if path is not None]
    sources = [bool(data.mock), data.data_path is not None, bool(part_paths)]
    are_set = " and ".join(["data.mock"] * sources[0] + ["data.data_path"] * sources[1] + part_paths)
    if sum(sources) > 1:
        raise ConfigError(
            f"{are_set} are set, but a run reads its data from one source; leave out all but one of data.mock, "
            "data.data_path and the data paths per split"
        )
    if rl.prompts_or_rollouts and any(sources):
        raise ConfigError(
            f"rl.{'prompts' if rl.prompts else 'rollouts'} is the training data, but {are_set} "
            f"{'are' if ' and ' in are_set else 'is'} set too; leave the settings of section data out"
        )
    if data.dataset is not None and (data.mock or rl.prompts_or_rollouts):
        other = "data.mock" if data.mock else f"rl.{'prompts' if rl.prompts else 'rollouts'}"
        raise ConfigError(f"data.dataset {data.dataset} and {other} are both set; leave out one")
    if not any(sources) and data.dataset is None and not rl.prompts_or_rollouts:
        raise ConfigError(
            "there is nothing to train on; set data.data_path to the prefix that `megalith preprocess` wrote, "
            "data.dataset to your own dataset, or data.mock to true"
        )
    if part_paths and data.train_data_path is None:
        raise ConfigError(
            f"{' and '.join(part_paths)} {'are' if part_paths[1:] else 'is'} set, but data.train_data_path is not; "
            "set data.train_data_path too"
        )


def _check_indexed_data(config: RunConfig) -> None:
    """Raise ConfigError for settings of indexed pre-training data in a run with other data."""
    data = config.data
    names = (
        "blend_schedule",
        "blend_temperature",
        "max_epochs_per_source",
        "packing",
        "fim_data",
        "streaming",
        "seq_length_schedule",
    )
    settings = [
        f"data.{name}" for name in names if getattr(data, name) != type(data).model_fields[name].default
    ]
    others = {
        "data.mock": data.mock,
        "data.dataset": data.dataset is not None,
        "rl.prompts or rl.rollouts": config.rl.prompts_or_rollouts is not None,
    }
    if config.chat is not None:
        others[f"{config.chat.name}.enabled"] = True
    if settings and (other := next((name for name, value in others.items() if value), None)):
        raise ConfigError(
            f"{' and '.join(settings)} {'apply' if settings[1:] else 'applies'} to pre-training data in "
            f"data.data_path, but {other} is set; leave {other} out, or {' and '.join(settings)}"
        )


def _check_balance(config: RunConfig) -> None:
    data, chat = config.data, config.chat
    packs = chat.packing if chat is not None else data.packing == "best_fit" and data.reset_attention_mask
    if data.balance_batches and not packs:
        raise ConfigError(
            "data.balance_batches needs packed samples whose documents do not attend to each other; set sft.packing to "
            "true (pre-training: data.packing to best_fit and data.reset_attention_mask to true), or leave "
            "data.balance_batches out"
        )


def _check_fill_in_middle(data: DataConfig) -> None:
    if data.fim_data and data.packing != "concat":
        raise ConfigError(
            f"data.fim_data changes the lengths of documents, so documents packed by data.packing {data.packing} "
            "would no longer fit; leave one of the two settings out"
        )
    if data.fim_data and data.fim_split_sample and data.fim_fragment_rate is None:
        raise ConfigError(
            f"data.fim_split_sample is {data.fim_split_sample!r}, but data.fim_fragment_rate is not set; set it to the "
            "probability that a fragment is rearranged"
        )
