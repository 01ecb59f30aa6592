"""A calculator as a tool, and a toy world to learn it in: python examples/grpo/calculator.py [FOLDER]

`add` is the tool of examples/grpo/calculator.yaml. Run as a program, this file writes into FOLDER (data/calculator) a
tokenizer with a chat template in which each number is a token, `sums.jsonl` with prompts, and `chats.jsonl` with
conversations, of which one in four calls the tool. The others guess.
"""

import json
import random
import sys
from pathlib import Path

import tokenizers

BELOW, CHATS, PROMPTS = 10, 6000, 400
SPECIAL = ["<|im_start|>", "<|im_end|>"]
PIECES = ["user\n", "assistant\n", "system\n", " + ", "\n", '<tool_call>\n{"name": "add", "arguments": {"a": ',
          ', "b": ', "}}\n</tool_call>", "<tool_response>\n", "\n</tool_response>", "add"]  # fmt: skip
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response><|im_end|>\\n" }}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set written = {"name": call.function.name, "arguments": call.function.arguments} %}
{{- "<tool_call>\\n" + written | tojson + "\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""


def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


def write_tokenizer(folder: Path) -> None:
    numbers = list(map(str, range(2 * BELOW - 1)))
    alphabet = sorted(set("".join([*PIECES, *numbers])))
    made = tokenizers.Tokenizer(tokenizers.models.BPE({one: n for n, one in enumerate(alphabet)}, []))
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([tokenizers.AddedToken(one, normalized=False) for one in [*PIECES, *numbers]])
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def chat(rng: random.Random) -> dict:
    a, b = rng.randrange(BELOW), rng.randrange(BELOW)
    question = {"role": "user", "content": f"{a} + {b}"}
    if rng.random() < 0.75:
        return {"messages": [question, {"role": "assistant", "content": str(rng.randrange(2 * BELOW - 1))}]}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]
    return {"messages": [question, *turns]}


def main(folder: str = "data/calculator", chats: int = CHATS) -> None:
    path, rng = Path(folder), random.Random(0)
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path)
    sums = [(rng.randrange(BELOW), rng.randrange(BELOW)) for _ in range(PROMPTS)]
    prompts = [{"prompt": f"{a} + {b}", "answer": a + b} for a, b in sums]
    for name, lines in (("sums", prompts), ("chats", [chat(rng) for _ in range(chats)])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:2])
