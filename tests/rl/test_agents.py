"""Rollouts with tools: sampled tokens stay as sampled, what is added is TRL's, and bad calls are answered."""

import hashlib
import json
import os
import time
from itertools import groupby
from threading import Event, Thread

import numpy as np
import pytest
from tool_policy import FORGETFUL, TEMPLATE, add, call, rollouts, tokenizer_in

from megalith.config.rl import RlConfig
from megalith.data.chat.call_formats import ParseContext, ToolCall, call_format, hermes, llama3_json
from megalith.data.chat.tagged_calls import glm45, qwen3_coder
from megalith.errors import ConfigError, DataError, TrainingError
from megalith.generation.requests import Sampling
from megalith.rl.agents.overlapped_turns import sample_overlapped
from megalith.rl.agents.policy_agent import PolicyAgent
from megalith.rl.agents.trajectory import Trajectory
from megalith.rl.tools.tool_functions import answer_text, tool_schema

ANSWERED = "<tool_response>"
TRLS = {  # TRL 1.16.0's _tool_call_loop on this template and these turns: segments, hashes of prompt and completion ids
    "12 + 3?": ([120, 32, 52, 26, 9], "2c5644e52683abbc", "e6d9951fe8263585"),
    "hello": ([8], "f8b4079735a3d966", "de39515ed6ff0a74"),
}  # fmt: skip


def turn_number(text: str) -> int:
    """Of the turn that follows: the number of turns that the policy has had."""
    return text.count("<|im_start|>assistant") - 1


def digest(ids: np.ndarray) -> str:
    return hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest()[:16]


def scripted(*turns):
    """A script of turns, the last of which repeats."""
    return lambda text, generation: turns[min(turn_number(text), len(turns) - 1)]


def only(groups):
    ((one,),) = [group.completions for group in groups]
    return one


@pytest.fixture
def apart(tmp_path) -> list[int]:
    """The ids of 1 and 2, which the tokenizer itself would join."""
    encode = tokenizer_in(tmp_path / "plain").encode
    assert len(encode("12")) == 1
    return encode("1") + encode("2")


def test_tokens_and_mask_are_trls_for_several_calls_and_turns(tmp_path, apart):
    encode = tokenizer_in(tmp_path / "plain").encode
    begin = 'thinking about it\n<tool_call>\n{"name": "add", "arguments": {"a": '
    turns = [
        encode(begin) + apart + encode(', "b": 3}}\n</tool_call>\n' + call("add", a=1, b=1)),
        encode(call("add", a=15, b=1)),
        encode("it is ") + apart,
    ]

    def script(text, generation):
        return encode("hi the re") if "hello" in text else turns[turn_number(text)]

    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in TRLS]
    groups, logged, _ = rollouts(tmp_path, script, prompts=prompts, rewards=["length"], max_tokens=4000)
    for group, (segments, prompt, ids) in zip(groups, TRLS.values(), strict=True):
        one = group.completions[0]
        assert [len(list(each)) for _, each in groupby(one.sampled)] == segments == list(one.segments)
        assert (digest(group.prompt_ids), digest(one.ids)) == (prompt, ids)
        assert np.isnan(one.logprobs).tolist() == (~one.sampled).tolist()
    assert logged["turns"] == [3, 1] and logged["tools/calls"] == [3, 0] and sum(logged["tools/errors"]) == 0
    messages = groups[0].completions[0].messages
    assert [one["role"] for one in messages] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [one["content"] for one in messages if one["role"] == "tool"] == ["15", "2", "16"]


def test_sampled_ids_are_never_tokenized_again(tmp_path, apart):
    encode = tokenizer_in(tmp_path / "plain").encode
    first = encode("the ") + apart + encode(call("add", a=1, b=2))
    one = only(rollouts(tmp_path, scripted(first, apart))[0])
    tokenizer = tokenizer_in(tmp_path / "plain")
    assert one.ids[one.sampled].tolist() == [*first, tokenizer.eod, *apart, tokenizer.eod]
    assert tokenizer.encode(tokenizer.decode(one.ids)) != one.ids.tolist()  # its text has other tokens


def test_a_template_that_rewrites_history_is_counted_and_the_turns_stay(tmp_path):
    script = scripted("first" + call("add", a=1, b=2), "second" + call("add", a=3, b=4), "15")
    groups, logged, tokenizer = rollouts(tmp_path, script, template=FORGETFUL)
    plain, _, _ = rollouts(tmp_path / "plain", script)
    assert only(groups).ids.tolist() == only(plain).ids.tolist()
    assert logged["history_rewritten"] == [1.0]
    assert "first" in tokenizer.decode(only(groups).ids)


def noisy(text: str) -> str:
    """Raise an error.

    Args:
        text: its text.
    """
    raise ValueError(text)


