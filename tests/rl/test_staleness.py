"""A queue of rollout batches ahead: each token has the version of its weights, and a checkpoint has the queue."""

import json
import shutil

import numpy as np
import pytest
import torch
from default_cases import by_default
from engine_stand_ins import served
from small_policy import configuration, metrics, write_prompts
from test_engines import model_tree, settings
from test_loop import run_of

import megalith
from megalith.parity.differences import BOUND
from megalith.rl.grpo import train_grpo
from megalith.rl.rollouts.rollout_reader import load_rollouts
from megalith.training.resume import load_run

AHEAD, STEPS, LONGEST = 3, 8, 8  # pieces of 3, 3 and 2 tokens


def run(folder, name: str, load: str | None = None, rl: dict | None = None, **train) -> list[dict]:
    """The metrics of the run in folder/name, whose weights a server of its own samples."""
    with served("vllm 0.24", model_tree(folder)) as server:
        sections = dict(rl=settings(server, max_staleness=AHEAD, save_rollouts=True) | (rl or {}))
        sections["train"] = dict(train_iters=STEPS, output_dir=str(folder / name)) | train
        sections["optim"] = dict(lr=1e-3)
        sections["checkpoint"] = dict(save_interval=1) | ({"load": load} if load else {})
        train_grpo(configuration(folder, **sections))
    return metrics(folder / name)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Its folder and metrics."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run(folder, "whole")


