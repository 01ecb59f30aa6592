"""A tokenizer with a template of the Hermes form, a scripted engine, and an agent over both."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import tokenizers

from megalith.config.rl import RlConfig
from megalith.data.chat.chat_template import ChatTemplate, template_of
from megalith.data.tokenizers.huggingface import HuggingFaceTokenizer
from megalith.data.tokenizers.tokenizer import TokenizerPaths
from megalith.generation.requests import Completion, Sampling
from megalith.rl.agents import policy_agent as agents
from megalith.rl.agents.policy_agent import PolicyAgent
from megalith.rl.rewards.rewards import Rewards
from megalith.rl.rollouts import prompts as run_prompts
from megalith.rl.rollouts.prompts import open_prompts
from megalith.rl.sampling.scored_groups import FIRST_KEY, GroupRecord, sample_groups

SPECIAL = ["<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
MERGES = [("1", "2"), ("t", "h"), ("th", "e")]  # so that a text has several tokenizations
TEMPLATE = """\
{%- if tools %}{{ "<|im_start|>system\\n" + tools | tojson + "<|im_end|>\\n" }}{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set written = {"name": call.function.name, "arguments": call.function.arguments} %}
{{- "\\n<tool_call>\\n" + written | tojson + "\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
FORGETFUL = TEMPLATE.replace("message.content }}", '(message.content if loop.last else "…") }}')
"""Renders only the last message in full."""


def write_tokenizer(folder: Path, template: str = TEMPLATE, more: Sequence[str] = ()) -> Path:
    """Of bytes, three merges, and the tags and `more` as tokens of their own."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = [*alphabet, *("".join(pair) for pair in MERGES)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({t: n for n, t in enumerate(vocab)}, MERGES))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([tokenizers.AddedToken(one, normalized=False) for one in [*TAGS, *more]])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "<|im_end|>",
                "pad_token": "<|im_end|>",
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        )
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


def tokenizer_in(folder: Path, template: str = TEMPLATE) -> HuggingFaceTokenizer:
    paths = TokenizerPaths(str(write_tokenizer(folder, template)), None, None, None)
    return HuggingFaceTokenizer.from_paths(paths)


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


class ScriptedEngine:
    """Answers each request with the text that `script(text, generation)` returns, and an end of sequence if it has
    none."""

    shared = False

    def __init__(
        self, tokenizer: HuggingFaceTokenizer, script: Callable[[str, int], str | list[int]], generations: int
    ):
        self.tokenizer, self.script, self.generations = tokenizer, script, generations

    def generate(self, prompts, sampling, *, keys=None, num_generations=1, max_new_tokens=None):
        made = []
        for number, prompt in enumerate(prompts):
            for generation in range(num_generations):
                if keys[number] >= FIRST_KEY:  # of one completion
                    generation = (keys[number] - FIRST_KEY) // sampling.max_new_tokens % self.generations
                answer = self.script(self.tokenizer.decode(prompt), generation)
                ids = answer if isinstance(answer, list) else self.tokenizer.encode(answer)
                limit = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens[number]
                ends = self.tokenizer.stop_ids
                ids = (ids if ids and ids[-1] in ends else [*ids, self.tokenizer.eod])[:limit]
                logprobs = [-0.01 * (n + 1) for n in range(len(ids))]
                truncated = ids[-1] not in ends
                made.append(Completion(number, generation, ids, logprobs, truncated, (3,)))
        return made


TEMPLATES: dict[bytes, ChatTemplate] = {}


def shared_template(tokenizer: HuggingFaceTokenizer) -> ChatTemplate:
    """One template for all tokenizers that have it: each starts a process."""
    source = tokenizer.files["chat_template.jinja"]
    return TEMPLATES.setdefault(source, template_of(tokenizer))


def rollouts(
    folder: Path,
    script: Callable[[str, int], str | list[int]],
    *,
    prompts: Sequence[dict] = ({"prompt": "12 + 3?", "answer": 15},),
    tools: Sequence[Callable] | None = (add,),
    environment: Callable | None = None,
    generations: int = 1,
    template: str = TEMPLATE,
    rewards: Sequence[str | Callable] = ("arithmetic",),
    max_tokens: int = 400,
    tokenizer: HuggingFaceTokenizer | None = None,
    **rl,
):
    """Return the scored groups, what is logged, and the tokenizer."""
    tokenizer = tokenizer or tokenizer_in(folder / "tokenizer", template)
    settings = {"tools": ["tools"] if tools else None} | {
        "environment": "environment_factory" if environment else None
    }
    config = RlConfig(
        prompts="records", reward_funcs=[*map(str, rewards)], **{"tool_workers": 0} | settings | rl
    )
    with (
        patch.object(agents, "template_of", shared_template),
        patch.object(run_prompts, "template_of", shared_template),
    ):
        agent = PolicyAgent(config, tokenizer, tools or None, environment)
        opened = open_prompts(
            config, tokenizer, max_tokens=4000, vocab_size=tokenizer.vocab_size, seed=0, records=prompts,
            tools=agent.schemas,
        )  # fmt: skip
    agent.open(opened.prompts)
    scored = Rewards(rewards, opened.prompts, max_tokens=max_tokens, workers=0, environment=agent.reward_name)
    try:
        pieces, logged = sample_groups(
            ScriptedEngine(tokenizer, script, generations), opened.prompts, scored, tokenizer,
            [GroupRecord(n, n) for n in range(len(opened.prompts))],
            Sampling(max_tokens, stop=tokenizer.stop_ids), generations, agent=agent, max_prompt_tokens=4000,
        )  # fmt: skip
    finally:
        agent.close()
        scored.close()
    return [one.group(opened.prompts) for one in pieces], logged, tokenizer
