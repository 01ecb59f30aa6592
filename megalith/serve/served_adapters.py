"""The adapters of a server: their API names, and the engine slots that hold them.

Loading and unloading follow vLLM's server: the same paths, fields and rules. Open requests of an unloaded adapter are
completed. Its slot is then free for another adapter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megalith.errors import printable
from megalith.serve.http_server import HttpError
from megalith.serve.remote_engine import ServedEngine

LOAD_FIELDS = {"lora_name": str, "lora_path": str, "load_inplace": bool}
UNLOAD_FIELDS = {"lora_name": str}
NO_EFFECT = ("lora_int_id",)  # vLLM's own number of an adapter


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter that requests can name."""

    name: str
    path: str
    slot: int


class ServedAdapters:
    """Adapters by name. All methods run in the server's event loop."""

    def __init__(
        self, live: ServedEngine, base: str, adapters: Iterable[ServedAdapter] = (), may_change: bool = False
    ):
        """Serve adapters that the engine has in its slots.

        Args:
            live: the engine.
            base: name of the model without adapters.
            adapters: the adapters that are loaded.
            may_change: clients may load and unload adapters.
        """
        self._live, self._base, self.may_change = live, base, may_change
        self._by_name = {adapter.name: adapter for adapter in adapters}
        self._lock = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the adapters."""
        return [*self._by_name]

    def slot(self, name: str | None) -> int | None:
        """Return the slot of a request's model: 0 for the base model, None for an unknown model."""
        if name in (None, self._base):
            return 0
        adapter = self._by_name.get(name)
        return None if adapter is None else adapter.slot

    def cards(self) -> list[dict[str, Any]]:
        """Return the entries of GET /v1/models."""
        head = {"object": "model", "created": 0, "owned_by": "megalith"}
        return [
            {"id": one.name, **head, "root": one.path, "parent": self._base} for one in self._by_name.values()
        ]

    async def load(self, body: dict[str, Any]) -> str:
        """Load an adapter (POST /v1/load_lora_adapter). Raise HttpError if that is not possible."""
        fields = _fields(body, LOAD_FIELDS)
        name, path = fields.get("lora_name"), fields.get("lora_path")
        if not name or not path:
            raise HttpError(400, "a request must have both lora_name and lora_path")
        async with self._lock:
            if name == self._base:
                raise HttpError(400, f"{name!r:.60} is the name of the base model; choose another one")
            if name in self._by_name and not fields.get("load_inplace"):
                raise HttpError(
                    400, f"the adapter {name!r:.60} is loaded already; set load_inplace to replace it"
                )
            slot = self._free_slot(name)
            error = await asyncio.wrap_future(self._live.set_adapter(slot, path))
            if error is not None:
                raise HttpError(400, f"{path!r:.200} cannot be loaded: {error}")
            self._by_name[name] = ServedAdapter(name, path, slot)
        return f"Success: LoRA adapter '{printable(name)}' added successfully."

    async def unload(self, body: dict[str, Any]) -> str:
        """Unload an adapter (POST /v1/unload_lora_adapter). Raise HttpError if no adapter has this name."""
        name = _fields(body, UNLOAD_FIELDS).get("lora_name")
        if not name:
            raise HttpError(400, "the request has no lora_name; add it")
        async with self._lock:
            if self._by_name.pop(name, None) is None:
                raise HttpError(
                    404, f"there is no adapter {name!r:.60}; the server has {', '.join(self.names) or 'none'}"
                )
        return f"Success: LoRA adapter '{printable(name)}' removed successfully."

    def _free_slot(self, name: str) -> int:
        """Return a slot for the adapter `name`: one without adapter and requests, otherwise the slot of the adapter
        that it replaces.
        """
        used = {one.slot for one in self._by_name.values()} | self._live.used_slots
        free = [slot for slot in range(1, self._live.engine.slots + 1) if slot not in used]
        if not free and name in self._by_name and self._by_name[name].slot not in self._live.used_slots:
            free = [self._by_name[name].slot]
        if not free:
            raise HttpError(
                400, f"all {self._live.engine.slots} slots are in use (--max-loras); unload an adapter first, or wait "
                "until the requests of one that was unloaded have ended"
            )  # fmt: skip
        return free[0]


def _fields(body: dict[str, Any], kinds: dict[str, type]) -> dict[str, Any]:
    """Return the fields of a request that `kinds` names.

    Raise HttpError for other fields and for values of another type.
    """
    for name, value in body.items():
        if value is None or name in NO_EFFECT:
            continue
        if name not in kinds:
            raise HttpError(400, f"{name!r:.60} is not supported; the fields are {', '.join(kinds)}")
        if not isinstance(value, kinds[name]):
            raise HttpError(
                400,
                f"{name} is {value!r:.60}; it must be {'text' if kinds[name] is str else 'true or false'}",
            )
    return {name: value for name, value in body.items() if name in kinds and value is not None}
