"""The model's shape: what is computed, said once and without a word on how it is spread over devices.

The settings of linear attention and of experts stand here, all others in dense.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from megalith.config import small
from megalith.config.base import DEFAULT, Decides, Needs, Resolved, Shrinks
from megalith.config.dense import DenseModel

LINEAR = Needs("experimental_attention_variant", strict=True)


class HybridModel(DenseModel):
    """The settings of `model` for layers whose mixer is no attention, and attention's own gate (Qwen3-Next).

    A gated delta net (Yang et al. 2024) keeps of all tokens before one matrix a head, [key_head_dim, value_head_dim],
    whatever their number: so a layer of it costs as much for each token however long the sequence is.
    """

    experimental_attention_variant: Literal["gated_delta_net"] | None = None
    """What stands in attention's place in the layers of linear_attention_freq: a gated delta net (Qwen3-Next)."""

    linear_attention_freq: Annotated[
        PositiveInt | list[Literal[0, 1]],
        LINEAR,
        Resolved("linear_attention_layers"),
        Shrinks(small.window_skip),
    ] = 4
    """Which layers these are: all but every N-th, or where a list with a number a layer has a 1."""

    linear_conv_kernel_dim: Annotated[PositiveInt, LINEAR] = 4
    """Tokens that the convolution before the delta rule sees of each unit, the present one included."""

    linear_key_head_dim: Annotated[PositiveInt, LINEAR, Shrinks(small.HEAD_DIM)] = 128
    """Size of a head's query and key."""

    linear_value_head_dim: Annotated[PositiveInt, LINEAR, Shrinks(small.HEAD_DIM)] = 128
    """Size of a head's value."""

    linear_num_key_heads: Annotated[PositiveInt, LINEAR, Shrinks(small.heads_of_delta)] = 16
    """Heads of queries and keys."""

    linear_num_value_heads: Annotated[PositiveInt, LINEAR, Shrinks(small.value_heads_of_delta)] = 32
    """Heads of values; as many share a query and key head."""

    attention_output_gate: bool = False
    """Multiplies what attention gives by the sigmoid of a gate for each of its elements (Qwen3-Next)."""

    @property
    def linear_attention_layers(self) -> list[int]:
        """The numbers of the layers with linear attention in attention's place."""
        if self.experimental_attention_variant is None:
            return []
        every = self.linear_attention_freq
        if isinstance(every, list):
            return [number for number, is_linear in enumerate(every) if is_linear]
        return [number for number in range(self.num_layers) if (number + 1) % every]