def objects() -> str:
    """Return an object."""
    return object()


def stuck() -> str:
    """Hang."""
    time.sleep(60)


def crash() -> str:
    """End the process."""
    os._exit(3)


async def later(seconds: float, answer: str) -> str:
    """Answer later.

    Args:
        seconds: how much later.
        answer: what to answer.
    """
    time.sleep(seconds)
    return answer


BAD = {  # what the policy writes: how the answer begins
    "<tool_call>{not json}</tool_call>": "error: the tool call is invalid: it is not JSON",
    '<tool_call>{"arguments": {}}</tool_call>': "error: the tool call is invalid: it has no name",
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': "error: the tool call is invalid: its arguments",
    '<tool_call>{"name": "add"': "error: the tool call is invalid: it has no closing </tool_call>",
    call("multiply", a=1): "error: there is no tool 'multiply'; the tools are add, noisy, objects, stuck, crash",
    call("add", a=1): "error: add cannot be called with these arguments: missing a required argument: 'b'",
    call("add", a=1, b=2, c=3): "error: add cannot be called with these arguments: got an unexpected keyword",
    call("noisy", text="oh\ud800"): "error: noisy raised ValueError: oh\ufffd",
    call("objects"): "error: objects failed: it returned a object, which is not text",
    call("stuck"): "error: stuck did not return within 2 s",
    call("crash"): "error: crash failed: its process ended with exit code 3",
}  # fmt: skip


def test_a_bad_call_is_answered_with_an_error_and_counted(tmp_path):
    """In worker processes: one hangs and one crashes, and the run goes on."""
    calls = list(BAD)
    prompts = [{"prompt": f"number {number}", "answer": 15} for number in range(len(calls))]

    def script(text, generation):
        number = int(text.rpartition("number ")[2].partition("<")[0])
        return "15" if ANSWERED in text.rpartition("number ")[2] else calls[number]

    tools = (add, noisy, objects, stuck, crash)
    groups, logged, _ = rollouts(
        tmp_path, script, prompts=prompts, tools=tools, tool_workers=2, tool_timeout=2.0, max_tokens=900
    )
    for group, (written, expected) in zip(groups, BAD.items(), strict=True):
        _, tool, final = group.completions[0].messages
        assert tool["content"].startswith(expected), written
        assert final["content"] == "15" and group.completions[0].rewards == [1.0]
    assert logged["tools/errors"] == [1.0] * len(BAD)


def test_several_answers_are_in_the_order_of_the_calls(tmp_path):
    calls = "".join(call("later", seconds=0.2 - 0.1 * n, answer=f"answer {n}") for n in range(3))
    one = only(rollouts(tmp_path, scripted(calls, "15"), tools=(later,), tool_workers=3)[0])
    assert [each["content"] for each in one.messages[1:4]] == ["answer 0", "answer 1", "answer 2"]


def test_turns_calls_and_tokens_have_limits(tmp_path):
    again = scripted(call("add", a=1, b=2))
    one = only(rollouts(tmp_path, again, max_turns=2)[0])
    assert len(one.segments) == 3 and not one.truncated  # the second turn's call has no answer
    assert [each["role"] for each in one.messages] == ["assistant", "tool", "assistant"]
    one = only(rollouts(tmp_path, again, max_turns=3, max_tool_calls=1)[0])
    answers = [each["content"] for each in one.messages if each["role"] == "tool"]
    assert answers == ["3", "error: the limit of 1 tool calls is reached; answer without tools"]
    whole = only(rollouts(tmp_path, again, max_turns=3)[0])
    ends = np.cumsum(whole.segments)
    for limit in (1, ends[0], ends[1], ends[1] + 1, len(whole.ids) - 1):
        one = only(rollouts(tmp_path, again, max_turns=3, max_tokens=limit)[0])
        assert one.ids.tolist() == whole.ids[: len(one.ids)].tolist() and one.truncated
        assert len(one.segments) % 2 == 1, limit  # ends with a sampled token
        assert len(one.ids) == limit or len(one.ids) in ends


def test_trajectories_do_not_depend_on_the_batch(tmp_path):
    def script(text, generation):
        number = text.rpartition("number ")[2].partition("<")[0]
        return (
            number
            if turn_number(text) >= int(number) + generation
            else call("add", a=int(number), b=generation)
        )

    prompts = [{"prompt": f"number {number}", "answer": number} for number in range(4)]
    together, _, _ = rollouts(tmp_path, script, prompts=prompts, generations=3)
    for group, prompt in zip(together, prompts, strict=True):
        alone, _, _ = rollouts(tmp_path, script, prompts=[prompt], generations=3)
        for one, other in zip(group.completions, alone[0].completions, strict=True):
            assert one.ids.tolist() == other.ids.tolist() and one.segments == other.segments


