"""Single-player games of TextArena by name: `rl.environment: textarena:GuessTheNumber-v0`.

The game's first message is appended to the prompt. Each turn is a move, and the reward is the one that the game gives
at its end. A prompt's record may have a `seed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalith.errors import ConfigError, did_you_mean
from megalith.rl.agents.prompt_text import Message, with_text

GAME = "[GAME]"  # begins what the game says in an observation that is text


def make_environment(identity: str) -> Callable[[Mapping[str, Any]], TextGame]:
    """Return a factory that creates games with this id from a prompt's columns.

    Raises:
        ConfigError: if textarena is not installed or has no such game.
    """
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise ConfigError(
            f"rl.environment is textarena:{identity}, but textarena cannot be imported ({error}); "
            "pip install textarena"
        ) from None
    if identity not in ENV_REGISTRY:
        raise ConfigError(
            f"rl.environment is textarena:{identity}, which textarena does not have; choose one of its "
            f"{len(ENV_REGISTRY)} games{did_you_mean(identity, ENV_REGISTRY) or ''}"
        )
    return lambda columns: TextGame(textarena.make(identity), columns.get("seed"))


class TextGame:
    """A game in which the policy is the only player."""

    def __init__(self, game: Any, seed: int | None):
        self._game, self._seed, self._shown = game, seed, ""

    def init(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Start the game, and return the prompt with its first message."""
        self._game.reset(num_players=1, seed=self._seed)
        return with_text(messages, self._news()), {}

    def step(self, text: str) -> dict[str, Any]:
        """Make a move."""
        is_done, _ = self._game.step(action=text)
        if is_done:
            rewards, _ = self._game.close()
            return {"observations": [], "reward": float((rewards or {}).get(0) or 0.0), "done": True}
        return {"observations": [{"role": "user", "content": self._news()}], "reward": 0.0, "done": False}

    def _news(self) -> str:
        """Return the game's messages since the last call."""
        player, observation = self._game.get_observation()
        if not isinstance(observation, str):  # messages (from, text, type)
            return "\n".join(str(text) for sender, text, *_ in observation if sender != player)
        new = observation
        if self._shown and observation.startswith(self._shown):  # the whole game so far
            new = observation[len(self._shown) :]
            new = new[max(new.find(GAME), 0) :]  # without the player's own move
        self._shown = observation
        return new.strip()
