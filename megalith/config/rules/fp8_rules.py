"""Rules of FP8: formats, recipes and the sizes that its matmuls take."""

from __future__ import annotations

from collections.abc import Iterator

from megalith.config.model import ModelConfig
from megalith.config.run import RunConfig
from megalith.errors import ConfigError

SIXTEEN, BLOCK = 16, 128  # multiples required by FP8 matmuls, and by the blockwise recipe


def check_fp8(config: RunConfig) -> None:
    """Raise ConfigError unless the FP8 settings are supported.

    The error names the sizes that are not multiples of 16, or of 128 with the blockwise recipe.
    """
    train = config.train
    if train.fp8_format is None:
        return
    if train.fp8_recipe == "mxfp8":
        raise ConfigError(
            "train.fp8_recipe is mxfp8, which needs a GPU of compute capability 10; choose "
            "delayed, tensorwise or blockwise"
        )
    if train.fp8_recipe == "blockwise" and train.fp8_format != "e4m3":
        raise ConfigError(
            f"train.fp8_format is {train.fp8_format}, but PyTorch's blockwise matmul supports only e4m3, whose range "
            "suffices for gradients because each block has a scale; set train.fp8_format to e4m3 with "
            "train.fp8_recipe blockwise"
        )
    kept = train.num_layers_at_start_in_bf16 + train.num_layers_at_end_in_bf16
    if train.first_last_layers_bf16 and kept >= config.model.num_layers:
        raise ConfigError(
            f"train.num_layers_at_start_in_bf16 {train.num_layers_at_start_in_bf16} and "
            f"train.num_layers_at_end_in_bf16 {train.num_layers_at_end_in_bf16} leave none of the "
            f"{config.model.num_layers} layers in FP8; lower one of the two, or leave train.fp8_format out"
        )
    multiple = BLOCK if train.fp8_recipe == "blockwise" else SIXTEEN
    wrong = [f"{name} {value}" for name, value in (*_widths(config), *_tokens(config)) if value % multiple]
    if wrong:
        raise ConfigError(
            f"train.fp8_recipe {train.fp8_recipe} needs matrix dimensions that are multiples of {multiple}, but a "
            f"rank has {', '.join(dict.fromkeys(wrong))}; change these sizes or the parallel sizes that divide them, "
            "or leave train.fp8_format out"
        )


def _tokens(config: RunConfig) -> Iterator[tuple[str, int]]:
    parallel, data = config.parallel, config.data
    lengths = {"": data.seq_length}
    if config.model.encoder_layers:
        lengths[" in the decoder"] = data.decoder_length
    for where, length in lengths.items():
        tokens = config.train.micro_batch_size * length // parallel.context_parallel_size
        yield f"tokens of a micro-batch{where}", tokens
        if parallel.overlaps:  # micro-batches are halved
            tokens //= 2
            yield f"tokens of half a micro-batch{where}", tokens
        if parallel.sequence_parallel:
            yield f"tokens under sequence_parallel{where}", tokens // parallel.tensor_model_parallel_size
        if parallel.context_parallel_size > 1 and config.train.fp8_recipe == "blockwise":
            # otherwise a block would contain other tokens than in one process
            yield f"tokens of a rank's chunk{where}", length // (2 * parallel.context_parallel_size)


def _widths(config: RunConfig) -> Iterator[tuple[str, int]]:
    """Yield the input and output widths of a rank's matmuls, with names."""
    model, size = config.model, config.parallel.tensor_model_parallel_size
    yield "model.hidden_size", model.hidden_size
    if model.multi_latent_attention:
        yield from _latent_widths(model, size)
    elif model.attention_layers:
        heads, groups = model.num_attention_heads // size, max(model.query_groups // size, 1)
        yield "rows of linear_qkv", (heads * (1 + model.attention_output_gate) + 2 * groups) * model.head_dim
        yield "columns of linear_proj", heads * model.head_dim
    if "mamba2" in model.recurrent_mixers:
        heads, groups = model.mamba_heads // size, max(model.mamba_num_groups // size, 1)
        inputs = heads * (2 * model.mamba_head_dim + 1) + 2 * groups * model.mamba_state_dim
        yield "rows of Mamba-2's linear_zxbcdt (with a row per head)", inputs
        yield "columns of Mamba-2's linear_out", heads * model.mamba_head_dim
    if "short_conv" in model.recurrent_mixers:
        yield "rows of the short convolution's linear_bcx", 3 * model.hidden_size // size
        yield "columns of the short convolution's linear_out", model.hidden_size // size
    if "gated_delta_net" in model.recurrent_mixers:
        keys, values = model.linear_num_key_heads // size, model.linear_num_value_heads // size
        yield (
            "rows of linear_in",
            2 * (keys * model.linear_key_head_dim + values * model.linear_value_head_dim),
        )
        yield "columns of linear_out", values * model.linear_value_head_dim
    if "kimi_delta_attention" in model.recurrent_mixers:
        heads = model.linear_num_key_heads // size
        yield "rows of linear_in", heads * (2 * model.linear_key_head_dim + model.linear_value_head_dim)
        yield "columns of linear_out", heads * model.linear_value_head_dim
    if len(model.expert_layers) < model.num_layers + len(model.mtp_layers):
        yield "ffn_hidden_size", model.ffn_size // size
    if model.num_experts is not None:
        yield "moe_ffn_hidden_size", model.expert_size // config.parallel.expert_tensor_parallel_size
    if model.moe_shared_expert_intermediate_size:
        yield "moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size // size


def _latent_widths(model: ModelConfig, size: int) -> Iterator[tuple[str, int]]:
    heads = model.num_attention_heads // size
    keys = model.qk_head_dim + model.qk_pos_emb_head_dim
    if model.q_lora_rank:
        yield "q_lora_rank", model.q_lora_rank
    yield "rows of queries", heads * keys
    yield "kv_lora_rank", model.kv_lora_rank
    yield "rows of linear_kv_down_proj", model.kv_lora_rank + model.qk_pos_emb_head_dim
    yield "rows of linear_kv_up_proj", heads * (model.qk_head_dim + model.v_head_dim)
    yield "columns of linear_proj", heads * model.v_head_dim
