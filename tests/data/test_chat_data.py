"""Chat data: what each form says, what of it is learned, how it is packed, and what is refused."""

import json
import os
import select
import shutil
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from bos_tokenizer import bos_tokenizer
from default_cases import by_default

from megalith.config.data import DataConfig
from megalith.config.fine_tuning import SftConfig
from megalith.config.preferences import DpoConfig
from megalith.data.best_fit import best_fit_decreasing
from megalith.data.chat import sample_cache
from megalith.data.chat.chat_dataset import ChatDataset, make_chat_batch, open_chat_data
from megalith.data.chat.chat_template import ChatTemplate, template_of
from megalith.data.chat.conversations import Chat
from megalith.data.chat.sample_cache import cached_samples
from megalith.data.chat.samples import EQUAL, Samples, read_samples
from megalith.data.tokenizers.open_tokenizer import build_tokenizer, load_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.errors import ConfigError, DataError

PLAIN = """{%- for m in messages -%}
<|{{ m.role }}|>{{ m.content }}{{ eos_token }}
{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
MARKED = """{%- for m in messages -%}
<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration -%}
{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
REWRITES = "{% for m in messages %}{{ m.content if loop.last else m.content[:2] }};{% endfor %}"

TURNS = [("user", "two and two?"), ("assistant", "four, café ☕"), ("user", "sure?"), ("assistant", "yes")]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A byte-pair tokenizer with `<|endoftext|>`, in a folder as transformers has them."""
    folder = tmp_path_factory.mktemp("tokenizer")
    text = "\n".join(f"<|{role}|>{content}" for role, content in TURNS * 9)
    (folder / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    train_tokenizer([folder / "text.jsonl"], 300, folder)
    return folder


def tokenizer_with(folder: Path, template: str | None):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    if template is not None:
        tokenizer.files["chat_template.jinja"] = template.encode()
    return tokenizer


def read(tokenizer, *records, longest=200, name="chat.jsonl", **settings) -> Samples:
    """The samples of a file with a record a line; text stands there as it is."""
    lines = (one if isinstance(one, str) else json.dumps(one) for one in records)
    Path(name).write_text("".join(line + "\n" for line in lines))
    vocab_size = tokenizer.vocab_size if tokenizer else 60
    kind = DpoConfig if name.startswith("pairs") else SftConfig
    return read_samples([Path(name)], tokenizer, kind(enabled=True, **settings), longest, vocab_size)


def learned_text(tokenizer, samples: Samples, i: int = 0) -> str:
    span = slice(*samples.starts[i : i + 2])
    return tokenizer.decode(samples.tokens[span][samples.learned[span]].tolist())


FORMS = {
    "messages": {"messages": MESSAGES},
    "ShareGPT": {"conversations": [{"from": {"user": "human", "assistant": "gpt"}[r], "value": c} for r, c in TURNS]},
    "prompt and completion": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    "parts": {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]},
}  # fmt: skip


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by marks"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_conversation_is_the_same_sample_with_the_assistants_turns_learned(
    folder, form, template
):
    tokenizer = tokenizer_with(folder, template)
    samples = read(tokenizer, FORMS[form])
    text = "".join(f"<|{role}|>{content}<|endoftext|>\n" for role, content in TURNS)
    assert tokenizer.decode(samples.tokens.tolist()) == text
    end = "<|endoftext|>" if template is MARKED else "<|endoftext|>\n"
    assert learned_text(tokenizer, samples) == f"four, café ☕{end}yes{end}"
    whole = read(tokenizer, FORMS[form], assistant_only_loss=False, completion_only_loss=False)
    assert whole.learned.all() and np.array_equal(whole.tokens, samples.tokens)


def test_alpaca_and_texts_learn_the_answer_alone(folder):
    tokenizer = tokenizer_with(folder, PLAIN)
    alpaca = {"instruction": "Add.", "input": "2 2", "output": "four", "system": "Be brief."}
    samples = read(tokenizer, alpaca, {"prompt": "two and two is ", "completion": "four"})
    assert learned_text(tokenizer, samples, 0) == "four<|endoftext|>\n"
    assert "Add.\n2 2" in tokenizer.decode(samples.tokens.tolist())
    assert learned_text(tokenizer, samples, 1) == "four<|endoftext|>"
    samples = read(tokenizer, alpaca | {"history": [["Hello.", "Hi."], ["Ready?", "yes"]]})
    assert learned_text(tokenizer, samples) == "Hi.<|endoftext|>\nyes<|endoftext|>\nfour<|endoftext|>\n"
    assert read(tokenizer, {"prompt": "a ", "completion": "b"}, completion_only_loss=False).learned.all()


def test_texts_begin_as_the_tokenizer_has_it_and_conversations_as_their_template(tmp_path):
    tokenizer = bos_tokenizer(tmp_path, PLAIN)
    begin, end = tokenizer.encode("<s>"), tokenizer.encode("</s>")
    whole = [*begin, *tokenizer.encode("a b"), *end]
    samples = read(tokenizer, {"prompt": "a ", "completion": "b"})
    assert samples.tokens.tolist() == whole and samples.learned.tolist() == [False] * 3 + [True] * 2
    pair = {"prompt": "a ", "chosen": "b", "rejected": "c"}
    samples = read(tokenizer, pair, name="pairs.jsonl")
    assert samples.tokens[: samples.starts[1]].tolist() == whole
    samples = read(tokenizer, {"messages": MESSAGES})
    assert begin[0] not in samples.tokens.tolist()  # which this template does not write


def test_of_a_completion_the_earlier_turns_of_the_assistant_are_a_prompt(folder):
    record = {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}
    for template in (PLAIN, MARKED):
        tokenizer = tokenizer_with(folder, template)
        assert learned_text(tokenizer, read(tokenizer, record)).strip() == "yes<|endoftext|>"
        assert "four" in learned_text(tokenizer, read(tokenizer, record, completion_only_loss=False))


def test_ids_and_masks_are_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = tokenizer_with(folder, MARKED)
    samples = read(tokenizer, {"messages": MESSAGES})
    found = theirs.apply_chat_template(
        MESSAGES,
        chat_template=MARKED,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert samples.tokens.tolist() == found["input_ids"]
    assert samples.learned.astype(int).tolist() == found["assistant_masks"]
    asked = theirs.apply_chat_template(
        MESSAGES[:1], chat_template=PLAIN, tokenize=False, add_generation_prompt=True
    )
    assert (
        template_of(tokenizer_with(folder, PLAIN)).render(MESSAGES[:1], add_generation_prompt=True) == asked
    )


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("is_list", [True, False])
def test_conversations_with_tools_have_the_template_for_tools_as_in_transformers(folder, tmp_path, is_list):
    transformers = pytest.importorskip("transformers")
    named = {"default": "plain {{ messages[0].content }}", "tool_use": PLAIN + "{{ tools[0].function.name }}"}
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.chat_template = named
    theirs.save_pretrained(tmp_path)  # default in chat_template.jinja, tool_use in a folder
    if is_list:  # as older versions do
        (tmp_path / "chat_template.jinja").unlink()
        shutil.rmtree(tmp_path / "additional_chat_templates")
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path)
    tokenizer.save(tmp_path / "saved")
    for opened in (tokenizer, load_tokenizer(tmp_path / "saved")):
        template = template_of(opened)
        assert template.tool_source == named["tool_use"]
        for tools in (None, TOOLS):
            expected = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
            assert template.render(MESSAGES, **({"tools": tools} if tools else {})) == expected
    samples = read(tokenizer, {"messages": MESSAGES, "tools": TOOLS})
    expected = theirs.apply_chat_template(MESSAGES, tools=TOOLS, return_dict=True)
    assert samples.tokens.tolist() == expected["input_ids"] and samples.learned.any()


def test_other_tokenizers_encode_the_text_between_the_bounds_and_refuse_a_token_across_one():
    tokenizer = build_tokenizer("ByteTokenizer")
    assert tokenizer.encode_marked(["abcd"], [[(1, 3)]]) == [(list(b"abcd"), [False, True, True, False])]
    numbers = build_tokenizer("NullTokenizer", vocab_size=90)
    assert numbers.encode_marked(["1 23"], [[(1, 4)]]) == [([1, 23], [False, True])]
    assert "only partly in the loss" in numbers.encode_marked(["1 23"], [[(3, 4)]])[0]


def test_a_template_stays_in_its_sandbox():
    with pytest.raises(ValueError, match="rejects it"):
        ChatTemplate("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", {}).render(MESSAGES)
    with pytest.raises(ConfigError, match="is invalid"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(ConfigError, match="No filter named 'louder'"):
        ChatTemplate("{{ messages | louder }}", {}).render(MESSAGES)


UNBOUNDED = {
    "{{ 'a' * 10**10 }}": "needs more than 2 GB of memory",
    "{{ '%1000000000000d' | format(1) }}": "needs more than 2 GB of memory",
    "{{ 'a' | center(4 * 10**7) }}": "its text is longer than 33,554,432 characters",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "5 s of CPU time",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "recursion depth",
}


@pytest.mark.parametrize("source", by_default(UNBOUNDED, *(s for s in UNBOUNDED if UNBOUNDED[s][0] != "5")))
def test_a_template_is_bounded_in_time_and_memory(source):
    template = ChatTemplate("{% if messages[0].content == 'bad' %}" + source + "{% endif %}fine", {})
    with pytest.raises(ValueError, match=UNBOUNDED[source]):
        template.render([{"role": "user", "content": "bad"}])
    assert template.render(MESSAGES) == "fine"


def test_a_forked_process_renders_by_a_process_of_its_own():
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"content": "ours"}]) == "ours"
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.write(writer, template.render([{"content": "theirs"}]).encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(reader, 99) == b"theirs" and template.render([{"content": "again"}]) == "again"


def test_a_template_is_freed_while_a_forked_process_has_its_pipes():
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"content": "ours"}]) == "ours"
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.close(writer)
        select.select([reader], [], [], 30)  # until the test is over
        os._exit(0)
    before = time.monotonic()
    del template
    assert time.monotonic() - before < 20
    os.close(writer)
    os.waitpid(pid, 0)
    os.close(reader)


BAD = {
    "no JSON": ("{", "not JSON"),
    "no form": ({"text": "a"},  "its keys are 'text'"),
    "role": ({"messages": [{"role": "pirate", "content": "a"}]}, "message 1 has the role 'pirate'"),
    "order": ({"messages": [MESSAGES[0], MESSAGES[0]]}, "message 2 has role user after role user; expected"),
    "start": ({"messages": MESSAGES[1:]}, "message 1 has role assistant at the start"),
    "late system": ({"messages": [*MESSAGES, {"role": "system", "content": "a"}]}, "message 5 has role system after"),
    "empty": ({"messages": [MESSAGES[0], {"role": "assistant", "content": " "}]}, "2 (assistant) is empty"),
    "no answer": ({"messages": MESSAGES[:1]}, "it has no assistant message"),
    "no list": ({"messages": "hello"}, "must be a list of at least one message"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part that is not text"),
    "mixed": ({"prompt": "a", "completion": MESSAGES[1:]}, "one of prompt and completion is text"),
    "surrogate": ('{"prompt": "a", "completion": "\\ud800"}', "has an unpaired surrogate"),
    "beyond": ({"input_ids": [1, 300]}, "token 1 is 300, but the vocabulary has"),
    "labels": ({"input_ids": [1, 2], "labels": [1, 3]}, "label 1 is 3, neither its token 2"),
    "lengths": ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries and input_ids has 2"),
    "nothing": ({"input_ids": [1, 2], "labels": [1, -100]}, "no token in the loss"),
    "huge": ({"input_ids": [1, 2**70]}, "input_ids is not a list of whole numbers of 64 bits"),
    "instruction": ({"instruction": 5, "output": "a"}, "its instruction is 5, not text"),
    "history": ({"instruction": "a", "output": "b", "history": ["cd"]}, "its history is ['cd'], not a list of pairs"),
    "completion": ({"prompt": 5, "completion": MESSAGES[1:]}, "'prompt' must be a list of messages, not 5"),
    "turns": ({"conversations": 5}, "'conversations' must be a list of messages, not 5"),
    "arguments": ({"messages": MESSAGES, "chat_template_kwargs": "a"}, "chat_template_kwargs is 'a', not an object"),
    "tools": ({"messages": MESSAGES, "tools": "{a"}, "its tools are text that is not JSON"),
    "no tools": ({"messages": MESSAGES, "tools": 7}, "its tools are 7, not a list"),
    "system": ({"messages": MESSAGES[-2:], "system": "Be brief."}, "its system is 'Be brief.', which is not used"),
    "its system": ({"prompt": "a", "completion": "b", "system": "c"}, "put it at the start of the prompt, or remove"),
    "its prompt": ({"instruction": "a", "output": "b", "system_prompt": "c"}, "rename it to system, or remove it"),
    "functions": ({"messages": MESSAGES, "functions": [{"name": "f"}]}, "give functions as tools"),
    "context": ({"instruction": "a", "context": "b", "output": "c"}, "its context is 'b', which is not used"),
    "long": ({"input_ids": [1] * 201}, "201 tokens, more than data.seq_length 200"),
}  # fmt: skip


@pytest.mark.parametrize("case", by_default(BAD, *list(BAD)[::2], "no JSON"))
def test_a_bad_sample_is_named_by_file_line_and_number_or_counted(folder, case):
    record, reason = BAD[case]
    tokenizer = tokenizer_with(folder, PLAIN)
    with pytest.raises(DataError) as found:
        read(tokenizer, {"messages": MESSAGES}, "", record)
    assert "chat.jsonl line 3 (" in str(found.value) and reason in str(found.value)
    if case == "no JSON":  # a file that is damaged is no sample
        return
    assert "(sample 2)" in str(found.value)
    samples = read(tokenizer, {"messages": MESSAGES}, "", record, skip_bad_samples=True)
    assert len(samples) == 1 and samples.counts == {"skipped as unusable": 1} and reason in samples.first_bad


def test_a_chat_without_a_template_or_with_one_that_rewrites_turns_is_refused(folder):
    with pytest.raises(DataError, match=r"chat.jsonl line 1 \(sample 1\): .*sft.chat_template_path"):
        read(tokenizer_with(folder, None), {"messages": MESSAGES})
    with pytest.raises(DataError, match=r"line 1 \(sample 1\).* put \{% generation %\}"):
        read(tokenizer_with(folder, REWRITES), {"messages": MESSAGES})
    with pytest.raises(DataError, match=r"data\.tokenizer_type"):
        read(None, {"messages": MESSAGES})
    raising = "{{ raise_exception('only two turns') }}"
    with pytest.raises(DataError, match="only two turns"):
        read(tokenizer_with(folder, raising), {"messages": MESSAGES})


@pytest.mark.parametrize(
    ("mode", "kept"), [("keep_start", [5, 6, 7]), ("keep_end", [7, 8, 9]), ("drop", None)]
)
def test_what_is_too_long_is_cut_or_dropped_as_chosen_and_counted(mode, kept):
    long = {"input_ids": [5, 6, 7, 8, 9], "completion_mask": [0, 1, 1, 1, 1]}
    unlearned = {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, -100, 4]}
    samples = read(None, long, unlearned, {"input_ids": [3, 4]}, longest=3, truncation_mode=mode)
    of_samples = [samples.tokens[a:b].tolist() for a, b in zip(samples.starts, samples.starts[1:])]
    assert of_samples[0] == (kept or [3, 4]) and of_samples[-1] == [3, 4]
    assert sum(samples.counts.values()) == 2
    if mode == "keep_start":
        assert samples.counts["dropped, with no token in the loss after truncation"] == 1


def test_packing_fits_every_sample_once_tightly_and_by_the_seed_alone():
    lengths = np.clip(np.random.default_rng(1).lognormal(5.86, 0.9, 3000).astype(int), 2, 4096)
    rows = best_fit_decreasing(lengths, 4096, seed=5)
    assert sorted(i for row in rows for i in row) == list(range(3000))
    assert max(lengths[row].sum() for row in rows) <= 4096
    assert len(rows) <= 1.01 * lengths.sum() / 4096 + 1
    assert rows == best_fit_decreasing(lengths, 4096, seed=5) != best_fit_decreasing(lengths, 4096, seed=6)
    assert best_fit_decreasing(np.array([3, 6, 4, 7]), 10, seed=0) == [[0, 3], [1, 2]]


def test_a_row_keeps_its_samples_apart_and_learns_no_first_token():
    samples = read(None, {"input_ids": [1, 2, 3]}, {"input_ids": [4, 5], "completion_mask": [0, 1]})
    packed = ChatDataset(samples, 0, 2, 8, packing=True, seed=0, padding=9)
    batch = make_chat_batch(packed[0][None], np.array([7]))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 9, 9, 9]]
    assert batch.labels[0, [0, 1, 3]].tolist() == [2, 3, 5]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch.document_ends.tolist() == [[3] + [8] * 7]
    assert packed.note(True) == "1 row of 8: 62.5 % of tokens, 2.0 sequences per row"
    padded = ChatDataset(samples, 0, 2, 8, packing=False, seed=0, padding=9).pad_to_batches(4)
    batch = make_chat_batch(np.stack([padded[i] for i in range(4)]), np.arange(4))
    assert batch.document_ends is None and batch.loss_mask.sum(1).tolist() == [2, 1, 0, 0]


def test_parquet_and_saved_datasets_ask_for_their_package_and_name_the_row(monkeypatch, tmp_path):
    Path("chat.parquet").touch()
    Path("saved").mkdir()
    sft = SftConfig(enabled=True)
    for path, package in (("chat.parquet", "pyarrow"), ("saved", "datasets")):
        for module in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"{package} package.*\[datasets\]"):
            read_samples([Path(path)], None, sft, 8, 60)
    rows = [{"input_ids": [1, 2], "labels": None}, {"input_ids": [1]}]
    library = types.SimpleNamespace(load_from_disk=lambda path: rows)
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(DataError, match=r"saved row 2 \(sample 2\)"):
        read_samples([Path("saved")], None, sft, 8, 60)
    library.load_from_disk = lambda path: {"train": rows}
    with pytest.raises(ConfigError, match="has the splits train"):
        read_samples([Path("saved")], None, sft, 8, 60)
    Path("alpaca.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"alpaca.json entry 2 \(sample 2\)"):
        read_samples([Path("alpaca.json")], None, sft, 8, 60)


def test_a_validation_share_too_small_for_a_sample_is_said(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    data, sft = DataConfig(data_path=str(tmp_path / "one.jsonl"), split="90,10,0", seq_length=8), SftConfig()
    found = open_chat_data(data, sft, None, 60, 0, tmp_path / "cache")
    assert (
        found.valid is None
        and "valid: data.split 90,10,0 gives this split none of the 1 sample" in found.notes[1]
    )
    whole = open_chat_data(data.model_copy(update={"split": "1"}), sft, None, 60, 0, tmp_path / "cache")
    assert len(whole.notes) == 1


def test_tools_and_keywords_reach_the_template():
    template = ChatTemplate("{{ tools | tojson }} {{ mood }}", {})
    assert (
        template.text_and_spans(Chat(MESSAGES, arguments={"tools": [{"n": "é"}], "mood": 1}), False)[0]
        == '[{"n": "é"}] 1'
    )


# Preferences

WRONG = {"role": "assistant", "content": "five"}
PAIRS = {
    "messages": {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:2], "rejected": [WRONG]},
    "conversations": {"prompt": None, "chosen": MESSAGES[:2], "rejected": [MESSAGES[0], WRONG]},
    "texts": {"prompt": "two and two? ", "chosen": "four, café ☕", "rejected": "five"},
    "texts with their prompt": {"chosen": "two and two? four, café ☕", "rejected": "two and two? two"},
}


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
BY_KEYS = """{% for m in messages -%}
{{ '<|' + m.role + '|>' }}{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}
{%- if m.thinking %}({{ m.thinking }}){% endif %}
{%- if m.content is undefined %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|endoftext|>' }}
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
CALLING = {
    "null content": {"content": None},
    "empty content": {"content": ""},
    "no content": {},
    "null calls": {"content": "a", "tool_calls": None},
    **{key: {"content": None, key: "hm"} for key in ("thinking", "reasoning", "reasoning_content")},
    "two": {"content": "a", "thinking": "hm", "reasoning_content": "oh", "reasoning": None},
}


@pytest.mark.parametrize("case", CALLING)
def test_a_message_has_the_keys_that_transformers_gives_to_a_template(folder, case):
    transformers = pytest.importorskip("transformers", minversion="5.20")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": CALLS, **CALLING[case]},
                {"role": "tool", "content": "3"}, {"role": "assistant", "content": "three"}]  # fmt: skip
    if case == "null calls":
        del messages[2]
        messages.insert(2, messages[0])
    tokenizer = tokenizer_with(folder, BY_KEYS)
    samples = read(tokenizer, {"messages": messages})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, chat_template=BY_KEYS, tokenize=False)
    assert tokenizer.decode(samples.tokens.tolist()) == expected
    assert learned_text(tokenizer, samples).endswith("three<|endoftext|>\n")


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("form", PAIRS)
def test_every_form_of_a_preference_learns_both_answers_behind_the_prompt(folder, form, template):
    tokenizer = tokenizer_with(folder, template)
    samples = read(tokenizer, PAIRS[form], name="pairs.jsonl")
    assert (len(samples), samples.sequences_per_sample, len(samples.lengths)) == (1, 2, 2)
    end = "<|endoftext|>" if "texts" in form else "<|endoftext|>\n"
    answers = ("four, café ☕", "two" if form == "texts with their prompt" else "five")
    prompt = "two and two? " if "texts" in form else "<|user|>two and two?<|endoftext|>\n<|assistant|>"
    if form == "texts with their prompt":  # the space goes with the word
        prompt, answers = prompt[:-1], tuple(f" {answer}" for answer in answers)
    for i, answer in enumerate(answers):
        assert learned_text(tokenizer, samples, i) == answer + end
        assert (
            tokenizer.decode(samples.tokens[slice(*samples.starts[i : i + 2])].tolist())
            == prompt + answer + end
        )


