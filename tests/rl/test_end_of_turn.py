"""Models that end a turn with one of several tokens: they stop where transformers does, and their turns continue."""

import json
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch
import transformers
from tool_policy import TEMPLATE, rollouts, shared_template, write_tokenizer

from megalith.data.tokenizers.huggingface import HuggingFaceTokenizer
from megalith.data.tokenizers.tokenizer import TokenizerPaths
from megalith.errors import ConfigError
from megalith.generation.engine import Engine
from megalith.generation.live_engine import LiveEngine
from megalith.generation.requests import Sampling
from megalith.generation.sampling import complete
from megalith.rl.agents.turn_template import TurnTemplate
from megalith.serve.chat_format import ChatFormat
from megalith.serve.chat_session import ChatSession
from megalith.serve.http_server import HttpServer
from megalith.serve.openai_service import Access, OpenAiService
from megalith.training.loading import load_with_tokenizer

sys.path.append(str(Path(__file__).parents[1]))
from serve.http_client import Client

HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
GPT_OSS = """\
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- "<|start|>functions." + message.name + " to=assistant<|channel|>commentary<|message|>" }}
{{- message.content + "<|end|>" }}
{%- elif message.role == "assistant" %}
{%- if message.thinking and message.tool_calls %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
{%- endif %}
{%- set is_last = loop.last %}
{%- for call in message.tool_calls or [] %}
{{- "<|start|>assistant to=functions." + call.function.name + "<|channel|>commentary json<|message|>" }}
{{- call.function.arguments | tojson + "<|call|>" }}
{%- else %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
{{- "<|return|>" if is_last and not add_generation_prompt else "<|end|>" }}
{%- endfor %}
{%- else %}
{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""
"""gpt-oss's chat template, without its system message and schemas."""


def gpt_oss_tokenizer(folder: Path) -> HuggingFaceTokenizer:
    """A tokenizer that ends with <|return|>, and by its generation_config.json with <|call|> too."""
    write_tokenizer(folder, GPT_OSS, HARMONY)
    tokens = {
        one["content"]: one["id"]
        for one in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }
    made = json.loads((folder / "tokenizer.json").read_text())
    for one in made["added_tokens"]:
        one["special"] = True
    (folder / "tokenizer.json").write_text(json.dumps(made))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [tokens["<|return|>"], tokens["<|im_end|>"], tokens["<|call|>"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return HuggingFaceTokenizer.from_paths(TokenizerPaths(str(folder), None, None, None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny Llama that ends early, with each of its three ends."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = gpt_oss_tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=200, initializer_range=0.3,
        tie_word_embeddings=False,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    llama.lm_head.weight.data[list(tokenizer.stop_ids)] *= 2.5
    llama.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(tokenizer.stop_ids)}))
    return folder


def test_ends_are_those_of_the_generation_config_and_the_tokenizers_own(tmp_path):
    tokenizer = gpt_oss_tokenizer(tmp_path)
    id_of = tokenizer.token_id
    assert tokenizer.stop_ids == (id_of("<|return|>"), id_of("<|im_end|>"), id_of("<|call|>"))
    cases = [  # generation_config.json, config.json → ends in addition to the tokenizer's
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5,)),
        ({}, {"eos_token_id": 7}, ()),
        (None, {"eos_token_id": [7, 9]}, (7, 9)),
        ({"eos_token_id": [True, "x", -1, 10**6, id_of("<|return|>")]}, None, ()),
    ]
    for generation, model, more in cases:
        for name, tree in (("generation_config.json", generation), ("config.json", model)):
            (tmp_path / name).unlink(missing_ok=True)
            if tree is not None:
                (tmp_path / name).write_text(json.dumps(tree))
        opened = HuggingFaceTokenizer.from_paths(TokenizerPaths(str(tmp_path), None, None, None))
        assert opened.stop_ids == (id_of("<|return|>"), *more)


