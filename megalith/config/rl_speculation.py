"""Settings of speculative decoding of rollouts (docs/inference.md). Names are vLLM's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import PositiveInt

from megalith.config.base import Decides, RequiresSetting, Section


class SpeculationSettings(Section):
    """Settings of speculative decoding, which verifies several drafted tokens at a time. Included in section `rl`."""

    decides: ClassVar[Decides] = Decides.NOTHING

    speculative_method: Annotated[
        Literal["none", "ngram", "draft_model", "mtp"],
        RequiresSetting("prompts"),
        RequiresSetting("engine", "own", strict=True),
    ] = "none"
    """Source of drafts in Megalith's engine: ngram (what followed the last earlier occurrence of the latest tokens),
    draft_model (a smaller model) or mtp (the policy's own layers for multi-token prediction). Completions are the same
    as without speculative decoding; only the speed changes."""

    num_speculative_tokens: Annotated[PositiveInt, RequiresSetting("speculative_method", unless="none")] = 4
    """Drafts per decode step."""

    prompt_lookup_max: Annotated[PositiveInt, RequiresSetting("speculative_method", "ngram")] = 4
    """ngram: maximum n-gram length, the number of latest tokens whose earlier occurrence is looked for."""

    prompt_lookup_min: Annotated[PositiveInt, RequiresSetting("speculative_method", "ngram")] = 1
    """ngram: minimum n-gram length."""

    draft_model: Annotated[str | None, RequiresSetting("speculative_method", "draft_model", strict=True)] = (
        None
    )
    """The smaller model of draft_model, a run or a Hugging Face folder with the policy's tokenizer. It is not
    trained."""
