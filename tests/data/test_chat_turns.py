"""Turns of the assistant in the text of templates that render a message differently depending on what follows it."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from default_cases import by_default
from test_chat_data import read

from megalith.data.chat.chat_template import ChatTemplate
from megalith.data.chat.conversations import Chat
from megalith.data.chat.samples import ENDLESS
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.errors import DataError

# G and E become marks in the template that transformers makes its masks by; the template under test has none.
THINK_LAST = """{%- set ns = namespace(last=0) -%}
{%- for m in messages[::-1] -%}{%- if m.role == 'user' and not ns.last -%}
{%- set ns.last = messages|length - loop.index -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set reason = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and PROMPT -%}
{{- '<think>\\n' }}G{{ reason + '\\n</think>\\n\\n' + answer + '<|im_end|>\\n' }}E
{%- elif loop.index0 > ns.last -%}
G{{ '<think>\\n' + reason + '\\n</think>\\n\\n' + answer + '<|im_end|>\\n' }}E
{%- else -%}G{{ answer + '<|im_end|>\\n' }}E{%- endif -%}
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' + ('<think>\\n' if PROMPT else '') }}{%- endif -%}"""
END_AFTER_LOOP = """{% for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}G{{ m.content + '<|end|>\\n' }}
{%- if loop.last and not add_generation_prompt %}{{ eos_token }}{% endif %}E
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}
{%- elif messages[-1].role != 'assistant' %}{{ eos_token }}{% endif %}"""
CHANNELS = """{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{{- '<|start|>system<|message|>S<|end|>' -}}
{%- for m in rest -%}
{%- if m.role != 'assistant' -%}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}{%- continue -%}
{%- endif -%}
{{- '<|start|>assistant' }}G{{ '<|channel|>final<|message|>' + m.content -}}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}E
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"""
EMPTY_THINK = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n<think>' }}G{{ '</think>' + m.content.split('</think>')[-1]|trim + '<|im_end|>\\n' }}E
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"""
HEADER_IN_ASK = """{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|User|>' + m.content -}}{%- endif -%}
{%- if m.role == 'assistant' -%}{{- '<|Assistant|>' }}G{{ m.content.split('</think>')[-1] + '<|end|>' }}E{%- endif -%}
{%- if loop.last and add_generation_prompt -%}{{ '<|Assistant|><think>\\n' }}{%- endif -%}
{%- endfor -%}"""

TEMPLATES = {
    "reasoning in the last turn": THINK_LAST.replace("PROMPT", "false"),
    "a prompt that opens reasoning": THINK_LAST.replace("PROMPT", "true"),
    "an end of text after the loop": END_AFTER_LOOP,
    "channels and another end": CHANNELS,
    "empty reasoning": EMPTY_THINK,
    "a prompt inside the loop": HEADER_IN_ASK,
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>"]


def plain(template: str) -> str:
    return template.replace("G{{", "{{").replace("}}E", "}}").replace("%}E", "%}")


def marked(template: str) -> str:
    begun = template.replace("G{{", "{% generation %}{{")
    return begun.replace("}}E", "}}{% endgeneration %}").replace("%}E", "%}{% endgeneration %}")


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[k % 2], "content": one} for k, one in enumerate(contents)]


CONVERSATIONS = {
    "two turns": turns("x", "y", "z", "w"),
    "one turn": turns("two and two?", "four"),
    "reasoning": turns("x", "<think>\nfirst\n</think>\n\ny", "x", "<think>\nthen\n</think>\n\nx"),
    "text like the prompt's": turns("a", "<b>y", "y", "<|a", "s", "<t"),
    "system": [{"role": "system", "content": "Be brief."}, *turns("x", "yes, y", "y", "\n no ")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A byte-pair tokenizer with the special tokens of the templates."""
    folder = tmp_path_factory.mktemp("turns")
    (folder / "text.jsonl").write_text(json.dumps({"text": "one and two <think>\nthree"}) + "\n")
    train_tokenizer([folder / "text.jsonl"], 270, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def tokenizer_with(folder: Path, template: str):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    tokenizer.files["chat_template.jinja"] = template.encode()
    return tokenizer


# Each template with two conversations, each conversation with at least two templates.
PAIRS = list(itertools.product(TEMPLATES, CONVERSATIONS))
CHOSEN = [
    *PAIRS[::3],
    ("a prompt inside the loop", "text like the prompt's"),
    ("channels and another end", "system"),
]


@pytest.mark.parametrize(("template", "messages"), by_default(PAIRS, *CHOSEN))
def test_turns_without_marks_are_those_of_transformers_by_marks(folder, template, messages):
    template, messages = TEMPLATES[template], CONVERSATIONS[messages]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        messages,
        chat_template=marked(template),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    samples = read(tokenizer_with(folder, plain(template)), {"messages": messages})
    assert samples.tokens.tolist() == expected["input_ids"]
    assert samples.learned.astype(int).tolist() == expected["assistant_masks"]
    assert samples.counts == {}
    stock = theirs.apply_chat_template(
        messages, chat_template=plain(template), tokenize=True, return_dict=True
    )
    assert stock["input_ids"] == expected["input_ids"]


@pytest.mark.parametrize(
    "template",
    by_default(TEMPLATES, "a prompt that opens reasoning", "channels and another end", "empty reasoning"),
)
def test_a_completion_begins_behind_its_header(folder, template):
    template, messages = TEMPLATES[template], CONVERSATIONS["two turns"]
    record = {"prompt": messages[:3], "completion": messages[3:]}
    by_turn = read(tokenizer_with(folder, plain(template)), record)
    whole = read(tokenizer_with(folder, plain(template)), record, assistant_only_loss=False)
    by_marks = read(tokenizer_with(folder, marked(template)), record)
    for samples in (by_turn, whole):
        assert np.array_equal(samples.tokens, by_marks.tokens)
        assert np.array_equal(samples.learned, by_marks.learned)


UNKNOWN = {
    "shortened answers": "{% for m in messages %}{{ m.content if loop.last else m.content[:2] }};{% endfor %}",
    "no loop over messages": "{{ messages|map(attribute='content')|join(' ') }}"
    "{{ '' if add_generation_prompt else '!' }}",
    "another header": "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% else %}!{% endif %}",
    "another prompt when last": "{% for m in messages %}{% if m.role == 'assistant' %}A:{{ m.content }}{% else %}"
    "{{ m.content }}{{ ' (last)' if loop.last else ' (more)' }}{% endif %}{% endfor %}"
    "{{ 'A:' if add_generation_prompt else '!' }}",
}


@pytest.mark.parametrize("template", UNKNOWN.values(), ids=UNKNOWN)
def test_turns_that_are_not_found_are_refused(folder, template):
    record = {"messages": turns("question", "answer one", "again", "answer two")}
    with pytest.raises(DataError, match=r"line 1 \(sample 1\).* put \{% generation %\}"):
        read(tokenizer_with(folder, template), record)


def test_text_of_the_markers_is_refused_and_templates_do_not_see_them():
    template = ChatTemplate(plain(TEMPLATES["channels and another end"]), {})
    for character in "\ufdd0\ufdd2\ufdd4":
        with pytest.raises(ValueError, match="U\\+FDD0"):
            template.text_and_spans(Chat(turns("x", f"y{character}")), True)
    counted = "{% for m in messages %}{{ m.content }}{{ m.content|length }};{% endfor %}"
    counted += "{{ '' if add_generation_prompt else '!' }}"
    text, spans = ChatTemplate(counted, {}).text_and_spans(Chat(turns("ab", "cde", "f", "g")), True)
    assert text == "ab2;cde3;f1;g1;!" and [text[a:b] for a, b in spans] == ["cde3;", "g1;!"]


# Messages that say that they are not learned

PLAIN = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
BY_MARKS = """{% for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}
{%- else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"""
TWICE_MARKED = BY_MARKS.replace("content }}<", "content }}{% endgeneration %}{% generation %}<", 1)
END_LESS = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def learned(tokenizer, samples) -> str:
    return tokenizer.decode(samples.tokens[samples.learned].tolist())


MARKED = {"turns": PLAIN, "marks": BY_MARKS, "marks in parts": TWICE_MARKED}
KEYS = ["weight", "train", "training", "train_on_turn", "loss", "masked"]


@pytest.mark.parametrize(
    ("template", "key"),
    by_default(itertools.product(MARKED, KEYS), *zip(MARKED, KEYS), ("turns", "masked")),
)
def test_a_message_of_weight_0_is_read_and_not_learned(folder, template, key):
    template = MARKED[template]
    tokenizer = tokenizer_with(folder, template)
    messages = turns("x", "bad answer", "z", "w")
    whole = read(tokenizer, {"messages": messages})
    no, yes = (1, 0) if key == "masked" else (0, 1)
    messages[0][key], messages[1][key], messages[3][key] = no, no, yes
    samples = read(tokenizer, {"messages": messages})
    assert np.array_equal(samples.tokens, whole.tokens)
    assert learned(tokenizer, samples) == "w<|end|>" and "bad answer" in learned(tokenizer, whole)
    shared = [{"from": m["role"], "value": m["content"], key: bool(m.get(key, no))} for m in messages[1:]]
    samples = read(
        tokenizer, {"conversations": [{"from": "human", "value": "x"}, *shared], "system": "Be brief."}
    )
    assert learned(tokenizer, samples) == "w<|end|>"
    record = {"prompt": messages[:3], "completion": messages[3:]}
    assert learned(tokenizer, read(tokenizer, record)) == "w<|end|>"
    assert learned(tokenizer, read(tokenizer, record, completion_only_loss=False)) == "w<|end|>"


ANSWER = {"role": "assistant", "content": "w"}
UNLEARNED = {
    "all": ({"messages": [*turns("x"), {**ANSWER, "weight": 0}]}, {}, "it has no token in the loss"),
    "half": ({"messages": [*turns("x"), {**ANSWER, "weight": 0.5}]}, {}, r"message 2 has weight 0.5; use 1"),
    "user": ({"messages": [{**turns("x")[0], "train": True}, ANSWER]}, {}, r"message 1 \(user\) has train True"),
    "part": ({"messages": [*turns("x"), {**ANSWER, "train_detail": []}]}, {}, r"message 2 has train_detail"),
    "everything": (
        {"messages": [*turns("x", "y", "z"), {**ANSWER, "weight": 0}]},
        {"assistant_only_loss": False},
        "assistant_only_loss is false",
    ),
    "sample": ({"messages": turns("x", "y"), "weight": 0}, {}, "its weight is 0, but each sample counts once"),
    "KTO": ({"prompt": "x", "completion": "y", "label": False}, {}, r"label is False, which marks an undesirable"),
    "KTO's messages": ({"messages": turns("x", "y"), "label": 0}, {}, r"label is 0"),
    "KTO's tag": ({"messages": turns("x", "y"), "kto_tag": False}, {}, r"kto_tag is False"),
    "other weight": ({"messages": turns("x", "y"), "sample_weight": 0.2}, {}, "its sample_weight is 0.2"),
    "torchtune": ({"messages": [*turns("x"), {**ANSWER, "masked": True}]}, {}, "it has no token in the loss"),
    "masked": ({"messages": [{**turns("x")[0], "masked": False}, ANSWER]}, {}, r"message 1 \(user\) has masked"),
    "half masked": ({"messages": [*turns("x"), {**ANSWER, "masked": 2}]}, {}, r"masked 2; use 0 \(in the loss\) or 1"),
    "trainable": ({"messages": [*turns("x"), {**ANSWER, "trainable": False}]}, {}, "message 2 has trainable False"),
    "learn": ({"conversations": [{"from": "user", "value": "x"}, {"from": "gpt", "value": "y", "do_learn": 0}]}, {},
              "message 2 has do_learn 0, which is not a supported key"),
    "conversation's mask": ({"messages": turns("x", "y"), "loss_mask": [0, 1]}, {}, "it has loss_mask, which is not"),
    "NeMo's mask": ({"messages": turns("x", "y"), "mask": "Assistant"}, {}, "it has mask, which is not"),
    "tokens' mask": ({"input_ids": [1, 2], "mask": [0, 1]}, {}, "it has mask, which is not used"),
    "verl's mask": ({"input_ids": [1, 2], "response_mask": [1, 0]}, {}, "it has no token in the loss"),
    "padding": ({"input_ids": [1, 2], "attention_mask": [1, 0]}, {}, "its attention_mask has zeros"),
    "mask": ({"input_ids": [1, 2], "assistant_masks": [1, 0]}, {}, "it has no token in the loss"),
    "masks": ({"input_ids": [1, 2], "labels": [1, 2], "completion_mask": [1, 0]}, {}, "it has no token in the loss"),
    "short": ({"input_ids": [1, 2], "loss_mask": [1]}, {}, "loss_mask has 1 entries"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLEARNED)
def test_what_is_not_to_be_learned_is_never_learned_in_silence(folder, case):
    record, settings, reason = UNLEARNED[case]
    with pytest.raises(DataError, match=rf"line 1 \(sample 1\) is unusable: .*{reason}"):
        read(tokenizer_with(folder, PLAIN), record, **settings)


def test_keys_that_change_nothing_are_taken(folder):
    tokenizer = tokenizer_with(folder, PLAIN)
    records = (
        {"prompt": "x", "completion": "y", "label": True, "weight": 1},
        {"messages": turns("x", "y"), "label": "maths", "weight": None, "kto_tag": True},
        {"messages": turns("x", "y"), "mask": "User", "loss_weight": 1.0, "masked_text": "text"},
        {
            "messages": [
                {**turns("x")[0], "training_source": "web", "masked": True},
                {**ANSWER, "masked": False},
            ]
        },
        {
            "input_ids": [1, 2],
            "attention_mask": [1, 1],
            "assistant_masks": [0, 1],
            "special_tokens_mask": [1, 0],
        },
    )
    assert len(read(tokenizer, *records)) == len(records)


def test_a_preference_takes_no_answer_of_weight_0(folder):
    tokenizer = tokenizer_with(folder, PLAIN)
    record = {"prompt": turns("x"), "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "v", "weight": 0}]}
    with pytest.raises(DataError, match="message 2 of the rejected conversation is excluded from the loss"):
        read(tokenizer, record, name="pairs.jsonl")
    turn = turns("a", "b", "x")
    turn[1]["weight"] = 0
    assert (
        len(read(tokenizer, {**record, "prompt": turn, "rejected": turns("x", "v")[1:]}, name="pairs.jsonl"))
        == 1
    )


# End tokens


def test_answers_without_an_end_token_are_counted(folder):
    by_marks = PLAIN.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    record = {"messages": turns("x", "y", "z", "w")}
    for template in (END_LESS, by_marks):
        assert read(tokenizer_with(folder, template), record, record).counts == {ENDLESS: 2}
    pair = {"prompt": turns("x"), "chosen": [ANSWER], "rejected": turns("x", "y")[1:]}
    assert read(tokenizer_with(folder, END_LESS), pair, name="pairs.jsonl").counts == {ENDLESS: 1}
    end = "{% if not add_generation_prompt %}{{ eos_token }} {% endif %}"
    assert read(tokenizer_with(folder, END_LESS + end), record).counts == {}
    others = {"prompt": "a", "completion": "b"}, {"input_ids": [1, 2]}
    assert read(tokenizer_with(folder, END_LESS), *others).counts == {}
