"""How the run is spread over devices: sizes of the mesh, sharding, overlap, recomputation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megalith.config.base import KEPT, Needs, Section

FULL = Needs("recompute_granularity", "full", strict=True)
EXPERTS = Needs("model.num_experts", strict=True)
STAGES = Needs("pipeline_model_parallel_size", above=1)


class ParallelConfig(Section):
    """World size = tensor · pipeline · context · data; expert parallelism is folded out of the last three."""

    tensor_model_parallel_size: PositiveInt = 1
    """Devices that each layer is split over (TP)."""

    sequence_parallel: Annotated[bool, Needs("tensor_model_parallel_size", above=1, strict=True)] = False
    """Splits norms, dropout and the residual stream over the tensor-parallel devices along the sequence (SP)."""

    save_gathered_inputs: Annotated[bool, KEPT, Needs("sequence_parallel", True)] = True
    """SP: compiled layers save the gathered inputs of column-parallel linears; false: their shards, gathered again in
    the backward pass, as Megatron-LM does."""

    tp_comm_overlap: bool | Literal["auto"] = "auto"
    """Ping-pong micro-batches: of two halves one computes while the other's collectives (TP, or CP's a2a) run."""

    symmetric_memory_groups: list[Literal["tp", "cp", "dp"]] | Literal["auto"] = "auto"
    """Axes whose large collectives use the GPUs' copy engines, on one host with NVLink; dp is heard and has none."""

    pipeline_model_parallel_size: PositiveInt = 1
    """Stages that the layers are split over (PP)."""

    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Model chunks on each pipeline rank (interleaving)."""

    microbatch_group_size_per_virtual_pipeline_stage: Annotated[
        PositiveInt | None, Needs("pipeline_model_parallel_size", above=1, strict=True)
    ] = None
    """Interleaving: micro-batches that go through a chunk before the next chunk's turn; by default one a stage."""

    pipeline_schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes over the stages; 1f1b with several chunks a rank is interleaved."""

    decoder_first_pipeline_num_layers: PositiveInt | None = None
    """Layers on the first pipeline rank, where it should hold fewer or more than the others."""

    decoder_last_pipeline_num_layers: PositiveInt | None = None
    """Layers on the last pipeline rank, where it should hold fewer or more than the others."""

    account_for_embedding_in_pipeline_split: Annotated[bool, STAGES] = False
    """Counts the embedding as a layer when layers are split evenly, so the first stage holds one layer less."""

    account_for_loss_in_pipeline_split: Annotated[bool, STAGES] = False
    """Counts head and loss as a layer when layers are split evenly, so the last stage holds one layer less."""

    pipeline_model_parallel_layout: str | None = None
    """Every stage in order, `|` between them: E embedding, t layer, L head and loss, as in `Et*3|(tt|)*6,t*2|L`."""

    context_parallel_size: PositiveInt = 1
    """Devices that each sequence is split over (CP)."""

    cp_comm_type: Annotated[
        Literal["auto", "p2p", "all_gather", "a2a", "a2a+p2p"], Needs("context_parallel_size", above=1)
    ] = "auto"
    """How keys and values reach the queries: p2p is a ring, a2a is Ulysses, a2a+p2p both, on two levels; auto: a2a
    among the devices of one host where its heads divide, a ring else and between hosts; of an encoder-decoder a2a, its
    one way."""

    hierarchical_context_parallel_sizes: Annotated[
        Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None,
        Needs("cp_comm_type", "a2a+p2p", strict=True),
    ] = None
    """a2a+p2p: the sizes of its a2a, among neighbouring devices, and of its p2p; their product is the context size."""

    expert_model_parallel_size: Annotated[PositiveInt, EXPERTS] = 1
    """Devices that the experts are spread over (EP)."""

    expert_tensor_parallel_size: Annotated[PositiveInt, EXPERTS] = 1
    """Devices that each expert is split over (ETP)."""

    moe_token_dispatcher_type: Annotated[Literal["alltoall", "allgather"], Needs("model.num_experts")] = (
        "alltoall"
    )
    """How tokens reach their experts: by all-to-all, or by all-gather and reduce-scatter."""

    moe_static_dispatch: Annotated[Literal["auto"] | bool, Needs("expert_model_parallel_size", above=1)] = (
        "auto"
    )
    """Tokens go to their experts in buffers as large as any routing needs, so that the host reads no sizes and never
    waits; none is dropped. Micro-batches of all ranks are then of one size. auto: in training in bf16 on GPUs, where
    nearly every rank has experts of a token and memory allows."""

    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = (
        "no_shard"
    )
    """What is sharded over data-parallel devices: nothing, or in turn optimizer state, gradients, parameters."""

    dp_comm_overlap_bucket_size: Annotated[
        PositiveInt | None, Needs("data_parallel_sharding_strategy", "no_shard")
    ] = None
    """Bytes of fp32 gradients that replicas reduce together, at least; absent: a layer's."""

    fsdp_unsharded_layers: Annotated[
        NonNegativeInt | Literal["auto"], Needs("data_parallel_sharding_strategy", "optim_grads_params")
    ] = "auto"
    """Last layers of each stage whose parameters stay gathered for a whole step; auto: as many as GPU memory allows."""

    reduce_scatter_with_fp32_accumulation: Annotated[
        bool | Literal["auto"],
        Needs("data_parallel_sharding_strategy", "optim_grads", "optim_grads_params"),
    ] = "auto"
    """Layers' gradients are sent in the compute dtype, by all-to-all, and added up in fp32: the sums are the same, for
    half the bytes; auto: where all devices of the run are in one host."""

    num_distributed_optimizer_instances: Annotated[
        PositiveInt,
        Needs("data_parallel_sharding_strategy", "optim", "optim_grads", "optim_grads_params", strict=True),
    ] = 1
    """Replicas of the sharded state (hybrid sharding): each is sharded over data · context / replicas devices."""

    recompute_granularity: Annotated[Literal["full", "selective"] | None, KEPT] = None
    """Activations recomputed in the backward pass: of whole layers, or of chosen modules."""

    recompute_method: Annotated[Literal["uniform", "block"] | None, KEPT, FULL] = None
    """Full recomputation: `uniform` saves every recompute_num_layers-th input; `block` recomputes the first ones."""

    recompute_num_layers: Annotated[PositiveInt, KEPT, Needs("recompute_granularity", "full")] = 1
    """Full recomputation: layers in a unit (uniform), or layers recomputed in each pipeline stage (block)."""

    recompute_saves_attention: Annotated[bool | Literal["auto"], KEPT, FULL] = "auto"
    """Full recomputation: attention's output is saved beside a layer's input, twice the memory, and not computed again;
    auto: where GPU memory allows."""

    recompute_modules: Annotated[
        list[Literal["core_attn", "mlp", "mlp_act", "layernorm"]],
        KEPT,
        Needs("recompute_granularity", "selective"),
    ] = ["core_attn"]
    """Selective recomputation: which modules; mlp_act is the activation function of MLPs, experts' excepted."""

    distribute_saved_activations: Annotated[bool, FULL] = False
    """Full recomputation: saved inputs are sharded over tensor-parallel devices, not replicated."""

    cpu_offloading_num_layers: NonNegativeInt = 0
    """First layers of each pipeline stage whose saved activations are offloaded to host memory."""

    @property
    def overlaps(self) -> bool:
        """Whether micro-batches are run as two halves; an `auto` that nobody has chosen for is off."""
        return self.tp_comm_overlap is True

    @property
    def direct_axes(self) -> set[str]:
        """The axes whose collectives copy engines do."""
        return set() if self.symmetric_memory_groups == "auto" else set(self.symmetric_memory_groups) - {"dp"}

    @property
    def saves_attention(self) -> bool:
        """The recompute_saves_attention; an `auto` that nobody has chosen for is off."""
        return self.recompute_saves_attention is True

    @property
    def unsharded_layers(self) -> int:
        """The fsdp_unsharded_layers; an `auto` that nobody has chosen for is none."""
        return 0 if self.fsdp_unsharded_layers == "auto" else self.fsdp_unsharded_layers

    @property
    def keeps_layers_whole(self) -> bool:
        """Whether the parameters of some layers stay whole on a device from a step's first pass to its last."""
        return self.data_parallel_sharding_strategy != "optim_grads_params" or self.unsharded_layers > 0

    @property
    def exchanges_gradients(self) -> bool:
        """The reduce_scatter_with_fp32_accumulation; an `auto` that nobody has chosen for is off."""
        return self.reduce_scatter_with_fp32_accumulation is True

    @property
    def cp_exchange(self) -> str:
        """The cp_comm_type; an `auto` that nobody has chosen for is the ring."""
        return "p2p" if self.cp_comm_type == "auto" else self.cp_comm_type
