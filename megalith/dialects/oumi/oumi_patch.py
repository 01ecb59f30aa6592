"""Patch an installed Oumi to train with Megalith: call `megalith.oumi.patch()` before `oumi train` runs.

    python -m megalith.oumi train -c X.yaml        run Oumi's own command line, patched

The patch adds the trainer type MEGATRON_GRPO to TrainerType in oumi.core.configs, adds the sections megatron and grpo
to TrainingConfig, and makes build_trainer in oumi.builders return Megalith's trainer. For this type `oumi.train.train`
passes the configuration to the trainer without loading the model first, as it does for verl. The patch also adds
`oumi.core.trainers.megatron.bridge_utils.check_megatron_bridge_available`.
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
REQUIRED = ("safetensors", "tokenizers")  # for weight conversion


def check_megatron_bridge_available() -> None:
    """Raise ImportError if the packages for weight conversion are missing. Megalith replaces Megatron-Bridge."""
    for name in REQUIRED:
        try:
            importlib.import_module(name)
        except ImportError:
            raise ImportError(
                f"megatron-bridge is not available: Megalith replaces it and needs {name}; run: {install_line('hf')}"
            ) from None


def patch() -> None:
    """Register Megalith's trainer with the Oumi installed in this process.

    Idempotent. Raises ConfigError if Oumi cannot be imported.
    """
    try:
        configs = importlib.import_module("oumi.core.configs")
        builders = importlib.import_module("oumi.builders.training")
        training = importlib.import_module("oumi.train")
    except ImportError as error:
        raise ConfigError(
            f"Oumi cannot be imported ({error}): pip install oumi, or use `megalith oumi train`, which does not need it"
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
    modules = {}
    for name in MODULES:
        module = modules[name] = ModuleType(
            f"oumi.core.trainers.{name}", "Megalith's replacement for Megatron-Bridge."
        )
        sys.modules[module.__name__] = module
    modules["megatron"].__path__ = []
    modules["megatron.bridge_utils"].check_megatron_bridge_available = check_megatron_bridge_available
    modules["megatron.megatron_grpo_trainer"].OumiMegatronGrpoTrainer = OumiMegatronGrpoTrainer
    modules["megatron"].bridge_utils = modules["megatron.bridge_utils"]
    trainers.megatron = modules["megatron"]
    trainers.OumiMegatronGrpoTrainer = OumiMegatronGrpoTrainer
    importlib.import_module("oumi.core.configs").MegatronParams = MegatronParams


def _add_sections(config: type) -> None:
    """Add the sections megatron and grpo, as dicts, to a dataclass that other modules have already imported."""
    for name in ("megatron", "grpo"):
        section = dataclasses.field(default_factory=dict)
        section.name, section.type, section.kw_only = name, dict[str, Any], False
        section._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        config.__dataclass_fields__[name] = section
        config.__annotations__[name] = dict[str, Any]
    original_init = config.__init__

    def init(self: Any, *args: Any, megatron: Any = None, grpo: Any = None, **kwargs: Any) -> None:
        self.megatron, self.grpo = dict(megatron or {}), dict(grpo or {})
        original_init(self, *args, **kwargs)

    config.__init__ = init  # type: ignore[misc]


def _wrap_builder(builders: ModuleType, kind: Any, *importers: str) -> None:
    oumi_original = builders.build_trainer

    def build_trainer(trainer_type: Any, processor: Any = None, verbose: bool = False) -> Callable[..., Any]:
        if trainer_type != kind[NAME]:
            return oumi_original(trainer_type, processor, verbose)
        from megalith.dialects.oumi.oumi_trainer import OumiMegatronGrpoTrainer

        return OumiMegatronGrpoTrainer

    builders.build_trainer = build_trainer
    for name in importers:
        if getattr(sys.modules.get(name), "build_trainer", None) is oumi_original:
            sys.modules[name].build_trainer = build_trainer


def _wrap_train(training: ModuleType, kind: Any) -> None:
    oumi_original = training.train

    def train(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.training.trainer_type != kind[NAME]:
            return oumi_original(config, *args, **kwargs)
        trainer_class = training.build_trainer(kind[NAME], processor=None)
        trainer = trainer_class(processing_class=None, config=config)
        trainer.train(resume_from_checkpoint=config.training.resume_from_checkpoint)
        return None

    training.train = train
    sys.modules["oumi"].train = train  # importing oumi.train had set this to the module


def run_oumi(words: list[str]) -> int:
    """Run Oumi's own command line in this process, patched. Returns its exit code."""
    patch()
    program = importlib.import_module("oumi.cli.main")
    sys.argv = ["oumi", *words]
    try:
        program.run()
    except SystemExit as error:
        return int(error.code or 0)
    return 0
