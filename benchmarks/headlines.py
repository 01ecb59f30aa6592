"""Write the comparisons with other systems: `python -m benchmarks.headlines`.

They are a table at the head of RESULTS.md, a table per verdict in docs/compared.md, and the picture
docs/images/benchmarks.svg. This file contains no figures: each is read from a table of RESULTS.md by its section, row
and column. Tables are written between two marks. tests/test_words.py checks all three.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPARED = ROOT / "docs" / "compared.md"
LEVEL = 0.03  # machines of one type differ by as much
RESULTS, PICTURE = ROOT / "benchmarks" / "RESULTS.md", ROOT / "docs" / "images" / "benchmarks.svg"
BEGIN, END = "<!-- benchmarks.headlines writes this", "<!-- to here -->"
INK, OURS, PEER = "#808080", "#2f81f7", "#b0752c"  # to be read on white and on black
# As in site/pictures.
READABLE = "text{fill:#333a44!important}@media(prefers-color-scheme:dark){text{fill:#d5dae1!important}}"
NUMBER = re.compile(r"[\d,]+(?:\.\d+)?")


@dataclass(frozen=True)
class Bar:
    """A figure's name and its cell in RESULTS.md."""

    name: str
    section: str  # what the heading begins with
    row: str  # what the row's first cell begins with
    column: str


@dataclass(frozen=True)
class Comparison:
    """One workload, run by Megalith and by peers."""

    work: str
    unit: str  # "ms" is better where it is less; all others where they are more
    ours: Bar
    peers: tuple[Bar, ...]
    where: str  # what was run together
    command: str


EQUAL, TUNED = "Against peers with equal freedom", "Fine-tuning"
EIGHT, FP8 = "Layouts on eight GPUs", "FP8 against torchtitan"
OTHERS, DROPOUT = "Against other code", "fp16 with dropout 0.1"
ENCODERS = "BERT-large and T5-3B"
PER_GPU, MEMORY = "tokens/s/GPU", "memory, GB"

