"""MegatronLMPlugin: the fields of Accelerate's own plugin, and five more from Accelerate's guides.

A field that the script does not set is read from the environment variable `MEGATRON_LM_<FIELD>`, which Accelerate's
launcher fills from its options and its configuration file. If neither sets it, the Hugging Face model (dropout, rotary
embeddings) or Megalith (no recomputation) decides; Accelerate has a default for all fields.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from typing import Any

from accelerate.utils import MegatronLMPlugin as StockPlugin
from accelerate.utils import str_to_bool

from megalith.errors import ConfigError, did_you_mean

PREFIX = "MEGATRON_LM_"
YAML_PREFIX = "megatron_lm_"
FIELD_OF_YAML_KEY = {"learning_rate_decay_iters": "lr_decay_iters"}
"""Key of a configuration file → field."""
GUIDE_FIELDS = ("distribute_checkpointed_activations", "partition_activations", "check_for_nan_in_loss_and_grad",
        "legacy_bin")  # fmt: skip
SIZES = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size", "num_micro_batches")


@dataclass
class MegatronLMPlugin(StockPlugin):
    """Accelerate's MegatronLMPlugin, with the fields of its guides that its code lacks.

    A value from the script takes precedence over the environment, then Accelerate's default (`context_parallel_size`
    defaults to 1). `set_fields` names the fields set by the script or the environment, `env_fields` those set by the
    environment. None means not set.
    """

    checkpoint_num_layers: int | None = field(
        default=None, metadata={"help": "recompute full layers in units of this many layers"}
    )
    distribute_checkpointed_activations: bool | None = field(
        default=None, metadata={"help": "shard the saved inputs of recomputed layers over tensor parallelism"}
    )
    partition_activations: bool | None = field(
        default=None, metadata={"help": "alias of distribute_checkpointed_activations"}
    )
    check_for_nan_in_loss_and_grad: bool | None = field(
        default=None,
        metadata={"help": "always on: a step with NaN or Inf is skipped and counted as skipped"},
    )
    legacy_bin: bool | None = field(
        default=None, metadata={"help": "save_state also writes one .bin file per tensor and pipeline rank"}
    )

    def __new__(cls, *args: Any, **options: Any) -> MegatronLMPlugin:
        """Record the fields that the script sets, even to their defaults."""
        plugin = super().__new__(cls)
        arguments = {**dict(zip((item.name for item in fields(cls)), args)), **options}
        plugin.set_fields = {name for name, value in arguments.items() if value is not None}
        plugin.env_fields = set()
        return plugin

    def __post_init__(self) -> None:
        for item in fields(self):
            variable = PREFIX + item.name.upper()
            text, kind = os.environ.get(variable), _kind(item)
            if text is not None and kind and item.name not in self.set_fields:
                setattr(self, item.name, _parsed(variable, kind, text))
                self.set_fields.add(item.name)
                self.env_fields.add(item.name)
        for name in GUIDE_FIELDS:
            if getattr(self, name) is None:
                setattr(self, name, name == "check_for_nan_in_loss_and_grad")
        if self.context_parallel_size is None:
            self.context_parallel_size = 1
        super().__post_init__()
        for name in SIZES:
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(
                    f"MegatronLMPlugin's {name} is {getattr(self, name)!r}; set it to a whole "
                    "number of at least 1"
                )

    def is_set(self, name: str) -> bool:
        """Return True if the script or the environment set the field."""
        return name in self.set_fields

    def data_parallel_size_of(self, processes: int) -> int:
        """Return processes / (TP × PP × CP). Raises ConfigError if that is not a whole number."""
        product = self.tp_degree * self.pp_degree * self.context_parallel_size
        if processes % product:
            sizes = ("tp_degree", "pp_degree", "context_parallel_size")
            from_env = " and ".join(name for name in sizes if name in self.env_fields)
            raise ConfigError(
                f"the number of processes, {processes}, is not divisible by tp_degree {self.tp_degree} × pp_degree "
                f"{self.pp_degree} × context_parallel_size {self.context_parallel_size} = {product}; start "
                f"a multiple of {product} (accelerate launch --multi_gpu "
                "--num_processes, on CPUs too), or lower a degree"
                + (f"; {from_env} comes from the configuration file or from {PREFIX}…" if from_env else "")
            )
        return processes // product

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Store the sizes of a Hugging Face model in `megatron_lm_default_args`."""
        from megalith.dialects.accelerate.published_weights import family_of_module

        family, hf_config = family_of_module(model)
        model_config = family.read_config(hf_config)
        if self.seq_length is None:
            default_shape = (0, model_config.max_position_embeddings)
            shape = getattr((batch_data or {}).get("input_ids"), "shape", default_shape)
            self.seq_length = self.decoder_seq_length or shape[1]
        self.megatron_lm_default_args.update(
            model_type_name="gpt",
            seq_length=self.seq_length,
            num_layers=model_config.num_layers,
            hidden_size=model_config.hidden_size,
            num_attention_heads=model_config.num_attention_heads,
            max_position_embeddings=model_config.max_position_embeddings,
            orig_vocab_size=model_config.vocab_size,
            pretraining_flag=True,
            return_logits=self.return_logits,
        )

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Store the settings of Adam or SGD. `prepare` raises an error that names any other class."""
        with suppress(ValueError, KeyError):
            super().set_optimizer_type(optimizer)

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Set the schedule's length to that of a MegatronLMDummyScheduler, in optimizer steps of the script."""
        defaults = self.megatron_lm_default_args
        dp, defaults["data_parallel_size"] = defaults.get("data_parallel_size"), 1
        super().set_scheduler_args(scheduler)
        defaults["data_parallel_size"] = dp

    def set_tensorboard_logging_options(self) -> None:
        """Do nothing: all metrics are always logged."""


FIELDS = {item.name: item for item in fields(MegatronLMPlugin)}


def _kind(item: Field) -> type | None:
    """Return the type of a field's environment variable. None if the field has none, such as a function."""
    kind = (
        bool
        if isinstance(item.default, bool)
        else {"int | None": int, "bool | None": bool}.get(item.type, item.type)
    )
    return kind if kind in (bool, int, float, str) else None


def _parsed(variable: str, kind: type, text: str) -> Any:
    try:
        if not text:
            raise ValueError
        return str_to_bool(text) == 1 if kind is bool else kind(text)
    except ValueError:
        expected = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}[kind]
        raise ConfigError(f"{variable} is {text!r}; set it to {expected}") from None


def environment_of(section: dict[str, Any]) -> dict[str, str]:
    """Return a configuration file's `megatron_lm_config` as environment variables.

    Raises ConfigError for an unknown key and suggests the nearest one.
    """
    variables = {}
    for key, value in section.items():
        name = key.removeprefix(YAML_PREFIX)
        name = FIELD_OF_YAML_KEY.get(name, name)
        if name in FIELDS and not key.startswith(YAML_PREFIX):
            raise ConfigError(
                f"megatron_lm_config has {key}, but keys begin with {YAML_PREFIX}; write {YAML_PREFIX}{key}"
            )
        if name not in FIELDS:
            near = did_you_mean(key, [YAML_PREFIX + other for other in (*FIELDS, *FIELD_OF_YAML_KEY)])
            raise ConfigError(f"megatron_lm_config has {key}, which is not a field of MegatronLMPlugin{near}")
        if _kind(FIELDS[name]) is None:
            raise ConfigError(
                f"megatron_lm_config has {key}, which cannot be written in a file; pass {name} to MegatronLMPlugin in "
                "the script"
            )
        if value is not None:
            variables[PREFIX + name.upper()] = str(value)
    return variables
