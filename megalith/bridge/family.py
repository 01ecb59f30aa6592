"""A model family of transformers as two literal tables: its tensors and its configuration.

The type tables below (`COUNTS`, `NUMBERS`, …) are checked before anything is computed from a config.json, because the
file may be damaged or hostile.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from megalith.bridge.model_differences import differences
from megalith.bridge.rows import RowRun, Rule
from megalith.bridge.settings import ConfigRow, Tree
from megalith.config import LoraConfig, ModelConfig
from megalith.config.base import Decides, as_config_error
from megalith.errors import ConfigError, short_repr
from megalith.models.adapters import add_adapters
from megalith.models.model_types import make_model
from megalith.models.transformer import Transformer
from megalith.models.vocabulary import VOCABULARY

MOST_LAYERS = 10_000
LARGEST = 2**31 - 1

# fmt: off
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "first_k_dense_replace",
                "encoder_layers", "decoder_layers", "num_dense_layers", "num_nextn_predict_layers",
                "mtp_num_hidden_layers")
COUNTS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "original_max_position_embeddings", "sliding_window", "sliding_window_pattern",
    "n_embd", "n_inner", "n_head", "n_heads", "n_positions", "max_seq_len", "num_experts", "num_local_experts",
    "n_routed_experts", "moe_num_shared_experts", "dim_model_base",
    "n_shared_experts", "num_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
    "n_embed", "seq_length", "shared_expert_intermediate_size", "type_vocab_size",
    "rotary_dim", "no_rope_layer_interval", "ffn_dim", "word_embed_proj_dim",
    "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads",
    "decoder_sparse_step", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "shared_intermediate_size", "max_window_layers", "global_attn_every_n_layers",
    "num_kv_heads", "ffn_hidden_size", "num_ln_in_parallel_attn",
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_d_ssm", "mamba_expand", "expand",
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "state_size", "conv_kernel", "conv_L_cache",
    "block_ff_dim", "block_multiple_of", "moe_shared_expert_intermediate_size", "intermediate_multiple_size",
    "intermediate_size_mlp", "attention_chunk_size", "local_attention", "floor_scale", "interleave_moe_layer_step",
    "moe_num_experts", "moe_k", "moe_layer_start_index", "moe_layer_interval",
    "d_model", "d_kv", "d_ff", "dim", "hidden_dim", "num_heads", "relative_attention_num_buckets",
    "relative_attention_max_distance", "encoder_ffn_dim", "decoder_ffn_dim", "encoder_attention_heads",
    "decoder_attention_heads", "decoder_vocab_size",
)
NUMBERS = (
    "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "attention_factor", "rotary_pct", "rotary_emb_base",
    "swiglu_limit", "swiglu_alpha", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
    "logits_scaling", "logit_scale", "scale_emb", "scale_depth", "softmax_scale",
    "lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier",
    "ssm_out_multiplier", "block_ffn_dim_multiplier",
    "rotary_scaling_factor", "rotary_seq_len_interpolation_factor", "rope_scaling_factor", "yarn_beta_fast",
    "yarn_beta_slow",
)
FROM_ZERO = (
    "mscale", "mscale_all_dim", "attn_pdrop", "attn_scale", "llama_4_scaling_beta", "moe_norm_min", "alpha",
    "input_jitter_noise", "router_jitter_noise", "moe_jitter_eps",
)
NAMES = (
    "hybrid_override_pattern", "mtp_hybrid_override_pattern", "model_type", "rope_type", "type", "topk_method",
    "feed_forward_proj", "dense_act_fn",
)
OBJECTS = (  # checked recursively
    "rope_scaling", "rope_parameters", "full_attention", "sliding_attention", "attn_config", "ffn_config",
)
LISTS = {
    "architectures": str, "layer_types": str, "mlp_only_layers": int, "moe_layers": int, "no_rope_layers": int,
    "short_factor": float, "long_factor": float, "mlp_layer_types": str, "attention_layers": str,
    "layer_rope_theta": float, "attn_layer_indices": int, "full_attn_idxs": int, "layers_block_type": str,
    "mtp_layers_block_type": str, "ssm_multipliers": float, "mlp_multipliers": float, "rope_scaling_layers": int,
}
# fmt: on


def check_types(hf_config: Mapping[str, Any], where: str = "config.json") -> None:
    """Raise ConfigError if the value of a key in the tables above has another type. Null is allowed everywhere."""
    for key, value in hf_config.items():
        if value is not None and (rule := _broken_rule(key, value)):
            raise ConfigError(
                f"{where} has {key} {short_repr(value, 80)}, which is not {rule}; correct it, or fetch it again"
            )
        if key in OBJECTS and value:
            check_types(value, f"{where}'s {key}")


# Keys that transformers reads in every family, with the values that have no effect.
EVERY_FAMILY = {"per_layer_config": (None, {}), "is_causal": (None, True)}


def _check_unsupported_keys(hf_config: Mapping[str, Any]) -> None:
    for key, harmless in EVERY_FAMILY.items():
        if hf_config.get(key) not in harmless:
            raise ConfigError(
                f"config.json has {key} {short_repr(hf_config[key], 80)}, which changes what the model "
                "computes and is not supported; use a model without it"
            )


def _broken_rule(key: str, value: Any) -> str | None:
    if key in LAYER_COUNTS:
        return (
            None if _is_count(value) and value <= MOST_LAYERS else f"a number of layers up to {MOST_LAYERS:,}"
        )
    if key == "sliding_window_pattern" and isinstance(value, str) and set(value) <= {"L", "G"}:
        return None  # EXAONE's spelling
    if key in COUNTS:
        return None if _is_count(value) else f"a whole number from 0 to {LARGEST:,}"
    if key in NUMBERS:
        return None if _is_number(value) and value > 0 else "a number above 0"
    if key in FROM_ZERO:
        return None if _is_number(value) and value >= 0 else "a number from 0"
    if key in NAMES:
        return None if isinstance(value, str) else "a name"
    if key in OBJECTS:
        return None if isinstance(value, dict) else "an object"
    if key in LISTS:
        fits = {str: lambda one: isinstance(one, str), int: _is_count, float: _is_number}[LISTS[key]]
        is_list = isinstance(value, list) and all(map(fits, value))
        return None if is_list else f"a list of {'names' if LISTS[key] is str else 'numbers'}"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


LAYER = re.compile(r"^((?:encoder\.)?layers)\.(\d+)\.")


@dataclass(frozen=True)
class Family:
    """A model architecture of the transformers library, with the tables that map it to Megalith's model."""

    architecture: str
    """Name of the class in transformers, as in config.json's `architectures`."""

    model_type: str
    """config.json's `model_type`."""

    tensors: Mapping[str, Rule]
    """Megalith's parameter names, with {layer}, and the rule for each. Rows for parameters that a model lacks are
    unused."""

    settings: tuple[ConfigRow, ...]
    """Rows that map the configuration."""

    tied: str
    """Hugging Face name of the output matrix. Files may contain it even if it is tied to the embedding."""

    transformers_class: str = ""
    """Class of transformers that runs the family, if it is another family's. Files name this class or
    `architecture`."""

    exported_as: str = ""
    """Architecture of exports without the rest of a multimodal model, if transformers has no class for this language
    model alone."""

    other_model_types: tuple[str, ...] = ()
    """Further values of `model_type` that transformers reads as this family."""

    writes_tables: bool = False
    """True if an export writes `stored_tables`."""

    mtp_copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a multi-token prediction layer that repeat tensors of the model → the repeated tensors.

    An export writes them.
    """

    constants: Mapping[str, float] = field(default_factory=dict)
    """Scalars of each layer that transformers stores and that are constants here. An import checks them, an export
    writes them."""

    ignored: tuple[str, ...] = ()
    """Patterns of tensor names to ignore: masks and frequencies stored by older versions."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that config.json omits, if they differ from the default in the key's row."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of keys that transformers accepts → the name in the rows."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Suffixes of tensor names in older files → current suffixes."""

    embedding_copies: tuple[str, ...] = ()
    """Hugging Face names of copies of the word embedding that files may contain. The copies must equal the
    embedding.
    """

    trusts_stored_head: bool = False
    """Untie the output matrix if the files contain one that differs from the embedding, whatever config.json says."""

    not_in_fp8: str = ""
    """Name suffix of matrices that transformers cannot read in FP8, and which are therefore exported unquantized."""

    prefix: str = "model."
    """Prefix of every name except the head's. Files of the bare model lack it."""

    prefix_with_head: str = ""
    """Prefix of the names in files of the model with a head, for the family of the bare model."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a field that is not a tuple, such as ("a") in place of ("a",)."""
        for each in fields(self):
            value = getattr(self, each.name)
            if not each.type.startswith("tuple"):
                continue
            if not isinstance(value, tuple):
                raise ConfigError(
                    f"{self.architecture} has {each.name} {short_repr(value, 80)}, a {type(value).__name__}, but it "
                    f"is a tuple; write {each.name}=(…,), with a comma also after a single value"
                )
            for one in value if each.type == "tuple[str, ...]" else ():
                if not isinstance(one, str):
                    raise ConfigError(
                        f"{self.architecture} has {short_repr(one, 80)} in {each.name}, but it is a tuple of strings; "
                        f"correct {each.name}"
                    )

    def read_config(self, hf_config: Mapping[str, Any]) -> ModelConfig:
        """Return the model configuration of a config.json. Raises ConfigError for unsupported values."""
        check_types(hf_config)
        _check_unsupported_keys(hf_config)
        values, hf_config = {}, {**self.defaults, **self._without_aliases(hf_config)}
        for setting in self.settings:
            for name, value in setting.read(hf_config).items():
                if values.setdefault(name, value) == value:
                    continue
                if name in ModelConfig.fields_deciding(Decides.FUNCTION):
                    raise ConfigError(
                        f"config.json gives model.{name} both {values[name]!r} and {value!r}, which is not supported"
                    )
                warnings.warn(
                    f"config.json gives model.{name} both {values[name]!r} and {value!r}; {values[name]!r} is used "
                    "throughout",
                    stacklevel=3,
                )
        try:
            return ModelConfig.model_validate(values)
        except ValidationError as error:
            raise as_config_error(error) from None

    def _without_aliases(self, hf_config: Mapping[str, Any]) -> Tree:
        """Return a config.json with aliases replaced by the names in the table.

        Raises ConfigError if two spellings differ.
        """
        named = {key: value for key, value in hf_config.items() if key not in self.aliases}
        for alias, key in self.aliases.items():
            if hf_config.get(alias) is None:
                continue
            if named.setdefault(key, hf_config[alias]) != hf_config[alias]:
                raise ConfigError(
                    f"config.json has {key} {named[key]!r} and {alias} {hf_config[alias]!r}, two "
                    "names of one setting with different values; remove one of them"
                )
        return named

    def write_config(self, model: ModelConfig) -> Tree:
        """Return the config.json of a model. Raises ConfigError, with the settings, if this family cannot express
        it."""
        model = self.described_model(model.without_mup())
        hf_config: Tree = {"architectures": [self.architecture], "model_type": self.model_type}
        for setting in self.settings:
            hf_config |= setting.write(model)
        if changed := differences(model, self.read_config(hf_config)):
            raise ConfigError(f"it has {'; '.join(changed)}")
        return hf_config

    @property
    def roots_outside_prefix(self) -> set[str]:
        """First name components of the tensors outside `prefix`, which belong to the head."""
        names = [self.tied, *(name for rule in self.tensors.values() for name in rule.names)]
        return {name.partition(".")[0] for name in names if not name.startswith(self.prefix)}

    def stored_as(self, shapes: Mapping[str, tuple[int, ...]]) -> Family:
        """Return the variant of the family whose tables fit checkpoints with these tensor shapes.

        Families override it if the order of dimensions differs among their files.
        """
        return self

    def table(self, model: ModelConfig) -> Mapping[str, Rule]:
        """Return the tensor table of a model. Families override it if their names depend on the configuration."""
        return self.tensors

    def stores_mtp(self, hf_config: Mapping[str, Any], tensors: Collection[str]) -> bool:
        """Return True if a folder has an MTP layer that its config.json does not mention. A family with such folders
        overrides this method.
        """
        return False

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """Return the duplicates among the tensors of MTP layers: copy's name → name of the model's tensor."""
        return {
            copy.format(layer=layer): original
            for layer in model.mtp_layers
            for copy, original in self.mtp_copies.items()
        }

    def stored_constants(self, model: ModelConfig) -> dict[str, float]:
        """Return the scalars that the model's files contain in addition to its parameters, by name.

        Families override it if the scalars depend on the configuration.
        """
        return {
            name.format(layer=layer): value
            for layer in range(model.num_layers)
            for name, value in self.constants.items()
        }

    def stored_model(self, model: ModelConfig, names: Collection[str]) -> ModelConfig:
        """Return the configuration of the model in a folder whose tensors have these `names`. A family whose folders
        may lack a parameter of `model` overrides this method.
        """
        return model

    def described_model(self, model: ModelConfig) -> ModelConfig:
        """Return the configuration that the config.json of `model` describes, including parameters that files
        may lack.
        """
        return model

    def stored_tables(self, model: ModelConfig) -> dict[str, Tensor]:
        """Return the tables that files may contain although Megalith computes them, by name, float32. An import checks
        them. A family with such files overrides this method.
        """
        return {}

    def groups(self, model: ModelConfig) -> list[Group]:
        """Return the model's tensors, in its order, each with the Hugging Face tensors from which it is assembled."""
        groups, table = [], self.table(model)
        for name, tensor in build_on_meta(model).state_dict().items():
            layer = LAYER.match(name)
            row = name if name in table else LAYER.sub(r"\1.{layer}.", name)
            if row not in table:
                raise ConfigError(
                    f"{self.architecture} has no tensor for {name}; add a row for {row} to the tensors of the family, "
                    "or correct the setting that gives the model this tensor"
                )
            shape = tuple(tensor.shape)
            if name in VOCABULARY:
                shape = (model.vocab_size, *shape[1:])
            groups.append(Group(name, shape, table[row], layer and layer[2], model))
        return groups


