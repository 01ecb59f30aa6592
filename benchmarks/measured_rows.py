"""The rows of benchmarks/RESULTS.md and docs/performance.md that test the planner, measured on H200."""

from __future__ import annotations

from typing import NamedTuple

from megalith.config import RunConfig

FIT, TOLD = "fit", "told"
MIRRORED = "mirrored"  # one rank's step without the wire (mirrored_rank.py): its memory holds
OLD = "old"  # of an older version: its memory holds, its kernels or its recomputation were slower
MISSED = "missed"  # predicted before it was measured, and outside the bounds


class Row(NamedTuple):
    name: str
    use: str
    """FIT: constants of the time model were fitted to this row. TOLD and others: the row only tests them."""
    processes: int
    model: dict
    batch: tuple[int, int, int]
    """Micro-batch, global batch, sequence."""
    parallel: dict
    ms: float | None
    gigabytes: float | None
    more: dict = {}
    frees_qkv: bool = False
    """Measured since attention keeps its values and not all of linear_qkv's output (`saved_before_attention`)."""

    def tree(self) -> dict:
        """Return the contents of the run file."""
        micro, batch, seq = self.batch
        more = {section: dict(values) for section, values in self.more.items()}
        train = dict(train_iters=10, micro_batch_size=micro, global_batch_size=batch, precision="bf16")
        return {
            "model": self.model,
            "data": dict(mock=True, seq_length=seq) | more.get("data", {}),
            "parallel": dict(self.parallel),
            "optim": dict(lr=1e-4) | more.get("optim", {}),
            "train": train | more.get("train", {}),
            "runtime": more.get("runtime", {}),
            "lora": more.get("lora", {}),
        }

    def config(self) -> RunConfig:
        return RunConfig.from_tree(self.tree())


