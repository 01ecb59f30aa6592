"""Low-rank adapters: the adapted matrices, and the adapters' sizes.

A site is a matrix of a layer, named by its path in the layer, such as `mlp.linear_fc1`. Some sites fuse several
matrices that other libraries keep separate. Each of these sub-matrices has an adapter of its own, or the whole site has
one (WHOLE).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from megalith.config.base import Decides, RequiresSetting, Section
from megalith.config.dense import Probability
from megalith.config.hybrid import DELTA_RULES
from megalith.config.model import ModelConfig
from megalith.errors import ConfigError, nearest_of

WORD_EMBEDDINGS, OUTPUT_LAYER = "embedding.word_embeddings", "output_layer"
WHOLE = "whole"  # one adapter for all rows of a matrix
QKV, FC1, FC2 = "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"
PROJ, SHARED = "self_attention.linear_proj", "mlp.shared_experts."
EXPERTS = "mlp.experts."  # start of the sites with one matrix per expert
LATENT_QUERIES = (
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
)
LATENT = (*LATENT_QUERIES, "self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj")
DELTA_NET = ("self_attention.linear_in", "self_attention.linear_gates")
OUT = "self_attention.linear_out"  # of every mixer that is not attention
MAMBA, SHORT_CONV = "self_attention.linear_zxbcdt", "self_attention.linear_bcx"
PARALLEL_MAMBA = ("mamba.linear_zxbcdt", "mamba.linear_out")

# Sites in a layer's order, each with the parts of its rows that can have separate adapters.
SITES: dict[str, tuple[str, ...]] = {
    QKV: ("q", "k", "v"),
    **dict.fromkeys(LATENT, ()),
    **dict.fromkeys((*DELTA_NET, MAMBA, SHORT_CONV, OUT), ()),
    PROJ: (),
    **dict.fromkeys(PARALLEL_MAMBA, ()),
    "cross_attention.linear_q": (),
    "cross_attention.linear_kv": ("k", "v"),
    "cross_attention.linear_proj": (),
    FC1: ("gate", "up"),
    FC2: (),
    SHARED + "linear_fc1": ("gate", "up"),
    SHARED + "linear_fc2": (),
    EXPERTS + "linear_fc1": (),
    EXPERTS + "linear_fc2": (),
}

Parts = tuple[str, ...]
ALL: Parts = ()  # every part; WHOLE if the matrix has none

# Target → sites, each with the parts of its rows. The sites that the model lacks are ignored.
TARGETS: dict[str, dict[str, Parts]] = {
    # Megatron's names
    "linear_qkv": {QKV: ALL} | dict.fromkeys(LATENT, ALL),
    "linear_proj": {PROJ: ALL},
    "linear_in": {DELTA_NET[0]: ALL},
    "linear_gates": {DELTA_NET[1]: ALL},
    "linear_zxbcdt": {MAMBA: ALL, PARALLEL_MAMBA[0]: ALL},  # Mamba-2
    "linear_bcx": {SHORT_CONV: ALL},
    "linear_out": {OUT: ALL, PARALLEL_MAMBA[1]: ALL},
    "linear_fc1": {FC1: ALL, SHARED + "linear_fc1": ALL, EXPERTS + "linear_fc1": ALL},
    "linear_fc2": {FC2: ALL, SHARED + "linear_fc2": ALL, EXPERTS + "linear_fc2": ALL},
    "cross_attention": {site: ALL for site in SITES if site.startswith("cross_attention.")},
    "experts": {EXPERTS + "linear_fc1": ALL, EXPERTS + "linear_fc2": ALL},
    "shared_experts": {SHARED + "linear_fc1": ALL, SHARED + "linear_fc2": ALL},
    # transformers' names
    "q_proj": {QKV: ("q",), LATENT[0]: ALL},
    "k_proj": {QKV: ("k",)},
    "v_proj": {QKV: ("v",)},
    "o_proj": {PROJ: ALL},
    "gate_proj": {FC1: ("gate",), SHARED + "linear_fc1": ("gate",)},
    "up_proj": {FC1: ("up",), SHARED + "linear_fc1": ("up",)},
    "down_proj": {FC2: ALL, SHARED + "linear_fc2": ALL},
    "qkv_proj": {QKV: (WHOLE,)},  # Phi-3
    "gate_up_proj": {FC1: (WHOLE,), SHARED + "linear_fc1": (WHOLE,)},
    "c_attn": {QKV: (WHOLE,)},  # GPT-2
    "c_fc": {FC1: (WHOLE,)},
    "c_proj": {PROJ: ALL, FC2: ALL},
    "q_a_proj": {LATENT[1]: ALL},  # DeepSeek
    "q_b_proj": {LATENT[2]: ALL},
    "kv_a_proj_with_mqa": {LATENT[3]: ALL},
    "kv_b_proj": {LATENT[4]: ALL},
    "in_proj_qkvz": {DELTA_NET[0]: ALL},  # Qwen3-Next
    "in_proj_ba": {DELTA_NET[1]: ALL},
    "in_proj": {MAMBA: ALL, PARALLEL_MAMBA[0]: ALL, SHORT_CONV: ALL},
    "out_proj": {OUT: ALL, PARALLEL_MAMBA[1]: ALL},
    "experts.gate_up_proj": {EXPERTS + "linear_fc1": ALL},  # PEFT's target_parameters
    "experts.down_proj": {EXPERTS + "linear_fc2": ALL},
    # sites, and parts of sites
    **{site: {site: ALL} for site in SITES},
    **{f"{site}.{part}": {site: (part,)} for site, parts in SITES.items() for part in (*parts, WHOLE)},
}  # fmt: skip
SHORT_NAMES = tuple(name for name in TARGETS if name not in SITES and name.rpartition(".")[0] not in SITES)
ROUTERS = ("router", "gate", "mlp.router", "mlp.gate", "shared_expert_gate", "mlp.shared_expert_gate")


TokenId = Annotated[int, Field(ge=0)]


class LoraConfig(Section):
    """Low-rank adapters (LoRA), trained on frozen weights."""

    requires: ClassVar[RequiresSetting] = RequiresSetting("rank", strict=True)

    rank: Annotated[PositiveInt | None, Decides.FUNCTION] = None
    """Rank of the adapters. Default: no adapters; all weights are trained."""

    alpha: Annotated[PositiveFloat, Decides.FUNCTION] = 32.0
    """Numerator of the adapters' scale, alpha / rank."""

    use_rslora: Annotated[bool, Decides.FUNCTION] = False
    """Scale adapters by alpha / √rank (rsLoRA, Kalajdzievski 2023)."""

    dropout: Annotated[Probability, Decides.UPDATES] = 0.0
    """Dropout probability on the input of adapters."""

    targets: list[str] = Field(
        default=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], min_length=1
    )
    """Linear layers with adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2 (of MLPs, experts and shared
    experts), or transformers names such as q_proj and experts.gate_up_proj. In Mamba-2 linear_zxbcdt and linear_out, in
    short convolutions linear_bcx and linear_out, in delta nets linear_in, linear_gates and linear_out."""

    rank_pattern: Annotated[dict[str, PositiveInt], Decides.FUNCTION] = Field(default={})
    """Ranks of some adapters, by name: a regular expression that matches the end of a name such as
    model.layers.0.self_attn.q_proj, starting at a dot, as in PEFT. The first match counts."""

    alpha_pattern: Annotated[dict[str, PositiveFloat], Decides.FUNCTION] = Field(default={})
    """Alpha of some adapters, by name as in rank_pattern."""

    layers_to_transform: Annotated[list[Annotated[int, Field(ge=0)]] | None, Decides.FUNCTION] = Field(
        default=None, min_length=1
    )
    """Indices of the layers with adapters, from 0 in each stack. Default: all."""

    use_dora: Annotated[bool, Decides.FUNCTION] = False
    """Also train the magnitude of each row of the adapted matrices, separately from its direction (DoRA, Liu et al.
    2024)."""

    init_lora_weights: Annotated[str, Decides.FUNCTION] = "default"
    """Initial A and B, in PEFT's words. default: A random, B 0. pissa: the largest singular values of the matrix and
    their vectors (Meng et al. 2024); pissa_niter_N approximates them with N iterations. olora: the first columns of its
    QR decomposition (Büyükakyüz 2024). The frozen part is then the matrix minus B · A. loftq: a low-rank
    approximation of the quantization error of quantize_base (Li et al. 2024)."""

    loftq_iter: Annotated[PositiveInt, Decides.FUNCTION] = 1
    """Iterations of LoftQ: each one quantizes the matrix minus the last B · A, and then fits B · A to the quantization
    error."""

    modules_to_save: Annotated[list[str] | None, Decides.FUNCTION] = Field(default=None, min_length=1)
    """Modules without adapters that are trained in full: embeddings, output matrix, norms, routers. Names are
    transformers', such as embed_tokens, lm_head and norm, which match the end of a module's name, as in PEFT, or
    Megalith's, such as word_embeddings."""

    trainable_token_indices: Annotated[
        list[TokenId] | dict[str, Annotated[list[TokenId], Field(min_length=1)]] | None, Decides.FUNCTION
    ] = Field(default=None, min_length=1)
    """Tokens whose rows of the embedding are trained: token ids, or token ids by matrix, such as
    {embed_tokens: [5, 9], lm_head: [9]}, as in PEFT. A tied output matrix uses the same rows."""

    loraplus_lr_ratio: Annotated[PositiveFloat | None, Decides.UPDATES] = None
    """Learning rate of B relative to A's, which is optim.lr (LoRA+, Hayou et al. 2024). Default: 1."""

    quantize_base: Annotated[Literal["none", "int8", "fp8", "nf4", "mxfp4"], Decides.FUNCTION] = "none"
    """Quantize the frozen linear layers: nf4 as bitsandbytes does with double quantization (QLoRA, Dettmers et al.
    2023), int8 by row, fp8 in blocks of 128 × 128, mxfp4. Each matmul decodes them to the compute dtype."""

    load: str | None = None
    """Folder with adapters in PEFT's format to start from. Sets rank, alpha, targets and the settings of
    individual modules."""

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _check_patterns(cls, patterns: dict[str, Any]) -> dict[str, Any]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return patterns

    @field_validator("trainable_token_indices")
    @classmethod
    def _check_tokens(cls, tokens: Any) -> Any:
        for each in tokens.values() if isinstance(tokens, dict) else [tokens or ()]:
            if twice := sorted({token for token in each if each.count(token) > 1}):
                raise ValueError(f"token {twice[0]} is listed twice; list each token once")
        return tokens

    @field_validator("init_lora_weights", mode="before")
    @classmethod
    def _check_initialization(cls, value: Any) -> Any:
        if value is True:  # PEFT's word for the default
            return "default"
        if value in ("default", "pissa", "olora", "loftq") or re.fullmatch(
            r"pissa_niter_[1-9]\d*", str(value)
        ):
            return value
        raise ValueError(f"{value!r} is not supported; choose default, pissa, pissa_niter_N, olora or loftq")

    @property
    def decomposes_base(self) -> bool:
        """True if A and B begin as factors that are subtracted from the matrix (PiSSA, OLoRA)."""
        return self.rank is not None and self.init_lora_weights not in ("default", "loftq")

    @property
    def begins_with_loftq(self) -> bool:
        """True if A and B begin as an approximation of the base's quantization error (LoftQ)."""
        return self.rank is not None and self.init_lora_weights == "loftq"

    @property
    def keeps_initial_factors(self) -> bool:
        """True if the frozen part of the model depends on factors that adapters keep: of PiSSA and OLoRA, or of LoftQ
        with several iterations."""
        return self.decomposes_base or (self.begins_with_loftq and self.loftq_iter > 1)

    @property
    def has_quantized_base(self) -> bool:
        """True if a run quantizes its frozen linear layers."""
        return self.rank is not None and self.quantize_base != "none"

    def rank_of(self, layer: str, site: str, part: str) -> int:
        """Return the rank of an adapter.

        Args:
            layer: name of the layer in the model, such as layers.0.
            site: path of the matrix in the layer.
            part: sub-matrix of the site, or WHOLE.
        """
        return _first_match(self.rank_pattern, adapter_names(layer, site, part), self.rank)

    def alpha_of(self, layer: str, site: str, part: str) -> float:
        """Return alpha of an adapter. See `rank_of` for the arguments."""
        return _first_match(self.alpha_pattern, adapter_names(layer, site, part), self.alpha)

    def scaling_of(self, layer: str, site: str, part: str) -> float:
        """Return the factor of an adapter's output. See `rank_of` for the arguments."""
        rank, alpha = self.rank_of(layer, site, part), self.alpha_of(layer, site, part)
        return alpha / rank**0.5 if self.use_rslora else alpha / rank

    def tokens_by_matrix(self) -> dict[str, list[int]]:
        """Return `trainable_token_indices` keyed by matrix name."""
        tokens = self.trainable_token_indices or {}
        return tokens if isinstance(tokens, dict) else {WORD_EMBEDDINGS: tokens}

    def adapts_layer(self, number: int, model: ModelConfig) -> bool:
        """Return True if layer `number` of the model has adapters. A decoder's layers count from 0 after an encoder."""
        if self.layers_to_transform is None:
            return True
        return index_in_stack(number, model) in self.layers_to_transform

    def parts(self, model: ModelConfig) -> dict[str, Parts]:
        """Return, for each site with adapters, the adapted sub-matrices, in the order of SITES.

        Raises ConfigError for a target that is unknown or that the model lacks.
        """
        targeted: dict[str, set[str]] = {}
        available = model_sites(model)
        for target in self.targets:
            sites = {site: parts for site, parts in _sites_of(target).items() if site in available}
            if not model.gated and any({"gate", "up"} & set(parts) for parts in sites.values()):
                raise ConfigError(
                    f"lora.targets has {target}, but the MLP has no gate; use linear_fc1, or leave {target} out"
                )
            if not sites:
                names = [name for name in SHORT_NAMES if TARGETS[name].keys() & available.keys()]
                raise ConfigError(
                    f"lora.targets has {target}, which this model does not have; use some of {', '.join(names)}"
                )
            for site, parts in sites.items():
                targeted.setdefault(site, set()).update(parts or available[site])
        for site, parts in targeted.items():
            if WHOLE in parts and len(parts) > 1:
                raise ConfigError(
                    f"lora.targets {', '.join(self.targets)} names both the fused matrix "
                    f"{site.rpartition('.')[2]} and parts of it; list either the fused matrix or "
                    "its parts"
                )
        return {
            site: tuple(part for part in (WHOLE, *order) if part in targeted[site])
            for site, order in SITES.items()
            if site in targeted
        }


