"""Transcripts of the report: turns by colour, and nothing of a model's text is markup."""

from megalith.report.page.transcripts import MAX_MESSAGES, completion_html


def test_turns_are_sampled_or_added_and_escaped():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "<b>"}}}
    record = {
        "prompt": "<script>1",
        "completion": "not shown",
        "messages": [
            {"role": "assistant", "content": "<script>2", "tool_calls": [call, "odd"]},
            {"role": "tool", "name": "<i>", "content": "<script>3"},
            {"role": "assistant", "content": "done"},
            "odd",
        ],
        "segments": [12, 30, 9],
        "turn_rewards": [0.0, 1.0],
    }
    html = completion_html(record)
    assert "<script" not in html and "<b>&" not in html and "<i>" not in html and "not shown" not in html
    assert [html.count(f"turn {kind}") for kind in ("sampled", "added")] == [2, 1]
    assert "2 turns; 21 sampled and 30 added tokens; rewards of the turns 0.0, 1.0" in html
    assert "add({" in html


def test_long_and_odd_transcripts_are_bounded():
    many = {"messages": [{"role": "assistant", "content": "x" * 10_000}] * 500}
    html = completion_html(many)
    assert html.count("turn sampled") == MAX_MESSAGES and "460 more messages" in html and len(html) < 100_000
    assert "text" in completion_html({"messages": "odd", "completion": "text"})
    assert completion_html({"messages": [{"role": None, "content": 5}], "segments": ["x"]})
