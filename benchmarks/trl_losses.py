"""Compare SFT, preference training and reward models with TRL's trainers: same tiny Llama, tokenizer and records.

    python -m benchmarks.trl_objective --make /tmp/trl     # once: an environment with this one's packages and TRL
    /tmp/trl/bin/python -m benchmarks.trl_losses           # compares; one line per case

Compares the token ids of each sample and which of them are in the loss, exactly; the loss of the batch, to 1e-5; and
every gradient, relative to 1e-4, in fp32 on a CPU.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.trl_objective import GRADIENT_BOUND, LOSS_BOUND, in_our_names, require_trl

SEQ = 96
TEMPLATE = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|assistant|>{% generation %}{{ m.content + eos_token }}{% endgeneration %}{{ '\\n' }}
{%- else -%}<|{{ m.role }}|>{{ m.content }}{{ '\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


TEXTS = [
    ("two and two?", "four", "five, as one says"),
    ("and café ☕ is?", "a coffee", "tea"),
    ("again, how much is it in all?", "it is four, as was said before", "no"),
]
CHATS = [
    *({"messages": said(question, answer, "sure?", "yes")} for question, answer, _ in TEXTS),
    {"messages": [{"role": "system", "content": "Be brief."}, *said("one?", "1")]},
]
COMPLETIONS = [
    {"prompt": said(question), "completion": said(question, answer)[1:]} for question, answer, _ in TEXTS
]
PLAIN = [{"prompt": f"{question} ", "completion": answer} for question, answer, _ in TEXTS]
PAIRS = [
    {"prompt": said(q), "chosen": said(q, right)[1:], "rejected": said(q, wrong)[1:]}
    for q, right, wrong in TEXTS
]
WHOLE_PAIRS = [{"chosen": said(q, right), "rejected": said(q, wrong)} for q, right, wrong in TEXTS]
PLAIN_PAIRS = [{"prompt": f"{q} ", "chosen": right, "rejected": wrong} for q, right, wrong in TEXTS]
MARGINS = [pair | {"margin": 0.25 * number} for number, pair in enumerate(PAIRS)]
CUT = {"max_length": 52, "truncation_mode": "keep_start"}
# Records; settings that both have; and ours alone.
CASES = {
    "sft assistant turns": (CHATS, {"assistant_only_loss": True}, {"packing": False}),
    "sft packed": (CHATS, {"assistant_only_loss": True}, {"packing": True}),
    "sft everything": (CHATS, {"assistant_only_loss": False}, {"packing": False}),
    "sft completion": (COMPLETIONS, {"assistant_only_loss": False}, {"packing": False}),
    "sft plain text": (PLAIN, {"assistant_only_loss": False}, {"packing": False}),
    "sft cut": (CHATS, {"assistant_only_loss": True, **CUT}, {"packing": False}),
    "dpo sigmoid": (PAIRS, {"loss_type": "sigmoid"}, {}),
    "dpo sigmoid .5": (PAIRS, {"loss_type": "sigmoid", "beta": 0.5}, {"packing": True}),
    "dpo hinge": (WHOLE_PAIRS, {"loss_type": "hinge"}, {}),
    "dpo ipo": (PAIRS, {"loss_type": "ipo"}, {}),
    "dpo robust": (PLAIN_PAIRS, {"loss_type": "robust", "label_smoothing": 0.1}, {}),
    "dpo sigmoid_norm": (PLAIN_PAIRS, {"loss_type": "sigmoid_norm"}, {}),
    "dpo cut": (PAIRS, {"loss_type": "sigmoid", **CUT}, {}),
    "reward": (PAIRS, {}, {}),
    "reward packed": (WHOLE_PAIRS, {"center_rewards_coefficient": 0.1}, {"packing": True}),
    "reward margin": (MARGINS, {}, {}),
}  # fmt: skip
Sequence = tuple[list[int], list[bool]]  # token ids, and which are learned


def main() -> int:
    require_trl()
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        for name, (records, both, own) in CASES.items():
            loss, gradient = compare(Path(folder), name.partition(" ")[0], records, both, own)
            print(f"{name:20} tokens equal   loss {loss:.1e}   worst gradient {gradient:.1e}", flush=True)
            worst = max(worst, loss / LOSS_BOUND, gradient / GRADIENT_BOUND)
    return int(worst > 1)


def make(folder: Path) -> None:
    """Write two models of one shape, and a tokenizer with a chat template in the first one's folder."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    from megalith.data.tokenizers.train_tokenizer import train_tokenizer

    disable_progress_bar()
    text = json.dumps({"text": " ".join(word for texts in TEXTS for word in texts)})
    (folder / "text.jsonl").write_text(text + "\n")
    for seed, name in enumerate(("model", "reference"), 1):
        torch.manual_seed(seed)
        train_tokenizer([folder / "text.jsonl"], 300, folder / name)
        size = len(json.loads((folder / name / "tokenizer.json").read_text())["model"]["vocab"]) + 1
        shape = LlamaConfig(vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)  # fmt: skip
        LlamaForCausalLM(shape).save_pretrained(folder / name)
        if name == "model":
            shape.num_labels = 1
            LlamaForSequenceClassification(shape).save_pretrained(folder / "scorer")
            for file in ("tokenizer.json", "tokenizer_config.json"):
                if (folder / name / file).exists():
                    shutil.copy(folder / name / file, folder / "scorer")
            (folder / "scorer" / "chat_template.jinja").write_text(TEMPLATE)
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)


