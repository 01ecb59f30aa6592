"""Events from the engine's thread to the tasks of the server's event loop.

Waking the loop costs a system call. Events are therefore collected, and the loop is woken once for all events that
arrive before it runs. A task takes all of its waiting events in one call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

Event = tuple[int, list[int], list[float], str | None]
"""Index of the choice, new ids, their log-probabilities, and the reason for its end, None before the end."""


def merged(events: Sequence[Event]) -> Sequence[Event]:
    """Join the events of each choice. The choices keep the order of their first events."""
    if len(events) == 1:
        return events
    joined: dict[int, Event] = {}
    for index, ids, logprobs, reason in events:
        _, earlier, its_logprobs, _ = joined.get(index, (index, [], [], None))
        joined[index] = index, earlier + ids, its_logprobs + logprobs, reason
    return list(joined.values())


class EventRelay:
    """Passes events from other threads to the mailboxes of one event loop."""

    def __init__(self) -> None:
        self._events: deque[tuple[Mailbox, Event]] = deque()
        self._is_scheduled = False

    def mailbox(self) -> Mailbox:
        """Return a mailbox of the running event loop."""
        return Mailbox(self, asyncio.get_running_loop())

    def put(self, mailbox: Mailbox, event: Event) -> None:
        """Send an event to a mailbox. May be called from any thread."""
        self._events.append((mailbox, event))
        if not self._is_scheduled:
            self._is_scheduled = True
            mailbox.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False  # before the events are read, so that none is left behind
        while self._events:
            mailbox, event = self._events.popleft()
            mailbox.receive(event)


class Mailbox:
    """The events of one task."""

    def __init__(self, relay: EventRelay, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._relay = relay
        self._events: list[Event] = []
        self._waiter: asyncio.Future[Any] | None = None

    def put(self, event: Event) -> None:
        """Send an event to the task. Called by any thread."""
        self._relay.put(self, event)

    def receive(self, event: Event) -> None:
        """Add an event. Called only in the loop's thread."""
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Event]:
        """Wait for events and return them in order."""
        while not self._events:
            self._waiter = self.loop.create_future()
            await self._waiter
        events, self._events = self._events, []
        return events