def model_sites(model: ModelConfig) -> dict[str, Parts]:
    """Return the sites that occur in the model's layers, each with all its sub-matrices, or WHOLE if it has none."""
    layers = range(model.num_layers)
    experts = {number for number in model.expert_layers if number < model.num_layers}
    present: set[str] = set()
    if model.linear_attention_layers:
        of_mixer = dict.fromkeys(DELTA_RULES, DELTA_NET) | {"mamba2": (MAMBA,), "short_conv": (SHORT_CONV,)}
        sites = [site for mixer in model.recurrent_mixers for site in (*of_mixer[mixer], OUT)]
        present |= set(PARALLEL_MAMBA if model.parallel_mixers else sites)
    if any(map(model.has_attention, layers)):
        queries = LATENT_QUERIES[:1] if model.q_lora_rank is None else LATENT_QUERIES[1:]
        present |= {PROJ, *queries, *LATENT[3:]} if model.multi_latent_attention else {PROJ, QKV}
    if model.encoder_layers:
        present |= TARGETS["cross_attention"].keys()
    if any(model.has_mlp(number) and number not in experts for number in layers):
        present |= {FC1, FC2}
    if experts:
        present |= TARGETS["experts"].keys()
    if experts and model.moe_shared_expert_intermediate_size:
        present |= TARGETS["shared_experts"].keys()
    whole = () if model.gated else ("gate", "up")
    return {
        site: (WHOLE,) if set(parts) <= set(whole) else parts
        for site, parts in SITES.items()
        if site in present
    }


