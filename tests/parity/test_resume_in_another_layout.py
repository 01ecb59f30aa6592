"""A run saved in one layout goes on in another: its tensors to the bit, its losses as if it had never stopped."""

import functools

import pytest
import torch
from default_cases import by_default
from parity_cases import layers, run_config, train

from megalith.config import RunConfig
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import BOUND, relative_error
from megalith.parity.job import start, state_by_name

SAVED_AFTER, STEPS = 1, 3
BIASED = "deepseek documents"

# run, saved in, loaded in (None: one process)
CASES = [
    ("gpt2 untied, documents, dropout", "tp4", "pp2-zero_bubble-dp2-zero1"),
    (BIASED, "tp2-sp-etp2-ep2", "ep4-zero3"),
    ("t5 dropout", "pp4-uneven", "tp2-sp"),  # relative positions stand on every stage
]
# By default checkpoint/test_checkpoint_layouts.py goes through more, and test_moments_parity.py into one process.
MORE = [
    ("llama tied, documents", "cp2-dp2-zero3", None),
    ("gpt2 untied, documents, dropout", None, "tp2-sp-dp2-zero3"),
    ("llama tied, documents", "pp4-uneven", "tp2-cp2"),
    ("llama tied, documents", "dp4-zero1-hybrid", "tp2-pp2-interleaved"),
    (BIASED, "ep2-dp4-zero1", None),
]


def save(config: RunConfig) -> dict[str, torch.Tensor]:
    """Trains SAVED_AFTER steps; returns what a checkpoint then holds."""
    job = start(config)
    train(job, SAVED_AFTER)
    job.save()
    return state_by_name(job)


def go_on(config: RunConfig) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What the checkpoint gave, and the losses from there to the end."""
    job = start(config)
    assert job.step == SAVED_AFTER
    return state_by_name(job), train(job, job.total_steps - job.step)


@functools.cache
def uninterrupted(run: str, num_layers: int) -> list[float]:
    job = start(run_config(run, None, "", model={"num_layers": num_layers}, train={"train_iters": STEPS}))
    return train(job, job.total_steps)


@pytest.mark.parametrize(
    "run, saved_in, loaded_in",
    by_default(CASES + MORE, CASES[0]),
    ids=str,
)
@pytest.mark.fault(9)
def test_tensors_to_the_bit_and_losses_as_if_never_stopped(pool, tmp_path, run, saved_in, loaded_in):
    num_layers = max(layers(layout) for layout in (saved_in, loaded_in) if layout)

    def on_rank_0(function, layout, **checkpoint):
        train = {"output_dir": str(tmp_path), "train_iters": STEPS}
        model = {"num_layers": num_layers}
        config = run_config(run, layout, "", model=model, train=train, checkpoint=checkpoint)
        if layout is None:
            return function(config)
        return pool.run(function, config, size=LAYOUTS[layout].processes)[0]

    saved = on_rank_0(save, saved_in)
    loaded, losses = on_rank_0(go_on, loaded_in, load=str(tmp_path))
    assert saved.keys() == loaded.keys()
    different = [name for name, tensor in saved.items() if not torch.equal(tensor, loaded[name])]
    assert not different
    assert relative_error(losses, uninterrupted(run, num_layers)[SAVED_AFTER:]) <= BOUND
