"""Environments on an OpenEnv server: `rl.environment: openenv:http://127.0.0.1:8000`.

Each turn is an action with one text field, which the server's schema names. Observations are sent to the policy as
text, or as JSON if they have several fields. A prompt's record may have a `seed`.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalith.config.rules.addresses import check_address
from megalith.errors import ConfigError
from megalith.rl.agents.prompt_text import Message, with_text

SECONDS = 30.0  # for the server's schema


def make_environment(identity: str) -> Callable[[Mapping[str, Any]], OpenEnvSession]:
    """Return a factory that opens a session on the server at this address, given a prompt's columns.

    Raises:
        ConfigError: if openenv-core is not installed, or the address is malformed.
    """
    check_address(identity, "rl.environment openenv")
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise ConfigError(
            f"rl.environment is openenv:{identity}, but openenv-core cannot be imported ({error}); "
            "pip install openenv-core"
        ) from None

    def make(columns: Mapping[str, Any]) -> OpenEnvSession:
        client = GenericEnvClient(base_url=identity).sync()
        return OpenEnvSession(client, text_field(identity), columns.get("seed"))

    make.name = "openenv"
    return make


def text_field(url: str) -> str:
    """Return the name of the action field that receives a turn's text.

    Raise ValueError unless the schema has exactly one.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url.rstrip('/')}/schema", timeout=SECONDS) as answer:
        schema = json.loads(answer.read(1 << 20))["action"]
    properties = schema.get("properties", {})
    texts = [name for name, each in properties.items() if each.get("type") == "string"]
    required = [name for name in texts if name in schema.get("required", ())]
    chosen = required or texts
    if len(chosen) != 1:
        raise ValueError(
            f"the server's actions have the fields {', '.join(properties) or 'none'}, "
            f"{len(chosen)} of them text; only actions with one text field are supported"
        )
    return chosen[0]


class OpenEnvSession:
    """An episode on the server."""

    def __init__(self, client: Any, field: str, seed: int | None):
        self._client, self._field, self._seed = client, field, seed

    def init(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Begin an episode, and return the prompt with its first observation."""
        self._client.connect()
        result = self._client.reset(**({} if self._seed is None else {"seed": self._seed}))
        text = observation_text(result.observation)
        return (with_text(messages, text) if text else list(messages)), {}

    def step(self, text: str) -> dict[str, Any]:
        """Send a turn as an action."""
        result = self._client.step({self._field: text})
        content = observation_text(result.observation)
        observations = [] if result.done else [{"role": "user", "content": content}]
        return {"observations": observations, "reward": float(result.reward or 0.0), "done": result.done}

    def close(self) -> None:
        """End the session."""
        self._client.close()


def observation_text(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: its only field, or JSON if it has several fields."""
    fields = {
        name: value
        for name, value in observation.items()
        if name not in ("done", "reward", "metadata") and value not in (None, "")
    }
    if len(fields) == 1 and isinstance(value := next(iter(fields.values())), str):
        return value
    return json.dumps(fields, ensure_ascii=False) if fields else ""
