"""Every key of a config.json with other values: transformers' function of it against ours.

A value that gives transformers' model another function has to give ours the same function, or be refused.
"""

import contextlib
import copy
import json
import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from bart_reference import CLASSES as BART_KINDS
from bart_reference import reference as bart_reference
from models.reference import CASES, random_parameters
from torch import Tensor, nn

from megalith.bridge.families import family_of
from megalith.bridge.folder import SourceFolder
from megalith.bridge.load import load_source
from megalith.bridge.match import match
from megalith.bridge.model_differences import conversion_notes
from megalith.config.rules.model_rules import check_model
from megalith.errors import ConfigError, MegalithError
from megalith.models.model_types import make_model

BERT = dict(vocab_size=151, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
            max_position_embeddings=64)  # fmt: skip
T5 = dict(vocab_size=151, d_model=64, d_kv=12, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4,
          relative_attention_num_buckets=8, relative_attention_max_distance=20, decoder_start_token_id=0)  # fmt: skip
ENCODERS: dict[str, Callable[[], nn.Module]] = {
    **{
        kind: lambda kind=kind: _encoder(
            kind, (transformers.MegatronBertConfig if "Megatron" in kind else transformers.BertConfig)(**BERT)
        )
        for kind in ("BertForPreTraining", "BertForMaskedLM", "BertModel", "MegatronBertForMaskedLM")
    },
    **{
        kind: lambda kind=kind: _encoder(
            f"{kind}ForMaskedLM", getattr(transformers, f"{kind}Config")(**BERT, type_vocab_size=2)
        )
        for kind in ("Roberta", "XLMRobertaXL", "RobertaPreLayerNorm", "Ernie")
    },
    "distilbert": lambda: _encoder(
        "DistilBertForMaskedLM",
        transformers.DistilBertConfig(
            **{key: value for key, value in BERT.items() if key != "intermediate_size"}, hidden_dim=96
        ),
    ),
    "bert-generation, encoder": lambda: _encoder(
        "BertGenerationEncoder", transformers.BertGenerationConfig(**BERT)
    ),
    "modernbert": lambda: _encoder(
        "ModernBertForMaskedLM",
        transformers.ModernBertConfig(
            **BERT,
            local_attention=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
    ),
    "emu3": lambda: _encoder(
        "Emu3ForCausalLM", transformers.Emu3TextConfig(**BERT, num_key_value_heads=2, pad_token_id=0)
    ),
    "t5": lambda: _encoder(
        "T5ForConditionalGeneration", transformers.T5Config(**T5, feed_forward_proj="relu")
    ),
    "mt5": lambda: _encoder("MT5ForConditionalGeneration", transformers.MT5Config(**T5)),
    "umt5": lambda: _encoder("UMT5ForConditionalGeneration", transformers.UMT5Config(**T5)),
    **{
        kind: lambda kind=kind: bart_reference(kind, std=STD, decoder_layers=2, dropout=0.1)
        for kind in BART_KINDS
    },
}
MODELS = [*CASES, *ENCODERS]
# Keys that older versions of transformers wrote, or that stand in the classes of other families.
OTHERS = (
    "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct", "rotary_emb_base",
    "sliding_window_pattern", "original_max_position_embeddings", "per_layer_config", "hidden_activation",
    "attention_chunk_size", "is_causal", "use_bidirectional_attention", "tie_encoder_decoder", "pruned_heads",
    "residual_in_fp32", "tie_last_hidden_states", "position_embedding_type", "num_labels",
)  # fmt: skip
ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu", "quick_gelu")
NAMES = {
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "position_embedding_type": ("absolute", "relative_key"),
    "feed_forward_proj": ("relu", "gated-gelu", "gated-silu"),
}  # fmt: skip
ROPES: tuple[Any, ...] = (
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_theta": 77.0},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0, "rope_theta": 50.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.3},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0, "strange": 7},
    {"full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 99.0},
     "sliding_attention": {"rope_type": "default", "rope_theta": 55.0}},
)  # fmt: skip
PER_LAYER = ({"0": {"rms_norm_eps": 0.5}}, {"1": {"sliding_window": 2}}, {"0": {"hidden_act": "relu"}})
NOT_THE_MODEL = (  # chunks of an MLP draw dropout in another order
    "architectures", "model_type", "dtype", "torch_dtype", "chunk_size_feed_forward",
)  # fmt: skip
STD = 0.25  # of the weights: attention has to depend on what it sees
SAME = 2e-4  # of the largest logit: more than rounding, less than another function


def values(key: str, now: Any) -> Iterator[Any]:
    """Other values for a key that has the value `now`."""
    if key in ("rope_parameters", "rope_scaling"):
        yield from ROPES
    elif key == "per_layer_config":
        yield from PER_LAYER
    elif isinstance(now, bool):
        yield not now
    elif isinstance(now, int):
        yield from (now + 1, now // 2, 0, 1)
    elif isinstance(now, float):
        yield from (now * 2 + 0.25, 0.0, 1.0, 3.0)
    elif isinstance(now, str):
        yield from NAMES.get(key, ACTIVATIONS)
    elif isinstance(now, list):
        yield from (now[::-1], now[:1] * len(now), [])
    else:
        yield from (True, False, 2, 0.5, 3.0, "gelu", [0, 1, 0], {"0": [0, 1]})
    if now is not None:
        yield None


class Fuzzed:
    """A tiny model of transformers in a folder, and what of it depends on its config.json."""

    def __init__(self, name: str, folder: Path):
        reference = _decoder(name) if name in CASES else ENCODERS[name]()
        reference.save_pretrained(folder)
        self.kind, self.folder = type(reference), folder
        self.config_class = type(reference.config)  # several share a class of models
        self.tree = json.loads((folder / "config.json").read_text())
        self.state = copy.deepcopy(reference.state_dict())
        self.source = SourceFolder(folder)
        self.tensors = dict(self.source.tensors)
        self._logits: dict[str, Tensor] = {}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Every key that transformers reads of such a configuration, with its value here."""
        with _read_keys() as read:
            config = self._config(self.tree)
            self._run(self._build(self.tree))
        tree = json.loads(config.to_json_string(use_diff=False)) | self.tree
        keys = [
            *(key for key in tree if key in read),
            *OTHERS,
            *config.attribute_map,
            *sorted(read & _all_keys()),
        ]
        return {key: tree.get(key) for key in keys if key not in NOT_THE_MODEL}

    def faults(self, keys: Collection[str] | None = None) -> list[str]:
        """The values of keys, by default of all, that change transformers' function otherwise than ours."""
        base, (ours, model) = self.theirs(self.tree), self.ours(self.tree)
        assert base is not None and _close(ours, base[0]), "the models differ before any change"
        found = []
        for key, value in self.changes():
            if keys is not None and key not in keys:
                continue
            tree = self.tree | {key: value}
            try:
                logits, other = self.ours(tree)
            except MegalithError:
                continue
            theirs = self.theirs(tree)
            if theirs is not None and not _close(logits, theirs[0]):
                found.append(f"{key} {value!r}: logits differ by {_difference(logits, theirs[0]):.1e}")
            elif theirs is not None and other == model and not _close(theirs[1], base[1]):
                found.append(f"{key} {value!r}: training differs")
        return found

    def changes(self) -> Iterator[tuple[str, Any]]:
        """Each key with each of its other values."""
        for key, now in self.defaults.items():
            for value in values(key, now):
                yield key, value

    def ours(self, tree: dict[str, Any]) -> tuple[Tensor, str]:
        """Our logits, and our configuration as text, with what was warned of. Raises MegalithError."""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            family = family_of(tree, "the test")
            config = family.read_config(copy.deepcopy(tree))
            check_model(config)
        if notes := conversion_notes(config):
            raise ConfigError(*notes)
        text = repr(vars(config))
        if text not in self._logits:
            self.source.config, self.source.tensors = tree, dict(self.tensors)
            fit = match(self.source, family, config)
            model = make_model(fit.groups[0].model, device="cpu").eval()
            load_source(fit, model, 0)
            self._logits[text] = _our_logits(model)
        return self._logits[text], text + "".join(str(each.message) for each in warned)

    def theirs(self, tree: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """transformers' logits, in evaluation and in training; None where it runs no such model with these weights."""
        try:
            model = self._build(tree)
            model.load_state_dict(self.state)
            evaluated = self._run(model)
            torch.manual_seed(7)
            return evaluated, self._run(model.train())
        except Exception:
            return None

    def _config(self, tree: dict[str, Any]) -> transformers.PreTrainedConfig:
        decoded = transformers.PreTrainedConfig._decode_special_floats(
            copy.deepcopy(tree)
        )  # infinite numbers
        return self.config_class(**decoded)

    def _build(self, tree: dict[str, Any]) -> nn.Module:
        config = self._config(tree)
        config.dtype = torch.float32
        return self.kind._from_config(config, attn_implementation="eager").eval()

    @staticmethod
    @torch.no_grad()
    def _run(model: nn.Module) -> Tensor:
        more = {"decoder_input_ids": _ids()} if model.config.is_encoder_decoder else {}
        output = model(_ids(), **more, return_dict=True)
        return next(
            output[name] for name in ("logits", "prediction_logits", "last_hidden_state") if name in output
        )


@torch.no_grad()
def _our_logits(model: nn.Module) -> Tensor:
    config = model.config
    if config.encoder_layers:
        return model(_ids(), encoder_input_ids=_ids())
    if config.model_type == "bert" and not config.add_lm_head:
        return model.encodings(_ids()).hidden
    return model(_ids())


def _decoder(name: str) -> nn.Module:
    config = CASES[name][0]()
    return random_parameters(
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"), STD
    )


def _encoder(kind: str, config: transformers.PreTrainedConfig) -> nn.Module:
    return random_parameters(
        getattr(transformers, kind)._from_config(config, attn_implementation="eager"), STD
    )


def _ids() -> Tensor:
    """Tokens without any family's padding."""
    return torch.randint(2, 151, (2, 48), generator=torch.Generator().manual_seed(3))


def _difference(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is other
    return bool(one.isfinite().all() and _difference(one, other) <= SAME) or bool(other.isnan().any())


def _all_keys() -> set[str]:
    """The keys of every class of a family."""
    classes = {type(make()) for make, _ in CASES.values()}
    return {key for kind in classes for key in json.loads(kind().to_json_string(use_diff=False))}


@contextlib.contextmanager
def _read_keys() -> Iterator[set[str]]:
    """The names of the attributes that are read of configurations in the meantime."""
    base, read = transformers.PreTrainedConfig, set()
    original = base.__getattribute__

    def recording(self: Any, name: str) -> Any:
        read.add(name)
        return original(self, name)

    base.__getattribute__ = recording
    try:
        yield read
    finally:
        base.__getattribute__ = original


logging.getLogger("transformers").setLevel(logging.ERROR)
