"""Transformer layers: one class per residual topology. Its `forward` is the formula.

A layer has mixers (mixers/), in which tokens see each other, and a feed-forward half, an MLP or experts, which takes
each token by itself. Their outputs are normalized as `norm_placement` requires, or `linear_norm_placement` if the mixer
is not attention, and multiplied by `branch_factor`. After dropout, they are added to the residual stream.

    class                     formula                                                     models
    SequentialLayer           x + mixer(norm(x)), then x + mlp(norm(x))                   GPT-2, Llama, OLMo 2, Gemma
    MoELayer                  x + mixer(norm(x)), then x + experts(norm(x))               Mixtral, DeepSeek, Qwen3
    CrossAttentionLayer       x + cross_attention(norm(x)) between the two                decoders of T5
    ParallelLayer             x + mixer(norm(x)) + mlp(other_norm(x))                     GPT-NeoX, Falcon-40B
    SharedNormParallelLayer   x + mixer(h) + mlp(h) with h = norm(x)                      GPT-J, Falcon-7B, Phi
    SharedNormParallelMoELayer   x + mixer(h) + experts(h) with h = norm(x)               Cohere 2 MoE
    PostNormLayer             h + mixer(h) with h = norm(x), then h + mlp(h)              BERT
    PostNormMoELayer          h + mixer(h) with h = norm(x), then h + experts(h)
    PostNormCrossAttentionLayer   PostNormLayer with h + cross_attention(h), h = norm(x)  decoders of BART and Marian
    MixerLayer                x + mixer(norm(x))                                          Nemotron-H, Mamba-2
    MLPLayer                  x + mlp(norm(x))                                            Nemotron-H
    ExpertsLayer              x + experts(norm(x))                                        Nemotron-H
    ParallelMixersLayer       x + mamba(h) + attention(h) with h = norm(x), then x + mlp(norm(x))   Falcon-H1
    mtp_layer(topology)       norm(layer(join(x, embedding)))                             DeepSeek-V3's MTP
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.linear import MLP
from megalith.models.mixers import MakeMixer, make_mixer
from megalith.models.mixers.attention import CrossAttention
from megalith.models.mixers.mamba2 import Mamba2
from megalith.models.moe import MoE
from megalith.models.mtp import MTPProjection
from megalith.models.norm import Norm, Residual, add_norm, branch_output
from megalith.models.pass_context import Context
from megalith.models.runnable import Runnable, runnable, without_runner
from megalith.ops.dropout import ATTENTION_OUTPUT, CROSS_ATTENTION_OUTPUT, MLP_OUTPUT, Mask
from megalith.ops.fused_norm import residual_add

Branch = tuple[Tensor, Mask | None]
"""A branch's output [batch, seq, hidden] and the dropout that is applied before it is added to the residual stream."""


class TransformerLayer(Runnable):
    """Modules and submodule calls that all residual topologies share.

    Args:
        config: sizes, placement of the norms, dropout.
        number: the layer's number in the model, from 0.
        device: where parameters are created, without values.
        mixer: makes the mixer from (config, number, device).
    """

    has_mixer: ClassVar[bool] = True
    has_mamba: ClassVar[bool] = False
    has_mlp: ClassVar[bool] = True
    has_experts: ClassVar[bool] = False
    has_cross_attention: ClassVar[bool] = False
    is_mtp: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        device: torch.device | None = None,
        *,
        mixer: MakeMixer = make_mixer,
    ):
        super().__init__()
        self.number = number
        self.dropout = config.hidden_dropout
        self.multiplier = config.branch_factor

        placement = config.norm_placement_in(number)

        def norm(*placements: str) -> Norm | None:
            return Norm(config, config.hidden_size, device) if placement in placements else None

        self.input_layernorm = self.self_attention = self.post_attention_layernorm = None
        if self.has_mixer:
            if config.has_input_layernorm(number):
                self.input_layernorm = norm("pre", "sandwich")
            self.self_attention = mixer(
                config, number, device
            )  # its name in checkpoints, whatever the mixer is
            self.post_attention_layernorm = norm("post", "sandwich")
        if self.has_mamba:
            self.mamba = Mamba2(config, number, device)
        if self.has_cross_attention:
            self.pre_cross_attn_layernorm = norm("pre", "sandwich")
            self.cross_attention = CrossAttention(config, number, device)
            self.post_cross_attn_layernorm = norm("post", "sandwich")
        self.pre_mlp_layernorm = self.mlp = self.post_mlp_layernorm = None
        if self.has_mlp and not config.shared_layernorm:
            self.pre_mlp_layernorm = norm("pre", "sandwich")
        if self.is_mtp:
            self.join = MTPProjection(config, device)
            self.final_layernorm = Norm(config, config.hidden_size, device)
        if self.has_mlp:
            self.mlp = MoE(config, device) if self.has_experts else MLP(config, device)
            always = ("pre",) if self.has_experts and config.moe_post_layernorm else ()
            self.post_mlp_layernorm = norm("post", "sandwich", *always)

    @property
    def mixers(self) -> list[nn.Module]:
        """The modules that move information between tokens."""
        mixers = [self.self_attention] if self.has_mixer else []
        mixers += [self.mamba] if self.has_mamba else []
        return mixers + ([self.cross_attention] if self.has_cross_attention else [])

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return the residual stream after the layer, of x's shape and dtype.

        The shape is [batch, seq, hidden], or with sequence parallelism [1, tokens / tp, hidden].
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement forward")

    def attention_branch(self, h: Tensor, context: Context) -> Branch:
        y = branch_output(self.self_attention(h, context), self.post_attention_layernorm, self.multiplier)
        return y, self.dropout_mask(context, ATTENTION_OUTPUT)

    def mlp_branch(self, h: Tensor, context: Context) -> Branch:
        y = branch_output(self.mlp(h, context), self.post_mlp_layernorm, self.multiplier)
        return y, self.dropout_mask(context, MLP_OUTPUT)

    def dropout_mask(self, context: Context, site: int) -> Mask | None:
        if context.dropout is None or self.dropout == 0:
            return None
        return Mask(self.dropout, context.dropout.output_rows(site), context.dropout.columns)


