"""Write preferences about sums (brief answers over wordy ones), and their text to train a tokenizer on.

python examples/dpo/make_preferences.py data [pairs]        # data/preferences.jsonl, data/preference_text.jsonl
"""

import json
import random
import sys
from pathlib import Path

QUESTIONS = ("What is {a} and {b}?", "Please add {b} to {a}.", "{a} + {b} = ?")
BRIEF = ("It is {c}.", "{c}.", "The sum is {c}.")
WORDY = (
    "Well, let me see: {a} and {b} make {c}, I think.",
    "If you add {b} to {a}, as you ask, {c} comes out.",
)


def preference(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Return a question, a brief answer and a wordy answer."""
    a, b = rng.randrange(10), rng.randrange(10)

    def said(role: str, texts: tuple[str, ...]) -> list[dict[str, str]]:
        return [{"role": role, "content": rng.choice(texts).format(a=a, b=b, c=a + b)}]

    return {
        "prompt": said("user", QUESTIONS),
        "chosen": said("assistant", BRIEF),
        "rejected": said("assistant", WORDY),
    }


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(folder: str, count: int = 400) -> None:
    rng = random.Random(20)
    pairs = [preference(rng) for _ in range(count)]
    Path(folder).mkdir(parents=True, exist_ok=True)
    write(Path(folder) / "preferences.jsonl", pairs)
    chats = [pair["prompt"] + pair[answer] for pair in pairs for answer in ("chosen", "rejected")]
    texts = ["\n".join(f"<|{m['role']}|>\n{m['content']}" for m in messages) for messages in chats]
    write(Path(folder) / "preference_text.jsonl", [{"text": text} for text in texts])


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
