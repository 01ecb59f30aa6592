"""Dynamic context parallelism on GPUs: compiled layers, fused kernels, and groups that change from pass to pass."""

import json
import random

import pytest

from megalith.config import RunConfig
from megalith.launch.pool import Pool
from megalith.parity.differences import relative_error
from megalith.parity.job import start

MODEL = dict(num_layers=4, hidden_size=256, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=512, swiglu=True,
             vocab_size=1000, max_position_embeddings=1024, hidden_dropout=0.0, attention_dropout=0.0,
             normalization="RMSNorm", add_bias_linear=False, position_embedding_type="rope",
             untie_embeddings_and_output_weights=True)  # fmt: skip
SEQ, STEPS = 1024, 6
LOSS_BOUND, NORM_BOUND = 2e-3, 2e-2  # of bf16, as in test_grid_gpu.py


LATENT = {name: value for name, value in MODEL.items() if name != "num_query_groups"} | dict(
    multi_latent_attention=True, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=32
)  # fmt: skip


def configuration(folder, model=MODEL, **parallel) -> RunConfig:
    """An SFT run over samples of lognormal lengths."""
    rng, path = random.Random(0), folder / "samples.jsonl"
    with path.open("w") as file:
        for number in range(700):
            length = SEQ if number % 50 == 3 else min(max(int(rng.lognormvariate(4.5, 1.0)), 2), SEQ)
            file.write(json.dumps({"input_ids": [rng.randrange(1000) for _ in range(length)]}) + "\n")
    return RunConfig.from_tree(
        {
            "model": model,
            "parallel": parallel,
            "data": {"train_data_path": str(path), "seq_length": SEQ},
            "sft": {"enabled": True},
            "optim": {"lr": 1e-3, "lr_warmup_iters": 0},
            "train": {"train_iters": STEPS, "micro_batch_size": 1, "global_batch_size": 8, "precision": "bf16",
                      "eval_iters": 0, "output_dir": str(folder / "run")},
            "runtime": {"device": "cuda"},
        }
    )  # fmt: skip


def curve(config: RunConfig) -> tuple[list[float], list[float], list[int]]:
    """Return the losses and gradient norms of the steps, and the context parallel sizes of this rank's passes."""
    run, sizes = start(config), []
    backward = run.model.backward

    def recording(micro_batches, *args, **options):
        sizes.extend(batch.cp_size for batch in micro_batches)
        return backward(micro_batches, *args, **options)

    run.model.backward = recording
    with run.data.train_loader(0, 0, run.device) as batches:
        steps = [run.train_step(batches) for _ in range(STEPS)]
    return [step.loss.item() for step in steps], [step.grad_norm.item() for step in steps], sizes


@pytest.mark.parametrize("kind", ["a2a", "p2p", "all_gather"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_losses_are_those_of_one_gpu(gpus, tmp_path, kind, strategy):
    expected = gpus.run(curve, configuration(tmp_path), size=1)[0]
    dynamic = dict(
        dynamic_context_parallel=True,
        max_seqlen_per_dp_cp_rank=SEQ // 2,
        cp_comm_type=kind,
        data_parallel_sharding_strategy=strategy,
    )
    ranks = gpus.run(curve, configuration(tmp_path, **dynamic), size=2)
    assert {size for _, _, sizes in ranks for size in sizes} == {1, 2}
    for losses, norms, _ in ranks:
        assert relative_error(losses, expected[0]) < LOSS_BOUND
        assert relative_error(norms, expected[1]) < NORM_BOUND


@pytest.fixture(scope="module")
def four_processes():
    pool = Pool(4, timeout=300.0, device_type="cuda")
    yield pool
    pool.close()


@pytest.mark.four_gpus
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("model", [MODEL, LATENT], ids=["gqa", "mla"])
def test_pipelines_and_latent_attention_have_the_losses_of_one_gpu(four_processes, tmp_path, model, schedule):
    expected = four_processes.run(curve, configuration(tmp_path, model), size=1)[0]
    dynamic = dict(
        dynamic_context_parallel=True,
        max_seqlen_per_dp_cp_rank=SEQ // 2,
        pipeline_model_parallel_size=2,
        pipeline_schedule=schedule,
    )
    ranks = four_processes.run(curve, configuration(tmp_path, model, **dynamic), size=4)
    assert {size for _, _, sizes in ranks for size in sizes} == {1, 2}
    for losses, norms, _ in ranks:
        assert relative_error(losses, expected[0]) < LOSS_BOUND
        assert relative_error(norms, expected[1]) < NORM_BOUND