COMPARISONS = (
    *(
        Comparison(
            f"Llama-3-8B, bf16, {count} GPUs, FSDP2",
            PER_GPU,
            Bar("Megalith", EQUAL, f"Megalith, defaults, {word} GPUs", PER_GPU),
            tuple(
                Bar(f"{name}, {how}", EQUAL, f"{name}, {how}, {word} GPUs", PER_GPU) for name, how in peers
            ),
            "two calls on one machine",
            f"megalith bench llama3-8b --layout dp={count},data_parallel_sharding_strategy=optim_grads_params "
            f"--batch {2 * count} --steps 14 --warmup 5 --peer best",
        )
        for count, word, peers in (
            (
                4,
                "four",
                (
                    ("torchtitan", "micro-batch 2, never resharded"),
                    ("liger-kernel", "micro-batch 2, never resharded"),
                ),
            ),
            (2, "two", (("liger-kernel", "micro-batch 2"), ("torchtitan", "micro-batch 1"))),
        )
    ),
    Comparison(
        "Llama-3-8B, bf16, 8 GPUs",
        PER_GPU,
        Bar("Megalith", EIGHT, "Megalith, `optim_grads`", PER_GPU),
        (Bar("torchtitan, micro-batch 2, never resharded", EIGHT, "torchtitan", PER_GPU),),
        "one call",
        "megalith bench llama3-8b --layout dp=8,data_parallel_sharding_strategy=optim_grads --batch 16 --steps 15 "
        "--warmup 5 --peer torchtitan:never",
    ),
    Comparison(
        "Llama-3-8B, 12 layers, FP8, 1 GPU",
        PER_GPU,
        Bar("Megalith, delayed scaling", FP8, "Megalith, delayed scaling", PER_GPU),
        (
            Bar("torchtitan, tensorwise", FP8, "torchtitan, tensorwise", PER_GPU),
            Bar("torchtitan, rowwise", FP8, "torchtitan, rowwise", PER_GPU),
        ),
        "one call",
        "megalith bench llama3-8b --layout dp=1 --batch 2 --steps 12 --warmup 5 --set model.num_layers=12 "
        "train.fp8_format=hybrid train.micro_batch_size=1 --peer torchtitan:fp8 torchtitan:fp8-rowwise",
    ),
    Comparison(
        "Qwen3-30B-A3B, 12 layers, EP4, balanced",
        PER_GPU,
        Bar("Megalith", EQUAL, "Megalith, EP4, balanced", PER_GPU),
        (Bar("torchtitan, never resharded", EQUAL, "torchtitan, EP4, balanced", PER_GPU),),
        "two calls on one machine",
        "megalith bench qwen3-30b-a3b --layout dp=4,ep=4,data_parallel_sharding_strategy=optim --batch 8 --steps 14 "
        "--warmup 5 --set model.num_layers=12 --peer torchtitan:never",
    ),
    Comparison(
        "LoRA of Llama-3-8B, 1 GPU",
        "tokens/s",
        Bar("Megalith", TUNED, "8B, LoRA of rank 16 on every linear, nothing", "tokens/s"),
        (Bar("PEFT, liger-kernel", TUNED, "8B by PEFT with liger", "tokens/s"),),
        "one call",
        "megalith bench finetune llama3-8b --runs lora --batch 1 --micro 1 --steps 7 --warmup 3 --peer peft-liger",
    ),
    Comparison(
        "GPT-2-large, bf16, 1 GPU",
        "ms",
        Bar("Megalith", OTHERS, "Megalith", "ms per step"),
        (
            Bar("plain PyTorch, compiled", OTHERS, "plain PyTorch", "ms per step"),
            Bar("transformers, compiled", OTHERS, "transformers under", "ms per step"),
        ),
        "one call",
        "megalith bench gpt2-large --peer hf plain",
    ),
    *(
        Comparison(
            f"GPT-2-large, fp16 with dropout, {name}",
            "ms",
            Bar("Megalith", DROPOUT, row, "ms per step"),
            (Bar("Megatron-LM" + note, DROPOUT, row, "Megatron-LM, ms"),),
            "different machines",
            f"megalith bench gpt2-large-dropout --layout {layout} --batch 64 --steps 14 --warmup 6",
        )
        for name, row, layout, note in (
            ("DP2", "DP2", "dp2", ""),
            ("TP2 + SP", "TP2 + SP", "tp2+sp", ""),
            ("CP2", "CP2", "cp2", ""),
            ("PP2 in four chunks", "PP2", "pp2-v4", ", in one chunk"),
        )
    ),
    Comparison(
        "BERT-large, bf16, 1 GPU",
        "ms",
        Bar("Megalith", ENCODERS, "BERT-large", "ms per step"),
        (Bar("transformers, compiled", ENCODERS, "transformers, BERT", "ms per step"),),
        "one call",
        "megalith bench bert-large --peer hf --steps 20 --warmup 8",
    ),
    Comparison(
        "T5-3B, bf16, 1 GPU",
        "ms",
        Bar("Megalith", ENCODERS, "T5-3B", "ms per step"),
        (Bar("transformers, compiled", ENCODERS, "transformers, T5", "ms per step"),),
        "one call",
        "megalith bench t5-3b --peer hf --steps 16 --warmup 6",
    ),
)


