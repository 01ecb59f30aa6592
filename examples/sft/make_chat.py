"""Write a tiny chat data set about sums, and its text to train a tokenizer on.

python examples/sft/make_chat.py data [conversations]   # data/chat.jsonl, data/chat_text.jsonl, data/chat_sums.jsonl

chat_sums.jsonl has single questions with their answers, for GRPO and evaluation.
"""

import json
import random
import sys
from pathlib import Path

QUESTIONS = ("What is {a} and {b}?", "Please add {b} to {a}.", "{a} + {b} = ?")
ANSWERS = ("It is {c}.", "{a} and {b} make {c}.")


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """Return a conversation of one to four questions and answers; one in three starts with a system message."""
    messages = [{"role": "system", "content": "You add numbers."}] if rng.random() < 1 / 3 else []
    for _ in range(rng.choice((1, 1, 2, 4))):
        a, b = rng.randrange(10), rng.randrange(10)
        for role, texts in (("user", QUESTIONS), ("assistant", ANSWERS)):
            messages.append({"role": role, "content": rng.choice(texts).format(a=a, b=b, c=a + b)})
    return messages


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(folder: str, count: int = 400) -> None:
    rng = random.Random(20)
    chats = [conversation(rng) for _ in range(count)]
    Path(folder).mkdir(parents=True, exist_ok=True)
    write(Path(folder) / "chat.jsonl", [{"messages": messages} for messages in chats])
    texts = ["\n".join(f"<|{m['role']}|>\n{m['content']}" for m in messages) for messages in chats]
    write(Path(folder) / "chat_text.jsonl", [{"text": text} for text in texts])
    sums = [(a, b) for a in range(10) for b in range(10)]
    problems = [{"prompt": one.format(a=a, b=b), "answer": a + b} for a, b in sums for one in QUESTIONS]
    write(Path(folder) / "chat_sums.jsonl", problems)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