def target_name(site: str, part: str, model: ModelConfig) -> str:
    """Return the shortest target that names only this sub-matrix of this site."""
    present = model_sites(model)
    for name in SHORT_NAMES:
        meant = {each: parts or present[each] for each, parts in TARGETS[name].items() if each in present}
        if meant == {site: (part,)}:
            return name
    return site if present[site] == (part,) else f"{site}.{part}"


def adapter_names(layer: str, site: str, part: str) -> list[str]:
    """Return the names of an adapter that patterns may match: Megalith's and transformers' names."""
    before = f"model.{layer}.{site.rpartition('.')[0]}".replace("self_attention", "self_attn")
    names = [f"{layer}.{site}.{part}", f"{layer}.{site}"]
    for target in SHORT_NAMES:
        parts = TARGETS[target].get(site)
        if parts is not None and part in (parts or (WHOLE,)):
            names.append(f"{before}.{target.rpartition('.')[2]}")
    return names


def index_in_stack(number: int, model: ModelConfig) -> int:
    """Return a layer's index in its stack. In the model, the decoder's layers follow the encoder's."""
    return number - model.encoder_layers if number >= model.encoder_layers else number


def _sites_of(target: str) -> Mapping[str, Parts]:
    name = (
        target.removeprefix("mlp.") if target.startswith("mlp.experts.") and target not in TARGETS else target
    )
    if name in ROUTERS:
        raise ConfigError(
            f"lora.targets has {target}, but routers cannot have adapters: changed scores would "
            "send tokens to experts that were not trained on them; leave {target} out"
        )
    if name not in TARGETS:
        near = nearest_of(target, SHORT_NAMES)
        raise ConfigError(f"lora.targets has {target!r}, which is not a known target{near}")
    return TARGETS[name]


def _first_match(patterns: Mapping[str, Any], names: list[str], default: Any) -> Any:
    matching: Iterator[Any] = (
        value
        for pattern, value in patterns.items()
        if any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in names)
    )
    return next(matching, default)