def figure(bar: Bar, text: str) -> float:
    """Return the number in RESULTS.md that a bar names.

    Raises:
        ValueError: no such section, row or column.
    """
    parts = re.split(r"^##+ ", text, flags=re.MULTILINE)
    section = next((part for part in parts if part.startswith(bar.section)), None)
    if section is None:
        raise ValueError(f"RESULTS.md has no section {bar.section!r}")
    columns: list[str] = []
    for line in section.splitlines():
        cells = (
            [cell.strip().replace("**", "") for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        )
        if not cells:
            columns = []
        elif not columns:
            columns = cells
        elif cells[0].startswith(bar.row) and bar.column in columns:
            return float(NUMBER.search(cells[columns.index(bar.column)])[0].replace(",", ""))
    raise ValueError(f"RESULTS.md has under {bar.section!r} no row {bar.row!r} with a column {bar.column!r}")


def speed(comparison: Comparison, peer: Bar, text: str) -> float:
    """Return how many times as fast as the peer Megalith is."""
    ours, theirs = figure(comparison.ours, text), figure(peer, text)
    return theirs / ours if comparison.unit == "ms" else ours / theirs


def memory(bar: Bar, text: str) -> str:
    """Return ", N GB" where the row has a column of memory, else nothing."""
    try:
        return f", {_shown(figure(replace(bar, column=MEMORY), text))} GB"
    except ValueError:
        return ""


def table(text: str) -> str:
    """Return the comparisons as a Markdown table."""
    lines = ["| workload | Megalith | peer | ratio | measured in | command |", "|---|---|---|---|---|---|"]
    for each in COMPARISONS:
        ours = f"**{_shown(figure(each.ours, text))}** {each.unit}{memory(each.ours, text)}"
        for number, peer in enumerate(each.peers):
            first = number == 0
            cells = (
                each.work if first else "",
                ours if first else "",
                f"{peer.name}: {_shown(figure(peer, text))}{memory(peer, text)}",
                f"{speed(each, peer, text):.2f} ×",
                each.where if first else "",
                f"`{each.command}`" if first else "",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def picture(text: str) -> str:
    """Return an SVG bar chart of the speed relative to each peer."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {"svg.hashsalt": "megalith", "svg.fonttype": "none", "font.size": 9, "text.color": INK}
    rows = [
        (each.work.replace("`", ""), peer.name, speed(each, peer, text))
        for each in COMPARISONS
        for peer in each.peers
    ]
    with pyplot.rc_context(style):
        drawn, axes = pyplot.subplots(figsize=(7.2, 0.52 * len(rows) + 0.7), layout="constrained")
        places = range(len(rows))
        axes.barh(places, [times for *_, times in rows], height=0.5, color=OURS)
        axes.vlines(
            [1] * len(rows), *([place + side for place in places] for side in (-0.25, 0.25)), color=PEER
        )
        for place, (work, peer, times) in zip(places, rows):
            axes.text(0.02, place - 0.42, f"{work}; {peer}", color=INK, va="center", fontsize=8)
            axes.text(times + 0.01, place, f"{times:.2f} ×", color=INK, va="center")
        axes.set(xlim=(0, 1.15 * max(times for *_, times in rows)), yticks=[], ylim=(len(rows) - 0.5, -0.75))
        axes.set_xlabel("Speed relative to the peer; the line marks equal speed", color=INK)
        axes.tick_params(colors=INK)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(INK)
        made = io.StringIO()
        drawn.savefig(made, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(drawn)
    return made.getvalue().replace("</style>", f"{READABLE}</style>", 1)


def compared(text: str) -> str:
    """Return the tables of docs/compared.md: by speed, by memory, and the commands that their rows number."""
    rows = [(number, each, peer) for number, each in enumerate(COMPARISONS, 1) for peer in each.peers]
    speeds = [(speed(each, peer, text), number, each, peer) for number, each, peer in rows]
    verdicts = (
        ("Faster", lambda ratio: ratio > 1 + LEVEL),
        ("Level", lambda ratio: abs(ratio - 1) <= LEVEL),
        ("Slower", lambda ratio: ratio < 1 - LEVEL),
    )
    lines: list[str] = []
    for title, belongs in verdicts:
        lines += [f"### {title}", "", *_speeds([row for row in speeds if belongs(row[0])]), ""]
    lines += ["## Memory", "", *_memories(rows, text), "", "## Commands", ""]
    lines += [f"{number}. `{each.command}`" for number, each in enumerate(COMPARISONS, 1)]
    return "\n".join(lines)


def _speeds(rows: list[tuple[float, int, Comparison, Bar]]) -> list[str]:
    """Return a table of speeds relative to the peers."""
    if not rows:
        return ["None."]
    lines = ["| Workload | Peer | Speed | Measured in | Command |", "|---|---|---|---|---|"]
    return lines + [
        f"| {each.work} | {peer.name} | {ratio:.2f} × | {each.where} | {number} |"
        for ratio, number, each, peer in rows
    ]


def _memories(rows: list[tuple[int, Comparison, Bar]], text: str) -> list[str]:
    """Return a table of the comparisons whose both sides measured memory."""
    lines = ["| Workload | Megalith, GB | Peer | Peer, GB | Ratio |", "|---|---|---|---|---|"]
    for _, each, peer in rows:
        try:
            ours, theirs = (figure(replace(bar, column=MEMORY), text) for bar in (each.ours, peer))
        except ValueError:
            continue
        lines.append(
            f"| {each.work} | {_shown(ours)} | {peer.name} | {_shown(theirs)} | {ours / theirs:.2f} × |"
        )
    return lines


def with_block(page: str, block: str) -> str:
    """Return a page with a block between its marks."""
    before, rest = page.split(BEGIN, 1)
    mark, rest = rest.split("\n", 1)
    return f"{before}{BEGIN}{mark}\n{block}\n{END}{rest.split(END, 1)[1]}"


def with_table(text: str) -> str:
    """Return RESULTS.md with its table."""
    return with_block(text, table(text))


def with_verdicts(page: str, text: str) -> str:
    """Return docs/compared.md with its tables."""
    return with_block(page, compared(text))


def main() -> None:
    text = RESULTS.read_text("utf-8")
    RESULTS.write_text(with_table(text), "utf-8")
    COMPARED.write_text(with_verdicts(COMPARED.read_text("utf-8"), text), "utf-8")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(text), "utf-8")
    print(table(text), PICTURE, sep="\n")


if __name__ == "__main__":
    main()