BAD_PAIRS = {
    "images": ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x.png"]}, "it has images, but models train"),
    "missing": ({"prompt": "a", "rejected": "b"}, "its keys are 'prompt', 'rejected', which match none"),
    "null": ({"prompt": "a", "chosen": None, "rejected": "b"}, "none of these formats"),
    "empty": ({"prompt": "a", "chosen": " ", "rejected": "b"}, "its chosen answer is empty"),
    "empty turn": (
        {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:2], "rejected": [{"role": "assistant", "content": ""}]},
        "in the rejected conversation, message 2 (assistant) is empty",
    ),
    "role": (
        {"prompt": MESSAGES[:1], "chosen": MESSAGES[:1], "rejected": [WRONG]},
        "in the chosen conversation, message 2 has role user after role user",
    ),
    "mixed": ({"prompt": "a", "chosen": MESSAGES[:2], "rejected": MESSAGES[:2]}, "remove the prompt"),
    "number": ({"prompt": MESSAGES[:1], "chosen": 5, "rejected": MESSAGES[1:2]}, "'chosen' must be a list"),
    "numbers": ({"chosen": MESSAGES[:2], "rejected": 6}, "'rejected' must be a list of messages, not 6"),
    "no prompt": ({"chosen": "four", "rejected": "two"}, "no common prefix"),
    "instruction": ({"instruction": "a", "chosen": "bc", "rejected": "bd"}, "its instruction is 'a', which is not"),
    "question": ({"question": "a", "chosen": "bc", "rejected": "bd"}, "give the question to both answers as prompt"),
    "system": ({"system": "a", "prompt": "b", "chosen": "c", "rejected": "d"}, "put it at the start of the prompt"),
    "object": ({"messages": [], "chosen": {"role": "assistant"}, "rejected": {}}, "must be a list of messages"),
    "equal": ({"chosen": MESSAGES[:2], "rejected": MESSAGES[:2]}, "are equal, so the start of the answers"),
    "beyond": ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [300]}, "token 1 of its rejected answer is 300"),
    "nothing": ({"prompt_ids": [1], "chosen_ids": [], "rejected_ids": [3]}, "its chosen answer has no token"),
    "long": ({"prompt_ids": [1], "chosen_ids": [1], "rejected_ids": [1] * 200}, "rejected answer has 201 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_a_bad_preference_is_named_by_file_line_and_number_or_counted(folder, case):
    record, reason = BAD_PAIRS[case]
    tokenizer, name = tokenizer_with(folder, PLAIN), "pairs.jsonl"
    with pytest.raises(DataError) as found:
        read(tokenizer, PAIRS["texts"], "", record, name=name)
    assert "pairs.jsonl line 3 (sample 2) is unusable: " in str(found.value) and reason in str(found.value)
    samples = read(tokenizer, PAIRS["texts"], "", record, name=name, skip_bad_samples=True)
    assert len(samples) == 1 and samples.counts == {"skipped as unusable": 1} and reason in samples.first_bad


def test_pairs_of_equal_answers_are_counted_and_long_ones_cut_or_dropped_whole():
    equal = {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [3, 4]}
    long = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6]}
    asked = {"prompt_ids": [1, 2, 3, 4], "chosen_ids": [5], "rejected_ids": [6]}
    for mode, kept in (("keep_start", 2), ("keep_end", 3), ("drop", 1)):
        samples = read(None, equal, long, asked, longest=4, truncation_mode=mode, name="pairs.jsonl")
        assert (len(samples), samples.counts[EQUAL], sum(samples.counts.values())) == (kept, 1, 3)
    assert read(None, long, longest=5, name="pairs.jsonl").counts == {}


