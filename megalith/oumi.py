"""`from megalith.oumi import MegatronParams, OumiMegatronGrpoTrainer, patch`: Oumi's names (docs/from_oumi.md).

python -m megalith.oumi train -c X.yaml     the installed Oumi's own command line, with our trainer in it
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
    if name != "OumiMegatronGrpoTrainer":  # whose imports take seconds
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
