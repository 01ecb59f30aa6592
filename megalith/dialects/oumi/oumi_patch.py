"""Megalith behind an installed Oumi: `from megalith.oumi import patch; patch()` before `oumi train`'s own code runs.

    python -m megalith.oumi train -c X.yaml        Oumi's own command line, so patched

The trainer's kind MEGATRON_GRPO is added to oumi.core.configs' TrainerType, the sections megatron and grpo to its
TrainingConfig, and oumi.builders' build_trainer makes ours of that kind. `oumi.train.train` would load the whole model
before it asks for a trainer: for this kind it hands the configuration to our trainer at once, as it does for verl's.
`oumi.core.trainers.megatron.bridge_utils.check_megatron_bridge_available` is there to be imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from enum import EnumMeta
from types import ModuleType
from typing import Any

from megalith.errors import ConfigError, install_line

NAME, VALUE = "MEGATRON_GRPO", "megatron_grpo"
MODULES = ("megatron", "megatron.bridge_utils", "megatron.megatron_grpo_trainer")  # below oumi.core.trainers
NEEDED = ("safetensors", "tokenizers")  # what conversion is made of


def check_megatron_bridge_available() -> None:
    """Raises ImportError where weights cannot be converted; Megalith does what Megatron-Bridge does."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError:
            raise ImportError(
                f"megatron-bridge is not available: Megalith does its work, and {name} is missing for it; run: "
                f"{install_line('hf')}"
            ) from None


def patch() -> None:
    """Puts our trainer into the installed Oumi of this process. Twice is as once. Raises ConfigError without Oumi."""
    try:
        configs = importlib.import_module("oumi.core.configs")
        builders = importlib.import_module("oumi.builders.training")
        training = importlib.import_module("oumi.train")
    except ImportError as error:
        raise ConfigError(
            f"Oumi cannot be imported ({error}): pip install oumi, or use `megalith oumi train`, which needs none"
        ) from None
    kind = configs.TrainerType
    if NAME in kind.__members__:
        return
    _add_member(kind)
    _add_modules()
    _add_sections(configs.TrainingConfig)
    _wrap_builder(builders, kind, "oumi.builders", "oumi.train")
    _wrap_train(training, kind)


def _add_member(kind: EnumMeta) -> None:
    member = object.__new__(kind)
    member._name_, member._value_ = NAME, VALUE
    member.__objclass__ = kind
    kind._member_names_.append(NAME)
    kind._member_map_[NAME] = member
    kind._value2member_map_[VALUE] = member
    type.__setattr__(kind, NAME, member)


def _add_modules() -> None:
    from megalith.dialects.oumi.oumi_params import MegatronParams
    from megalith.dialects.oumi.oumi_trainer import OumiMegatronGrpoTrainer

    trainers = importlib.import_module("oumi.core.trainers")
    found = {}
    for name in MODULES:
        module = found[name] = ModuleType(
            f"oumi.core.trainers.{name}", "Megalith in Megatron-Bridge's place."
        )
        sys.modules[module.__name__] = module
    found["megatron"].__path__ = []
    found["megatron.bridge_utils"].check_megatron_bridge_available = check_megatron_bridge_available
    found["megatron.megatron_grpo_trainer"].OumiMegatronGrpoTrainer = OumiMegatronGrpoTrainer
    found["megatron"].bridge_utils = found["megatron.bridge_utils"]
    trainers.megatron = found["megatron"]
    trainers.OumiMegatronGrpoTrainer = OumiMegatronGrpoTrainer
    importlib.import_module("oumi.core.configs").MegatronParams = MegatronParams


def _add_sections(config: type) -> None:
    """The sections megatron and grpo as dicts of a dataclass that others have imported already."""
    for name in ("megatron", "grpo"):
        one = dataclasses.field(default_factory=dict)
        one.name, one.type, one.kw_only = name, dict[str, Any], False
        one._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        config.__dataclass_fields__[name] = one
        config.__annotations__[name] = dict[str, Any]
    made = config.__init__

    def init(self: Any, *args: Any, megatron: Any = None, grpo: Any = None, **kwargs: Any) -> None:
        self.megatron, self.grpo = dict(megatron or {}), dict(grpo or {})
        made(self, *args, **kwargs)

    config.__init__ = init  # type: ignore[misc]


def _wrap_builder(builders: ModuleType, kind: Any, *importers: str) -> None:
    theirs = builders.build_trainer

    def build_trainer(trainer_type: Any, processor: Any = None, verbose: bool = False) -> Callable[..., Any]:
        if trainer_type != kind[NAME]:
            return theirs(trainer_type, processor, verbose)
        from megalith.dialects.oumi.oumi_trainer import OumiMegatronGrpoTrainer

        return OumiMegatronGrpoTrainer

    builders.build_trainer = build_trainer
    for name in importers:
        if getattr(sys.modules.get(name), "build_trainer", None) is theirs:
            sys.modules[name].build_trainer = build_trainer


def _wrap_train(training: ModuleType, kind: Any) -> None:
    theirs = training.train

    def train(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.training.trainer_type != kind[NAME]:
            return theirs(config, *args, **kwargs)
        made = training.build_trainer(kind[NAME], processor=None)
        trainer = made(processing_class=None, config=config)
        trainer.train(resume_from_checkpoint=config.training.resume_from_checkpoint)
        return None

    training.train = train
    sys.modules["oumi"].train = train  # where importing the module of this name has put that


def run_oumi(words: list[str]) -> int:
    """Oumi's own command line in this process, patched."""
    patch()
    program = importlib.import_module("oumi.cli.main")
    sys.argv = ["oumi", *words]
    try:
        program.run()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