# Once a run


def test_samples_are_read_once_and_mapped_until_files_settings_or_template_change(
    folder, tmp_path, monkeypatch
):
    reads, cache = [], tmp_path / "cache"
    plain = read_samples

    def counted(*wanted, **how) -> Samples:
        reads.append(1)
        return plain(*wanted, **how)

    monkeypatch.setattr(sample_cache, "read_samples", counted)
    tokenizer, file = tokenizer_with(folder, PLAIN), Path("chat.jsonl")
    own = read(tokenizer, FORMS["messages"], {"messages": []}, FORMS["parts"], skip_bad_samples=True)

    def opened(tokenizer=tokenizer, longest=200, **settings) -> Samples:
        sft = SftConfig(enabled=True, skip_bad_samples=True, **settings)
        return cached_samples(cache, [file], tokenizer, sft, longest, tokenizer.vocab_size)

    first, again = opened(), opened(packing=False)
    assert len(reads) == 1 and isinstance(again.tokens, np.memmap)
    for found in (first, again):
        assert found.identity() == own.identity() and list(found.sources) == own.sources
        assert (found.counts, found.first_bad, len(found)) == (own.counts, own.first_bad, 2)
    opened(assistant_only_loss=False), opened(longest=150), opened(tokenizer_with(folder, MARKED))
    assert len(reads) == 4
    file.write_text(file.read_text() + json.dumps(FORMS["messages"]) + "\n")
    assert len(opened()) == 3 and len(reads) == 5
    (tokens,) = [
        path for path in cache.glob("chat-*/tokens.npy") if len(np.load(path)) == len(opened().tokens)
    ]
    np.save(tokens, np.load(tokens) + 10**6)  # damaged
    assert opened().tokens.max() < 10**6 and len(reads) == 6
    cache.joinpath("lock").unlink()
    cache.joinpath("lock").symlink_to("elsewhere")  # nothing is written through it
    assert len(opened()) == 3 and len(reads) == 7 and not Path("elsewhere").exists()
