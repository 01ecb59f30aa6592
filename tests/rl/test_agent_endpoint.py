"""Agents over an endpoint: sampled ids become trajectories as they were sampled, and what fails costs its own alone."""

import asyncio
import json
import os
import time
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from serve.http_client import Client, ScriptedLive
from tool_policy import FORGETFUL, TEMPLATE, call, shared_template, tokenizer_in

from megalith.config.rl import RlConfig
from megalith.errors import DataError
from megalith.generation.requests import Sampling
from megalith.rl.agents import endpoint_agent as agents
from megalith.rl.agents.endpoint_agent import EndpointAgent
from megalith.rl.rewards.rewards import Rewards
from megalith.rl.rollouts import prompts as run_prompts
from megalith.rl.rollouts.prompts import open_prompts
from megalith.rl.sampling.scored_groups import GroupRecord, sample_groups


class ScriptedRun(ScriptedLive):
    """A scripted live engine whose `run` waits for its end."""

    def run(self) -> None:
        while not self.is_closed:
            time.sleep(0.005)

    def close(self) -> None:
        self.is_closed = True

    is_closed = False


def sessions(folder, agent, script, *, prompts=({"prompt": "12 + 3?", "answer": 15},), generations=1,
             template=TEMPLATE, max_tokens=400, rewards=(), **rl):  # fmt: skip
    """Return the groups, what is logged, the tokenizer, the agent and the engine."""
    tokenizer = tokenizer_in(folder / "tokenizer", template)
    config = RlConfig(
        prompts="records", agent="agent", reward_funcs=list(rewards) or None,
        **{"agent_workers": 0, "agent_timeout": 20} | rl,
    )  # fmt: skip
    with (
        patch.object(agents, "template_of", shared_template),
        patch.object(run_prompts, "template_of", shared_template),
    ):
        endpoint = EndpointAgent(config, tokenizer, agent)
        opened = open_prompts(
            config, tokenizer, max_tokens=4000, vocab_size=tokenizer.vocab_size, seed=0, records=prompts
        )
    endpoint.open(opened.prompts)
    scored = Rewards(
        rewards, opened.prompts, max_tokens=max_tokens, workers=0, environment=endpoint.reward_name
    )
    live = ScriptedRun(tokenizer, script)
    engine = SimpleNamespace(live_engine=lambda sampling: live, version=3)
    sampling = Sampling(max_tokens, stop=(tokenizer.eod,), vocab_size=tokenizer.vocab_size)
    try:
        pieces, logged = sample_groups(
            engine, opened.prompts, scored, tokenizer, [GroupRecord(n, n) for n in range(len(opened.prompts))],
            sampling, generations, agent=endpoint, max_prompt_tokens=4000,
        )  # fmt: skip
    finally:
        endpoint.close()
        scored.close()
    return SimpleNamespace(
        groups=[one.group(opened.prompts) for one in pieces], logged=logged, tokenizer=tokenizer, agent=endpoint,
        live=live,
    )  # fmt: skip


TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]


async def with_tools(client, row) -> float:
    """Answer calls until there are none; the reward is 1 for the right answer."""
    messages = [{"role": "user", "content": row["prompt"][-1]["content"]}]
    while True:
        answer = await client.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, temperature=0.2
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float(message.content.strip() == str(row["answer"]))
        for each in message.tool_calls:
            numbers = json.loads(each.function.arguments)
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": each.id,
                    "name": "add",
                    "content": str(sum(numbers.values())),
                }
            )


def two_turns(text: str) -> str:
    return "15" if "<tool_response>" in text else "hm " + call("add", a=12, b=3)


