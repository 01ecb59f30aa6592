"""Parallelism: mesh sizes, sharding, overlap and recomputation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megalith.config.base import RequiresSetting, Section


class ShardsSequences(RequiresSetting):
    """Requires context parallelism, of one size or dynamic."""

    def is_met(self, section: Section, config: Section | None) -> bool:
        return section.shards_sequences


FULL = RequiresSetting("recompute_granularity", "full", strict=True)
EXPERTS = RequiresSetting("model.num_experts", strict=True)
DYNAMIC = RequiresSetting("dynamic_context_parallel", True, strict=True)
STAGES = RequiresSetting("pipeline_model_parallel_size", greater_than=1)


class ParallelConfig(Section):
    """World size = tensor · pipeline · context · data. Expert parallelism reuses tensor, context and data ranks."""

    tensor_model_parallel_size: PositiveInt = 1
    """Tensor parallel size (TP): ranks that each layer is sharded over."""

    sequence_parallel: Annotated[
        bool, RequiresSetting("tensor_model_parallel_size", greater_than=1, strict=True)
    ] = False
    """Shard norms, dropout and the residual stream over TP ranks along the sequence (SP)."""

    save_gathered_inputs: Annotated[bool, RequiresSetting("sequence_parallel", True)] = True
    """Save the gathered inputs of column-parallel linears in compiled layers with SP. Off: save shards and gather
    again in the backward pass, as Megatron-LM does."""

    tp_comm_overlap: bool | Literal["auto"] = "auto"
    """Divide micro-batches into halves (ping-pong): one computes while the collectives of the other (TP, or CP's a2a)
    run."""

    symmetric_memory_groups: list[Literal["tp", "cp", "dp"]] | Literal["auto"] = "auto"
    """Axes whose large collectives use the GPUs' copy engines, on one host with NVLink. dp is accepted and has no
    effect."""

    pipeline_model_parallel_size: PositiveInt = 1
    """Pipeline parallel size (PP): stages that the layers are divided into."""

    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Number of model chunks per pipeline rank (interleaving)."""

    microbatch_group_size_per_virtual_pipeline_stage: Annotated[
        PositiveInt | None, RequiresSetting("pipeline_model_parallel_size", greater_than=1, strict=True)
    ] = None
    """Interleaving: micro-batches that run through a chunk before the rank starts its next chunk. Default: the
    pipeline parallel size."""

    pipeline_schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Pipeline schedule. 1f1b with several chunks per rank is interleaved."""

    decoder_first_pipeline_num_layers: PositiveInt | None = None
    """Number of layers on the first pipeline rank, if it differs from the others."""

    decoder_last_pipeline_num_layers: PositiveInt | None = None
    """Number of layers on the last pipeline rank, if it differs from the others."""

    account_for_embedding_in_pipeline_split: Annotated[bool, STAGES] = False
    """Count the embedding as a layer in the even split, so that the first stage has one layer fewer."""

    account_for_loss_in_pipeline_split: Annotated[bool, STAGES] = False
    """Count head and loss as a layer in the even split, so that the last stage has one layer fewer."""

    pipeline_model_parallel_layout: str | None = None
    """Explicit stages, separated by `|`: E embedding, t layer, L head and loss, such as `Et*3|(tt|)*6,t*2|L`."""

    context_parallel_size: PositiveInt = 1
    """Context parallel size (CP): ranks that each sequence is sharded over."""

    cp_comm_type: Annotated[
        Literal["auto", "p2p", "all_gather", "a2a", "a2a+p2p"],
        ShardsSequences("context_parallel_size", greater_than=1),
    ] = "auto"
    """Communication of context parallelism: p2p (ring), all_gather, a2a (Ulysses), or a2a+p2p on two levels. auto: a2a
    over as many ranks of a host as divide the heads, p2p over the others; a2a for encoder-decoders. With rl.exact or
    train.batch_invariant: a2a if the CP size divides the heads, all_gather otherwise."""

    hierarchical_context_parallel_sizes: Annotated[
        Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None,
        RequiresSetting("cp_comm_type", "a2a+p2p", strict=True),
    ] = None
    """Sizes of a2a+p2p: a2a over adjacent ranks, then p2p. Their product is the context parallel size."""

    dynamic_context_parallel: bool = False
    """Choose the context parallel size of each sequence in `megalith sft`: long sequences take several of the
    data × context ranks, and short ones are packed on single ranks, so that the ranks have equal work in each pass."""

    max_seqlen_per_dp_cp_rank: Annotated[PositiveInt | None, DYNAMIC] = None
    """Tokens that a rank can hold in a pass. Default: as many as without dynamic_context_parallel, micro_batch_size ·
    seq_length / context_parallel_size."""

    min_dynamic_context_parallel_size: Annotated[PositiveInt, DYNAMIC] = 1
    """Smallest number of ranks that a sequence is sharded over, a power of two."""

    expert_model_parallel_size: Annotated[PositiveInt, EXPERTS] = 1
    """Expert parallel size (EP): ranks that the experts are distributed over."""

    expert_tensor_parallel_size: Annotated[PositiveInt, EXPERTS] = 1
    """Expert tensor parallel size (ETP): ranks that each expert is sharded over."""

    moe_token_dispatcher_type: Annotated[
        Literal["alltoall", "allgather"], RequiresSetting("model.num_experts")
    ] = "alltoall"
    """Dispatch of tokens to experts: all-to-all, or all-gather and reduce-scatter."""

    moe_static_dispatch: Annotated[
        Literal["auto"] | bool, RequiresSetting("expert_model_parallel_size", greater_than=1)
    ] = "auto"
    """Dispatch tokens in buffers large enough for any routing, so that the host never waits for sizes. No token is
    dropped. All ranks need micro-batches of the same size. auto: on in bf16 training on GPUs, if each token's experts
    are spread over nearly all ranks and memory allows."""

    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = (
        "no_shard"
    )
    """Sharding over data-parallel ranks. no_shard: nothing. optim: fp32 weights and optimizer state (ZeRO-1).
    optim_grads: gradients too (ZeRO-2). optim_grads_params: the compute weights too (ZeRO-3)."""

    dp_comm_overlap_bucket_size: Annotated[
        PositiveInt | None, RequiresSetting("data_parallel_sharding_strategy", "no_shard")
    ] = None
    """Minimum size of a gradient all-reduce bucket, in bytes of fp32. Default: the gradients of one layer."""

    fsdp_unsharded_layers: Annotated[
        NonNegativeInt | Literal["auto"],
        RequiresSetting("data_parallel_sharding_strategy", "optim_grads_params"),
    ] = "auto"
    """Number of layers at the end of each stage whose parameters stay gathered during a step. auto: as many as memory
    allows."""

    reduce_scatter_with_fp32_accumulation: Annotated[
        bool | Literal["auto"],
        RequiresSetting("data_parallel_sharding_strategy", "optim_grads", "optim_grads_params"),
    ] = "auto"
    """Send layers' gradients by all-to-all in the compute dtype and add them in fp32: half the bytes of an fp32
    reduce-scatter. auto: on if all devices of the run are on one host."""

    num_distributed_optimizer_instances: Annotated[
        PositiveInt,
        RequiresSetting(
            "data_parallel_sharding_strategy", "optim", "optim_grads", "optim_grads_params", strict=True
        ),
    ] = 1
    """Replicas of the sharded state (hybrid sharding). Each is sharded over data · context / replicas ranks."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recomputation in the backward pass: whole layers, or chosen modules."""

    recompute_method: Annotated[Literal["uniform", "block"] | None, FULL] = None
    """Full recomputation: `uniform` saves every recompute_num_layers-th layer input; `block` recomputes the first
    layers."""

    recompute_num_layers: Annotated[PositiveInt, RequiresSetting("recompute_granularity", "full")] = 1
    """Full recomputation: layers per unit (uniform), or recomputed layers per pipeline stage (block)."""

    recompute_saves_attention: Annotated[bool | Literal["auto"], FULL] = "auto"
    """Full recomputation: save each layer's attention output instead of recomputing it, which doubles the saved memory
    per layer. auto: if memory allows."""

    recompute_modules: Annotated[
        list[Literal["core_attn", "mlp", "mlp_act", "layernorm"]],
        RequiresSetting("recompute_granularity", "selective"),
    ] = ["core_attn"]
    """Modules of selective recomputation. mlp_act is the activation function of MLPs, except in experts."""

    distribute_saved_activations: Annotated[bool, FULL] = False
    """Full recomputation: shard saved inputs over TP ranks instead of replicating them."""

    cpu_offloading_num_layers: NonNegativeInt = 0
    """Number of layers at the start of each pipeline stage whose saved activations are offloaded to host memory."""

    @property
    def shards_sequences(self) -> bool:
        """True if context parallelism shards sequences, all of them or long ones."""
        return self.context_parallel_size > 1 or self.dynamic_context_parallel

    @property
    def overlaps(self) -> bool:
        """True if micro-batches ping-pong. False for an unresolved `auto`."""
        return self.tp_comm_overlap is True

    @property
    def copy_engine_axes(self) -> set[str]:
        """Axes whose collectives use copy engines."""
        return set() if self.symmetric_memory_groups == "auto" else set(self.symmetric_memory_groups) - {"dp"}

    @property
    def saves_attention(self) -> bool:
        """Value of recompute_saves_attention; False for an unresolved `auto`."""
        return self.recompute_saves_attention is True

    @property
    def unsharded_layers(self) -> int:
        """Value of fsdp_unsharded_layers; 0 for an unresolved `auto`."""
        return 0 if self.fsdp_unsharded_layers == "auto" else self.fsdp_unsharded_layers

    @property
    def has_unsharded_layers(self) -> bool:
        """True if some layers' parameters stay gathered during a step."""
        return self.data_parallel_sharding_strategy != "optim_grads_params" or self.unsharded_layers > 0

    @property
    def uses_fp32_reduce_scatter(self) -> bool:
        """Value of reduce_scatter_with_fp32_accumulation; False for an unresolved `auto`."""
        return self.reduce_scatter_with_fp32_accumulation is True

    @property
    def resolved_cp_comm_type(self) -> str:
        """Value of cp_comm_type; p2p for an unresolved `auto`."""
        return "p2p" if self.cp_comm_type == "auto" else self.cp_comm_type
