"""Accelerate's API: `from megalith.accelerate import Accelerator, MegatronLMPlugin` (docs/accelerate.md).

python -m megalith.accelerate SCRIPT.py ARGUMENTS     run a script that imports from accelerate itself
"""

import sys

from megalith.errors import ConfigError, install_line

try:
    import accelerate  # noqa: F401
except ImportError:
    raise ConfigError(f"megalith.accelerate needs Accelerate itself: {install_line('accelerate')}") from None

from megalith.dialects.accelerate.patch import OURS, patch

globals().update(OURS)
__all__ = [*OURS, "patch"]


def __getattr__(name: str) -> object:
    if name != "MegalithTrainer":  # imported lazily: it takes seconds
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megalith.dialects.accelerate.hugging_face_trainer import MegalithTrainer

    return MegalithTrainer


if __name__ == "__main__":
    from megalith.dialects.accelerate.launch_door import run_script

    sys.exit(run_script(sys.argv[1:]))
