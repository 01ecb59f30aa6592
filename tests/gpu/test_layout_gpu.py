"""The layout report on GPUs: memory near its estimate, times from real kernels, links, memory that is full."""

import statistics

import pytest
import torch
from layout_job import configuration, gradients_of_late_exchanges, links_between, printed_by_run

import megalith
from megalith.config.rules.auto_settings import Machine, resolve_auto
from megalith.errors import TrainingError
from megalith.report.metrics import read_records

MODEL = dict(num_layers=8, hidden_size=1024, num_attention_heads=16, vocab_size=32000)
WIDE = dict(MODEL, hidden_size=2048)  # enough work that the GPU, not the host, sets the pace
LLAMA = dict(num_query_groups=4, swiglu=True, ffn_hidden_size=5504, normalization="RMSNorm", add_bias_linear=False,
             position_embedding_type="rope", untie_embeddings_and_output_weights=True)  # fmt: skip
WIDE_LLAMA = dict(WIDE, **LLAMA)
LLAMA_8B = dict(LLAMA, num_layers=4, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
                ffn_hidden_size=14336, vocab_size=32000)  # four of its layers  # fmt: skip
RANK, EXPECTED, MEASURED, STEP, COMPUTE, COMMUNICATION, BUBBLE, IDLE = 0, 5, 6, 7, 8, 9, 10, 11


def large(output, model=MODEL, micro=8, **parallel):
    return configuration(
        output,
        model=model,
        data=dict(seq_length=1024),
        train=dict(micro_batch_size=micro, global_batch_size=64, precision="bf16"),
        runtime=dict(device="cuda"),
        parallel=parallel,
    )


def measured_rows(text: str) -> list[list[float]]:
    """The table of the measured step: a row a rank, its columns as numbers."""
    _, table = text.split("measured in step 5")
    return [[float(cell) for cell in line.split()] for line in table.splitlines()[3:5]]


@pytest.mark.quiet
@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        pytest.param(dict(pipeline_model_parallel_size=2), WIDE_LLAMA, id="pp2, llama"),
        pytest.param(dict(tensor_model_parallel_size=2), WIDE, id="tp2, gpt"),
        pytest.param(
            dict(tensor_model_parallel_size=2, sequence_parallel=True), WIDE_LLAMA, id="tp2-sp, llama"
        ),
        pytest.param(dict(context_parallel_size=2), WIDE, id="cp2, gpt"),
        pytest.param(dict(data_parallel_sharding_strategy="no_shard"), WIDE_LLAMA, id="dp2, llama"),
        pytest.param(dict(data_parallel_sharding_strategy="optim_grads_params"), WIDE, id="dp2-zero3, gpt"),
    ],
)
def test_measured_step_adds_up_and_memory_is_near_the_estimate(gpus, tmp_path, parallel, model):
    micro = (
        32 if "tensor_model_parallel_size" in parallel else 8
    )  # in halves, each of which takes the host its time
    text = gpus.run(printed_by_run, large(tmp_path, model, micro, **parallel))[0]
    print(text)
    rows = measured_rows(text)
    for row in rows:
        parts = row[COMPUTE] + row[COMMUNICATION] + row[BUBBLE] + row[IDLE]
        assert row[STEP] == pytest.approx(parts, abs=0.3)
        assert row[COMPUTE] > 0.3 * row[STEP]
        assert row[MEASURED] == pytest.approx(row[EXPECTED], rel=0.25)
        if "pipeline_model_parallel_size" not in parallel:
            assert row[BUBBLE] == 0
        if "tensor_model_parallel_size" in parallel:
            assert row[COMMUNICATION] > 0
    if "pipeline_model_parallel_size" in parallel:  # 1/9 for equal stages; the head makes the last one longer
        assert 0.05 < sum(row[BUBBLE] for row in rows) / sum(row[STEP] for row in rows) < 0.6


PLAIN, AUTO = dict(tp_comm_overlap=False, symmetric_memory_groups=[]), {}


