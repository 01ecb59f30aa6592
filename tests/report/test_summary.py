"""The start summary: the figures that a user checks before walking away, readable at 100 columns."""

import io
import os
import pty
import re

import pytest

from megalith.config import RunConfig
from megalith.hardware import DeviceInfo, device_info
from megalith.planner.layout import build_layout
from megalith.report.summary import print_summary

GPT2_LARGE = [
    *("--model.preset", "gpt2-large", "--data.mock", "--data.seq_length", "1024", "--optim.lr", "1e-4"),
    *("--train.micro_batch_size", "32", "--train.global_batch_size", "128", "--train.train_iters", "500"),
    *("--train.precision", "bf16", "--train.output_dir", "runs/large"),
]
H200 = device_info("NVIDIA H200", memory_bytes=150_754_820_096)


def _summary(*changes, device=H200, data_parallel_size=2):
    stream = io.StringIO()
    config = RunConfig.load(None, [*GPT2_LARGE, *changes])
    stages = config.parallel.pipeline_model_parallel_size * config.parallel.tensor_model_parallel_size
    print_summary(build_layout(config, data_parallel_size * stages), device, stream)
    return stream.getvalue()


def test_summary_shows_parameters_flops_batch_memory_and_device():
    text = _summary()
    assert "gpt2-large: 36 layers × 1280, 20 heads of 64, MLP 5120 gelu_tanh" in text
    assert "vocabulary 50,257 padded to 50,304" in text
    assert "774,090,240, without embedding and head 708,390,400" in text
    assert "= embedding 65.7M + attention 236M + MLP 472M + norms 187k; head tied to embedding" in text
    assert "4.92 GFLOP causal (as in the log), 5.20 GFLOP full" in text
    assert "128 = micro 32 × data parallel 2 × accumulation 2; × 1,024 = 131,072 tokens per step" in text
    assert "500 steps, 64,000 sequences, 65.5M tokens (0.0847 per parameter)" in text
    assert "weights 3.1 GB + bf16 copy 1.5 GB + gradients 3.1 GB + optimizer 6.2 GB" in text
    sharded = _summary("--parallel.data_parallel_sharding_strategy", "optim")
    assert "weights 1.5 GB + gathered copy 1.8 GB" in sharded
    assert "2 × NVIDIA H200, 150.8 GB, bf16 peak 989 TFLOP/s" in text
    assert "runs/large" in text


def test_summary_counts_layers_with_an_mlp_without_those_of_multi_token_prediction():
    experts = ["--model.num_experts", "8", "--model.mtp_num_layers", "2", "--model.moe_ffn_hidden_size", "64"]
    assert "layers with an MLP" not in _summary(*experts)
    text = _summary(*experts, "--model.moe_layer_freq", "2")
    assert "18 layers with an MLP of 5120" in " ".join(text.split())


def test_file_gets_plain_text_within_100_columns_and_megatrons_parameter_lines_on_request():
    assert "in billions" not in _summary()
    text = _summary("--log.console", "lines")
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text.endswith(
        " Number of parameters in transformer block in billions:  0.71\n"
        " Number of parameters in embedding layers in billions: 0.06\n"
        " Total number of parameters in billions: 0.77\n"
        " Number of parameters in most loaded shard in billions: 0.7724\n"
    )


def test_the_most_loaded_shard_is_counted_by_megatrons_formula():
    """Which knows neither biases nor uneven stages, and of an untied head only where there is one stage."""
    block, table = 36 * (12 * 1280**2 + 4 * 1280) + 2 * 1280, 50_304 * 1280
    untied, two_stages = (
        "model.untie_embeddings_and_output_weights=true",
        "parallel.pipeline_model_parallel_size=2",
    )
    for changes, parameters in [
        (("parallel.tensor_model_parallel_size=2",), (block + table) / 2),
        ((untied,), block + 2 * table),
        ((two_stages,), block / 2 + table),
        ((two_stages, untied, "parallel.decoder_first_pipeline_num_layers=24"), block / 2 + table),
    ]:
        last = _summary(*changes, "log.console=lines").splitlines()[-1]
        assert float(last.rpartition(":")[2]) == pytest.approx(parameters / 1e9, abs=1e-4)


def test_terminal_gets_colour_and_no_lines_for_scripts():
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as terminal:
        print_summary(build_layout(RunConfig.load(None, GPT2_LARGE), 1), H200, terminal)
        text = os.read(parent, 65536).decode()
    os.close(parent)
    assert "\x1b[1;36m" in text
    assert "accumulation 4" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "in billions" not in text


def test_device_without_a_known_peak_says_so():
    cpu = DeviceInfo("CPU (2 cores)", memory_bytes=8 * 10**9)
    text = _summary("--train.precision", "fp32", device=cpu, data_parallel_size=1)
    assert "CPU (2 cores), 8.0 GB, fp32; its peak is not known, so no MFU" in text
    assert " copy" not in text
    assert "more than the device's 8.0 GB: lower train.micro_batch_size" in text


def test_memory_is_that_of_the_fullest_stage_and_every_device_is_counted():
    text = _summary("--parallel.pipeline_model_parallel_size", "2", data_parallel_size=1)
    assert "on a device of stage 0, the fullest" in text
    assert "= weights 1.7 GB + bf16 copy 1.4 GB" in text  # a copy for each micro-batch in flight
    assert "2 × NVIDIA H200" in text


def test_ramp_up_and_a_length_in_samples_are_counted():
    text = _summary("--train.train_iters", "null", "--train.train_samples", "1280")
    assert "10 steps, 1,280 sequences" in text
    text = _summary("--train.rampup_batch_size", "64", "64", "640")
    assert "ramped up from 64 by 64 over 640 sequences" in text
    assert "500 steps, 63,360 sequences" in text
