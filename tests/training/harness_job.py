"""The harness's requests, answered by our model in a layout: what ranks run for test_task_harness.py."""

from pathlib import Path

import torch
from lm_eval.api.instance import Instance

from megalith.bridge.load import load_initial_weights
from megalith.bridge.origin import tokenizer_of
from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.launch.launcher import this_process
from megalith.parallel.mesh import build_mesh
from megalith.training.build import build_model, prepare, vocabulary_rows
from megalith.training.task_harness import HarnessModel

LONGEST = 32
PAIRS = [
    ("3 and 4 is", " 7"),
    ("3 and 4 is", " twelve"),
    ("", "so"),
    ("a " * 40, "b c"),
    ("the answer ", "is"),
]
TEXTS = ["so 3 plus 4.", "a text that is longer than one row of tokens has room for, and than two"]
ASKED = [("one", {"until": ["e"], "max_gen_toks": 9}), ("b" * 90, {"until": ["\n\n"], "max_gen_toks": 60})]

Figures = tuple[list[tuple[float, bool]], list[float], list[str]]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, n) for n, each in enumerate(arguments)]


def figures(model, tokens: list[tuple[list[int], list[int]]], writer=None) -> Figures:
    """Of PAIRS and of `tokens`, (context, continuation) each; of TEXTS; and what `writer`, by default `model`, lets
    follow on ASKED."""
    scores = model.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    scores += model._loglikelihood_tokens([(("", ""), *pair) for pair in tokens], disable_tqdm=True)
    whole = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    texts = (writer or model).generate_until(requests("generate_until", ASKED), disable_tqdm=True)
    return scores, model.loglikelihood_rolling(whole, disable_tqdm=True), texts


def of_layout(folder: str, parallel: dict, tokens: list[tuple[list[int], list[int]]]) -> Figures:
    size = this_process().world_size
    config = RunConfig.from_tree({
        "model": {"init_from": folder}, "data": {"mock": True, "seq_length": LONGEST}, "optim": {"lr": 1.0},
        "train": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": size}, "parallel": parallel,
    })  # fmt: skip
    config = prepare(config, size).config
    mesh = build_mesh(config.parallel, size, "cpu")
    model = build_model(config, mesh, torch.device("cpu"))
    load_initial_weights(folder, model.chunks, vocabulary_rows(config), 1, mesh.world if size > 1 else Axis())
    return figures(HarnessModel(model.eval(), tokenizer_of(Path(folder)), config), tokens)
