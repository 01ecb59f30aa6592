"""Prompts from files, text or chat: ids kept, too long ones dropped or refused, and one order for seed and position."""

import json

import pyarrow
import pytest
from bos_tokenizer import bos_tokenizer
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from megalith.config.rl import RlConfig
from megalith.data.tokenizers.huggingface import CHAT_TEMPLATE
from megalith.data.tokenizers.plain import ByteTokenizer
from megalith.errors import DataError
from megalith.rl.rollouts.prompts import open_prompts

TEMPLATE = (
    "{{ tools[0] if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def opened(path, longest=50, chat=True, seed=1, **rl):
    tokenizer = ByteTokenizer({CHAT_TEMPLATE: TEMPLATE.encode()} if chat else None)
    return open_prompts(
        RlConfig(prompts=str(path), **rl), tokenizer, max_tokens=longest, vocab_size=257, seed=seed
    )


def written(folder, *records):
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_text_and_chat_with_ids_and_columns(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = written(
        tmp_path,
        {"id": "a", "prompt": "1+1=", "answer": 2},
        {"prompt": messages, "extra_info": {"index": 7}},
        {"prompt": "2"},
    )
    text, chat, last = opened(path).prompts
    assert (text.id, text.ids, text.columns) == ("a", list(b"1+1="), {"id": "a", "answer": 2})
    assert (chat.id, bytes(chat.ids), chat.messages) == (7, b"<user>hi<assistant>", messages)
    assert last.id == 2 and last.where.endswith("p.jsonl, line 3")
    assert bytes(opened(path, chat_prompts=True).prompts[2].ids) == b"<user>2<assistant>"


def test_a_text_begins_as_the_tokenizer_has_it_and_a_chat_as_its_template(tmp_path):
    tokenizer = bos_tokenizer(tmp_path / "tokenizer", "{{ bos_token }}{{ messages[0].content }}")
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    messages = [{"role": "user", "content": "hi"}]
    path = written(tmp_path, {"prompt": "hi"}, {"prompt": "<s>hi"}, {"prompt": messages})
    prompts = open_prompts(
        RlConfig(prompts=str(path)), tokenizer, max_tokens=9, vocab_size=tokenizer.vocab_size, seed=1
    ).prompts
    chat = reference.apply_chat_template(messages, tokenize=True, return_dict=True).input_ids
    assert prompts[0].ids == reference("hi").input_ids == chat
    assert [prompt.ids for prompt in prompts[1:]] == [chat, chat]


def test_parquet_is_the_same_prompts(tmp_path):
    records = [{"question": f"{n}+1", "answer": n + 1} for n in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "p.parquet")
    found = [
        [(p.id, p.ids, p.columns) for p in opened(path, prompt_column="question").prompts]
        for path in (written(tmp_path, *records), tmp_path / "p.parquet")
    ]
    assert found[0] == found[1] and found[0][3] == (3, list(b"3+1"), {"answer": 4})


def test_too_long_ones_are_refused_or_dropped_with_a_count(tmp_path):
    path = written(tmp_path, {"prompt": "12345"}, {"prompt": "123"})
    with pytest.raises(DataError, match=r"line 1 has a prompt of 5 tokens, but at most 4 fit"):
        opened(path, longest=4)
    found = opened(path, longest=4, overlong_prompts="drop")
    assert (len(found), found.dropped) == (1, 1)
    with pytest.raises(DataError, match=r"2 were longer than 2 tokens"):
        opened(path, longest=2, overlong_prompts="drop")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"question": "x"}, "has no 'prompt'"),
        ({"prompt": ""}, "has no token"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "nothing to answer",
        ),
        ({"prompt": [{"role": "robot", "content": "a"}]}, "role 'robot'"),
        ({"prompt": 5}, "must be a list of at least one message"),
        ({"prompt": "a", "images": ["x.png"]}, "it has images, but models train on text only"),
        ({"prompt": "\ud800"}, "has an unpaired surrogate"),
        ({"prompt": [{"role": "user", "content": "\ud800"}]}, "has an unpaired surrogate"),
        ({"prompt": [{"role": "user", "content": "a"}], "tools": ["\ud800"]}, "has an unpaired surrogate"),
    ],
)
def test_an_unusable_prompt_is_named(tmp_path, record, said):
    with pytest.raises(DataError, match=rf"p.jsonl, line 1 .*{said}"):
        opened(written(tmp_path, record))


def test_messages_without_a_template_are_refused(tmp_path):
    with pytest.raises(DataError, match="no chat template"):
        opened(written(tmp_path, {"prompt": [{"role": "user", "content": "a"}]}), chat=False)


def test_the_order_is_of_seed_and_position_alone(tmp_path):
    path = written(tmp_path, *({"prompt": str(n)} for n in range(10)))
    found = opened(path)
    first, second = ([found.index(at) for at in range(begin, begin + 10)] for begin in (0, 10))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert opened(path).index(13) == second[3]
    assert [opened(path, shuffle_dataset=False).index(at) for at in (0, 9, 10)] == [0, 9, 0]
