"""Results published for H100 and A100, as Megalith's configurations and figures per GPU."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from megalith.config import RunConfig
from megalith.planner import layer_times, passes

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


class MegatronCore(passes.Passes):
    """The passes as Megatron-Core with Transformer Engine makes them in Bridge's recipes: weights, experts' too, are
    cast to FP8 once a step whatever memory there is, and wgrads are added up inside their GEMMs. In those of dense
    models, collectives of tensor parallelism go in as many steps as there are ranks, and all but the first run beside
    the GEMM (`tp_comm_overlap`). Megalith does the first alone, of dense weights where memory suffices."""

    def _tensor(self, number: int) -> tuple[float, float]:
        forward, backward = super()._tensor(number)
        exposed = 1.0 if self.expert_layers else 1 / self.tensor + layer_times.GEMM_SLOWDOWN["copy engine"]
        return exposed * forward, exposed * backward

    def _weight_casts(self, weight: int, both: int, one: int, experts: bool) -> tuple[float, float]:
        return (weight * both / self.micro_batches if experts else 0, 0)

    def _cast_once(self) -> float:
        return 1.0


class Published(NamedTuple):
    name: str
    device: str
    gpus: int
    model: dict
    batch: tuple[int, int, int]
    """Micro-batch, global batch, sequence."""
    parallel: dict
    figure: float
    """TFLOP/s per GPU, or tokens per second and GPU."""
    unit: str
    fp8: bool = False

    @property
    def by_megatron_core(self) -> bool:
        """True if Megatron-Core was measured, which overlaps or omits work that Megalith does not."""
        return self.name.startswith("Bridge")

    def config(self) -> RunConfig:
        micro, batch, seq = self.batch
        train = dict(train_iters=1, micro_batch_size=micro, global_batch_size=batch, precision="bf16")
        return RunConfig.from_tree(
            {
                "model": dict(max_position_embeddings=seq) | self.model,
                "data": dict(mock=True, seq_length=seq),
                "optim": dict(lr=1e-4),
                "parallel": dict(sequence_parallel=self.parallel.get("tensor_model_parallel_size", 1) > 1)
                | self.parallel,
                "train": train | (dict(fp8_format="hybrid", fp8_recipe="tensorwise") if self.fp8 else {}),
                "runtime": dict(activation_memory_budget=1.0),  # as it stands, whether that fits or not
            }
        )


def sizes(tp: int, pp: int, cp: int = 1, vp: int | None = None, **more) -> dict:
    result = dict(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp, **more
    )
    return result | ({} if vp is None else dict(virtual_pipeline_model_parallel_size=vp))


ENDS = dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
OPTIM = dict(data_parallel_sharding_strategy="optim")
LLAMA405, LLAMA70 = dict(preset="llama3-405b"), dict(preset="llama3-70b")
META = dict(**ENDS, **OPTIM)
BALANCED = dict(moe_router_force_load_balancing=True)

# fmt: off
H100_ROWS = [  # The Llama 3 Herd of Models, table 4; Megatron-Bridge's table of 2026
    Published("Meta, 8,192 GPUs", H100, 8192, LLAMA405, (1, 2048, 8192), sizes(8, 16, 1, 8, **META), 430, "TFLOP/s"),
    Published("Meta, 16,384 GPUs", H100, 16384, LLAMA405, (1, 2048, 8192), sizes(8, 16, 1, 8, **META), 400, "TFLOP/s"),
    Published("Meta, 131,072 tokens", H100, 16384, LLAMA405, (1, 128, 131072),
              sizes(8, 16, 16, 8, **META), 380, "TFLOP/s"),
    Published("Bridge, Llama-3-70B, FP8", H100, 64, LLAMA70, (1, 256, 8192), 
              sizes(4, 8, 1, 5, **OPTIM), 1664, "tokens/s", True),
    Published("Bridge, Llama-3-405B, FP8", H100, 1024, LLAMA405, (1, 1536, 8192), 
              sizes(8, 8, 2, 8, **META), 328, "tokens/s", True),
    Published("Bridge, Qwen3-235B, FP8", H100, 256, dict(BALANCED, preset="qwen3-235b-a22b"), (1, 8192, 4096),
              sizes(2, 8, expert_model_parallel_size=32, decoder_last_pipeline_num_layers=10, **OPTIM),
              1712, "tokens/s", True),
    Published("Bridge, Qwen3-30B, FP8", H100, 16, dict(BALANCED, preset="qwen3-30b-a3b"), (1, 1024, 4096),
              sizes(1, 1, expert_model_parallel_size=16, **OPTIM), 8960, "tokens/s", True),
]
# Narayanan et al. 2021, table 1: layers, hidden, heads, TP, PP, chunks, GPUs, batch, micro-batch, TFLOP/s. The table
# has neither chunks nor micro-batches: they are those of the authors' scripts (Megatron-LM, examples/sc21), two chunks
# where these name none, for the paper says that its pipelines are interleaved.
SC21 = [
    ("1.7B", 24, 2304, 24, 1, 1, 1, 32, 512, 16, 137), ("3.6B", 30, 3072, 32, 2, 1, 1, 64, 512, 16, 138),
    ("7.5B", 36, 4096, 32, 4, 1, 1, 128, 512, 16, 142), ("18.4B", 40, 6144, 48, 8, 1, 1, 256, 1024, 8, 135),
    ("39.1B", 48, 8192, 64, 8, 2, 2, 512, 1536, 4, 138), ("76.1B", 60, 10240, 80, 8, 4, 3, 1024, 1792, 2, 140),
    ("145.6B", 80, 12288, 96, 8, 8, 2, 1536, 2304, 2, 148), ("310B", 96, 16384, 128, 8, 16, 2, 1920, 2160, 1, 155),
    ("530B", 105, 20480, 128, 8, 35, 3, 2520, 2520, 1, 163), ("1T", 128, 25600, 160, 8, 64, 2, 3072, 3072, 1, 163),
]
# fmt: on


RECOMPUTED = dict(recompute_granularity="full", recompute_saves_attention=False)
IN_2021 = {
    "parallel.sequence_parallel": False,
    "parallel.tp_comm_overlap": False,
    "parallel.symmetric_memory_groups": [],
}
"""Features of tensor parallelism that did not exist in 2021."""


def sc21_row(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    tp: int,
    pp: int,
    vp: int,
    gpus: int,
    batch: int,
    micro: int,
    tera: int,
) -> Published:
    model = dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=51200,
                 hidden_dropout=0.0, attention_dropout=0.0)  # fmt: skip
    parallel = sizes(tp, pp, 1, vp if vp > 1 else None, **RECOMPUTED)
    return Published(name, A100, gpus, model, (micro, batch, 2048), parallel, tera, "TFLOP/s")


class OldAttention(passes.Passes):
    """Attention as Megatron-LM had it in 2021: GEMMs a head, and the matrix of scores in memory between them. A score
    in fp16 is written, masked and normalized (read, written), dropped (read, written, a byte of mask), read: 13 bytes;
    backward 19, where dropout and softmax read their outputs too. Layers are recomputed whole."""

    def _recomputed_work(self, number: int, forward: Counter[str]) -> Counter[str]:
        return Counter(forward)

    def _attention(self, number: int, forward: Counter[str], backward: Counter[str]) -> None:
        seq, heads = self.config.data.seq_length, self.model.num_attention_heads / self.tensor
        scores = self.tokens * seq * heads
        one = 2 * self.rates.matmul(seq, self.model.head_dim, seq, "bf16") * heads * self.tokens / seq
        forward["attention"] += one + 13 * scores / self.streams
        backward["attention"] += 2 * one + 19 * scores / self.streams