def step_times(gpus, folder, *ways: dict, model, micro, **parallel) -> list[float]:
    """Medians of a step, ms, of runs with these settings of `parallel`."""
    found = []
    for number, way in enumerate(ways):
        config = large(folder / str(number), model, micro, **parallel, **way)
        settings = {"train.train_iters": 16, "checkpoint.save_at_end": False}
        print(gpus.run(printed_by_run, config.with_settings(settings))[0])
        steps = read_records(folder / str(number) / "metrics.jsonl")
        found.append(statistics.median(step["step_time_ms"] for step in steps[7:]))  # the fifth is profiled
    return found


@pytest.mark.quiet
@pytest.mark.parametrize(
    "parallel",
    [
        dict(tensor_model_parallel_size=2, sequence_parallel=True),
        dict(context_parallel_size=2, cp_comm_type="a2a"),
    ],
    ids=["tp2-sp", "cp2-a2a"],
)
def test_what_auto_chooses_is_faster_than_without_overlap(gpus, tmp_path, parallel):
    """By the steps' times without the profiler, under which the host of two halves is late."""
    plain, auto = step_times(gpus, tmp_path, PLAIN, AUTO, model=LLAMA_8B, micro=32, **parallel)
    print(f"plain {plain:.1f} ms, auto {auto:.1f}")
    assert auto < 0.99 * plain


@pytest.mark.quiet
@pytest.mark.parametrize("micro", [8, 32])  # 1.2 and 4.9 TFLOP per layer
def test_auto_makes_halves_only_where_the_host_keeps_up(gpus, tmp_path, micro):
    parallel = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    times = step_times(gpus, tmp_path, PLAIN, dict(tp_comm_overlap=True), model=WIDE, micro=micro, **parallel)
    auto, _ = resolve_auto(large(tmp_path, WIDE, micro, **parallel), Machine(2, compiled=True, nvlink=True))
    print(
        f"micro-batch {micro}: plain {times[0]:.1f} ms, halves {times[1]:.1f}, by auto {auto.parallel.overlaps}"
    )
    assert times[auto.parallel.overlaps] < 1.05 * min(times)


@pytest.mark.parametrize("model", [WIDE, dict(LLAMA_8B, num_layers=2)], ids=["gpt", "llama"])
@pytest.mark.parametrize("sent", [True, False], ids=["in bf16", "in fp32"])
def test_gradients_of_fsdp_lie_where_activations_did_and_are_the_same(gpus, tmp_path, model, sent):
    """To the bit, however late their reduction comes; a layer that stays gathered among them."""
    strategy = dict(data_parallel_sharding_strategy="optim_grads_params", fsdp_unsharded_layers=1)
    strategy["reduce_scatter_with_fp32_accumulation"] = sent
    config = large(tmp_path, model, 2, **strategy).with_settings({"train.deterministic": True})
    expected, found = (
        gpus.run(gradients_of_late_exchanges, config, own_stream) for own_stream in (True, False)
    )
    assert [part for part, _ in expected] == [0.0, 0.0]
    assert found == [(1.0, sums) for _, sums in expected]


def test_driver_says_what_links_the_gpus(gpus):
    for rank, links in enumerate(gpus.run(links_between, "cuda")):
        assert set(links) <= {1 - rank}
        assert set(links.values()) <= {"NVLink", "PCIe"}
        assert links, "neither nvidia-ml-py nor nvidia-smi answered"


def test_full_memory_is_told_with_what_holds_it(tmp_path):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(3.5e9 / total)
    try:
        with pytest.raises(TrainingError) as raised:
            megalith.train(large(tmp_path / "run"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    text = str(raised.value)
    assert text.startswith(
        "out of memory on cuda:0 of rank 0 (pp 0, dp 0, cp 0, tp 0; stage 0 of 1, layers E 0–7 L): "
    )
    assert "were requested" in text and "activations and temporary tensors" in text
    assert "parallel.recompute_granularity full (−" in text