def compare(folder: Path, kind: str, records: list, both: dict, own: dict) -> tuple[float, float]:
    """Return the relative errors of the loss and of the worst gradient."""
    from megalith.parity.differences import gradient_errors

    sequences, loss, model = {"sft": their_sft, "dpo": their_dpo, "reward": their_reward}[kind](
        folder, records, both
    )
    mine, my_loss, gradients = ours(folder, kind, records, both | own)
    assert sorted(mine) == sorted(sequences), (mine, sequences)
    errors = gradient_errors(gradients, in_our_names(model, folder))
    return abs(my_loss - loss) / abs(loss), max(errors.values())


def common(folder: Path) -> dict:
    return dict(use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
                output_dir=str(folder / "trl"))  # fmt: skip


def their_parts(folder: Path, records: list) -> dict:
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    disable_progress_bar()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        folder / "model", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    return dict(model=model, train_dataset=Dataset.from_list(records), processing_class=tokenizer)


def their_sft(folder: Path, records: list, settings: dict) -> tuple[list[Sequence], float, torch.nn.Module]:
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(args=SFTConfig(**common(folder), **settings), **their_parts(folder, records))
    batch = trainer.data_collator(list(trainer.train_dataset))
    model = trainer.model.train()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    result = [
        (ids[attended > 0].tolist(), (labels[attended > 0] >= 0).tolist())
        for ids, attended, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"])
    ]
    return result, loss.item(), model


def their_dpo(folder: Path, records: list, settings: dict) -> tuple[list[Sequence], float, torch.nn.Module]:
    from transformers import LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    reference = LlamaForCausalLM.from_pretrained(folder / "reference")
    settings = settings | {"loss_type": [settings["loss_type"]]}
    trainer = DPOTrainer(
        args=DPOConfig(**common(folder), **settings), ref_model=reference, **their_parts(folder, records)
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    model = trainer.model.train()
    loss = trainer._compute_loss(model, batch, return_outputs=False)
    loss.backward()
    result = [
        (ids[attended > 0].tolist(), (learned[attended > 0] > 0).tolist())
        for ids, attended, learned in zip(
            batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
        )
    ]
    return result, loss.item(), model


def their_reward(
    folder: Path, records: list, settings: dict
) -> tuple[list[Sequence], float, torch.nn.Module]:
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    parts = their_parts(folder, records)
    parts["model"] = LlamaForSequenceClassification.from_pretrained(folder / "scorer")
    # transformers takes the score before the first padding token, which therefore ends no text.
    pad = parts["processing_class"].convert_ids_to_tokens(1)
    trainer = RewardTrainer(args=RewardConfig(**common(folder), pad_token=pad, **settings), **parts)
    batch = trainer.data_collator(list(trainer.train_dataset))
    model = trainer.model.train()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    ids = [row[attended > 0].tolist() for row, attended in zip(batch["input_ids"], batch["attention_mask"])]
    return [(each, []) for each in ids], loss.item(), model


def ours(folder: Path, kind: str, records: list, settings: dict) -> tuple[list[Sequence], float, dict]:
    from megalith.bridge.load import load_initial_weights
    from megalith.config import RunConfig
    from megalith.parallel.gather import ALONE
    from megalith.parity.job import start
    from megalith.rl.dpo import PreferenceTask
    from megalith.rl.reward_model import RewardTask
    from megalith.training.build import vocabulary_rows

    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tree = {
        "model": {"init_from": str(folder / {"sft": "model", "dpo": "reference", "reward": "scorer"}[kind])},
        "data": {"data_path": str(folder / "records.jsonl"), "split": "1,0,0", "num_workers": 0}
        | ({"seq_length": SEQ} if kind == "reward" else {}),
        kind: {"enabled": True} | ({} if kind == "reward" else {"max_length": SEQ}) | settings,
        "optim": {"lr": 1e-3},
        "train": {"train_iters": 1, "global_batch_size": 1, "output_dir": str(folder / "ours")},
        "runtime": {"device": "cpu", "compile": False},
    }
    config = RunConfig.from_tree(tree)
    task = {"dpo": PreferenceTask, "reward": RewardTask, "sft": lambda: None}[kind]
    rows = len(start(config, task()).data.train)
    run = start(
        config.with_settings({"train.global_batch_size": rows, "train.micro_batch_size": rows}), task()
    )
    weights = folder / ("scorer" if kind == "reward" else "model")
    load_initial_weights(str(weights), run.model.chunks, vocabulary_rows(run.config), 0, ALONE)
    with run.data.train_loader(0, 0, run.device) as batches:
        loss = run.gradients([next(batches)]).item()
    samples = run.data.train.samples
    result = [
        (
            samples.tokens[first:last].tolist(),
            [] if kind == "reward" else samples.learned[first:last].tolist(),
        )
        for first, last in zip(samples.starts, samples.starts[1:])
    ]
    return result, loss, {name: plain.grad for name, plain in run.model.parameters.named}


if __name__ == "__main__":
    sys.exit(main())