def test_a_conversation_is_one_trajectory_with_the_policy_agents_tokens(tmp_path):
    """The same conversation through rl.tools gives the same ids, segments and transcript."""
    from tool_policy import rollouts

    found = sessions(tmp_path, with_tools, two_turns, generations=2)
    for one in found.groups[0].completions:
        assert one.rewards.tolist() == [1.0] and one.branches == []
        assert [message["role"] for message in one.messages] == ["assistant", "tool", "assistant"]
        assert np.isnan(one.logprobs).tolist() == (~one.sampled).tolist() and set(one.version) == {3}
        text = found.tokenizer.decode(one.ids[one.sampled])
        assert text == "hm " + call("add", a=12, b=3) + "<|im_end|>" + "15<|im_end|>"
    assert found.logged["turns"] == [2, 2] and found.logged["agents/branches"] == [1, 1]
    assert all(request.temperature == 1.0 for request in found.live.requests)
    assert "sets temperature" in "".join(found.agent.take_problems())

    def script(text, generation):
        return two_turns(text)

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: number
            b: number
        """
        return a + b

    theirs, _, _ = rollouts(tmp_path / "tools", script)
    assert one.segments[:2] != () and theirs[0].completions[0].segments[2:] == one.segments[2:]
    assert theirs[0].completions[0].segments[1] == one.segments[1]


def test_sampled_ids_are_kept_though_their_text_has_others(tmp_path):
    plain = tokenizer_in(tmp_path / "plain")
    apart = plain.encode("1") + plain.encode("2")
    assert plain.encode("12") != apart

    async def twice(client, row) -> float:
        messages = list(row["prompt"])
        for text in ("again", None):
            answer = await client.chat.completions.create(model="any", messages=messages)
            content = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": f" {content}\n"}, {"role": "user", "content": text}]
        return 1.0

    one = sessions(tmp_path, twice, lambda text: apart).groups[0].completions[0]
    assert one.ids[one.sampled].tolist() == [*apart, plain.eod] * 2 and len(one.segments) == 3


def test_a_rewritten_history_begins_a_branch_with_the_same_reward(tmp_path):
    async def rewriting(client, row) -> float:
        ask = client.chat.completions.create
        first = (await ask(model="any", messages=row["prompt"])).choices[0].message.content
        other = [
            *row["prompt"],
            {"role": "assistant", "content": "no " + first},
            {"role": "user", "content": "so?"},
        ]
        await ask(model="any", messages=other)
        await ask(model="any", messages=[{"role": "user", "content": "a sub-agent"}])
        return 0.5

    found = sessions(
        tmp_path, rewriting, lambda text: "sub" if "sub-agent" in text else "yes" if "so?" in text else "hm"
    )
    one = found.groups[0].completions[0]
    texts = [found.tokenizer.decode(each.ids[each.sampled]) for each in (one, *one.branches)]
    assert texts == ["sub<|im_end|>", "hm<|im_end|>", "yes<|im_end|>"]
    assert "no hm" in found.tokenizer.decode(one.branches[1].prompt_ids)
    assert [each.rewards.tolist() for each in one.branches] == [[0.5], [0.5]]
    assert found.logged["agents/branches"] == [3]


def test_a_template_that_rewrites_history_is_counted(tmp_path):
    found = sessions(tmp_path, with_tools, two_turns, template=FORGETFUL)
    assert found.logged["history_rewritten"] == [1.0] and found.logged["agents/branches"] == [1]


def test_token_ids_and_choices_are_continued(tmp_path):
    async def by_ids(client, row) -> float:
        body = dict(model="any", n=2, extra_body={"return_token_ids": True})
        first = await client.completions.create(prompt="x", **body)
        ids = [*first.choices[1].prompt_token_ids, *first.choices[1].token_ids, 65, 66]
        await client.completions.create(model="any", prompt=ids, max_tokens=2)
        with pytest.raises(Exception, match="has token 99999, but the policy's vocabulary"):
            await client.completions.create(model="any", prompt=[99999])
        with pytest.raises(
            Exception, match="penalties, logit_bias, bad_words, response_format and a required"
        ):
            await client.completions.create(model="any", prompt="x", presence_penalty=0.5)
        return 1.0

    found = sessions(tmp_path, by_ids, lambda text: "the end")
    (sibling,) = found.groups[0].completions[0].branches
    one = found.groups[0].completions[0]
    assert one.segments == (len(sibling.ids), 2, 2) and one.truncated and not sibling.truncated
    assert found.logged["turns"] == [3] and found.logged["agents/refused"] == [2]


async def by_number(client, row) -> float:
    """Fail in the way of the row's number."""
    if row["number"] == 4:
        return 1.0
    answer = await client.chat.completions.create(model="any", messages=row["prompt"])
    if row["number"] == 0:
        raise ValueError("not today")
    if row["number"] == 1:
        time.sleep(60)
    if row["number"] == 2:
        os._exit(7)
    return "much" if row["number"] == 3 else len(answer.choices[0].message.content)