def test_completions_end_where_those_of_transformers_do(folder):
    """Greedy, in a batch call, in a chat and by the server; transformers reads the ends itself."""
    model, tokenizer = load_with_tokenizer(str(folder), "cpu", show_progress=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert tuple(theirs.generation_config.eos_token_id) == tokenizer.stop_ids
    chat = ChatFormat(tokenizer, shared_template(tokenizer), "harmony")
    questions = [f"{n} + 3?" for n in range(24)]
    prompts = [chat.prompt_ids([{"role": "user", "content": one}], {}) for one in questions]
    sampling = Sampling(24, 0, stop=tokenizer.stop_ids, vocab_size=tokenizer.vocab_size)
    found = complete(model, prompts, sampling)
    ends = set()
    for prompt, done in zip(prompts, found, strict=True):
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        ids = out[0, len(prompt) :].tolist()
        assert done.ids == ids and done.truncated == (ids[-1] not in tokenizer.stop_ids)
        assert done.content == [one for one in ids if one not in tokenizer.stop_ids]
        ends.add(ids[-1] if not done.truncated else None)
    assert set(tokenizer.stop_ids) <= ends  # every end is tried
    engine = Engine(model.config, "cpu", model.compute_dtype, max_rows=4, max_tokens=200, model=model.eval())
    live = LiveEngine(engine, tokenizer.stop_ids, tokenizer.vocab_size)
    thread = Thread(target=live.run)
    thread.start()
    server = HttpServer(OpenAiService(live, tokenizer, chat, "tiny", Access()))
    server.start()
    try:
        client = Client(server.port)
        for question, done in zip(questions, found, strict=True):
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
            status, value = client.post("/v1/chat/completions", body | {"return_token_ids": True})
            (choice,) = value["choices"]
            assert status == 200 and choice["token_ids"] == done.ids
            assert choice["finish_reason"] == ("length" if done.truncated else "stop")
            assert choice["message"]["content"] == tokenizer.decode(done.content)
    finally:
        live.close()
        thread.join()
        server.close()
    session = ChatSession(model, tokenizer, Sampling(24, 0))
    assert session.say(questions[0]) == tokenizer.decode(found[0].content)


def test_a_call_of_gpt_oss_ends_its_turn_and_the_tool_answers(tmp_path):
    """The template ends a call with <|call|> and an answer with <|return|>; sampled ids and masks stay as sampled."""
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 12, "b": 3}'
    think = "<|channel|>analysis<|message|>sum<|end|><|start|>assistant"

    def script(text: str, generation: int):
        if "functions.add to=assistant" in text:
            return "<|channel|>final<|message|>15"
        ids = tokenizer.encode(think + call)
        return [*ids, tokenizer.token_id("<|call|>")]

    tokenizer = gpt_oss_tokenizer(tmp_path / "t")
    (group,), logged, _ = rollouts(tmp_path, script, tokenizer=tokenizer)
    (one,) = group.completions
    answer = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>15<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>15<|return|>"
    parts = [tokenizer.encode(text) for text in (f"{think}{call}<|call|>", answer, final)]
    assert list(one.ids) == [one for part in parts for one in part] and list(one.segments) == [
        len(part) for part in parts
    ]
    assert logged["history_rewritten"] == [0.0] and logged["turns"] == [2.0] and not one.truncated


def test_an_answer_of_gpt_oss_continues_though_its_template_ends_it_otherwise(tmp_path):
    """An earlier answer ends with <|end|> in the template, and with <|return|> as sampled: kept, and counted."""
    tokenizer = gpt_oss_tokenizer(tmp_path / "t")
    template = TurnTemplate(tokenizer, shared_template(tokenizer))
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]
    ids, is_rewritten = template.added_ids(messages, [{"role": "user", "content": "and"}], {})
    assert tokenizer.decode(ids) == "<|start|>user<|message|>and<|end|><|start|>assistant" and is_rewritten


def test_a_turn_that_ends_otherwise_than_in_the_template_is_counted(tmp_path):
    tokenizer = gpt_oss_tokenizer(tmp_path / "t")
    template = TurnTemplate(tokenizer, shared_template(tokenizer))
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    added = [{"role": "tool", "name": "add", "content": "4"}]
    for end, is_rewritten in (("<|call|>", False), ("<|return|>", True)):
        assert template.added_ids(messages, added, {}, tokenizer.token_id(end))[1] is is_rewritten


def test_a_template_that_ends_no_turn_is_refused(tmp_path):
    write_tokenizer(tmp_path, TEMPLATE.replace("<|im_end|>", "<|over|>"))
    tokenizer = HuggingFaceTokenizer.from_paths(TokenizerPaths(str(tmp_path), None, None, None))
    with pytest.raises(
        ConfigError, match=r"end of sequence \(<\|im_end\|>\).*eos_token_id in generation_config"
    ):
        TurnTemplate(tokenizer, shared_template(tokenizer))
