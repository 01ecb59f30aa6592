"""The memory that a device of a run is expected to take, from the configuration alone.

Weights, gradients and optimizer state are exact: so many bytes a parameter that is here (counts.py). Saved activations
are an estimate, the tensors that the backward pass must find again (after Korthikanti et al., 2022, section 4), under
assumptions:

- attention runs in a fused kernel, so the matrix of probabilities is never whole; a mask of documents or of a window is
  made in fp32 and with attention dropout alone, and stands as a bias while a layer computes, beside keys and values
  repeated for each head of a group;
- dropout masks are computed again rather than kept;
- the loss takes the logits a chunk at a time (ops/cross_entropy.py), whose gradient takes their place, but where the
  vocabulary is cut or the logits are capped;
- the allocator's fragments, the libraries' workspaces and the CUDA context (about 1 GB) come on top.

Beside adapters, in bf16, the frozen weights are stored in bf16 (LocalParameters.store_frozen); they are taken to be
exact in it, as those of most published models are, and all to be matrices.

Experts are taken to have as many tokens each; what a token's rows take is estimated, not measured.

Of a step with several micro-batches the sum of the parts is what it needs at most: the last ones' gradients are there
while activations are. With one micro-batch a layer's activations go as its gradients come, so the fullest moment is the
end of the forward pass, without gradients, or that of the backward pass, without activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from megalith.config import ModelConfig, OptimConfig, RunConfig
from megalith.config.rules.expert_rules import (
    expert_data_parallel_size,
    expert_shard_size,
    rows_of_a_token,
)
from megalith.config.rules.parallel_rules import shard_size
from megalith.models.linear import Linear
from megalith.ops.cross_entropy import loss_chunk_tokens
from megalith.parallel.fp8_linears import layers_cast_once, saves_weight_codes, uses_fp8
from megalith.parallel.memory.recompute import unit_size
from megalith.parallel.pipeline.stages import Stage, schedule_kind
from megalith.parallel.tensor.roles import role_of
from megalith.planner.counts import MetaModel, layers_of, share_of_tokens

MASTER_BYTES = 4  # fp32 weights
GRADIENT_BYTES = 4  # fp32 gradients
INDEX_BYTES = 8  # int64
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1 + 4 / 256}  # with blocks as long as they may be
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LAYERS_GATHERED = 2  # with optim_grads_params: the one that computes, and the next


def moment_bytes(optim: OptimConfig) -> tuple[float, float]:
    """Of an element's optimizer state, in the layers and outside of them, where Muon is AdamW too; vectors, which are
    few, are counted as matrices. An optimizer of one's own is taken to be as Adam in fp32."""
    if optim.optimizer == "sgd":
        return 4, 4
    both = MOMENT_BYTES[optim.exp_avg_dtype] + MOMENT_BYTES[optim.exp_avg_sq_dtype]
    return (4 if optim.optimizer == "muon" else both), both


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by what holds them."""

    weights: int
    """fp32."""
    compute_copy: int
    """The weights in bf16 or fp16, or as FSDP2 has gathered them; 0 in fp32 without it."""
    gradients: int
    """With one micro-batch a step: what is there of them at the fullest moment, for activations, and cast weights that
    autograd keeps, go as they come."""
    optimizer: int
    activations: int
    """Of every micro-batch in flight."""
    loss: int
    """A chunk of logits, and the head's gradient, which is made in the forward pass."""

    @property
    def total(self) -> int:
        state = self.weights + self.compute_copy + self.gradients + self.optimizer
        return state + self.activations + self.loss


