"""Settings of a reference model that follows the policy. Names and defaults are TRL's."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt

from megalith.config.base import Decides, RequiresSetting, Section


class ReferenceSync(Section):
    """Mixing the policy into the reference model (TR-DPO). Part of the sections `dpo`, `kto` and `rl`."""

    decides: ClassVar[Decides] = Decides.UPDATES
    shares_requirement: ClassVar[bool] = True

    sync_ref_model: Annotated[bool, Decides.UPDATES] = False
    """Mix the policy's weights into the reference model's during the run (TR-DPO). Off: the reference keeps the run's
    initial weights."""

    ref_model_sync_steps: Annotated[PositiveInt, RequiresSetting("sync_ref_model", True), Decides.UPDATES] = (
        512
    )
    """Steps between two updates of the reference model."""

    ref_model_mixup_alpha: Annotated[
        float, Field(ge=0, le=1), RequiresSetting("sync_ref_model", True), Decides.UPDATES
    ] = 0.6
    """Weight of the policy in an update: reference = alpha · policy + (1 − alpha) · reference."""