def build_on_meta(model: ModelConfig, lora: LoraConfig | None = None) -> Transformer:
    """Return the model on the meta device, with adapters if `lora` has a rank. Raises ConfigError for invalid sizes."""
    try:
        built = make_model(model, device="meta")
        if lora is not None and lora.rank is not None:
            add_adapters(built, lora)
        return built
    except (RuntimeError, OverflowError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"a model of these sizes cannot be built ({reason}); correct the sizes in config.json"
        ) from None


@dataclass(frozen=True)
class Group:
    """One Megalith tensor, without vocabulary padding, and the Hugging Face tensors that it is assembled from."""

    name: str
    shape: tuple[int, ...]
    rule: Rule
    layer: str | None
    model: ModelConfig

    @property
    def experts(self) -> int | None:
        """Return the number of experts if Hugging Face stores one tensor per expert, otherwise None."""
        return self.shape[0] if "{expert}" in self.rule.names[0] else None

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield offset and shape of each box of the tensor that is stored separately: the whole tensor, or one
        expert.
        """
        rows = self.shape[0] if self.experts is None else 1
        for first in range(0, self.shape[0], rows):
            yield (first, *(0,) * (len(self.shape) - 1)), (rows, *self.shape[1:])

    @cached_property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of the tensor, or of one expert's slice."""
        return self.shape if self.experts is None and not self.rule.stacked else self.shape[1:]

    @cached_property
    def runs(self) -> list[RowRun]:
        """Blocks of rows to copy to or from Hugging Face tensors, for the tensor or one expert's slice."""
        return self.rule.runs(self.model, self.matrix_shape[0])

    def names(self, expert: int | None = None) -> list[str]:
        """Return the Hugging Face names in the rule's order; if experts are stored separately, the names of
        `expert`.
        """
        placeholders = {"layer": self.layer, "expert": expert, "last": self.model.depth(self.name) - 1}
        if self.layer is not None:
            first = 0 if self.name.startswith("encoder.") else self.model.encoder_layers
            placeholders["before"] = int(self.layer) - first - 1
            placeholders["decoder"] = int(self.layer) - self.model.encoder_layers
        try:
            names = [name.format(**placeholders) for name in self.rule.names]
        except KeyError as error:
            supported = " or ".join(f"{{{name}}}" for name in placeholders)
            raise ConfigError(
                f"the row of {self.name} has the placeholder {{{error.args[0]}}}; use {supported}"
            ) from None
        if self.layer == "0" and any("{before}" in name for name in self.rule.names):
            raise ConfigError(
                f"the row of {self.name} has the placeholder {{before}}, but no layer is before layer 0; add a row for "
                f"{self.name}"
            )
        return names

    @cached_property
    def sources(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face tensors and their shapes."""
        columns, stack = self.matrix_shape[1:], self.shape[:1] if self.rule.stacked else ()
        shapes = []
        for source in range(len(self.rule.names)):
            rows = sum(run.count for run in self.runs if run.source == source)
            shape = (*stack, *columns, rows) if self.rule.transposed else (*stack, rows, *columns)
            if self.rule.flat:
                shape = (shape[0] * shape[1], *shape[2:])
            before, after = self.rule.ones or (0, 0)
            shapes.append(((1,) * before) + shape + ((1,) * after))
        experts = [None] if self.experts is None else range(self.experts)
        return {name: shape for expert in experts for name, shape in zip(self.names(expert), shapes)}