def due(batch: int, tokens: int) -> list[int]:
    """The versions of a completion's tokens: each period between two syncs gives an equal share of what is left."""
    found, ahead = [], min(batch, AHEAD)
    for version in range(batch - ahead, batch):
        left = LONGEST - len(found)
        found += [version] * -(-left // (batch - version))
    return (found or [0] * LONGEST)[:tokens]


def test_each_token_has_the_version_whose_weights_give_its_log_probability(straight):
    folder, steps = straight
    several = 0
    for batch in range(STEPS):
        path = folder / "whole" / "rollouts" / f"batch_{batch:08d}.jsonl.zst"
        for group in load_rollouts(path).groups:
            for one in group.completions:
                versions = np.broadcast_to(one.version, len(one.ids))
                assert versions.tolist() == due(batch, len(one.ids)), batch
                several += len(set(versions)) > 1
                ids = torch.tensor([[*group.prompt_ids, *one.ids]])
                for version in set(versions.tolist()) - {
                    0
                }:  # the weights before the first step are not saved
                    said = logprobs(folder, version, ids)[len(group.prompt_ids) - 1 :]
                    assert np.allclose(
                        said[versions == version], one.logprobs[versions == version], atol=1e-5
                    )
    assert several > 20
    assert [step["queue_length"] for step in steps] == [3, 3, 3, 3, 3, 2, 1, 0]
    assert [step["staleness_max"] for step in steps] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert all(1 < step["staleness"] < 3 for step in steps[3:]) and steps[1]["staleness"] == 1.0
    assert all(step["tokens_dropped"] == 0 and step["drift_canary"] < 1.0001 for step in steps)


def logprobs(folder, version: int, ids: torch.Tensor, made={}) -> np.ndarray:  # noqa: B006
    """Of each token but the first, by the checkpoint of this step."""
    if version not in made:
        made[version] = megalith.load(folder / "whole" / "checkpoints" / f"step_{version:08d}")
    with torch.no_grad():
        found = made[version](ids).float().log_softmax(-1)[0, :-1]
    return found.gather(1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("step", by_default([1, 3, 6], 6))
def test_a_run_goes_on_with_the_queue_of_its_checkpoint_in_another_folder(straight, tmp_path, step):
    """Also where the server answers an evaluation's prompts by newer weights in between."""
    folder, steps = straight
    shutil.copy(folder / "prompts.jsonl", tmp_path)
    held_out = dict(eval_prompts=str(tmp_path / "prompts.jsonl"), max_eval_prompts=3, num_generations_eval=2)
    load = str(folder / "whole" / "checkpoints" / f"step_{step:08d}")
    again = run(tmp_path, "cut", load, held_out, eval_interval=2)
    said = (tmp_path / "cut" / "evaluations.jsonl").read_text().splitlines()
    assert len(said) == (STEPS - step + 1) // 2 and json.loads(said[-1])["validation_prompts"] == 3
    same = ("loss", "grad_norm", "rewards_mean", "staleness", "queue_length")
    assert [[one[name] for name in same] for one in again] == [
        [one[name] for name in same] for one in steps[step:]
    ]
    last = f"rollouts/batch_{STEPS - 1:08d}.jsonl.zst"
    assert (tmp_path / "cut" / last).read_bytes() == (folder / "whole" / last).read_bytes()


def losses_from(folder: str, load: str, parallel: dict, rl: dict) -> list[float]:
    sections = dict(rl=rl, parallel=parallel, optim=dict(lr=1e-3), checkpoint=dict(load=load))
    sections["train"] = dict(train_iters=STEPS, output_dir=f"{folder}/layout")
    run = run_of(configuration(folder, **sections), 2)
    load_run(run)
    with run.data.train_loader(run.step, run.consumed_samples, run.device) as batches:
        found = [run.train_step(batches).loss.item() for _ in range(run.step, STEPS)]
    run.task.close()
    return found


LAYOUTS = dict(tensor_model_parallel_size=2), dict(data_parallel_sharding_strategy="optim_grads_params")


def assert_same_in(parallel: dict, pool, folder, load, rl: dict, expected: list[float]) -> None:
    with served("vllm 0.24", model_tree(folder)) as server:
        case = str(folder), str(load), parallel, settings(server, **rl)
        found = pool.run(losses_from, *case, size=2)
    for mine in found:
        assert np.abs(np.subtract(mine, expected)).max() / np.abs(expected).max() < BOUND


@pytest.mark.parametrize("parallel", by_default(LAYOUTS, LAYOUTS[0]), ids=["tp2", "zero3"])
def test_so_it_does_in_another_layout(pool, straight, parallel):
    folder, steps = straight
    load = folder / "whole" / "checkpoints" / "step_00000004"
    expected = [step["loss"] for step in steps[4:]]
    assert_same_in(parallel, pool, folder, load, dict(max_staleness=AHEAD), expected)


def test_tokens_older_than_the_bound_leave_the_loss(straight, tmp_path, capsys):
    """Of a checkpoint with a longer queue."""
    folder, steps = straight
    shutil.copy(folder / "prompts.jsonl", tmp_path)
    load = str(folder / "whole" / "checkpoints" / "step_00000003")
    again = run(tmp_path, "cut", load, rl=dict(max_staleness=1))
    files = [tmp_path / "cut" / "rollouts" / f"batch_{n:08d}.jsonl.zst" for n in range(3, STEPS)]
    each = [[one for group in load_rollouts(path).groups for one in group.completions] for path in files]
    old = [sum(int((n - one.version > 1).sum()) * (len(one.ids) if len(one.version) == 1 else 1) for one in batch)
           for n, batch in enumerate(each, 3)]  # fmt: skip
    assert [step["tokens_dropped"] for step in again] == old and old[0] > 0 == old[-1]
    assert again[0]["loss"] != steps[3]["loss"] and all(np.isfinite(step["loss"]) for step in again)
    assert again[-1]["staleness_max"] == 1
    said = f"| staleness {again[0]['staleness']:.2f}, at most 3, dropped {old[0]} tokens, queue 2 | seconds: "
    assert said in capsys.readouterr().out


def test_a_queue_that_does_not_fit_is_left_out(straight, tmp_path, capsys):
    folder, _ = straight
    shutil.copy(folder / "prompts.jsonl", tmp_path)
    load = str(folder / "whole" / "checkpoints" / "step_00000003")
    again = run(tmp_path, "cut", load, rl=dict(max_completion_length=7), train_iters=5)
    assert (
        "note: the checkpoint's 3 rollout batches ahead are discarded and sampled again, because these settings "
        "changed: rl.max_completion_length" in capsys.readouterr().out
    )
    assert [step["staleness"] for step in again] == [0, 1]


@pytest.mark.full  # test_loop.py and test_rollouts.py stop inside a batch, other tests here resume with a queue
@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_a_run_that_stopped_inside_of_a_rollout_batch_goes_on_with_it_and_the_queue(pool, tmp_path, proximal):
    """And with the proximal policy, whose log-probabilities are the checkpoint's or follow from the versions; in
    another layout too."""
    rl = dict(mini_batches=2, max_staleness=2, use_decoupled_loss=True, prox_logp_method=proximal)
    write_prompts(tmp_path)
    whole = run(tmp_path, "whole", rl=rl)
    assert [step["staleness"] for step in whole[:4]] == [0, 0, 2, 2]
    assert all(("time_old_logprobs" in step) == (proximal == "recompute") for step in whole[::2])
    assert all(step["ratio"] != 1.0 for step in whole[1::2])
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "prompts.jsonl", tmp_path / "b")
    run(tmp_path / "b", "first", rl=rl, exit_interval=5)
    load = tmp_path / "b" / "first" / "checkpoints" / "step_00000005"
    cut = run(tmp_path / "b", "cut", str(load), rl=rl)
    expected = [step["loss"] for step in whole[5:]]
    assert [step["loss"] for step in cut] == expected
    assert_same_in(LAYOUTS[proximal == "recompute"], pool, tmp_path / "b", load, rl, expected)