class ModelConfig(HybridModel):
    """A decoder-only transformer: GPT-2, Llama, Mistral, Qwen, Gemma, OLMo, Phi and what lies between them."""

    needs: ClassVar[Needs] = Needs("num_experts")

    moe_layer_freq: Annotated[
        PositiveInt | list[Literal[0, 1]], Resolved("expert_layers"), Shrinks(small.expert_layers)
    ] = 1
    """Layers with experts: every n-th from layer 0 on, or a list with a 1 or 0 for each layer."""

    moe_ffn_hidden_size: Annotated[
        PositiveInt | None, Resolved("expert_size"), Shrinks(lambda value, _: value and 3 * small.HEAD_DIM)
    ] = None
    """Width of an expert. Absent: ffn_hidden_size."""

    moe_shared_expert_intermediate_size: Annotated[
        PositiveInt | None, Shrinks(lambda value, _: value and 2 * small.HEAD_DIM)
    ] = None
    """Width of the shared expert, an MLP that every token goes through too. Absent: none."""

    moe_shared_expert_gate: Annotated[bool, Needs("moe_shared_expert_intermediate_size", strict=True)] = False
    """Weighs the shared expert's output of each token by a sigmoid gate (Qwen2-MoE)."""

    moe_shared_expert_overlap: Annotated[bool, Decides.NOTHING] = True
    """Overlaps the shared expert with the all-to-alls, where parallel.moe_token_dispatcher_type is alltoall."""

    moe_router_topk: Annotated[PositiveInt, Shrinks(small.experts_of_token)] = 2
    """Experts that each token goes to."""

    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores; sigmoid scores of the chosen are divided by their sum (DeepSeek-V3)."""

    moe_router_pre_softmax: bool = False
    """Takes the softmax over all experts, before choosing, instead of over those chosen."""

    moe_router_topk_scaling_factor: Annotated[PositiveFloat | None, Resolved("expert_weight_factor")] = None
    """Multiplies the weights of the chosen experts."""

    add_router_bias: bool = False
    """A bias in the router's matrix, which is trained (gpt-oss)."""

    moe_router_num_groups: Annotated[
        PositiveInt | None, Shrinks(lambda value, _: value and small.EXPERT_GROUPS)
    ] = None
    """Groups of experts for group-limited routing: a token chooses among the experts of its best groups."""

    moe_router_group_topk: Annotated[
        PositiveInt | None, Shrinks(lambda value, _: value and min(value, small.BEST_GROUPS))
    ] = None
    """Groups that a token may choose experts from."""

    moe_router_enable_expert_bias: Annotated[
        bool, Needs("moe_router_score_function", "sigmoid", strict=True)
    ] = False
    """Balances without a loss: a bias on the scores for choosing alone, moved after each step (DeepSeek-V3)."""

    moe_router_bias_update_rate: Annotated[PositiveFloat, Decides.UPDATES] = 1e-3
    """How far the expert bias moves in a step, towards experts with fewer tokens than the mean."""

    moe_router_load_balancing_type: Annotated[
        Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"], Decides.UPDATES
    ] = "aux_loss"
    """Over which tokens moe_aux_loss_coeff balances the experts: a micro-batch, or each of its sequences; sinkhorn: no
    loss, but choices that are balanced over a micro-batch."""

    moe_aux_loss_coeff: Annotated[NonNegativeFloat, Decides.UPDATES] = 0.0
    """Weight of the load-balancing loss."""

    moe_z_loss_coeff: Annotated[NonNegativeFloat, Decides.UPDATES] = 0.0
    """Weight of the loss that keeps the router's logits small (1e-3 is usual)."""

    moe_expert_capacity_factor: Annotated[PositiveFloat | None, Decides.UPDATES] = None
    """In training an expert takes this times its even share of a micro-batch's tokens, drops others. Absent: all."""

    moe_token_drop_policy: Annotated[
        Literal["probs", "position"], Decides.UPDATES, Needs("moe_expert_capacity_factor")
    ] = "probs"
    """Tokens beyond the capacity that are dropped: those with the lowest weights, or those furthest back."""

    moe_pad_expert_input_to_capacity: Annotated[
        bool, Decides.NOTHING, Needs("moe_expert_capacity_factor", strict=True)
    ] = False
    """Fills every expert up to its capacity, so that sizes are fixed and the host never waits for them."""

    moe_router_force_load_balancing: bool = False
    """Sends tokens to the experts in turn, whatever the scores: for benchmarks."""

    moe_grouped_gemm: Annotated[bool, Decides.NOTHING, DEFAULT] = True
    """All local experts in one grouped matmul, on GPUs in bf16; otherwise a matmul for each expert."""

    moe_permute_fusion: Annotated[bool, Decides.NOTHING, DEFAULT] = True
    """What is around the experts' matmuls, activation and sum by token, is a kernel each on GPUs."""

    @property
    def expert_size(self) -> int:
        """Width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_weight_factor(self) -> float:
        """Multiplies the weights of the chosen experts."""
        return self.moe_router_topk_scaling_factor or 1.0

    @property
    def expert_layers(self) -> list[int]:
        """The numbers of the layers with experts."""
        if self.num_experts is None:
            return []
        frequency = self.moe_layer_freq
        if isinstance(frequency, int):
            own = list(range(0, self.num_layers, frequency))
        else:
            own = [number for number, has_experts in enumerate(frequency) if has_experts]
        return own + (self.further_layers if own[-1:] == [self.num_layers - 1] else [])
