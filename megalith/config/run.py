"""RunConfig: all settings of a run, from YAML, dotted overrides, presets and Megatron's spellings."""

from __future__ import annotations

import contextlib
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, PrivateAttr, ValidationError

from megalith.config.aliases import ALIASES, Rename, apply_aliases, remove_overridden
from megalith.config.base import Section, as_config_error
from megalith.config.data import DataConfig
from megalith.config.distillation import DistillConfig
from megalith.config.fine_tuning import ChatConfig, SftConfig
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import OptimConfig, ParamGroup
from megalith.config.other_systems import extension_error, format_error, hint_of_other_name, override_hint
from megalith.config.output import CheckpointConfig, LogConfig, RuntimeConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.preferences import DpoConfig, KtoConfig, RewardConfig
from megalith.config.presets import PRESETS
from megalith.config.rl import RlConfig
from megalith.config.train import TrainConfig
from megalith.config.yaml_loader import parse_yaml
from megalith.errors import ConfigError, did_you_mean, nearest_of

Tree = dict[str, dict[str, Any]]


class RunConfig(Section):
    """Configuration of one run, immutable.

    Each section of a run file is an attribute, such as `config.model` and `config.optim`, whose settings are in the
    configuration reference.
    """

    model: ModelConfig = Field(default_factory=ModelConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    dpo: DpoConfig = Field(default_factory=DpoConfig)
    kto: KtoConfig = Field(default_factory=KtoConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    rl: RlConfig = Field(default_factory=RlConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)

    _notes: tuple[str, ...] = PrivateAttr(())

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on accepted spellings that have no effect, collected while loading."""
        return self._notes

    @property
    def chat(self) -> ChatConfig | None:
        """Section of the fine-tuning method on chat data, or None if there is none."""
        return next((section for section in self.chat_sections if section.enabled), None)

    @property
    def chat_sections(self) -> tuple[ChatConfig, ...]:
        """Sections of the fine-tuning methods on chat data."""
        return self.sft, self.dpo, self.kto, self.reward

    @property
    def rows_per_micro_batch(self) -> int:
        """Rows of data.seq_length tokens per micro-batch; a preference pair is two."""
        rows = 2 if self.dpo.enabled else self.reward.rows_per_sample if self.reward.enabled else 1
        return self.train.micro_batch_size * rows

    @property
    def tokens_per_pass(self) -> int:
        """Maximum number of tokens of a context-parallel rank per forward pass."""
        limit = self.parallel.max_seqlen_per_dp_cp_rank if self.parallel.dynamic_context_parallel else None
        static = self.rows_per_micro_batch * self.data.seq_length // self.parallel.context_parallel_size
        return static if limit is None else limit

    @property
    def separates_documents(self) -> bool:
        """True if attention stays within documents of a row."""
        packs = self.rl.packing and self.rl.prompts_or_rollouts is not None
        resets = self.data.reset_attention_mask or self.data.seq_length_schedule is not None
        return resets or self.chat is not None or packs

    @property
    def is_batch_invariant(self) -> bool:
        """True if the forward pass uses operators whose bits do not depend on the batch."""
        return self.train.batch_invariant or (self.rl.exact and self.rl.prompts is not None)

    @property
    def has_reference_model(self) -> bool:
        """True if a reference model is used. With adapters, the reference is the model without adapters."""
        has_kl = self.rl.prompts_or_rollouts is not None and self.rl.beta > 0
        tunes = (self.dpo.enabled and self.dpo.needs_reference) or self.kto.enabled
        return (tunes or has_kl) and self.lora.rank is None

    @property
    def adapter_optim(self) -> OptimConfig:
        """Settings of the optimizer, with LoRA+'s learning rate for the adapters' B. Groups of optim.param_groups come
        first.
        """
        if self.lora.rank is None or self.lora.loraplus_lr_ratio is None:
            return self.optim
        group = ParamGroup(pattern=r"re:\.lora_B\.", lr_mult=self.lora.loraplus_lr_ratio)
        return self.optim.model_copy(update={"param_groups": [*self.optim.param_groups, group]})

    @property
    def run_folder(self) -> str:
        """Parent of the run's `checkpoints`: the output folder or checkpoint.save's URL."""
        return self.checkpoint.save or self.train.output_dir

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
        """Load a run file and apply overrides.

        Args:
            path: YAML file; None for defaults.
            overrides: `["--section.key", "value", …]` or `["section.key=value", …]`.

        Raises:
            ConfigError: unreadable file, unknown key, wrong type or contradicting alias.
        """
        if path is not None and not isinstance(path, str | Path):
            raise ConfigError(
                f"RunConfig.load takes the path of a run file, not {_shown(path)}; RunConfig.from_tree takes a dict"
            )
        tree = read_yaml(path) if path else _empty_tree()
        parsed = parse_overrides(overrides)
        for section, key, value in parsed:
            remove_overridden(tree, f"{section}.{key}", value)
        for section, key, value in parsed:
            tree[section][key] = value
        return cls.from_tree(tree)

    @classmethod
    def from_tree(cls, tree: Tree) -> RunConfig:
        """Build the configuration from plain dicts: section → key → value. Raises ConfigError."""
        if not isinstance(tree, Mapping):
            raise ConfigError(
                f"RunConfig.from_tree takes a dict of sections, not {_shown(tree)}; RunConfig.load reads a file"
            )
        tree = _sections_of(tree)
        _refuse_unknown(tree)
        preset = _preset(tree["model"].get("preset"))
        notes = apply_aliases(tree, preset)
        tree["model"] = {**preset, **tree["model"]}
        if tree["reward"].get("enabled") in (True, "true", "True"):
            tree["model"].setdefault("score_head", True)
        return cls._validated(tree, notes)

    @classmethod
    def _validated(cls, tree: Mapping[str, Any], notes: Iterable[str]) -> RunConfig:
        try:
            config = cls.model_validate(tree)
        except ValidationError as error:
            raise as_config_error(error) from None
        config._notes = tuple(notes)
        return config

    def with_notes(self, notes: Iterable[str]) -> RunConfig:
        """Return the configuration with additional notes for the user."""
        config = self.model_copy()
        config._notes = (*self._notes, *notes)
        return config

    def with_settings(self, settings: Mapping[str, Any]) -> RunConfig:
        """Return a copy with other values, "section.field" → value, validated as in loading. Raises ConfigError."""
        tree = _sections_of(_set_fields(self))
        for path, value in settings.items():
            section, _, field = path.partition(".")
            remove_overridden(tree, path, value)
            tree.setdefault(section, {})[field] = value
        tree = _sections_of(tree)
        _refuse_unknown(tree)
        return self._validated(tree, (*self._notes, *apply_aliases(tree, {})))

    def with_unvalidated(self, settings: Mapping[str, Any]) -> RunConfig:
        """Return a copy with other values without validation, for searches that try thousands."""
        sections: dict[str, dict[str, Any]] = {}
        for path, value in settings.items():
            section, _, field = path.partition(".")
            sections.setdefault(section, {})[field] = value
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        )

    def to_tree(self) -> Tree:
        """Return every field with its value, as plain dicts."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML. Loading it gives the same run."""
        # libyaml writes the same text in a fifth of the time
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        return yaml.dump(self.to_tree(), Dumper=dumper, sort_keys=False, allow_unicode=True)


def require_run_config(config: Any, function: str) -> None:
    """Raise ConfigError if the argument is not a RunConfig, for example a file name."""
    if isinstance(config, RunConfig):
        return
    made = "from_tree(…)" if isinstance(config, Mapping) else "load(…)"
    if isinstance(config, str | Path):
        made = f"load({str(config)!r})"
    raise ConfigError(f"{function} takes a RunConfig, not {_shown(config)}; pass megalith.RunConfig.{made}")


def _shown(value: Any) -> str:
    return (
        f"{type(value).__name__} {str(value)!r}"
        if isinstance(value, str | Path)
        else f"a {type(value).__name__}"
    )


def read_yaml(path: str | Path) -> Tree:
    """Read a run file into section → key → value. Rejects YAML tags that build objects (safe_load)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        near = override_hint(path) or nearest_file(path)
        raise ConfigError(f"there is no run file {path}{near or '; pass the path of a YAML file'}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the run file {path} cannot be read: {error}") from None
    if sentence := extension_error(path):
        raise ConfigError(sentence)
    try:
        content = parse_yaml(text)
    except yaml.YAMLError as error:
        message = " ".join(str(error).split()).replace(' in "<unicode string>",', " at")
        raise ConfigError(f"the run file {path} is not valid YAML: {message}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(
            f"the run file {path} contains a {type(content).__name__}; it needs sections: {_sections()}"
        )
    if sentence := format_error(path, content or {}):
        raise ConfigError(sentence)
    try:
        return _sections_of(content or {})
    except ConfigError as error:
        raise error.within(path) from None


def nearest_file(path: str | Path) -> str:
    """Return `; did you mean base.yaml?` with a similar run file of the same folder, or ""."""
    folder = Path(path).parent
    with contextlib.suppress(OSError):
        files = [each.name for each in folder.iterdir() if each.suffix in (".yaml", ".yml", ".json")]
        near = [name for name in files if Path(name).stem == Path(path).stem]
        near = near or difflib.get_close_matches(Path(path).name, files, cutoff=0.8)
        if near:
            return f"; did you mean {' or '.join(str(folder / name) for name in sorted(near)[:3])}?"
    return ""


def _sections_of(content: dict[Any, Any]) -> Tree:
    """Return `content` with a dict for every section. Raises ConfigError if it is not a mapping of sections."""
    tree = _empty_tree()
    for section, values in content.items():
        if section not in tree:
            raise ConfigError(f"unknown section {section!r}{_hint_for_section(str(section))}")
        if values is not None and not isinstance(values, dict):
            raise ConfigError(f"section {section!r} contains {values!r}; it needs keys with values")
        tree[section] = dict(values or {})
        for key in tree[section]:
            if not isinstance(key, str):
                raise ConfigError(
                    f"{section} has the key {key!r}, but settings' names are strings; inside "
                    'braces, quote values that contain commas, such as {split: "98,2,0"}'
                )
    return tree


def parse_overrides(arguments: Sequence[str]) -> list[tuple[str, str, Any]]:
    """Parse `--section.key value`, `--section.key=value` or `section.key=value` into (section, key, value).

    A key without a value means true; several values make a list, as does one value of a setting that only accepts
    lists. Values are YAML, so `null` and `[1, 2]` work; for settings that accept text, `100` is text.
    """
    result = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        index += 1
        if not begins_override(word):
            name, equals, _ = word.partition("=")
            hint = (_suggest_keys(name) if equals else "") or "; overrides are written --section.key value"
            raise ConfigError(f"unexpected argument {word!r}{hint}")
        path, equals, text = word.removeprefix("--").partition("=")
        values = [text] if equals else []
        while not equals and index < len(arguments) and not begins_override(arguments[index]):
            values.append(arguments[index])
            index += 1
        section, dot, key = path.replace("-", "_").partition(".")
        if not dot or section not in RunConfig.model_fields:
            hint = _hint_for_section(section, key) if dot else _hint_for_name(section)
            raise ConfigError(f"unknown setting --{path}{hint}")
        result.append((section, key, _parse_values(section, key, values)))
    return result


def begins_override(word: str) -> bool:
    """Return True if `word` of a command line starts a setting, not a value or a file name."""
    path, equals, _ = word.partition("=")
    return word.startswith("--") or (bool(equals) and path.partition(".")[0] in RunConfig.model_fields)


def _parse_values(section: str, key: str, values: list[str]) -> Any:
    try:
        parsed = [parse_yaml(value) for value in values]
    except yaml.YAMLError:
        parsed = list(values)
    if not parsed:
        return True
    if len(parsed) > 1:
        return parsed
    kinds = _kinds(section, key)
    if str in kinds and not isinstance(parsed[0], str | list | None):
        return values[0]
    if kinds == {list} and not isinstance(parsed[0], list | None):
        return parsed
    return parsed[0]


def _kinds(section: str, key: str) -> set[type]:
    """Return the types of values that a setting accepts, except null; lists of any kind are `list`."""
    alias = ALIASES.get(f"{section}.{key}")
    if isinstance(alias, Rename):
        section, key = alias.path.split(".")
    field = RunConfig.model_fields[section].annotation.model_fields.get(key)
    return _plain_kinds(field.annotation) if field is not None else set()


def _plain_kinds(annotation: Any) -> set[type]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_plain_kinds(a) for a in arguments if a is not type(None)))
    if origin is typing.Annotated:
        return _plain_kinds(arguments[0])
    return {origin or annotation}


def known_keys(section: str) -> list[str]:
    """Return the field names and accepted spellings of a section."""
    fields = RunConfig.model_fields[section].annotation.model_fields
    return [*fields, *(name.split(".")[1] for name in ALIASES if name.startswith(section + "."))]


def _set_fields(section: Section) -> dict[str, Any]:
    """Return the explicitly set fields, including nested sections, as plain dicts."""
    values = {name: getattr(section, name) for name in section.model_fields_set}
    return {
        name: _set_fields(value) if isinstance(value, Section) else value for name, value in values.items()
    }


def _refuse_unknown(tree: Tree) -> None:
    for section, values in tree.items():
        allowed = known_keys(section)
        for key in values:
            if key not in allowed and key.partition(".")[0] not in allowed:
                hint = (
                    _suggest_keys(key)
                    or hint_of_other_name(key)
                    or _nearest(key, [section])
                    or _nearest(key, RunConfig.model_fields, 0.75)
                    or "; `megalith train --help` lists them all"
                )
                raise ConfigError(f"unknown setting {section}.{key}{hint}")
    _unfold_nested(tree)


def _unfold_nested(tree: Tree) -> None:
    """Turn `model: {"rope_scaling.factor": 8}` from overrides into a nested dict."""
    for section, values in tree.items():
        for key in [key for key in values if "." in key]:
            outer, _, inner = key.partition(".")
            parent = values.get(outer) or {}
            if not isinstance(parent, dict):
                raise ConfigError(
                    f"{section}.{key} is set, but {section}.{outer} is {parent!r}, not a mapping; "
                    "remove one of them"
                )
            values[outer] = {**parent, inner: values.pop(key)}


def _suggest_keys(*keys: str) -> str:
    sections = RunConfig.model_fields.items()
    fields = [
        f"{name}.{key}" for key in keys for name, each in sections if key in each.annotation.model_fields
    ]
    homes = fields or [f"{name}.{key}" for key in keys for name, _ in sections if key in known_keys(name)]
    return f"; did you mean {' or '.join(homes)}?" if homes else ""


def _nearest(name: str, sections: Iterable[str], least: float = 0.6) -> str:
    """Return settings of some sections with names similar to `name` (difflib's ratio)."""
    homes = {key: f"{section}.{key}" for section in sections for key in known_keys(section)}
    near = difflib.get_close_matches(name, homes, cutoff=least)
    return f"; did you mean {' or '.join(homes[key] for key in near)}?" if near else ""


def _preset(name: Any) -> dict[str, Any]:
    if name is not None and (not isinstance(name, str) or name not in PRESETS):
        why = nearest_of(str(name), PRESETS)
        raise ConfigError(f"unknown preset {name!r}{why}")
    return PRESETS.get(name, {})


def _empty_tree() -> Tree:
    return {section: {} for section in RunConfig.model_fields}


def _sections() -> str:
    return ", ".join(RunConfig.model_fields)


def _hint_for_name(name: str) -> str:
    """Return the section of a setting given without one, or similar settings of all sections."""
    return (
        _suggest_keys(name)
        or hint_of_other_name(name)
        or _nearest(name, RunConfig.model_fields, 0.75)
        or "; `megalith train --help` lists them all, by section"
    )


def _hint_for_section(section: str, key: str = "") -> str:
    name = (key or section).replace("-", "_")
    return (
        _suggest_keys(name)
        or hint_of_other_name(name)
        or did_you_mean(section, RunConfig.model_fields)
        or f"; sections: {_sections()}"
    )
