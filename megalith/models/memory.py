"""The memory that a device of a run is expected to take, from the configuration alone.

Weights, gradients and optimizer state are exact: so many bytes a parameter that is here. Activations are an estimate,
the tensors that the backward pass must find again (after Korthikanti et al., 2022, section 4), under assumptions:

- attention runs in a fused kernel, so the matrix of probabilities is never whole;
- dropout masks are computed again rather than kept;
- the loss takes the logits a chunk at a time (ops/cross_entropy.py), at most 2^26 of them;
- the allocator's fragments, the libraries' workspaces and the CUDA context (about 1 GB) come on top.

The parts do not all peak at the same moment (a layer's activations go as its gradients come), so their sum is what a
step needs at most. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalith.config import ModelConfig, ParallelConfig

MASTER_BYTES = 4  # fp32 weights
GRADIENT_BYTES = 4  # fp32 gradients
OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "sgd": 4}  # fp32 moments, or momentum
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LOGITS_AT_ONCE = 2**26
LAYERS_GATHERED = 2  # with optim_grads_params: the one that computes, and the next


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by what holds them."""

    weights: int
    """fp32."""
    compute_copy: int
    """The weights in bf16 or fp16, or as FSDP2 has gathered them; 0 in fp32 on one device."""
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
    layers_held: int | None = None
    """Layers whose activations are kept at the fullest moment, counted once a micro-batch; None: `layers`."""
    embedding: bool = True
    head: bool = True
    """The final norm, and the output matrix with the loss."""
    chunks: int = 1
    """Pieces of the model that these layers make up: virtual pipeline stages."""
    compiled: bool = True
    fsdp: bool = False
    """Whether there is data × context parallelism, and so a gathered copy of the parameters."""
    shards: int = 1
    """Ranks over which the state is sharded."""
    accumulates: bool = True
    """Whether a step has several micro-batches."""
    offloaded: float = 0.0
    """Share of the optimizer state that is kept in host memory, 0 to 1."""


@dataclass(frozen=True)
class Cuts:
    """The sizes that a layer is cut by."""

    tensor: int = 1
    sequence: int = 1  # tensor, or 1 without sequence parallelism
    context: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig | None) -> Cuts:
        if parallel is None:
            return cls()
        tensor = parallel.tensor_model_parallel_size
        return cls(tensor, tensor if parallel.sequence_parallel else 1, parallel.context_parallel_size)


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
    layer = layer_parameters(model, cuts.tensor)
    outside = outside_parameters(model, share.embedding, share.head, cuts.tensor)
    here = layers * layer + outside
    rows = -(-model.padded_vocab_size // cuts.tensor)
    head = rows * model.hidden_size if share.head else 0
    tokens = micro_batch_size * seq_length // cuts.context
    logits = min(tokens * rows, LOGITS_AT_ONCE) if share.head else 0
    return MemoryEstimate(
        weights=MASTER_BYTES * here // share.shards,
        compute_copy=_compute_copy(share, layers, held, layer, outside, width)
        + (0 if precision == "fp32" else width * head),
        gradients=_gradients(share, here, layer, width),
        optimizer=int(OPTIMIZER_BYTES[optimizer] * here / share.shards * (1 - share.offloaded)),
        activations=width * tokens * _kept_per_token(model, share, layers, held, cuts),
        loss=(4 + 2 * width) * logits + GRADIENT_BYTES * head,
    )


def layer_parameters(model: ModelConfig, tensor: int = 1) -> int:
    """Parameters of one layer on one of `tensor` tensor-parallel ranks."""
    hidden, ffn = model.hidden_size, model.ffn_size
    query = model.num_attention_heads * model.head_dim
    qkv = query + 2 * model.query_groups * model.head_dim
    up = 2 * ffn if model.gated else ffn
    norm = 2 if model.normalization == "LayerNorm" else 1  # weight and bias, or weight
    qkv_rows = (
        qkv // tensor if model.query_groups >= tensor else qkv
    )  # ranks that share a KV group hold it whole
    total = qkv_rows * hidden + query // tensor * hidden + up // tensor * hidden + ffn // tensor * hidden
    if model.qkv_bias:
        total += qkv_rows
    if model.proj_bias:
        total += hidden
    if model.mlp_bias:
        total += up // tensor + hidden
    if model.qk_layernorm_full_width:
        total += norm * (query + model.query_groups * model.head_dim) // tensor
    elif model.qk_layernorm:
        total += 2 * norm * model.head_dim
    return total + model.norms_in_layer * norm * hidden


def outside_parameters(model: ModelConfig, embedding: bool = True, head: bool = True, tensor: int = 1) -> int:
    """Parameters outside the layers, on one of `tensor` tensor-parallel ranks of a stage with embedding or head.

    A stage with a tied head and no embedding has a copy of the word embedding.
    """
    table = -(-model.padded_vocab_size // tensor) * model.hidden_size
    total = table if embedding else 0
    if embedding and model.position_embedding_type == "learned_absolute":
        total += model.max_position_embeddings * model.hidden_size
    if head:
        total += (2 if model.normalization == "LayerNorm" else 1) * model.hidden_size
        if model.untie_embeddings_and_output_weights or not embedding:
            total += table
    return total


def layer_activations(
    model: ModelConfig, cuts: Cuts = Cuts(), compiled: bool = True, recomputed: Collection[str] = ()
) -> int:
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
    return norm_inputs + norm_outputs + attention + (0 if "mlp" in recomputed else mlp)


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


def _kept_per_token(model: ModelConfig, share: Share, layers: int, held: int, cuts: Cuts) -> int:
    """Elements kept of each token, over the layers that are held, after what recomputation saves."""
    parallel, stream = share.parallel, model.hidden_size // cuts.sequence
    inputs, whole = _kept(share, layers, held)
    everything = layer_activations(model, cuts, share.compiled)
    kept = inputs * stream + whole * everything
    if parallel is not None and parallel.recompute_granularity == "selective":
        less = layer_activations(model, cuts, share.compiled, parallel.recompute_modules)
        kept -= max(whole - 1, 0) * (everything - less)
    if share.head:
        kept += 2 * stream + model.hidden_size  # the last norm's input and output; its gradient
    return kept


def _compute_copy(share: Share, layers: int, held: int, layer: int, outside: int, width: int) -> int:
    if not share.fsdp:  # autograd keeps the cast weights of each micro-batch in flight
        return 0 if width == MASTER_BYTES else width * layer * _kept(share, layers, held)[1]
    frees = share.parallel.data_parallel_sharding_strategy == "optim_grads_params"
    return width * layer * (min(LAYERS_GATHERED, layers) if frees else layers) + MASTER_BYTES * outside


def _gradients(share: Share, here: int, layer: int, width: int) -> int:
    if share.shards == 1:
        return GRADIENT_BYTES * here
    each = share.parallel.data_parallel_sharding_strategy != "optim"
    if not each and share.accumulates:  # summed whole, cut at the end of the step
        return GRADIENT_BYTES * here
    return GRADIENT_BYTES * here // share.shards + (width + GRADIENT_BYTES) * layer