def test_agents_that_fail_cost_their_own_completion(tmp_path):
    """In processes: they raise, hang, crash, return no number, and ask for nothing."""
    prompts = [{"prompt": f"number {number}", "number": number} for number in range(6)]
    found = sessions(
        tmp_path, by_number, lambda text: "yes", prompts=prompts, agent_workers=6, agent_timeout=3
    )
    rewards = [group.completions[0].rewards[0] for group in found.groups]
    assert np.isnan(rewards[:5]).all() and rewards[5] == 3.0
    silent = found.groups[4].completions[0]
    assert silent.segments == (0, 1) and not silent.sampled.any()
    assert found.logged["agents/failed"] == [1, 1, 1, 1, 0, 0] and found.logged["agents/empty"] == [
        0,
        0,
        0,
        0,
        1,
        0,
    ]
    (line,) = found.agent.take_problems()
    assert "4 of 6 agents failed: for prompt" in line and "by_number raised ValueError: not today" in line


async def crashing_first(client, row) -> float:
    await client.chat.completions.create(model="any", messages=row["prompt"])
    if row["number"] < 2:
        os._exit(7)
    return 1.0


def test_processes_that_crash_are_missing_until_the_next_batch(tmp_path):
    """They are not replaced in the thread that runs the agents, where a fork may crash."""
    prompts = [{"prompt": f"number {number}", "number": number} for number in range(4)]
    found = sessions(
        tmp_path, crashing_first, lambda text: "yes", prompts=prompts, agent_workers=2, agent_timeout=9
    )
    assert found.logged["agents/failed"] == [1, 1, 1, 1]  # the last two were not started
    runner = found.agent._runner
    runner.prepare(4)
    assert len(runner._workers) == 2 and not any(worker.has_ended for worker in runner._workers)
    runner.close()


def test_agents_that_sample_nothing_at_all_end_the_run(tmp_path):
    async def broken(client, row) -> float:
        return row["nothing"]

    with pytest.raises(
        DataError, match=r"no agent has sampled a token: for prompt .* broken raised KeyError"
    ):
        sessions(tmp_path, broken, lambda text: "x")

    async def silent(client, row) -> float:
        return 1.0

    with pytest.raises(DataError, match="silent returned without a request"):
        sessions(tmp_path, silent, lambda text: "x")


def test_limits_of_turns_and_tokens_are_said_to_the_agent(tmp_path):
    errors = []

    async def endless(client, row) -> float:
        messages = list(row["prompt"])
        while True:
            try:
                answer = await client.chat.completions.create(model="any", messages=messages)
            except Exception as error:
                errors.append(str(error))
                return 1.0
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]

    one = sessions(tmp_path, endless, lambda text: "yes", max_turns=3).groups[0].completions[0]
    assert len(one.segments) == 5 and "rl.max_turns is 3, and the agent has sampled 3 turns" in errors.pop()
    one = sessions(tmp_path, endless, lambda text: "yes", max_tokens=20).groups[0].completions[0]
    assert len(one.ids) <= 20 and ("rl.max_completion_length is 20" in errors[0] or one.truncated)


def test_rewards_judge_instead_of_the_agent(tmp_path):
    async def answers(client, row) -> None:
        await client.chat.completions.create(model="any", messages=row["prompt"])

    found = sessions(tmp_path, answers, lambda text: "it is 15", rewards=["arithmetic"])
    assert found.groups[0].completions[0].rewards.tolist() == [1.0]


def test_sessions_end_with_their_agents(tmp_path):
    """A request to the session of an agent that has returned is refused."""
    addresses, refusals = [], []

    async def leaks(client, row) -> float:
        addresses.append(str(client.base_url).rstrip("/"))
        await client.chat.completions.create(model="any", messages=row["prompt"])
        if addresses[0] == str(client.base_url).rstrip("/"):
            return 1.0
        port, _, path = addresses[0].partition("127.0.0.1:")[2].partition("/")
        other = Client(int(port), "/" + path.removesuffix("/v1"))
        while not refusals:
            status, value = await asyncio.to_thread(other.chat, "hello", model="any")
            if status != 200:
                refusals.append((status, value["error"]["message"]))
        return 1.0

    sessions(tmp_path, leaks, lambda text: "x", generations=2, agent_workers=0)
    assert [(status, text[:21]) for status, text in refusals] == [(400, "the session has ended")]
