"""Oumi's Python API: `from megalith.oumi import MegatronParams, OumiMegatronGrpoTrainer, patch` (docs/from_oumi.md).

python -m megalith.oumi train -c X.yaml     run the installed Oumi's command line with Megalith's trainer
"""

import sys
from typing import Any

from megalith.dialects.oumi.oumi_params import (
    GrpoParams,
    MegatronCheckpointConfig,
    MegatronDDPConfig,
    MegatronGRPOConfig,
    MegatronOptimizerConfig,
    MegatronParams,
    MegatronSamplingConfig,
    MegatronTransformerConfig,
    TrainingConfig,
)
from megalith.dialects.oumi.oumi_patch import check_megatron_bridge_available, patch

__all__ = [
    "GrpoParams",
    "MegatronCheckpointConfig",
    "MegatronDDPConfig",
    "MegatronGRPOConfig",
    "MegatronOptimizerConfig",
    "MegatronParams",
    "MegatronSamplingConfig",
    "MegatronTransformerConfig",
    "OumiMegatronGrpoTrainer",  # noqa: F822 (below)
    "TrainingConfig",
    "check_megatron_bridge_available",
    "patch",
]


def __getattr__(name: str) -> Any:
    if name != "OumiMegatronGrpoTrainer":  # imported lazily: it takes seconds
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megalith.dialects.oumi.oumi_trainer import OumiMegatronGrpoTrainer

    return OumiMegatronGrpoTrainer


if __name__ == "__main__":
    from megalith.dialects.oumi.oumi_patch import run_oumi
    from megalith.errors import MegalithError
    from megalith.launch.failure import report

    try:
        sys.exit(run_oumi(sys.argv[1:]))
    except MegalithError as error:
        sys.exit(report(error))