class SequentialLayer(TransformerLayer):
    """Pre-norm layer, the mixer before the MLP: x + mixer(norm(x)), then x + mlp(norm(x)).

    With norm_placement "post", the outputs of mixer and MLP are normalized instead of their inputs. With "sandwich",
    both are.
    """

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = add_norm(self.input_layernorm, x)
        x, h = add_norm(self.pre_mlp_layernorm, x, *self.attention_branch(h, context))
        return residual_add(x, *self.mlp_branch(h, context))


class MoELayer(TransformerLayer):
    """x + mixer(norm(x)), then x + experts(norm(x))."""

    has_experts = True

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = add_norm(self.input_layernorm, x)
        x, h = add_norm(self.pre_mlp_layernorm, x, *self.attention_branch(h, context))
        plan = self.mlp.plan(h, context)  # the end of the compiled graph: see moe.py
        return self.mlp(h, plan, context, self.residual(x, context))

    def residual(self, x: Tensor, context: Context) -> Residual:
        """Return the residual stream x for the experts, which add their output to it outside the compiled graph."""
        mask = self.dropout_mask(context, MLP_OUTPUT)
        return Residual(x, self.post_mlp_layernorm, self.multiplier, mask)


class CrossAttentionLayer(TransformerLayer):
    """x + mixer(norm(x)), then x + cross_attention(norm(x)), then x + mlp(norm(x)) (Vaswani et al. 2017)."""

    has_cross_attention = True

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = add_norm(self.input_layernorm, x)
        x, h = add_norm(self.pre_cross_attn_layernorm, x, *self.attention_branch(h, context))
        x, h = add_norm(self.pre_mlp_layernorm, x, *self.cross_attention_branch(h, context))
        return residual_add(x, *self.mlp_branch(h, context))

    def cross_attention_branch(self, h: Tensor, context: Context) -> Branch:
        y = branch_output(self.cross_attention(h, context), self.post_cross_attn_layernorm, self.multiplier)
        return y, self.dropout_mask(context, CROSS_ATTENTION_OUTPUT)


class ParallelLayer(TransformerLayer):
    """x + mixer(norm(x)) + mlp(other_norm(x)) (Wang and Komatsuzaki 2021)."""

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = add_norm(self.input_layernorm, x)
        attention = self.attention_branch(h, context)
        mlp = self.mlp_branch(self.pre_mlp_layernorm(x), context)
        return residual_add(residual_add(x, *attention), *mlp)


class SharedNormParallelLayer(TransformerLayer):
    """x + mixer(h) + mlp(h) with h = norm(x)."""

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = add_norm(self.input_layernorm, x)
        attention, mlp = self.attention_branch(h, context), self.mlp_branch(h, context)
        return residual_add(residual_add(x, *attention), *mlp)


class SharedNormParallelMoELayer(MoELayer):
    """x + mixer(h) + experts(h) with h = norm(x)."""

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = add_norm(self.input_layernorm, x)
        x = residual_add(x, *self.attention_branch(h, context))
        plan = self.mlp.plan(h, context)  # the end of the compiled graph: see moe.py
        return self.mlp(h, plan, context, self.residual(x, context))


class PostNormLayer(TransformerLayer):
    """Layer with norms on the residual stream: h + mixer(h) with h = norm(x), then h + mlp(h) with h = norm(x).

    Each norm's output continues the residual stream (apply_residual_connection_post_layernorm).
    """

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        _, h = add_norm(self.input_layernorm, x)
        _, h = add_norm(self.pre_mlp_layernorm, h, *self.attention_branch(h, context))
        return residual_add(h, *self.mlp_branch(h, context))