class StageMemory:
    """What a device of a pipeline rank takes at the peak of a training step."""

    def __init__(
        self,
        config: RunConfig,
        meta: MetaModel,
        world_size: int,
        chunks: Sequence[Stage],
        layers_held: int | None = None,
        accumulates: bool = True,
    ):
        """`meta`: the model of `config`, on a rank. `layers_held`: layers whose activations are kept at the fullest
        moment, counted once a micro-batch; None: all of its own once. `accumulates`: whether a step has several
        micro-batches."""
        self.config, self.model, self.parallel = config, config.model, config.parallel
        parallel = config.parallel
        self.tensor, self.context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        self.sequence = self.tensor if parallel.sequence_parallel else 1
        self.width = COMPUTE_BYTES[config.train.precision]
        self.compiled = config.runtime.compile is not False and schedule_kind(parallel) != "zero_bubble"
        is_sharded = parallel.data_parallel_sharding_strategy != "no_shard"
        copies = world_size // parallel.pipeline_model_parallel_size // self.tensor
        self.fsdp, self.shards = is_sharded and copies > 1, shard_size(parallel, world_size)
        self.expert_fsdp = is_sharded and expert_data_parallel_size(parallel, world_size) > 1
        self.expert_shards = expert_shard_size(parallel, world_size)
        self.accumulates = accumulates

        self.meta = meta
        self.chunks, self.head = len(chunks), any(chunk.head for chunk in chunks)
        self.numbers = layers_of(config.model, chunks)
        self.layers = len(self.numbers)
        self.held = self.layers if layers_held is None else layers_held
        in_fp8 = once = 0
        if config.train.fp8_format:
            in_fp8 = sum(uses_fp8(number, config) for number in self.numbers)
            once = sum(len(layers_cast_once(layers_of(config.model, [chunk]), config)) for chunk in chunks)
        self.fp8 = in_fp8 / max(self.layers, 1)
        """The share of the layers that compute in FP8."""
        self.cast_once = once / max(self.layers, 1)
        """The share of them whose weights are cast once a step."""
        here = meta.in_layers(self.numbers)
        self.experts, self.adapters = here["experts"], here["adapters"]
        self.dense = here.total() - self.experts - self.adapters
        self.in_mlps = here["mlp"] / max(self.dense, 1)
        """The share of the layers' dense weights that MLPs have."""
        self.outside = meta.outside(chunks).total()
        stores_bf16 = bool(self.adapters) and config.train.precision == "bf16"
        self.stored_bytes = self.width if stores_bf16 else MASTER_BYTES

    def estimate(self) -> MemoryEstimate:
        optim, width = self.config.optim, self.width
        state = (self.dense + self.outside) / self.shards + self.experts / self.expert_shards
        stored = self.stored_bytes * state
        trained = (
            self.adapters / self.shards if self.adapters else state
        )  # adapters alone, where there are any
        models = 2 if self.config.has_reference_model else 1
        rows = -(-self.model.padded_vocab_size // self.tensor)
        head = rows * self.model.hidden_size if self.head else 0
        tokens = self.config.rows_per_micro_batch * self.config.data.seq_length // self.context
        of_head = int(tokens * share_of_tokens(self.config, self.model.num_layers - 1))
        logits = min(of_head, loss_chunk_tokens(rows)) * rows if self.head else 0
        offloaded = optim.optimizer_offload_fraction if optim.optimizer_cpu_offload else 0.0
        each, of_ends = moment_bytes(optim)
        moments = each * trained
        if not self.adapters:
            moments += (of_ends - each) * self.outside / self.shards
        activations = int(width * tokens * self._saved_per_token()) + self._masked_attention()
        fused = self.tensor == 1 and self.model.final_logit_softcapping is None
        loss = (1 if fused else 2) * width * logits + (0 if self.adapters else GRADIENT_BYTES * head)
        gradients = GRADIENT_BYTES * self.adapters or int(
            self._gradients(self.dense + self.outside, self.dense, self.shards)
            + self._gradients(self.experts, self.experts, self.expert_shards)
        )
        copies = self._copies() + (0 if self.stored_bytes == width else width * head)
        # Else autograd keeps them, as it does activations.
        stay = self.fsdp or self.expert_fsdp or self.cast_once or self.config.train.moe_cache_weights is True
        going = activations + loss + (0 if stay else copies)
        return MemoryEstimate(
            weights=int(models * stored + MASTER_BYTES * self.adapters / self.shards),
            compute_copy=copies,
            gradients=gradients if self.accumulates else max(gradients - going, 0),
            optimizer=int(moments * (1 - offloaded)),
            activations=activations,
            loss=loss,
        )

    def _whole_layers(self) -> tuple[int, int]:
        """Of the layers whose activations are held: how many save their input alone, how many everything.

        What is recomputed is there whole once, while its backward pass runs; of what waits in host memory, a layer.
        """
        parallel, layers, held = self.parallel, self.layers, self.held
        if not layers:
            return 0, held
        if first := min(parallel.cpu_offloading_num_layers * self.chunks, layers):
            held += 1 - held * first // layers
        if parallel.recompute_granularity != "full":
            return 0, held
        if parallel.recompute_method == "block":  # the first layers of each chunk, each by itself
            again = held * min(parallel.recompute_num_layers * self.chunks, layers) // layers
            return again, held - again + 1
        unit = min(parallel.recompute_num_layers, layers)
        return -(-held // unit), unit

    def _saved_per_token(self) -> float:
        """Elements saved of each token, over the layers that are held, after what recomputation saves."""
        parallel, stream = self.parallel, self.model.hidden_size // self.sequence
        inputs, whole = self._whole_layers()

        def mean_of(recomputed: Collection[str], code: float | None) -> float:
            kinds = self.meta.kinds(self.numbers).items()
            saved = sum(
                times
                * share_of_tokens(self.config, n)
                * saved_activations(self.meta, n, self.compiled, recomputed, code)
                + times * saved_of_encoded(self.meta, n)
                for n, times in kinds
            )
            return saved / max(self.layers, 1)

        def mean(recomputed: Collection[str] = ()) -> float:
            code = 1 / self.width if self.config.train.fp8_wgrad else None
            of_codes = self.fp8 * mean_of(recomputed, code) if self.fp8 else 0.0
            return of_codes + (1 - self.fp8) * mean_of(recomputed, None)

        everything = mean()
        saved = inputs * stream / (self.tensor if parallel.distribute_saved_activations else 1)
        if parallel.saves_attention:
            layers = min(inputs * unit_size(parallel), self.held)
            saved += (
                layers
                * self.model.num_attention_heads
                // self.tensor
                * (self.model.head_dim + 4 // self.width)
            )  # its log-sum-exp is float32
        saved += whole * everything
        if parallel.recompute_granularity == "selective":
            saved -= max(whole - 1, 0) * (everything - mean(parallel.recompute_modules))
        elif self.compiled and parallel.recompute_granularity is None and not self.model.num_experts:
            left = self.config.runtime.activation_share
            saved -= max(whole - 1, 0) * left_out(left, everything, everything - mean(["mlp_act"]), stream)
        if self.head:
            saved += 2 * stream + self.model.hidden_size  # the last norm's input and output; its gradient
        return saved

    def _masked_attention(self) -> int:
        """What attention takes where it has a mask (ops/attention_kernels.py).

        In bf16 and fp16 its kernel has documents and windows without one, but with dropout (a ring only its windows).
        Not counted: of both in a ring a mask of window² elements where two chunks meet.
        Bias, bools, and keys and values for each head with their gradients are there while one layer computes, but
        that torch's own function, which alone has attention dropout, keeps bias, keys and values of every layer. A
        ring has masks of its blocks alone.
        """
        model, width, documents = self.model, self.width, self.config.separates_documents
        sequences, seq = self.config.rows_per_micro_batch, self.config.data.seq_length
        if model.position_embedding_type == "relative":
            return self._relative_positions()
        if not makes_mask(self.config):
            return 0
        windowed = sum((window or seq) < seq for window in model.windows)
        exchanged = self.context == 1 or self.parallel.resolved_cp_comm_type == "a2a"
        scores = (sequences if documents else 1) * (seq if exchanged else seq // self.context) ** 2
        repeated = 0
        if model.query_groups < model.num_attention_heads:
            heads = model.num_attention_heads // self.tensor
            repeated = 2 * sequences * seq // self.context * heads * model.head_dim
        taken = (2 + width) * scores + 2 * width * repeated
        if model.attention_dropout:
            masked = 1 if documents else windowed / model.num_layers
            taken += int(width * masked * max(self._whole_layers()[1] - 1, 0) * (scores + repeated))
        return taken

    def _relative_positions(self) -> int:
        """Of each stack with layers here the buckets of all distances, and the heads' biases with their gradient in
        fp32; and what is added to an encoder layer's scores, with its mask of padding, and the gradient of that: of
        one layer, or uncompiled of every one that is held."""
        first, data = self.model.encoder_layers, self.config.data
        heads = self.model.num_attention_heads // self.tensor // self.context
        encodes = {number < first for number in self.numbers}
        pairs = sum((data.seq_length if is_encoder else data.decoder_length) ** 2 for is_encoder in encodes)
        taken = (INDEX_BYTES + MASTER_BYTES * heads + GRADIENT_BYTES * heads) * pairs
        if True in encodes:
            layers = 1 if self.compiled else max(self._whole_layers()[1], 1)
            added = self.width * self.config.rows_per_micro_batch * heads * data.seq_length**2
            taken += (layers + 1) * added
        return taken

    def _copies(self) -> int:
        saved = self.fp8 - self.cast_once if saves_weight_codes(self.config) else 0.0
        copies = self._compute_copy(self.dense, self.fsdp, saved, self.cast_once)
        freed = self.width if self.fsdp and not self.config.log.log_fp8_interval else 0  # of what is gathered
        copies += (2 - freed) * self.cast_once * self.dense  # for the whole step, by row and by column
        if self.expert_fsdp:
            copies += self._compute_copy(self.experts, True)
        elif self.width != self.stored_bytes:  # cast for each pass (ops/grouped_gemm.py), or once a step
            copies += self.width * (
                self.experts if self.config.train.moe_cache_weights is True else self._mean(self.experts)
            )
        return int(copies + (self.stored_bytes * self.outside if self.fsdp else 0))

    def _compute_copy(self, here: int, fsdp: bool, codes: float = 0.0, once: float = 0.0) -> float:
        """The share of the weights of which FP8 `codes` are saved, and not the cast weights, and of those cast `once` a
        step, of which neither is."""
        layer, whole = self.width * self._mean(here), self._whole_layers()[1]
        if self.parallel.recompute_granularity == "selective" and "mlp" in self.parallel.recompute_modules:
            whole -= self.in_mlps * max(whole - 1, 0)  # what is recomputed casts its weights again
        saved = codes * self._mean(here) * whole
        if not fsdp:  # autograd keeps the cast weights of each micro-batch in flight
            return saved + (0 if self.width == self.stored_bytes else (1 - codes - once) * layer * whole)
        frees = self.parallel.data_parallel_sharding_strategy == "optim_grads_params"
        stay = LAYERS_GATHERED + self.parallel.unsharded_layers * self.chunks if frees else self.layers
        return saved + layer * min(stay, self.layers)

    def _gradients(self, here: int, in_layers: int, shards: int) -> float:
        each = self.parallel.data_parallel_sharding_strategy != "optim"
        if shards == 1 or (not each and self.accumulates):  # summed whole, cut at the end of the step
            return GRADIENT_BYTES * here
        return GRADIENT_BYTES * here / shards + (self.width + GRADIENT_BYTES) * self._mean(in_layers)

    def _mean(self, in_layers: int) -> float:
        """Of a layer."""
        return in_layers / max(self.layers, 1)


def left_out(left: float, everything: float, activation: float, stream: int) -> float:
    """Of what a compiled layer saves, in elements of a token, what a budget of `left` leaves out. The compiler first
    recomputes what a kernel makes again for nothing, the activation function's result, however little of the budget is
    missing; `stream`, the layer's input, is saved in any."""
    return 0.0 if left == 1 else max((1 - left) * (everything - stream), activation)


def makes_mask(config: RunConfig) -> bool:
    """Whether attention needs a mask for documents or a window, since its kernel does not take them."""
    model, parallel, seq = config.model, config.parallel, config.data.seq_length
    exchanged = parallel.context_parallel_size == 1 or parallel.resolved_cp_comm_type == "a2a"
    fp32 = config.train.precision == "fp32"
    if not fp32 and not model.attention_dropout:
        return False
    windowed = model.window_size is not None and any((window or seq) < seq for window in model.windows)
    return (windowed or config.separates_documents) if exchanged or fp32 else windowed


def saved_activations(
    meta: MetaModel,
    number: int = 0,
    compiled: bool = True,
    recomputed: Collection[str] = (),
    code: float | None = None,
) -> float:
    """Elements that the backward pass finds again of each token in layer `number`, in the compute dtype, on one rank.

    Each matrix saves what it takes; what comes out of a column-parallel one is what attention or an activation saves.
    `recomputed` are the modules of selective recomputation. The compiler can make a norm's output and attention's
    again; without it the next matrix saves them. With sequence parallelism the compiler saves the gathered tokens
    rather than gather them twice. In FP8 matrices save codes of what they take, each so many elements as `code`;
    attention saves its output beside them.
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
    return meta.once(
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
    norm_inputs = model.norms_in_layer * model.hidden_size // sequence
    normed = 1 if model.shared_layernorm else 2
    norm_outputs = normed * model.hidden_size // (1 if gathers else sequence)  # what the matrices take
    if compiled and not gathers and "layernorm" in recomputed:
        norm_outputs = 0  # a recomputed MLP's input too: one graph has both
    attention = query + key_value
    if model.qk_layernorm or model.qk_l2_norm or model.position_embedding_type == "rope":
        attention += query + key_value // 2  # queries and keys before it, in one piece with the values
    if not (compiled and "core_attn" in recomputed):
        attention += query  # the output
    exchanged = query if parallel.context_parallel_size > 1 and "a2a" in parallel.resolved_cp_comm_type else 0
    attention += exchanged  # and the output as the all-to-all gives it to the next matrix
    if code is not None:
        attention += code * query
    if number in model.linear_attention_layers:
        attention = _of_delta_net(model) / tensor
    if saved_of_encoded(meta, number):  # cross-attention's norm, queries and output
        norm_inputs, norm_outputs = 1.5 * norm_inputs, 1.5 * norm_outputs
        attention += 2 * query + exchanged
    taken = 1.0 if code is None else code  # an element of what a matrix takes
    saved = norm_inputs + taken * norm_outputs + attention
    if "mlp" not in recomputed:
        again = compiled and code is None and "mlp_act" in recomputed
        out, into = meta.once(("between", number), lambda: _between_matrices(layer.mlp))
        saved += (out + (0 if again else taken) * into) / tensor
        if layer.has_experts:
            saved += _expert_rows(meta, layer.mlp.experts)
    return saved


def saved_of_encoded(meta: MetaModel, number: int) -> int:
    """Elements of each token of the encoder that cross-attention in layer `number` saves: its key and value."""
    model, tensor = meta.config, meta.parallel.tensor_model_parallel_size
    crosses = 0 < model.encoder_layers <= number
    return 2 * max(model.query_groups // tensor, 1) * model.head_dim if crosses else 0


def _of_delta_net(model: ModelConfig) -> int:
    """The convolution's input and output, and what the delta rule takes; the gate, what is read, and that gated."""
    values = model.linear_num_value_heads * model.linear_value_head_dim
    units = 2 * model.linear_num_key_heads * model.linear_key_head_dim + values
    return 3 * units + 3 * values


def _between_matrices(mlp: nn.Module) -> tuple[int, int]:
    """Of a token in an MLP, or the shared expert: elements out of column-parallel matrices, into row-parallel ones."""
    sizes = Counter()
    for name, linear in mlp.named_modules():
        if isinstance(linear, Linear):
            style, (rows, columns) = role_of(name, linear, False).style, linear.weight.shape
            sizes[style] += rows if style == "column" else columns
    return sizes["column"], sizes["row"]


def _expert_rows(meta: MetaModel, experts: nn.Module) -> float:
    """Of a token in experts, each with as many tokens as another: its rows, between the matrices too, and in static
    dispatch the room for more."""
    model, parallel = meta.config, meta.parallel
    fc1, fc2 = experts.linear_fc1.weight.shape[1], experts.linear_fc2.weight.shape[2]
    between = fc1 + fc2 if model.moe_permute_fusion else (fc1 + fc2) * 2 if model.gated else fc1 + 2 * fc2
    row = model.hidden_size + between / parallel.expert_tensor_parallel_size
    # Each rank of the tensor axis has its part of the tokens; ranks that an expert is cut over gather each other's.
    return (
        rows_of_a_token(model, parallel)
        * row
        * parallel.expert_tensor_parallel_size
        / parallel.tensor_model_parallel_size
    )
