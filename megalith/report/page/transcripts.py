"""Formats the completions of a GRPO run as HTML: prompt and text, or the turns of a transcript."""

from __future__ import annotations

from collections.abc import Sequence

from megalith.report.page.svg_charts import Html, preformatted, table, text
from megalith.report.run_files import Record, RunFiles, to_float

MAX_COMPLETIONS, COMPLETION_LENGTH = 12, 1500
MAX_MESSAGES = 40  # shown of a transcript
SAMPLED, ADDED = "sampled", "added"  # classes of page.css


def completions_html(run: RunFiles) -> str:
    """Return the newest completions, one per prompt."""
    newest = {str(record.get("prompt")): record for record in run.completions}
    shown = sorted(newest.values(), key=lambda r: to_float(r.get("step")) or 0.0)[-MAX_COMPLETIONS:]
    rows = [(record.get("step"), _rewards(record), Html(completion_html(record))) for record in shown]
    return table(("step", "rewards", "prompt and completion"), rows) if rows else ""


def _rewards(record: Record) -> str:
    rewards = record.get("rewards")
    items = rewards.items() if isinstance(rewards, dict) else ()
    return ", ".join(f"{name} {value}" for name, value in items)


def completion_html(record: Record) -> str:
    """Return a prompt and its completion as HTML.

    A completion is a text or, in a conversation with an environment, messages: those of the policy and those of the
    environment have different colours.
    """
    prompt, messages = preformatted(record.get("prompt"), COMPLETION_LENGTH), record.get("messages")
    if not isinstance(messages, list):
        return prompt + preformatted(record.get("completion"), COMPLETION_LENGTH)
    shown = [one for one in messages if isinstance(one, dict)]
    turns = "".join(map(_message, shown[:MAX_MESSAGES]))
    more = f"<p>{len(shown) - MAX_MESSAGES} more messages</p>" if len(shown) > MAX_MESSAGES else ""
    return f"{prompt}{turns}{more}<p>{text(_summary(record, shown))}</p>"


def _summary(record: Record, messages: Sequence[Record]) -> str:
    """Return the numbers of turns and tokens, and the reward of each step."""
    turns = sum(one.get("role") == "assistant" for one in messages)
    parts = [f"{turns} turn{'s' * (turns != 1)}"]
    segments = record.get("segments")
    if isinstance(segments, list) and all(type(one) is int for one in segments):
        parts.append(f"{sum(segments[::2]):,} sampled and {sum(segments[1::2]):,} added tokens")
    if isinstance(record.get("turn_rewards"), list):
        parts.append(
            "rewards of the turns " + ", ".join(f"{one}" for one in record["turn_rewards"][:MAX_MESSAGES])
        )
    return "; ".join(parts)


def _message(message: Record) -> str:
    role = message.get("role")
    kind = SAMPLED if role == "assistant" else ADDED
    name = f" {text(message['name'], 80)}" if isinstance(message.get("name"), str) else ""
    body = preformatted(message.get("content") or "", COMPLETION_LENGTH)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            line = f"{function.get('name')}({function.get('arguments')})"
            body += preformatted(line, COMPLETION_LENGTH)
    return f'<div class="turn {kind}"><b>{text(role, 40)}{name}</b>{body}</div>'
