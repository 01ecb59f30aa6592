"""MegatronLMPlugin: every field of Accelerate's own and four more, and what each means here.

A field that is not given is read from the environment, `MEGATRON_LM_` and its name in capitals, which Accelerate's
launcher fills from its options and its configuration file. What is given by neither leaves the decision to the Hugging
Face model (dropout, rotary embeddings) or to Megalith (recomputation: none), where Accelerate has a value for all.
"""

from __future__ import annotations

import os
from dataclasses import Field, dataclass, field, fields
from typing import Any

from accelerate.utils import MegatronLMPlugin as StockPlugin
from accelerate.utils import str_to_bool

from megalith.errors import ConfigError, did_you_mean

PREFIX = "MEGATRON_LM_"
YAML_PREFIX = "megatron_lm_"
RENAMED = {"learning_rate_decay_iters": "lr_decay_iters"}
"""Names of a configuration file's keys → the field."""
MORE = ("distribute_checkpointed_activations", "partition_activations", "check_for_nan_in_loss_and_grad",
        "legacy_bin")  # fmt: skip
SIZES = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size", "num_micro_batches")


@dataclass
class MegatronLMPlugin(StockPlugin):
    """Accelerate's MegatronLMPlugin, with the fields that its guides have beside those of its code.

    A script's own values come first, then the environment's, then the defaults: Accelerate's, but for
    `context_parallel_size`, which is 1. `given` has the names of the fields that either gave, `read` those that the
    environment did; None is no value.
    """

    checkpoint_num_layers: int | None = field(
        default=None, metadata={"help": "recompute whole layers, in units of so many"}
    )
    distribute_checkpointed_activations: bool | None = field(
        default=None, metadata={"help": "shard the saved inputs of recomputed layers over tensor parallelism"}
    )
    partition_activations: bool | None = field(default=None, metadata={"help": "the same, by another name"})
    check_for_nan_in_loss_and_grad: bool | None = field(
        default=None,
        metadata={"help": "always so: a step with NaN or Inf is skipped, and counted as skipped"},
    )
    legacy_bin: bool | None = field(
        default=None, metadata={"help": "save_state also writes a .bin file a tensor- and pipeline-rank"}
    )

    def __new__(cls, *args: Any, **options: Any) -> MegatronLMPlugin:
        """Keeps what the script has given: a value that is also the default is its word all the same."""
        plugin = super().__new__(cls)
        named = {**dict(zip((item.name for item in fields(cls)), args)), **options}
        plugin.given = {name for name, value in named.items() if value is not None}
        plugin.read = set()
        return plugin

    def __post_init__(self) -> None:
        for item in fields(self):
            variable = PREFIX + item.name.upper()
            text, kind = os.environ.get(variable), _kind(item)
            if text is not None and kind and item.name not in self.given:
                setattr(self, item.name, _parsed(variable, kind, text))
                self.given.add(item.name)
                self.read.add(item.name)
        for name in MORE:
            if getattr(self, name) is None:
                setattr(self, name, name == "check_for_nan_in_loss_and_grad")
        if self.context_parallel_size is None:
            self.context_parallel_size = 1
        super().__post_init__()
        for name in SIZES:
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(
                    f"MegatronLMPlugin's {name} is {getattr(self, name)!r}; give a whole number from 1"
                )

    def has(self, name: str) -> bool:
        """Whether the field was given, by the script or by the environment."""
        return name in self.given

    def data_parallel_size_of(self, processes: int) -> int:
        """What tensor, pipeline and context parallelism leave of so many processes. Raises ConfigError."""
        product = self.tp_degree * self.pp_degree * self.context_parallel_size
        if processes % product:
            sizes = ("tp_degree", "pp_degree", "context_parallel_size")
            read = " and ".join(name for name in sizes if name in self.read)
            raise ConfigError(
                f"{processes} processes are not divisible by tp_degree {self.tp_degree} × pp_degree {self.pp_degree} × "
                f"context_parallel_size {self.context_parallel_size} = {product}; start a multiple of {product} "
                "(accelerate launch --multi_gpu --num_processes, on CPUs too), or lower a degree"
                + (f"; {read} stands in the configuration file or in {PREFIX}…" if read else "")
            )
        return processes // product

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Keeps the sizes of a Hugging Face model for whoever reads `megatron_lm_default_args`."""
        from megalith.dialects.accelerate.published_weights import family_of_module

        family, theirs = family_of_module(model)
        ours = family.read_config(theirs)
        if self.seq_length is None:
            shape = getattr((batch_data or {}).get("input_ids"), "shape", (0, ours.max_position_embeddings))
            self.seq_length = self.decoder_seq_length or shape[1]
        self.megatron_lm_default_args.update(
            model_type_name="gpt",
            seq_length=self.seq_length,
            num_layers=ours.num_layers,
            hidden_size=ours.hidden_size,
            num_attention_heads=ours.num_attention_heads,
            max_position_embeddings=ours.max_position_embeddings,
            orig_vocab_size=ours.vocab_size,
            pretraining_flag=True,
            return_logits=self.return_logits,
        )

    def set_scheduler_args(self, scheduler: Any) -> None:
        """The length of the schedule of a MegatronLMDummyScheduler, in the script's own optimizer steps."""
        defaults = self.megatron_lm_default_args
        dp, defaults["data_parallel_size"] = defaults.get("data_parallel_size"), 1
        super().set_scheduler_args(scheduler)
        defaults["data_parallel_size"] = dp

    def set_tensorboard_logging_options(self) -> None:
        """Everything that there is is logged."""


FIELDS = {item.name: item for item in fields(MegatronLMPlugin)}


def _kind(item: Field) -> type | None:
    """What a field's text in the environment is; None for what has none, such as a function."""
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
        told = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}[kind]
        raise ConfigError(f"{variable} is {text!r}; give it {told}") from None


def environment_of(section: dict[str, Any]) -> dict[str, str]:
    """A configuration file's `megatron_lm_config` as variables of the environment. Raises ConfigError for an unknown
    key, with the nearest known one."""
    found = {}
    for key, value in section.items():
        name = key.removeprefix(YAML_PREFIX)
        name = RENAMED.get(name, name)
        if name not in FIELDS:
            near = did_you_mean(key, [YAML_PREFIX + known for known in (*FIELDS, *RENAMED)])
            raise ConfigError(f"megatron_lm_config has {key}, which is no field of MegatronLMPlugin{near}")
        if _kind(FIELDS[name]) is None:
            raise ConfigError(
                f"megatron_lm_config has {key}, which is no number, word or switch; give {name} to MegatronLMPlugin in "
                "the script"
            )
        if value is not None:
            found[PREFIX + name.upper()] = str(value)
    return found
