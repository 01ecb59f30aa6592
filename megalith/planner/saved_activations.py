"""Activations that a layer saves for its backward pass, in elements per token.

The estimate follows Korthikanti et al. (2022), section 4, with these assumptions:

- Attention is fused and never stores its probabilities. Masks for documents or windows exist only in fp32 and with
  attention dropout: a bias while a layer computes, and keys and values repeated for each head.
- Dropout masks are recomputed. The loss computes logits in chunks and stores their gradient in place
  (ops/cross_entropy.py), except with a sharded vocabulary or capped logits.
- All experts get equally many tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

from megalith.config import ModelConfig, RunConfig
from megalith.config.rules.expert_rules import rows_of_a_token
from megalith.models.linear import Linear
from megalith.parallel.tensor.roles import role_of
from megalith.planner.counts import MetaModel


def budget_savings(budget: float, saved: float, activation: float, stream: int) -> float:
    """Return the elements per token that a compiled layer no longer saves under an activation memory budget.

    Any budget below 1 makes the compiler recompute the activation function, which costs nothing in a fused kernel.

    Args:
        budget: fraction of the activations to save, 0 to 1.
        saved: elements per token saved without a budget.
        activation: elements per token of the activation function's output.
        stream: elements per token of the layer's input, which is always saved.
    """
    return 0.0 if budget == 1 else max((1 - budget) * (saved - stream), activation)


def makes_mask(config: RunConfig) -> bool:
    """Return True if attention needs a mask tensor because its kernel does not support documents or windows."""
    model, parallel, seq = config.model, config.parallel, config.data.seq_length
    exchanged = parallel.context_parallel_size == 1 or parallel.resolved_cp_comm_type == "a2a"
    fp32 = config.train.precision == "fp32"
    if not model.causal and model.window_size is not None:
        return True
    if not fp32 and not model.attention_dropout:
        return False
    windowed = any(model.reach(layer, seq) < seq for layer in range(model.num_layers))
    return (windowed or config.separates_documents) if exchanged or fp32 else windowed


def saved_activations(
    meta: MetaModel,
    number: int = 0,
    compiled: bool = True,
    recomputed: Collection[str] = (),
    code: float | None = None,
) -> float:
    """Return the elements per token that layer `number` saves for its backward pass, in the compute dtype, on a rank.

    Each matrix saves its input. The outputs of column-parallel matrices are saved by attention or the activation
    function. The compiler can recompute norms and attention outputs; without it the next matrix saves them. With
    sequence parallelism the compiler saves the gathered tokens instead of gathering them again. In FP8, matrices
    save FP8 data of their inputs, and attention also saves its output.

    Args:
        meta: the model, counted on a rank.
        number: index of the layer.
        compiled: layers are compiled.
        recomputed: modules of selective recomputation.
        code: elements per FP8 code, 1 / bytes of the compute dtype, or None without FP8.
    """
    parallel = meta.parallel
    exchanged = parallel.context_parallel_size > 1 and "a2a" in parallel.resolved_cp_comm_type
    settings = (
        compiled,
        *sorted(recomputed),
        code,
        parallel.sequence_parallel,
        parallel.save_gathered_inputs,
        exchanged,
        rows_of_a_token(meta.config, parallel) if meta.config.num_experts else 0,
    )
    return meta.cached(
        ("saved", number, *settings), lambda: _saved_activations(meta, number, compiled, recomputed, code)
    )


def _saved_activations(
    meta: MetaModel, number: int, compiled: bool, recomputed: Collection[str], code: float | None
) -> float:
    model, parallel, layer = meta.config, meta.parallel, meta.layer(number)
    tensor = parallel.tensor_model_parallel_size
    sequence = tensor if parallel.sequence_parallel else 1
    groups = max(model.query_groups // tensor, 1)
    query = model.num_attention_heads // tensor * model.head_dim
    key_value = 2 * groups * model.head_dim
    gathers = compiled and sequence > 1 and parallel.save_gathered_inputs
    parts = int(layer.has_mixer) + int(layer.has_mlp)
    norm_inputs = model.norms_in_layer(number) * model.hidden_size * parts // (2 * sequence)
    normed = 1 if model.shared_layernorm else parts
    norm_outputs = normed * model.hidden_size // (1 if gathers else sequence)  # inputs of the matrices
    if compiled and not gathers and "layernorm" in recomputed:
        norm_outputs = 0  # also the input of a recomputed MLP, which is in the same graph
    attention = query + key_value + saved_before_attention(model, query, key_value)
    if not (compiled and "core_attn" in recomputed):
        attention += query  # the output
    exchanged = query if parallel.context_parallel_size > 1 and "a2a" in parallel.resolved_cp_comm_type else 0
    attention += exchanged  # the output after the all-to-all, which the next matrix saves
    if code is not None:
        attention += code * query
    if not model.has_attention(number):
        attention = 0
    if (mixer := model.recurrent_mixer(number)) is not None:
        attention += _mixer_activations(model, mixer) / tensor
    if saved_of_encoder(meta, number):  # cross-attention's norm, queries and output
        norm_inputs, norm_outputs = 1.5 * norm_inputs, 1.5 * norm_outputs
        attention += 2 * query + exchanged
    per_input = 1.0 if code is None else code  # saved per element of a matrix's input
    saved = norm_inputs + per_input * norm_outputs + attention
    if layer.has_mlp and "mlp" not in recomputed:
        again = compiled and code is None and "mlp_act" in recomputed
        outputs, inputs = meta.cached(("between", number), lambda: _between_matrices(layer.mlp))
        saved += (outputs + (0 if again else per_input) * inputs) / tensor
        if layer.has_experts:
            saved += _expert_rows(meta, layer.mlp.experts)
    return saved


def saved_before_attention(model: ModelConfig, query: int, key_value: int) -> int:
    """Return the elements per token that are saved before queries and keys are normalized and rotated.

    Norms save their inputs. Rotary positions do not, but attention's gate is a view of linear_qkv's output, so with a
    gate that whole output is kept. `query` and `key_value` are the elements per token on a rank.
    """
    if model.qk_layernorm or model.qk_l2_norm:
        by_head = not (model.qk_layernorm_full_width or model.qk_layernorm_per_head)
        copied = (
            not by_head and 1 < model.query_groups < model.num_attention_heads
        )  # beside linear_qkv's output
        return query + key_value // 2 + copied * query
    keeps_inputs = model.attention_output_gate or model.multi_latent_attention
    return query + key_value // 2 if keeps_inputs and model.position_embedding_type == "rope" else 0


def saved_of_encoder(meta: MetaModel, number: int) -> int:
    """Return the elements per encoder token that cross-attention in layer `number` saves, which are its
    key and value.
    """
    model, tensor = meta.config, meta.parallel.tensor_model_parallel_size
    crosses = 0 < model.encoder_layers <= number
    return 2 * max(model.query_groups // tensor, 1) * model.head_dim if crosses else 0


def _mixer_activations(model: ModelConfig, mixer: str) -> int:
    """Return the elements per token that a mixer other than attention saves.

    They are the convolution's input and output, the recurrence's inputs, the gate, and the output before and after
    gating.
    """
    if (
        mixer == "short_conv"
    ):  # the projections B, C and x, the convolution's input and output, the gated output
        return 6 * model.hidden_size
    if mixer == "mamba2":
        values = model.mamba_heads * model.mamba_head_dim
        units = values + 2 * model.mamba_num_groups * model.mamba_state_dim
        return 3 * units + 3 * values + 2 * model.mamba_heads
    values = model.linear_num_value_heads * model.linear_value_head_dim
    units = 2 * model.linear_num_key_heads * model.linear_key_head_dim + values
    decays = 0
    if mixer == "kimi_delta_attention":  # in fp32, their projection, and both low-rank projections
        keys = model.linear_num_key_heads * model.linear_key_head_dim
        decays = 3 * keys + model.linear_key_head_dim + model.linear_value_head_dim
    return 3 * units + 3 * values + decays


def _between_matrices(mlp: nn.Module) -> tuple[int, int]:
    """Return the elements per token of an MLP's column-parallel outputs and row-parallel inputs."""
    sizes = Counter()
    for name, linear in mlp.named_modules():
        if isinstance(linear, Linear):
            style, (rows, columns) = role_of(name, linear).style, linear.weight.shape
            sizes[style] += rows if style == "column" else columns
    return sizes["column"], sizes["row"]


def _expert_rows(meta: MetaModel, experts: nn.Module) -> float:
    """Return the elements per token that experts save, if they are balanced.

    They are the inputs and intermediate activations of the rows, plus the spare rows of static dispatch.
    """
    model, parallel = meta.config, meta.parallel
    fc1, fc2 = experts.linear_fc1.weight.shape[1], experts.linear_fc2.weight.shape[2]
    between = fc1 + fc2 if model.moe_permute_fusion else (fc1 + fc2) * 2 if model.gated else fc1 + 2 * fc2
    row = model.hidden_size + between / parallel.expert_tensor_parallel_size
    # A tensor-parallel rank has its share of the tokens. Expert tensor parallelism gathers those of its ranks.
    return (
        rows_of_a_token(model, parallel)
        * row
        * parallel.expert_tensor_parallel_size
        / parallel.tensor_model_parallel_size
    )
