"""Settings of rollouts with tools, environments and several turns (docs/agents.md)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from megalith.config.base import Decides, RequiresSetting, Section
from megalith.config.extensions import CALL_FORMATS, ENVIRONMENTS, is_extension
from megalith.errors import nearest_of


class ToolSettings(Section):
    """Settings of the tools that the policy calls and of its environments. Included in section `rl`."""

    decides: ClassVar[Decides] = Decides.UPDATES

    tools: Annotated[str | list[str] | None, RequiresSetting("prompts", strict=True), Decides.SAMPLES] = None
    """Functions that the policy may call (docs/agents.md): path.py:function, with type hints and a docstring."""

    environment: Annotated[str | None, RequiresSetting("prompts", strict=True), Decides.SAMPLES] = None
    """Environment that the policy acts in: path.py:Class with reset and tools as methods (TRL) or with init and step
    (SkyRL), or skyrl_gym:ID, reasoning_gym:DATASET, textarena:GAME or openenv:URL. Each completion has its own
    instance."""

    agent: Annotated[str | None, RequiresSetting("prompts", strict=True), Decides.SAMPLES] = None
    """Agent that writes each completion: path.py:function, an async function of (client, row). The client is OpenAI's,
    with an endpoint that samples with the policy (docs/agents.md). It returns the reward, if rl.reward_funcs is not
    set."""

    agent_workers: Annotated[NonNegativeInt, RequiresSetting("agent"), Decides.NOTHING] = 64
    """Agents that run at a time per replica, each in a process of its own. 0: all run in the trainer's process, as
    asynchronous tasks."""

    agent_timeout: Annotated[PositiveFloat, RequiresSetting("agent"), Decides.SAMPLES] = 600.0
    """Time limit of an agent for a completion, in seconds."""

    max_turns: Annotated[
        PositiveInt | None, RequiresSetting("tools_environment_or_agent"), Decides.SAMPLES
    ] = None
    """Maximum number of times that the policy samples in a completion. Default: no limit other than
    max_completion_length, which counts the tokens of all turns and answers."""

    max_tool_calls: Annotated[
        NonNegativeInt | None, RequiresSetting("tools_or_environment"), Decides.SAMPLES
    ] = None
    """Maximum number of tool calls in a completion. Later calls are answered with an error. Default: no limit."""

    advantage_level: Annotated[Literal["trajectory", "turn"], RequiresSetting("environment")] = "trajectory"
    """trajectory: every token of a completion has the completion's advantage. turn: the tokens of a turn have an
    advantage computed from the rewards of that turn and later ones, compared with the same turn of the group's other
    completions."""

    step_discount: Annotated[float, Field(ge=0, le=1), RequiresSetting("environment")] = 1.0
    """Discount per turn of the rewards that an environment returns for its steps."""

    tool_timeout: Annotated[PositiveFloat, RequiresSetting("tools_or_environment"), Decides.SAMPLES] = 60.0
    """Time limit of a tool call or an environment's step, in seconds."""

    tool_workers: Annotated[NonNegativeInt, RequiresSetting("tools_or_environment"), Decides.NOTHING] = 4
    """Processes per rank for tools. Each instance of an environment has its own process. 0: call them in the
    trainer's process, without a time limit."""

    overlap_tools: Annotated[bool, RequiresSetting("tools_or_environment"), Decides.SAMPLES] = False
    """Sample turns while the tools of other completions run. Which turns share a batch then depends on timing, which
    changes log-probabilities by rounding unless rl.exact is on. Otherwise all completions take turns together."""

    tool_call_format: Annotated[str, RequiresSetting("tools_environment_or_agent"), Decides.SAMPLES] = "auto"
    """Format of the policy's tool calls: hermes (Hermes, Qwen), llama3_json, qwen3_coder, glm45, harmony (gpt-oss),
    response_template (the tokenizer's, parsed by transformers), or path.py:function. auto: derived from the tokenizer
    and its chat template."""

    @field_validator("environment", "tool_call_format", "agent")
    @classmethod
    def _check_tool_extension(cls, value: Any, info: ValidationInfo) -> Any:
        built_in = {
            "tool_call_format": [*CALL_FORMATS, "auto"], "environment": [FACTORY], "agent": [FUNCTION]
        }[info.field_name]  # fmt: skip
        library, _, identity = (value or "").partition(":")
        is_in_library = info.field_name == "environment" and library in ENVIRONMENTS and identity
        if value is not None and not is_in_library and not is_extension(value, dict.fromkeys(built_in)):
            text = f"write a built-in name or path.py:object{nearest_of(value, built_in)}"
            text = text.replace("{", "{{").replace("}", "}}")
            raise PydanticCustomError("extension", text)
        return value

    @property
    def tool_paths(self) -> list[str]:
        """Paths of the tools, FILE:FUNCTION."""
        return [self.tools] if isinstance(self.tools, str) else list(self.tools or ())

    @property
    def tools_or_environment(self) -> str | list[str] | None:
        """rl.tools if set, otherwise rl.environment."""
        return self.tools or self.environment

    @property
    def tools_environment_or_agent(self) -> str | list[str] | None:
        """rl.agent if set, otherwise rl.tools, otherwise rl.environment. Each can give a completion several turns."""
        return self.agent or self.tools_or_environment

    @property
    def uses_turns(self) -> bool:
        """True if a completion can have several turns."""
        return bool(self.tools_environment_or_agent)


FUNCTION = "agent"
"""Value of `rl.agent` in a run whose agent is an argument of megalith.grpo."""

FACTORY = "environment_factory"
"""Value of `rl.environment` in a run whose environment is an argument of GRPOTrainer."""