def seen_by_trl(prompts, completions, completion_ids, **columns) -> list[float]:
    assert [len(one) for one in completions] == [3, 3] and completions[0][1]["role"] == "tool"
    return [float(len(ids)) for ids in completion_ids]


def seen_by_verl(data_source, solution_str, ground_truth, extra_info) -> float:
    return float("<tool_response>\n3\n" in solution_str)


def test_rewards_get_turns_in_their_own_forms(tmp_path):
    rewards = ["arithmetic", "length", seen_by_trl, seen_by_verl]
    prompts = [{"prompt": "1 + 2?", "answer": 3, "length": 100}]
    groups, _, _ = rollouts(
        tmp_path,
        scripted(call("add", a=1, b=2), "it is 3"),
        prompts=prompts,
        rewards=rewards,
        generations=2,
    )
    one = groups[0].completions[0]
    length = 1 - abs(one.sampled_tokens - 100) / 100
    assert one.rewards.tolist() == pytest.approx([1.0, length, len(one.ids), 1.0])


def test_formats_read_what_models_write():
    context = ParseContext()
    turn = hermes("<think>\n<tool_call>{}</tool_call>\n</think>\nno", context)
    assert turn.calls == [] and turn.message["content"].endswith("no")
    text = '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "arguments": {}}'
    assert llama3_json(text, context).calls == [ToolCall("f", {"x": 1}), ToolCall("g")]
    assert llama3_json("{1, 2} is a set", context).calls[0].error
    assert llama3_json("the set {1}", context).calls == []
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json",
                           "transform": {"type": "function", "function": "{content}"}},
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }  # fmt: skip
    parse = call_format("auto", TEMPLATE, template)
    context = ParseContext("<|im_start|>assistant\n", [], "<|im_end|>", template)
    turn = parse('hm <call>{"name": "f", "arguments": {"x": 1}}</call>', context)
    assert turn.calls == [ToolCall("f", {"x": 1})] and turn.message["content"].strip() == "hm"
    assert parse("<call>{</call>", context).calls[0].error


SCHEMA = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"x": {"type": "integer"}, "text": {"type": "string"}}}}}]  # fmt: skip


def test_calls_with_a_tag_per_argument_are_read():
    context = ParseContext(tools=SCHEMA)
    coder = """hm
<tool_call>
<function=f>
<parameter=x>
3
</parameter>
<parameter=text>
12
two lines
</parameter>
</function>
</tool_call>
<tool_call>
<function=g>
<parameter=y>[1, {"z": null}]</parameter>
</function>
</tool_call>"""
    expected = [ToolCall("f", {"x": 3, "text": "12\ntwo lines"}), ToolCall("g", {"y": [1, {"z": None}]})]
    turn = call_format("auto", "<tool_call><function=", None)(coder, context)
    assert turn.calls == expected and turn.message["content"] == "hm"
    glm = """hm
<tool_call>f
<arg_key>x</arg_key>
<arg_value>3</arg_value>
<arg_key>text</arg_key>
<arg_value>12
two lines</arg_value>
</tool_call>
<tool_call>g
<arg_key>y</arg_key>
<arg_value>[1, {"z": null}]</arg_value>
</tool_call>"""
    turn = call_format("auto", "<tool_call><arg_key>", None)(glm, context)
    assert turn.calls == expected and len(turn.message["tool_calls"]) == 2
    for parse in (qwen3_coder, glm45):
        assert parse("<think><tool_call>f</tool_call></think>no", context).calls == []
        assert (
            parse("<tool_call><function=f", context)
            .calls[0]
            .error.startswith("error: the tool call is invalid")
        )
        assert parse("no call", context).message == {"role": "assistant", "content": "no call"}


def test_harmonys_channels_are_read():
    """Examples of the format's description: a call after reasoning, one by the role's recipient, and an answer."""
    parse, context = call_format("auto", "<|channel|>", None), ParseContext(tools=SCHEMA)
    called = (
        "<|channel|>analysis<|message|>Need to use function f.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"x": 3}<|call|>'
    )
    turn = parse(called, context)
    assert turn.calls == [ToolCall("f", {"x": 3})]
    assert turn.message["thinking"] == "Need to use function f." and turn.message["content"] == ""
    turn = parse(' to=functions.f<|channel|>commentary json<|message|>{"text": "a<b"}', context)
    assert turn.calls == [ToolCall("f", {"text": "a<b"})] and "thinking" not in turn.message
    preamble = "<|channel|>commentary<|message|>Two steps.<|end|><|start|>assistant"
    both = preamble + called.rpartition("assistant")[2]
    assert parse(both, context).message["content"] == "Two steps."
    answer = (
        "<|channel|>analysis<|message|>2 + 2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
    )
    turn = parse(answer, context)
    assert turn.calls == [] and (turn.message["content"], turn.message["reasoning_content"]) == ("4", "2 + 2")
    for arguments, reason in (("{x}", "are not JSON"), ("[1]", "are not an object")):
        (call,) = parse(f"<|channel|>commentary to=functions.f<|message|>{arguments}<|call|>", context).calls
        assert call.name == "f" and reason in call.error
    assert parse("plain text", context).message["content"] == "plain text"
    assert parse("<|channel|>final<|message|>cut", context).message["content"] == "cut"


