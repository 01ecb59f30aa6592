"""The memory that a device of a run is expected to take, from the configuration alone.

Weights, gradients and optimizer state are exact: so many bytes a parameter that is here. Activations are an estimate,
the tensors that the backward pass must find again (after Korthikanti et al., 2022, section 4), under assumptions:

- attention runs in a fused kernel, so the matrix of probabilities is never whole, but the mask of documents or of a
  window is, and as a bias while a layer computes, beside keys and values repeated for each head of a group;
- dropout masks are computed again rather than kept;
- the loss takes the logits a chunk at a time (ops/cross_entropy.py), at most 2^26 of them;
- the allocator's fragments, the libraries' workspaces and the CUDA context (about 1 GB) come on top.

Experts are taken to have as many tokens each; what a token's rows take is estimated, not measured.

The parts do not all peak at the same moment (a layer's activations go as its gradients come), so their sum is what a
step needs at most. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megalith.planner.layer_sizes import layer_size

if TYPE_CHECKING:
    from megalith.config import ModelConfig, ParallelConfig

MASTER_BYTES = 4  # fp32 weights
GRADIENT_BYTES = 4  # fp32 gradients
OPTIMIZER_BYTES = {
    "adamw": 8,
    "adam": 8,
    "sgd": 4,
    "muon": 4,
}  # fp32 moments, or momentum; of one's own: as AdamW's
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LOGITS_AT_ONCE = 2**26
LAYERS_GATHERED = 2  # with optim_grads_params: the one that computes, and the next


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by what holds them."""

    weights: int
    """fp32."""
    compute_copy: int
    """The weights in bf16 or fp16, or as FSDP2 has gathered them; 0 in fp32 without it."""
    gradients: int
    optimizer: int
    activations: int
    """Of every micro-batch in flight."""
    loss: int
    """A chunk of logits, and the head's gradient, which is made in the forward pass."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Share:
    """The part of a run that one device has, as far as its memory depends on it. By default all of it.

    How a layer is cut (tensor, sequence, context) stands in `parallel`; the numbers here are what the pipeline and
    the number of processes make of it.
    """

    parallel: ParallelConfig | None = None
    """None: one device."""
    layers: int | None = None
    """Layers whose parameters are here; None: all."""
    layers_with_experts: int | None = None
    """How many of them have experts; None: as many as of all layers, in proportion."""
    layers_held: int | None = None
    """Layers whose activations are kept at the fullest moment, counted once a micro-batch; None: `layers`."""
    embedding: bool = True
    head: bool = True
    """The final norm, and the output matrix with the loss."""
    chunks: int = 1
    """Pieces of the model that these layers make up: virtual pipeline stages."""
    compiled: bool = True
    fsdp: bool = False
    """Whether FSDP2 shards the parameters over data × context, and so there is a gathered copy of them."""
    shards: int = 1
    """Ranks over which the state is sharded."""
    expert_fsdp: bool = False
    """As `fsdp`, of the experts over the ranks that have the same."""
    expert_shards: int = 1
    """Ranks over which the state of an expert is sharded."""
    accumulates: bool = True
    """Whether a step has several micro-batches."""
    adapters: int = 0
    """Parameters of adapters here. They alone have gradients and optimizer state then; 0: every parameter has."""
    offloaded: float = 0.0
    """Share of the optimizer state that is kept in host memory, 0 to 1."""
    documents: bool = False
    """Whether attention stays inside documents."""


@dataclass(frozen=True)
class Cuts:
    """The sizes that a layer is cut by."""

    tensor: int = 1
    sequence: int = 1  # tensor, or 1 without sequence parallelism
    context: int = 1
    experts: int = 1  # expert · expert tensor
    expert_tensor: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig | None) -> Cuts:
        if parallel is None:
            return cls()
        tensor = parallel.tensor_model_parallel_size
        return cls(
            tensor,
            tensor if parallel.sequence_parallel else 1,
            parallel.context_parallel_size,
            parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size,
            parallel.expert_tensor_parallel_size,
        )


def expected_memory(
    model: ModelConfig,
    micro_batch_size: int,
    seq_length: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    share: Share = Share(),
) -> MemoryEstimate:
    """Peak memory of a training step on a device that has `share` of the run, in bytes.

    `precision` is fp32, bf16 or fp16, `optimizer` adamw, adam or sgd.
    """
    cuts = Cuts.of(share.parallel)
    layers = model.num_layers if share.layers is None else share.layers
    held = layers if share.layers_held is None else share.layers_held
    width = COMPUTE_BYTES[precision]
    layer = _mean_layer(model, share, layers, cuts)
    outside = outside_parameters(model, share.embedding, share.head, cuts.tensor)
    dense, experts = layers * layer.dense + outside, layers * layer.experts
    state = dense / share.shards + experts / share.expert_shards
    if share.adapters:
        state += share.adapters / share.shards
    trained = share.adapters / share.shards if share.adapters else state
    rows = -(-model.padded_vocab_size // cuts.tensor)
    head = rows * model.hidden_size if share.head else 0
    tokens = micro_batch_size * seq_length // cuts.context
    logits = min(tokens * rows, LOGITS_AT_ONCE) if share.head else 0
    return MemoryEstimate(
        weights=int(MASTER_BYTES * state),
        compute_copy=_copies(share, layers, held, layer, outside, width)
        + (0 if precision == "fp32" else width * head),
        gradients=GRADIENT_BYTES * share.adapters
        or int(
            _gradients(share, dense, layer.dense, share.shards, width)
            + _gradients(share, experts, layer.experts, share.expert_shards, width)
        ),
        optimizer=int(OPTIMIZER_BYTES.get(optimizer, 8) * trained * (1 - share.offloaded)),
        activations=int(width * tokens * _kept_per_token(model, share, layers, held, cuts))
        + _masked_attention(model, share, layers, held, cuts, (micro_batch_size, seq_length), width),
        loss=(4 + 2 * width) * logits + (0 if share.adapters else GRADIENT_BYTES * head),
    )


@dataclass(frozen=True)
class _MeanLayer:
    """What a layer here has on average."""

    dense: float
    experts: float
    with_experts: float  # the share of layers that have them


def _mean_layer(model: ModelConfig, share: Share, layers: int, cuts: Cuts) -> _MeanLayer:
    if not model.expert_layers or not layers:
        return _MeanLayer(layer_size(model, False, cuts.tensor).dense, 0, 0)
    if share.layers_with_experts is None:
        part = len(model.expert_layers) / model.num_layers
    else:
        part = share.layers_with_experts / layers
    with_experts = layer_size(model, True, cuts.tensor, cuts.experts)
    dense = part * with_experts.dense + (1 - part) * layer_size(model, False, cuts.tensor).dense
    return _MeanLayer(dense, part * with_experts.experts, part)


def outside_parameters(model: ModelConfig, embedding: bool = True, head: bool = True, tensor: int = 1) -> int:
    """Parameters outside the layers, on one of `tensor` tensor-parallel ranks of a stage with embedding or head.

    A stage with a head and no embedding has a copy of it where the head is tied, or predicts several tokens.
    """
    table = -(-model.padded_vocab_size // tensor) * model.hidden_size
    total = table if embedding else 0
    if embedding and model.position_embedding_type == "learned_absolute":
        total += model.max_position_embeddings * model.hidden_size
    if head:
        total += (2 if model.normalization == "LayerNorm" else 1) * model.hidden_size
        if model.untie_embeddings_and_output_weights:
            total += table
        if model.embedding_at_head and not embedding:
            total += table
        norm = 2 if model.normalization == "LayerNorm" else 1
        total += len(model.further_layers) * (2 * model.hidden_size + 3 * norm) * model.hidden_size
    return total


def layer_activations(
    model: ModelConfig,
    cuts: Cuts = Cuts(),
    compiled: bool = True,
    recomputed: Collection[str] = (),
    has_experts: bool = False,
) -> float:
    """Elements that the backward pass keeps of each token in a layer, in the compute dtype, on one rank.

    `recomputed` are the modules of selective recomputation. The compiler can make a norm's output and attention's
    again; without it the next matrix keeps them. With sequence parallelism the compiler keeps the gathered tokens
    rather than gather them twice.
    """
    groups = max(model.query_groups // cuts.tensor, 1)
    query = model.num_attention_heads // cuts.tensor * model.head_dim
    key_value = 2 * groups * model.head_dim
    gathers = compiled and cuts.sequence > 1
    norm_inputs = model.norms_in_layer * model.hidden_size // cuts.sequence
    norm_outputs = 2 * model.hidden_size // (1 if gathers else cuts.sequence)  # what the matrices take
    if compiled and not gathers and "layernorm" in recomputed:
        norm_outputs = (
            model.hidden_size // cuts.sequence if "mlp" in recomputed else 0
        )  # the MLP's input is kept
    attention = query + key_value
    if model.qk_layernorm or model.position_embedding_type == "rope":
        attention += query + key_value // 2  # queries and keys before it, in one piece with the values
    if not (compiled and "core_attn" in recomputed):
        attention += query  # the output
    mlp = (3 if model.gated else 2) * model.ffn_size // cuts.tensor  # up (and gate), its activation
    if has_experts:
        mlp = _expert_activations(model, cuts)
    return norm_inputs + norm_outputs + attention + (0 if "mlp" in recomputed else mlp)


def _expert_activations(model: ModelConfig, cuts: Cuts) -> float:
    """Of a token in a layer of experts, each with as many tokens as another: its rows, between the matrices too."""
    between = (3 if model.gated else 2) if model.moe_permute_fusion else (6 if model.gated else 3)
    row = model.hidden_size + between * model.expert_size / cuts.expert_tensor
    shared = (model.moe_shared_expert_intermediate_size or 0) // cuts.tensor
    own = 1 / cuts.tensor  # each rank of the tensor axis has its part of the tokens
    if cuts.expert_tensor > 1:
        own *= cuts.expert_tensor  # gathered
    return model.moe_router_topk * row * own + (3 if model.gated else 2) * shared


def _kept(share: Share, layers: int, held: int) -> tuple[int, int]:
    """Of the layers whose activations are held: how many keep their input alone, how many everything.

    What is recomputed is there whole once, while its backward pass runs; of what waits in host memory, a layer.
    """
    parallel = share.parallel
    if parallel is None or not layers:
        return 0, held
    if first := min(parallel.cpu_offloading_num_layers * share.chunks, layers):
        held += 1 - held * first // layers
    if parallel.recompute_granularity != "full":
        return 0, held
    if parallel.recompute_method == "block":  # the first layers of each chunk, each by itself
        first = min(parallel.recompute_num_layers * share.chunks, layers)
        again = held * first // layers
        return again, held - again + 1
    unit = min(parallel.recompute_num_layers, layers)
    return -(-held // unit), unit


def _kept_per_token(model: ModelConfig, share: Share, layers: int, held: int, cuts: Cuts) -> float:
    """Elements kept of each token, over the layers that are held, after what recomputation saves."""
    parallel, stream = share.parallel, model.hidden_size // cuts.sequence
    inputs, whole = _kept(share, layers, held)
    distributed = parallel is not None and parallel.distribute_saved_activations
    part = _mean_layer(model, share, layers, cuts).with_experts

    def activations(recomputed: Collection[str] = ()) -> float:
        kinds = [(1 - part, False)] + ([(part, True)] if part else [])
        return sum(
            share_of * layer_activations(model, cuts, share.compiled, recomputed, has)
            for share_of, has in kinds
        )

    everything = activations()
    kept = inputs * (stream // cuts.tensor if distributed else stream) + whole * everything
    if parallel is not None and parallel.recompute_granularity == "selective":
        kept -= max(whole - 1, 0) * (everything - activations(parallel.recompute_modules))
    if share.head:
        kept += 2 * stream + model.hidden_size  # the last norm's input and output; its gradient
    return kept


def _masked_attention(
    model: ModelConfig, share: Share, layers: int, held: int, cuts: Cuts, batch: tuple[int, int], width: int
) -> int:
    """What attention takes where it has a mask (ops/attention_blocks.py); `batch` is sequences and tokens in each.

    The mask of documents, a byte a score, stays for each micro-batch in flight. Bias, bools, and keys and values for
    each head with their gradients are there while one layer computes, but that torch's own function, which alone has
    attention dropout, keeps bias, keys and values of every layer. A ring has masks of its blocks alone.
    """
    sequences, seq = batch
    windowed = sum((window or seq) < seq for window in model.windows)
    if not share.documents and not windowed:
        return 0
    exchanged = cuts.context == 1 or share.parallel.cp_comm_type == "a2a"
    scores = (sequences if share.documents else 1) * (seq if exchanged else seq // cuts.context) ** 2
    repeated = 0
    if model.query_groups < model.num_attention_heads:
        heads = model.num_attention_heads // cuts.tensor
        repeated = 2 * sequences * seq // cuts.context * heads * model.head_dim
    in_flight = -(-held // max(layers, 1))
    mask = in_flight * scores if share.documents and exchanged else 0
    taken = mask + (2 + width) * scores + 2 * width * repeated
    if model.attention_dropout:
        masked = 1 if share.documents else windowed / model.num_layers
        taken += int(width * masked * max(_kept(share, layers, held)[1] - 1, 0) * (scores + repeated))
    return taken


def _copies(share: Share, layers: int, held: int, layer: _MeanLayer, outside: int, width: int) -> int:
    dense = _compute_copy(share, layers, held, layer.dense, share.fsdp, width)
    if share.expert_fsdp:
        experts = _compute_copy(share, layers, held, layer.experts, True, width)
    else:  # cast for each pass (ops/grouped_gemm.py)
        experts = 0 if width == MASTER_BYTES else width * layer.experts
    return int(dense + experts + (MASTER_BYTES * outside if share.fsdp else 0))


def _compute_copy(share: Share, layers: int, held: int, layer: float, fsdp: bool, width: int) -> float:
    if not fsdp:  # autograd keeps the cast weights of each micro-batch in flight
        return 0 if width == MASTER_BYTES else width * layer * _kept(share, layers, held)[1]
    frees = share.parallel.data_parallel_sharding_strategy == "optim_grads_params"
    return width * layer * (min(LAYERS_GATHERED, layers) if frees else layers)


def _gradients(share: Share, here: float, layer: float, shards: int, width: int) -> float:
    if shards == 1:
        return GRADIENT_BYTES * here
    each = share.parallel.data_parallel_sharding_strategy != "optim"
    if not each and share.accumulates:  # summed whole, cut at the end of the step
        return GRADIENT_BYTES * here
    return GRADIENT_BYTES * here / shards + (width + GRADIENT_BYTES) * layer