DROPPING = dict(preset="gpt2-large", num_attention_heads=16)
LARGE = dict(DROPPING, hidden_dropout=0.0, attention_dropout=0.0)
LLAMA = dict(preset="llama3-8b", vocab_size=128256)
LLAMA16, LLAMA8 = dict(LLAMA, num_layers=16), dict(LLAMA, num_layers=8)
LLAMA3B, LLAMA1B = dict(LLAMA, preset="llama3.2-3b"), dict(LLAMA, preset="llama3.2-1b")
LONGEST = dict(LLAMA, max_position_embeddings=131072)
PLAIN = dict(hidden_dropout=0.0, attention_dropout=0.0)
BALANCED = dict(moe_router_force_load_balancing=True)
QWEN = dict(BALANCED, preset="qwen3-30b-a3b")
ROUTED = dict(moe_router_force_load_balancing=False)
DEEPSEEK = dict(BALANCED, preset="deepseek-v2-lite", num_layers=14, moe_layer_freq=[0] + [1] * 13)
SP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
ALONE = dict(tp_comm_overlap=False, symmetric_memory_groups=[])
STATIC = dict(expert_model_parallel_size=2, data_parallel_sharding_strategy="optim", moe_static_dispatch=True)
PP = dict(pipeline_model_parallel_size=2, microbatch_group_size_per_virtual_pipeline_stage=4)
CP = dict(context_parallel_size=2)
WHOLE = dict(data_parallel_sharding_strategy="optim_grads_params")
FULL = dict(recompute_granularity="full", recompute_saves_attention=False)
SAVED = dict(recompute_granularity="full", recompute_saves_attention=True)
FP16 = dict(train=dict(precision="fp16"))
FP8 = dict(train=dict(fp8_format="hybrid"))
ONCE_IN_FP8 = dict(train=dict(fp8_format="hybrid", fp8_cache_weights=True))
OPTIM = dict(data_parallel_sharding_strategy="optim")
HALF = dict(optim=dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5))
IN_BF16 = dict(optim=dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"))
IN_FP8 = dict(optim=dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8"))
ALL = dict(optim=dict(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0))
PACKED = dict(data=dict(tokenizer_type="ByteTokenizer", reset_attention_mask=True, reset_position_ids=True))
V4 = dict(PP, pipeline_model_parallel_layout="E|t*2|(t*5|)*3t*6|t*9|t*4L")
V3 = dict(PP, pipeline_model_parallel_layout="Et|t*4|t*10|t*10|t*8|t*3L")
ONE, TWO, LONG = (32, 32, 1024), (64, 64, 1024), (1, 2, 8192)


def selective(*modules: str) -> dict:
    return dict(recompute_granularity="selective", recompute_modules=list(modules))


CHEAP = selective("layernorm", "mlp_act")
SEQUENCES, AT_ONCE = (1, 4, 8192), (2, 4, 8192)
GATHERED, FREED = dict(WHOLE, fsdp_unsharded_layers=32), dict(WHOLE, fsdp_unsharded_layers=0)

# fmt: off
TRADEOFFS = [  # GPT-2-large on one GPU; ¹ on another machine than the others
    Row("no recomputation", TOLD, 1, LARGE, ONE, {}, 321.1, 60.4),
    Row("recompute `core_attn`", TOLD, 1, LARGE, ONE, selective("core_attn"), 330.6, 57.3),
    Row("recompute `layernorm` ¹", TOLD, 1, LARGE, ONE, selective("layernorm"), 323.5, 54.3),
    Row("recompute `mlp_act` ¹", TOLD, 1, LARGE, ONE, selective("mlp_act"), 325.9, 48.4),
    Row("recompute `layernorm`, `mlp_act` ¹", TOLD, 1, LARGE, ONE, selective("layernorm", "mlp_act"), 329.9, 42.4),
    Row("recompute `mlp` ¹", TOLD, 1, LARGE, ONE, selective("mlp"), 340.4, 35.7),
    Row("full recompute, attention outputs saved (default if memory allows)", TOLD, 1, LARGE, ONE, SAVED,
        367.3, 17.3),
    Row("full recompute (`recompute_saves_attention: false`) ¹", TOLD, 1, LARGE, ONE, FULL, 388, 14.6),
    Row("half of the optimizer state on the host", TOLD, 1, LARGE, ONE, {}, 407.2, 57.2, HALF),
    Row("all optimizer state on the host", TOLD, 1, LARGE, ONE, {}, 506.9, 54.1, ALL),
    Row("packed documents ¹", TOLD, 1, LARGE, ONE, {}, 330.3, 60.4, PACKED),
    Row("FP8 delayed", TOLD, 1, LARGE, ONE, {}, 253.0, 52.1, FP8),
]
TWO_GPUS = [  # Llama-3-8B on two GPUs, on several machines; ², ³ one rank among mirrors of itself, on one machine each
    Row("`optim_grads_params`, `fsdp_unsharded_layers: 32`", TOLD, 2, LLAMA, SEQUENCES, GATHERED, 1592, 128.2),
    Row("`optim_grads_params`, `fsdp_unsharded_layers: 32` ²", MIRRORED, 2, LLAMA, SEQUENCES, GATHERED, 1546.2, 128.2),
    Row("micro-batch of 2, `activation_memory_budget: 0.9` ²", MIRRORED, 2, LLAMA, AT_ONCE, GATHERED,
        1582.7, 136.5, dict(runtime=dict(activation_memory_budget=0.9))),
    Row("micro-batch of 2, recompute `mlp_act` (`auto`)", TOLD, 2, LLAMA, AT_ONCE,
        dict(GATHERED, **selective("mlp_act")), 1561, 136.5),
    Row("micro-batch of 2, recompute `mlp_act` ³", MIRRORED, 2, LLAMA, AT_ONCE,
        dict(GATHERED, **selective("mlp_act")), 1566.0, 136.5),
    Row("micro-batch of 2, recompute `layernorm`, `mlp_act` ²", MIRRORED, 2, LLAMA, AT_ONCE,
        dict(GATHERED, **CHEAP), 1542.8, 128.0),
    Row("micro-batch of 2, recompute `layernorm`, `mlp_act`, moments in bf16 ²", MIRRORED, 2, LLAMA, AT_ONCE,
        dict(GATHERED, **CHEAP), 1525.2, 111.9, IN_BF16),
    Row("`optim_grads_params`, `fsdp_unsharded_layers: 0`", FIT, 2, LLAMA, SEQUENCES, FREED, 1700, 112.6),
    Row("`optim_grads`", TOLD, 2, LLAMA, SEQUENCES, dict(data_parallel_sharding_strategy="optim_grads"), 1634, 126.1),
    Row("`optim` ³", MIRRORED, 2, LLAMA, SEQUENCES, OPTIM, 1572.8, 142.2),
    Row("`optim`, `activation_memory_budget: 0.9` ²", MIRRORED, 2, LLAMA, SEQUENCES,
        OPTIM, 1616.3, 134.7,
        dict(runtime=dict(activation_memory_budget=0.9))),
    Row("`no_shard`", TOLD, 2, LLAMA, SEQUENCES, {}, None, None),
    Row("recompute `core_attn` ²", MIRRORED, 2, LLAMA, SEQUENCES, dict(GATHERED, **selective("core_attn")), 1618.2,
        126.0),
    Row("recompute `layernorm`, `mlp_act`, `fsdp_unsharded_layers: 0`", TOLD, 2, LLAMA, SEQUENCES, dict(FREED, **CHEAP),
        1696, 102.9),
    Row("recompute `layernorm`, `mlp_act`, moments in bf16, `fsdp_unsharded_layers: 24`", TOLD, 2, LLAMA, SEQUENCES,
        dict(WHOLE, fsdp_unsharded_layers=24, **CHEAP), 1637, 97.3, IN_BF16),
    Row("micro-batch of 2, recompute `layernorm`, `mlp_act`, moments in bf16, `fsdp_unsharded_layers: 24`",
        TOLD, 2, LLAMA, AT_ONCE, dict(WHOLE, fsdp_unsharded_layers=24, **CHEAP),
        1567, 108.4, IN_BF16),
    Row("micro-batch of 2, recompute `layernorm`, `mlp_act`, moments in bf16, `fsdp_unsharded_layers: 0` ³",
        MIRRORED, 2, LLAMA, AT_ONCE, dict(FREED, **CHEAP), 1526.7,
        97.9, IN_BF16),
    Row("recompute `mlp` ²", MIRRORED, 2, LLAMA, SEQUENCES, dict(GATHERED, **selective("mlp")), 1752.5, 105.7),
    Row("full recompute, attention outputs saved", TOLD, 2, LLAMA, SEQUENCES, dict(GATHERED, **SAVED), 1889, 93.3),
    Row("micro-batch of 2, full recompute except the last layer, attention outputs saved",
        TOLD, 2, LLAMA, AT_ONCE, dict(GATHERED, **SAVED),
        1816, 84.0),
    Row("full recompute", TOLD, 2, LLAMA, SEQUENCES, dict(GATHERED, **FULL), 1934, 92.1),
    Row("half of the optimizer state on the host ³", MIRRORED, 2, LLAMA, SEQUENCES, GATHERED, 1966.6, 112.2, HALF),
    Row("all optimizer state on the host ³", MIRRORED, 2, LLAMA, SEQUENCES, GATHERED, 2382.1, 96.1, ALL),
    Row("packed documents, `fsdp_unsharded_layers: 0`", TOLD, 2, LLAMA, SEQUENCES, FREED, 1685, 112.6, PACKED),
    Row("FP8 delayed, weights cast when used", TOLD, 2, LLAMA, SEQUENCES, GATHERED, 1214, 125.1,
        dict(train=dict(fp8_format="hybrid", fp8_cache_weights=False))),
    Row("FP8 delayed, `fsdp_unsharded_layers: 0`", TOLD, 2, LLAMA, SEQUENCES, FREED, 1308, 107.8, FP8),
    Row("PP2 in two chunks", TOLD, 2, LLAMA, SEQUENCES,
        dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*8|t*8|t*8|t*8L"), None, None),
]
WHOLE_DEEPSEEK = dict(BALANCED, preset="deepseek-v2-lite", num_layers=27, moe_layer_freq=[0] + [1] * 26)
LONGER = dict(LLAMA, max_position_embeddings=262144)
GRADS = dict(data_parallel_sharding_strategy="optim_grads")
PP2_VP8 = dict(OPTIM, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=8,
               expert_model_parallel_size=2, moe_static_dispatch=True, **selective("layernorm", "mlp"))
CAST_ONCE = dict(train=dict(moe_cache_weights=True))
EIGHT_GPUS = [  # one machine, each predicted before it was measured
    Row("`optim_grads`, eight GPUs", TOLD, 8, LLAMA, (2, 16, 8192), GRADS, 1543.1, 115.4),
    Row("`optim`, eight GPUs", TOLD, 8, LLAMA, (2, 16, 8192), OPTIM, 1549.5, 115.4),
    Row("`optim_grads`, FP8 delayed, eight GPUs", TOLD, 8, LLAMA, (2, 16, 8192), GRADS, 1105.6, 105.8, FP8),
    Row("`optim_grads`, FP8 tensorwise, eight GPUs", TOLD, 8, LLAMA, (2, 16, 8192), GRADS, 1125.6, 105.8,
        dict(train=dict(fp8_format="hybrid", fp8_recipe="tensorwise"))),
    Row("TP2 + SP, PP2 in four chunks, DP2, 32 sequences", TOLD, 8, LLAMA, (1, 32, 8192),
        dict(SP, **OPTIM, pipeline_model_parallel_size=2,
             pipeline_model_parallel_layout="Et*4|(t*4|)*4(t*5|)*2t*2L"), 3504.6, 52.5),
    Row("Llama-3-70B, `optim_grads_params`, recomputed, moments in bf16", MISSED, 8, dict(LLAMA, preset="llama3-70b"),
        (2, 16, 8192), dict(WHOLE, **FULL, fsdp_unsharded_layers=5), 15647, 126.0, IN_BF16),
    Row("Llama-3-8B, 262,144 tokens, CP8, `layernorm` and `mlp` recomputed", MISSED, 8, LONGER, (1, 1, 262144),
        dict(GRADS, context_parallel_size=8, **selective("layernorm", "mlp")), 18403, 84.8),
    Row("Qwen3-30B-A3B, EP8, router not balanced", TOLD, 8, dict(QWEN, **ROUTED), (2, 16, 4096),
        dict(OPTIM, expert_model_parallel_size=8), 872.0, 113.2, CAST_ONCE),
    Row("Qwen3-30B-A3B, EP2, PP2, VP8, DP4, router not balanced", MISSED, 8,
        dict(QWEN, **ROUTED), (2, 16, 4096), PP2_VP8, 1131.1, 89.0, CAST_ONCE),
    Row("DeepSeek-V2-Lite, EP4, DP8", MISSED, 8, WHOLE_DEEPSEEK, (2, 16, 4096),
        dict(GRADS, expert_model_parallel_size=4, moe_static_dispatch=True), 543.6, 116.5, CAST_ONCE),
]
ROWS = [
    Row("one GPU", FIT, 1, LARGE, ONE, {}, 320.5, 60.7),
    Row("one GPU, 64 sequences", OLD, 1, LARGE, TWO, {}, None, 109.5),
    Row("one GPU, `activation_memory_budget: 0.9`", TOLD, 1, LARGE, ONE, {}, 330.0, 47.1,
        dict(runtime=dict(activation_memory_budget=0.9))),
    Row("one GPU, fp16, dropout", FIT, 1, DROPPING, ONE, {}, 353.9, 60.6, FP16),
    Row("DP2", FIT, 2, LARGE, (32, 64, 1024), {}, 332.7, 60.7),
    Row("DP2, fp16, dropout", TOLD, 2, DROPPING, (32, 64, 1024), {}, 362.1, None, FP16),
    Row("DP2, `optim`", TOLD, 2, LARGE, (32, 64, 1024), OPTIM, 331.0, None),
    Row("DP2, `optim_grads_params`", OLD, 2, LARGE, (32, 64, 1024), WHOLE, 362.6, 54.8),
    Row("TP2", OLD, 2, LARGE, TWO, dict(tensor_model_parallel_size=2, **ALONE), 439.0, 67.4),
    Row("TP2, ping-pong, copy engines", TOLD, 2, LARGE, TWO, dict(tensor_model_parallel_size=2), 398.2, 67.6),
    Row("TP2 + SP", TOLD, 2, LARGE, TWO, SP, 375.7, 61.6),
    Row("TP2 + SP, fp16, dropout", TOLD, 2, DROPPING, TWO, SP, 413.9, None, FP16),
    Row("TP2 + SP, no overlap", FIT, 2, LARGE, TWO, dict(SP, **ALONE), 411.8, 61.3),
    Row("TP2 + SP, ping-pong with NCCL", FIT, 2, LARGE, TWO, dict(SP, symmetric_memory_groups=[]), 410.3, 61.4),
    Row("CP2", TOLD, 2, LARGE, TWO, CP, 347.4, 63.7),
    Row("CP2, fp16, dropout", TOLD, 2, DROPPING, TWO, CP, 381.7, None, FP16),
    Row("CP2, a2a with NCCL", OLD, 2, LARGE, TWO, dict(CP, cp_comm_type="a2a", **ALONE), 405.8, 63.9),
    Row("CP2, a2a with copy engines", TOLD, 2, LARGE, TWO,
        dict(CP, cp_comm_type="a2a", tp_comm_overlap=False, symmetric_memory_groups=["cp"]), 382.6, 63.9),
    Row("CP2, ring", OLD, 2, LARGE, TWO, dict(CP, cp_comm_type="p2p", **ALONE), 509.4, 61.8),
    Row("CP2, all_gather", OLD, 2, LARGE, TWO, dict(CP, cp_comm_type="all_gather", **ALONE), 615.5, 63.1),
    Row("PP2, 4 chunks", FIT, 2, LARGE, (16, 64, 1024), V4, 358.5, 54.3),
    Row("PP2, 4 chunks, fp16, dropout", TOLD, 2, DROPPING, (16, 64, 1024), V4, 396.6, None, FP16),
    Row("PP2, 3 chunks", TOLD, 2, LARGE, (16, 64, 1024), V3, 376.7, 55.0),
    Row("PP2, 2 chunks, 8 micro-batches", OLD, 2, LARGE, (8, 64, 1024),
        dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), 451.8, 24.0),
    Row("TP2 + SP, PP2, a slow host", OLD, 4, LARGE, (8, 64, 1024), 
        dict(SP, pipeline_model_parallel_size=2), 481.2, 11.1),
    Row("Llama-3-8B, recomputed outside the compiled graphs", OLD, 1, LLAMA, LONG, FULL, 1997, 135.1),
    Row("Llama-3-8B, recomputed", TOLD, 1, LLAMA, LONG, FULL, 1912, 135.1),
    Row("Llama-3-8B, recomputed, attention saved", TOLD, 1, LLAMA, LONG, SAVED, 1839, 138.3),
    Row("Llama-3-8B, FP8, recomputed, attention saved", TOLD, 1, LLAMA, LONG, SAVED, 1469, 135.1,
        dict(train=dict(fp8_format="hybrid", fp8_cache_weights=False))),
    Row("Llama-3-8B, micro-batch of 2, `layernorm` and `mlp_act` recomputed, moments in fp8", OLD, 1, LLAMA,
        (2, 2, 8192), CHEAP, 2201, 122.0, IN_FP8),  # 751 ms of it a kernel of fp8 moments since rewritten
    Row("Llama-3-8B, micro-batch of 2, only `mlp_act` recomputed, moments in fp8",
        TOLD, 1, LLAMA, (2, 2, 8192), selective("mlp_act"), 1520, 130.5, IN_FP8),
    Row("Llama-3-8B, micro-batch of 2, all layers except the last recomputed, moments in fp8",
        OLD, 1, LLAMA, (2, 2, 8192), SAVED, 1937, 81.2, IN_FP8),
    Row("Llama-3-8B, micro-batch of 2, `layernorm` and `mlp` recomputed, moments in bf16",
        TOLD, 1, LLAMA, (2, 2, 8192), selective("layernorm", "mlp"),
        1723, 97.7, IN_BF16),
    Row("Llama-3-8B, half of the layers recomputed outside the compiled graphs, optimizer state half on the host",
        OLD, 1,
        LLAMA, LONG, dict(FULL, recompute_method="block", recompute_num_layers=16), 2857, 128.5, HALF),
    Row("Llama-3-8B, half of the layers recomputed, half of the optimizer state on the host", TOLD, 1, LLAMA, LONG,
        dict(SAVED, recompute_method="block", recompute_num_layers=16), 2741, 129.6, HALF),
    Row("Llama-3-8B, FSDP2, recomputed outside the compiled graphs",
        OLD, 2, LLAMA, (1, 4, 8192), dict(WHOLE, **FULL), 2135, 76.3),
    Row("Llama-3-8B, FSDP2, `activation_memory_budget: 0.7`", TOLD, 2, LLAMA, (1, 4, 8192), FREED, 1744, 101.7,
        dict(runtime=dict(activation_memory_budget=0.7))),
    Row("Llama-3-8B, FSDP2, `activation_memory_budget: 0.58`", TOLD, 2, LLAMA, (1, 4, 8192), FREED, 1791, 99.6,
        dict(runtime=dict(activation_memory_budget=0.58))),
    Row("Llama-3-8B, TP2 + SP", TOLD, 2, LLAMA, (2, 4, 8192), SP, 1623, 118),
    Row("Llama-3-8B, TP2 + SP, FP8 delayed, weights cast once",
        OLD, 2, LLAMA, (2, 4, 8192), SP, None, 111,  # 1,286 ms profiled
        ONCE_IN_FP8),
    Row("Llama-3-8B, TP2 + SP, micro-batch of 4, `mlp_act` recomputed", TOLD, 2, LLAMA, (4, 4, 8192),
        dict(SP, **selective("mlp_act")), 1589, 130.3),
    Row("Llama-3-8B, 16 layers", TOLD, 1, LLAMA16, (1, 1, 8192), {}, 422.7, 85.6),
    Row("Llama-3-8B, 16 layers, FP8 delayed",
        FIT, 1, LLAMA16, (1, 1, 8192), {}, 322.6, 79.7, dict(train=dict(fp8_format="hybrid"))),
    Row("Llama-3-8B, 16 layers, FP8 tensorwise", TOLD, 1, LLAMA16, (1, 1, 8192), {}, 329.8, 79.7,
        dict(train=dict(fp8_format="hybrid", fp8_recipe="tensorwise"))),
    Row("Llama-3-8B, 16 layers, FP8 blockwise", FIT, 1, LLAMA16, (1, 1, 8192), {}, 358.1, 79.8,
        dict(train=dict(fp8_format="e4m3", fp8_recipe="blockwise"))),
    Row("Llama-3-8B, 16 layers, TP2 + SP", TOLD, 2, LLAMA16, (2, 2, 8192), dict(SP, **ALONE), 448.8, None),
    Row("Llama-3-8B, 16 layers, TP2 + SP, ping-pong with NCCL", TOLD, 2, LLAMA16, (2, 2, 8192), 
        dict(SP, symmetric_memory_groups=[]), 441.1, None),
    Row("Llama-3-8B, 16 layers, TP2 + SP, ping-pong, copy engines", TOLD, 2, LLAMA16, (2, 2, 8192), SP, 439.2, None),
    Row("Llama-3-8B, 16 layers, TP2 + SP, copy engines, no ping-pong", TOLD, 2, LLAMA16, (2, 2, 8192),
        dict(SP, tp_comm_overlap=False), 435.2, 55.5),
    Row("Llama-3-8B, 16 layers, TP2 + SP, copy engines, no ping-pong, `save_gathered_inputs: false`",
        TOLD, 2, LLAMA16, (2, 2, 8192),
        dict(SP, tp_comm_overlap=False, save_gathered_inputs=False), 442.2, 53.4),
    Row("Qwen3-30B-A3B, 8 layers, EP2", OLD, 2, dict(QWEN, num_layers=8), (1, 4, 4096),
        dict(expert_model_parallel_size=2, data_parallel_sharding_strategy="optim"), 208.9, 56.2),
    Row("Qwen3-30B-A3B, 8 layers, EP2, static dispatch",
        OLD, 2, dict(QWEN, num_layers=8), (1, 4, 4096), STATIC, 179.8, 58.5),
    Row("Qwen3-30B-A3B, 8 layers, EP2, static dispatch, weights cast once per step",
        OLD, 2, dict(QWEN, num_layers=8), (1, 4, 4096), STATIC,
        168.7, 63.4, dict(train=dict(moe_cache_weights=True))),
    Row("Qwen3-30B-A3B, 8 layers, EP2, static dispatch, weights cast once per step, micro-batch of 2",
        TOLD, 2, dict(QWEN, num_layers=8), (2, 4, 4096), STATIC,
        140.7, 58.2, dict(train=dict(moe_cache_weights=True))),
    Row("Qwen3-30B-A3B, 8 layers, EP2, static dispatch, weights cast once per step, micro-batch of 2, mirrored rank",
        MIRRORED, 2, dict(QWEN, num_layers=8),
        (2, 4, 4096), STATIC, 126.2, 58.2, dict(train=dict(moe_cache_weights=True))),
    Row("DeepSeek-V2-Lite, 14 layers, EP2, dense layers not compiled", OLD, 2, DEEPSEEK, (2, 8, 4096),
        dict(expert_model_parallel_size=2, data_parallel_sharding_strategy="optim"), 446.9, None),
    Row("DeepSeek-V2-Lite, 14 layers, EP2, static dispatch, compiled",
        TOLD, 2, DEEPSEEK, (2, 8, 4096), STATIC, 427.4, 102.9,
        dict(train=dict(moe_cache_weights=True))),
    Row("DeepSeek-V2-Lite, 14 layers, EP2, static dispatch, compiled, router not balanced, mirrored rank",
        MIRRORED, 2, dict(DEEPSEEK, **ROUTED), (2, 8, 4096), STATIC, 398.2, 102.9,
        dict(train=dict(moe_cache_weights=True))),
    Row("Llama-3-8B, `optim` over eight GPUs, mirrored rank", MIRRORED, 8, LLAMA, (1, 16, 8192), OPTIM, 1499, 106.0),
    Row("Llama-3-8B, `optim` over eight GPUs, FP8 delayed, mirrored rank",
        MIRRORED, 8, LLAMA, (1, 16, 8192), OPTIM, 1098, 101.2, ONCE_IN_FP8),
    Row("Llama-3-8B, `optim` over eight GPUs, FP8 delayed, micro-batch of 2, mirrored rank",
        MIRRORED, 8, LLAMA, (2, 16, 8192), OPTIM, 1043, 105.8,
        ONCE_IN_FP8),
    Row("Llama-3-8B, `optim` over eight GPUs, micro-batch of 2, mirrored rank",
        MIRRORED, 8, LLAMA, (2, 16, 8192), OPTIM, 1462, 115.4),
    Row("Llama-3-8B, 8 layers", TOLD, 1, LLAMA8, LONG, {}, 464.1, 61.8, frees_qkv=True),
    Row("Llama-3-8B, 8 layers, recomputed", TOLD, 1, LLAMA8, LONG, FULL, 547.4, 49.7),
    Row("Llama-3-8B, 8 layers, recomputed, attention saved", TOLD, 1, LLAMA8, LONG, SAVED, 534.9, 50.3),
    Row("Llama-3-8B, 8 layers, FSDP2, `fsdp_unsharded_layers: 8`", TOLD, 2, LLAMA8, (1, 4, 8192),
        dict(WHOLE, fsdp_unsharded_layers=8), 476.0, 47.5),
    Row("Llama-3-8B, 131,072 tokens, CP2, recomputed, attention saved", TOLD, 2, LONGEST, (1, 1, 131072),
        dict(WHOLE, **CP, **SAVED, cp_comm_type="a2a", fsdp_unsharded_layers=32), 21500, 115.2),
    Row("Llama-3-8B, 131,072 tokens, CP2, recomputed", TOLD, 2, LONGEST, (1, 1, 131072),
        dict(WHOLE, **CP, **FULL, cp_comm_type="a2a", fsdp_unsharded_layers=32), 25500, 98.3),
    Row("Llama-3.2-3B", TOLD, 1, LLAMA3B, (2, 4, 8192), {}, 1399, 106.0),
    Row("Llama-3.2-3B, FP8 delayed", TOLD, 1, LLAMA3B, (2, 4, 8192), {}, 1069, 100.8, FP8),
    Row("Llama-3.2-1B", TOLD, 1, LLAMA1B, (2, 16, 4096), {}, 1059, 35.1),
    Row("Llama-3.2-1B, 64 sequences", TOLD, 1, LLAMA1B, (2, 64, 4096), {}, 4207, 35.2),
    Row("Llama-3.2-1B, DP2", TOLD, 2, LLAMA1B, (4, 32, 4096), {}, 1050, 45.8),
    Row("Llama-3.2-1B, TP2", TOLD, 2, LLAMA1B, (4, 32, 4096), dict(tensor_model_parallel_size=2), 1186, None),
    Row("Llama-3-8B, LoRA of rank 16", TOLD, 1, LLAMA, (1, 1, 8192), {}, 607.5, 54.6, dict(lora=dict(rank=16)), True),
    Row("Llama-3-8B, LoRA of rank 16, recomputed, attention saved", TOLD, 1, LLAMA, (1, 1, 8192), SAVED, 780.7, 23.7,
        dict(lora=dict(rank=16)), True),
    Row("Llama-3-8B, QLoRA of rank 16 (NF4), recomputed, attention saved", TOLD, 1, LLAMA, (1, 1, 8192), SAVED, 812.3,
        13.3, dict(lora=dict(rank=16, quantize_base="nf4")), True),
    Row("Llama-3-8B, QLoRA of rank 16 (FP8)", TOLD, 1, LLAMA, (1, 1, 8192), {}, 620.1, 47.5,
        dict(lora=dict(rank=16, quantize_base="fp8")), True),
    Row("Llama-3-70B, 8 layers, QLoRA of rank 16 (NF4), recomputed, attention saved", MISSED, 1,
        dict(preset="llama3-70b", vocab_size=128256, num_layers=8), (1, 1, 8192), SAVED, 665.0, 15.6,
        dict(lora=dict(rank=16, quantize_base="nf4")), True),
    Row("Qwen3-0.6B, 16 sequences in a micro-batch", TOLD, 1, dict(preset="qwen3-0.6b"),
        (16, 32, 2048), {}, 607.7, 57.9),
    Row("BERT-large", TOLD, 1, dict(PLAIN, preset="bert-large"), (64, 64, 512), {}, 147.6, 31.5),
    Row("T5-3B", TOLD, 1, dict(PLAIN, preset="t5-3b"), (16, 16, 512), {}, 245.1, 73.2,
        dict(data=dict(decoder_seq_length=128))),
    *TWO_GPUS,
    *EIGHT_GPUS,
    *TRADEOFFS,
]
# fmt: on
# fmt: off
WITH_CASTS = [  # measured while casts of all experts' weights were saved from the forward to the backward pass
    Row("Qwen3-30B-A3B, 12 layers, EP4", OLD, 4, dict(QWEN, num_layers=12), (1, 8, 4096),
        dict(expert_model_parallel_size=4, data_parallel_sharding_strategy="optim"), None, 50.2),
    Row("DeepSeek-V2-Lite, 14 layers, EP2", OLD, 2, DEEPSEEK, (2, 8, 4096),
        dict(expert_model_parallel_size=2, data_parallel_sharding_strategy="optim"), None, 94.5),
]
# fmt: on
