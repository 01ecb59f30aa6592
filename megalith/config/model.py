"""Model shape, independent of parallelism.

This file has the settings of experts; all others are in dense.py, mup.py and hybrid.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from megalith.config.base import Decides, RequiresSetting, Resolved
from megalith.config.hybrid import HybridModel


class ModelConfig(HybridModel):
    """Transformer shape: GPT-2, Llama, Mistral, Qwen, Gemma, OLMo, Phi and others."""

    requires: ClassVar[RequiresSetting] = RequiresSetting("num_experts")

    moe_layer_freq: Annotated[
        PositiveInt | list[Literal[0, 1]],
        Resolved("expert_layers"),
    ] = 1
    """Layers with experts: every N-th from layer 0 on, or a list with one entry per layer, 1 = with experts."""

    moe_ffn_hidden_size: Annotated[PositiveInt | None, Resolved("expert_size")] = None
    """Width of an expert. Default: ffn_hidden_size."""

    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Width of the shared expert, an MLP that processes every token. Default: no shared expert."""

    moe_shared_expert_gate: Annotated[
        bool, RequiresSetting("moe_shared_expert_intermediate_size", strict=True)
    ] = False
    """Multiply the shared expert's output by a sigmoid gate per token (Qwen2-MoE)."""

    moe_average_shared_expert: Annotated[
        bool, RequiresSetting("moe_shared_expert_intermediate_size", strict=True)
    ] = False
    """Average the outputs of experts and shared expert instead of adding them (Cohere 2 with experts)."""

    moe_post_layernorm: Annotated[
        bool,
        RequiresSetting("num_experts", strict=True),
        RequiresSetting("norm_placement", "pre", strict=True),
    ] = False
    """Normalize the sum of the experts' and the shared expert's outputs (A.X K1)."""

    moe_shared_expert_overlap: Annotated[bool, Decides.NOTHING] = True
    """Overlap the shared expert with the all-to-alls if parallel.moe_token_dispatcher_type is alltoall."""

    moe_router_topk: PositiveInt = 2
    """Number of experts per token."""

    moe_router_score_function: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    """Function from router logits to scores. Sigmoid scores of the chosen experts are divided by their sum
    (DeepSeek-V3), unless moe_router_norm_topk_prob is off. `sparsemixer` weights each chosen expert by its softmax
    share among the experts whose logits are close to its own (Phi-MoE)."""

    moe_sparsemixer_jitter_eps: Annotated[
        NonNegativeFloat, RequiresSetting("moe_router_score_function", "sparsemixer", strict=True)
    ] = 0.01
    """SparseMixer: experts are compared with the best one if their logit is below its by at most 2 · this value · the
    larger absolute value of the two logits."""

    moe_router_norm_topk_prob: Annotated[
        bool, RequiresSetting("moe_router_score_function", "sigmoid", strict=True)
    ] = True
    """Divide the sigmoid scores of several chosen experts by their sum (off for Llama 4)."""

    moe_router_pre_softmax: bool = False
    """Take the softmax over all experts before choosing, instead of over the chosen ones."""

    moe_router_topk_scaling_factor: Annotated[PositiveFloat | None, Resolved("expert_weight_factor")] = None
    """Factor on the weights of the chosen experts."""

    moe_apply_probs_on_input: bool = False
    """Multiply the input of an expert by its weight instead of its output (Llama 4)."""

    add_router_bias: bool = False
    """Add a trained bias to the router (gpt-oss)."""

    moe_router_num_groups: PositiveInt | None = None
    """Number of expert groups for group-limited routing: a token chooses among the experts of its best groups."""

    moe_router_group_topk: PositiveInt | None = None
    """Number of groups that a token may choose experts from."""

    moe_router_enable_expert_bias: bool = False
    """Balance experts without a loss: add a bias to the scores for selection only and update it after each step
    (DeepSeek-V3; with softmax scores ERNIE 4.5)."""

    moe_router_bias_update_rate: Annotated[NonNegativeFloat, Decides.UPDATES] = 1e-3
    """Change of the expert bias per step, towards experts with fewer tokens than the mean; 0 freezes it."""

    moe_router_load_balancing_type: Annotated[
        Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"], Decides.UPDATES
    ] = "aux_loss"
    """Tokens over which moe_aux_loss_coeff balances experts: a micro-batch or each sequence. `sinkhorn` uses no loss
    but balances the choices over a micro-batch."""

    moe_aux_loss_coeff: Annotated[NonNegativeFloat, Decides.UPDATES] = 0.0
    """Weight of the load-balancing loss."""

    moe_z_loss_coeff: Annotated[NonNegativeFloat, Decides.UPDATES] = 0.0
    """Weight of the loss that keeps router logits small (typically 1e-3)."""

    moe_expert_capacity_factor: Annotated[PositiveFloat | None, Decides.UPDATES] = None
    """Maximum number of tokens per expert in training, as a multiple of an even share of the micro-batch; the rest are
    dropped. Default: no limit."""

    moe_token_drop_policy: Annotated[
        Literal["probs", "position"], Decides.UPDATES, RequiresSetting("moe_expert_capacity_factor")
    ] = "probs"
    """Tokens to drop beyond the capacity: those with the lowest weights, or the last ones."""

    moe_pad_expert_input_to_capacity: Annotated[
        bool, Decides.NOTHING, RequiresSetting("moe_expert_capacity_factor", strict=True)
    ] = False
    """Pad every expert's input to its capacity, so that sizes are fixed and the host never waits for them."""

    moe_router_force_load_balancing: bool = False
    """Assign tokens to experts in turn, ignoring the scores, for benchmarks."""

    moe_grouped_gemm: Annotated[bool, Decides.NOTHING] = True
    """Compute all local experts in one grouped GEMM on GPUs in bf16; otherwise one GEMM per expert."""

    moe_permute_fusion: Annotated[bool, Decides.NOTHING] = True
    """Fuse the experts' activation into one kernel, and the sum of a token's outputs into another, on GPUs."""

    @property
    def expert_size(self) -> int:
        """Width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_weight_factor(self) -> float:
        """Factor on the weights of the chosen experts."""
        return self.moe_router_topk_scaling_factor or 1.0

    @property
    def routed_layers(self) -> list[int]:
        """Indices of the layers with experts, without MTP layers.

        Their expert routing can be recorded and replayed.
        """
        return [number for number in self.expert_layers if number < self.num_layers]

    @property
    def expert_layers(self) -> list[int]:
        """Indices of the layers with experts."""
        if self.num_experts is None:
            return []
        if self.pattern_layers is not None:
            layers = [layer for layer, branch in enumerate(self.pattern_layers) if branch == "experts"]
            return layers + self.mtp_layers
        frequency = self.moe_layer_freq
        if isinstance(frequency, int):
            layers = list(range(0, self.num_layers, frequency))
        else:
            layers = [layer for layer, has_experts in enumerate(frequency) if has_experts]
        return layers + (self.mtp_layers if layers[-1:] == [self.num_layers - 1] else [])