class HeldLive:
    """A live engine whose second request is answered when the first one's tools run."""

    def __init__(self, fails: bool = False):
        self.fails, self.requests, self.tools_run, self.is_over = fails, [], Event(), Event()

    def submit(self, requests, on_tokens) -> None:
        self.requests += requests
        number, callback = len(self.requests), on_tokens[0]

        def answer() -> None:
            if number == 2:
                assert self.tools_run.wait(20)
            callback([number, 1], [-0.5, -0.25], "stop")

        Thread(target=answer).start()

    def run(self) -> None:
        if self.fails:
            raise TrainingError("the server has died")
        assert self.is_over.wait(20)

    def close(self) -> None:
        self.is_over.set()


def test_a_turn_is_sampled_while_the_tools_of_another_completion_run():
    trajectories = [Trajectory(n, n, 0, n, [5, 6]) for n in range(2)]
    live, batches = HeldLive(), []

    def advance(waiting) -> None:
        batches.append([one.slot for one in waiting])
        live.tools_run.set()
        for one in waiting:
            if one.turns == 2:
                one.end()
            else:
                one.add([7])

    sampling = Sampling(max_new_tokens=9, temperature=0.7, seed=3)
    sample_overlapped(live, trajectories, sampling, 4, lambda one: 10 * one.slot + one.turns, advance)
    assert batches[0] == [0] and [slot for batch in batches for slot in batch].count(1) == 2
    assert [one.segments for one in trajectories] == [[2, 1, 2], [2, 1, 2]]
    assert all(one.versions == [4] * 5 and one.has_ended for one in trajectories)
    assert {(tuple(each.prompt), each.max_new_tokens, each.key) for each in live.requests} == {
        ((5, 6), 9, 0), ((5, 6), 9, 10), ((5, 6, 1, 1, 7), 6, 1), ((5, 6, 2, 1, 7), 6, 11),
    }  # fmt: skip


def test_errors_of_tools_and_of_the_engine_end_overlapped_sampling():
    def advance(waiting) -> None:
        raise DataError("the template cannot continue")

    sampling = Sampling(max_new_tokens=9)
    with pytest.raises(DataError, match="cannot continue"):
        sample_overlapped(HeldLive(), [Trajectory(0, 0, 0, 0, [5])], sampling, 0, lambda one: 0, advance)
    with pytest.raises(TrainingError, match="has died"):
        sample_overlapped(HeldLive(True), [Trajectory(0, 0, 0, 0, [5])], sampling, 0, lambda one: 0, advance)


def test_answers_are_text():
    assert [answer_text(value) for value in ("a", 2, 2.5, None, True, ["é", 1], {"a": (1,)})] == [
        "a", "2", "2.5", "None", "True", '["é", 1]', '{"a": [1]}'
    ]  # fmt: skip
    assert answer_text("x" * (1 << 16) + "yy").endswith("x… (2 more characters)")


def unhinted(a):
    """Add.

    Args:
        a: a number.
    """


def test_unusable_tools_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"rl\.tools has unhinted, which cannot be described.*type hint"):
        tool_schema(unhinted)
    tokenizer = tokenizer_in(tmp_path / "tokenizer")
    rl = RlConfig(prompts="x", reward_funcs="length", tools="tools")
    with pytest.raises(ConfigError, match="two tools with the name add"):
        PolicyAgent(rl, tokenizer, [add, add])
    plain = tokenizer_in(tmp_path / "plain", TEMPLATE.replace("tool_call", "a").replace("tool_call", "a"))
    with pytest.raises(
        ConfigError,
        match=(
            r"rl\.tool_call_format is auto, but the chat template uses none of the built-in tool call "
            "formats"
        ),
    ):
        PolicyAgent(rl, plain, [add])
    endless = tokenizer_in(tmp_path / "endless", TEMPLATE.replace("<|im_end|>", "<|end|>"))
    with pytest.raises(
        ConfigError, match=r"does not end the assistant's turn .* \(<\|im_end\|>\).*set eos_token"
    ):
        PolicyAgent(rl, endless, [add])