class PostNormCrossAttentionLayer(CrossAttentionLayer):
    """PostNormLayer with cross-attention: h + cross_attention(h) with h = norm(x), between mixer and MLP."""

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        _, h = add_norm(self.input_layernorm, x)
        _, h = add_norm(self.pre_cross_attn_layernorm, h, *self.attention_branch(h, context))
        _, h = add_norm(self.pre_mlp_layernorm, h, *self.cross_attention_branch(h, context))
        return residual_add(h, *self.mlp_branch(h, context))


class PostNormMoELayer(MoELayer):
    """PostNormLayer with experts."""

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        _, h = add_norm(self.input_layernorm, x)
        _, h = add_norm(self.pre_mlp_layernorm, h, *self.attention_branch(h, context))
        plan = self.mlp.plan(h, context)  # the end of the compiled graph: see moe.py
        return self.mlp(h, plan, context, self.residual(h, context))


class MixerLayer(TransformerLayer):
    """x + mixer(norm(x)). With norm_placement "post" or "sandwich", the mixer's output is normalized."""

    has_mlp = False

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = add_norm(self.input_layernorm, x)
        return residual_add(x, *self.attention_branch(h, context))


class MLPLayer(TransformerLayer):
    """x + mlp(norm(x))."""

    has_mixer = False

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = add_norm(self.pre_mlp_layernorm, x)
        return residual_add(x, *self.mlp_branch(h, context))


class ExpertsLayer(MoELayer):
    """x + experts(norm(x))."""

    has_mixer = False

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = add_norm(self.pre_mlp_layernorm, x)
        plan = self.mlp.plan(h, context)  # the end of the compiled graph: see moe.py
        return self.mlp(h, plan, context, self.residual(x, context))


class ParallelMixersLayer(TransformerLayer):
    """x + mamba(h) + attention(h) with h = norm(x), then x + mlp(norm(x)) (Falcon-H1)."""

    has_mamba = True

    def __init__(
        self,
        config: ModelConfig,
        number: int,
        device: torch.device | None = None,
        *,
        mixer: MakeMixer = make_mixer,
    ):
        super().__init__(config, number, device, mixer=mixer)
        self.factors = config.attention_in_multiplier, config.attention_out_multiplier
        self.mamba_factor = config.ssm_out_multiplier

    @runnable
    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = add_norm(self.input_layernorm, x)
        x, h = add_norm(self.pre_mlp_layernorm, x, *self.mixers_branch(h, context))
        return residual_add(x, *self.mlp_branch(h, context))

    def mixers_branch(self, h: Tensor, context: Context) -> Branch:
        before, after = self.factors
        attention = self.self_attention(h * before if before != 1 else h, context) * after
        y = self.mamba(h, context) * self.mamba_factor + attention
        return branch_output(y, None, self.multiplier), self.dropout_mask(context, ATTENTION_OUTPUT)


BRANCHES = {"mlp": MLPLayer, "experts": ExpertsLayer}
"""Classes of layers with a single branch that is not a mixer (PATTERN_LAYERS)."""


@cache
def mtp_layer(topology: type[TransformerLayer]) -> type[TransformerLayer]:
    """Return the class of MTP layers (mtp.py) with a residual topology: norm(layer(join(x, embedding)))."""
    formula = without_runner(topology.forward)

    class MTPLayer(topology):
        is_mtp = True

        @runnable
        def forward(self, x: Tensor, context: Context) -> Tensor:
            return self.final_layernorm(formula(self, self.join(x, context), context))

    return MTPLayer


def layer_class(config: ModelConfig, number: int, cross: bool = False) -> type[TransformerLayer]:
    """Return the class of layer `number`. With `cross`, the layer has cross-attention.

    Raises ConfigError for cross-attention with a topology that has none.
    """
    experts, post_norm = number in config.expert_layers, config.apply_residual_connection_post_layernorm
    if cross:
        if experts or config.parallel_attn_mlp:
            raise ConfigError(
                "a layer with cross-attention supports neither experts (model.num_experts) nor "
                "model.parallel_attn_mlp; leave these settings out"
            )
        topology = PostNormCrossAttentionLayer if post_norm else CrossAttentionLayer
    elif config.pattern_layers is not None and number < config.num_layers:
        topology = BRANCHES.get(config.pattern_layers[number], MixerLayer)
    elif config.parallel_mixers and number in config.linear_attention_layers:
        topology = ParallelMixersLayer
    elif config.parallel_attn_mlp and experts:
        topology = SharedNormParallelMoELayer
    elif config.parallel_attn_mlp:
        topology = SharedNormParallelLayer if config.shared_layernorm else ParallelLayer
    elif post_norm:
        topology = PostNormMoELayer if experts else PostNormLayer
    else:
        topology = MoELayer if experts else SequentialLayer
    return mtp_layer(topology) if number in config.mtp_layers else topology
