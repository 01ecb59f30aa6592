"""MegatronEngine: a prepared model whose forward call runs the complete pipeline schedule.

Pipelines interleave forward and backward passes, so a training call runs all of them and keeps the gradients of the
loss. The returned loss is the output of an autograd function: its backward pass receives d(script's loss)/d(loss),
multiplies the kept gradients by it, and adds them to the step's gradients. `loss * 0.5`, sums of several calls' losses
and division by the accumulation steps are therefore exact in every layout.

The loss is the mean over the counted tokens of the global batch, as in one process that has all samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import GradientState, PartialState
from accelerate.utils import GradScalerKwargs
from torch import Tensor, nn

from megalith.comm.collectives import all_reduce_no_grad
from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.data.token_ids import TokenIds
from megalith.dialects.accelerate.padding_row import exclude_padding_row
from megalith.dialects.accelerate.plugin import MegatronLMPlugin
from megalith.dialects.accelerate.plugin_settings import (
    PRECISIONS,
    reject_inner_padding,
    run_config,
    token_multiple,
)
from megalith.dialects.accelerate.process_state import collective_call, patch_save_pretrained
from megalith.dialects.accelerate.published_weights import (
    GatheredParameter,
    family_of_module,
    fill_module,
    gather_state,
    load_module,
    shard_parameters,
    source_parameters,
)
from megalith.dialects.accelerate.replica_loader import host_copy, num_padding_rows
from megalith.dialects.accelerate.script_batches import (
    LABELS,
    TOKEN_TYPES_IGNORED,
    WRONG_IDS,
    check_batch,
    check_ids,
    is_right_padded,
    next_token_batch,
    pad_sequences,
    reject_extra_outputs,
    reject_token_types,
    split_micro_batches,
)
from megalith.dialects.accelerate.script_checkpoint import load_engine, save_engine
from megalith.dialects.accelerate.script_optimizer import CallGradients, CallLoss, EngineOptimizer
from megalith.dialects.accelerate.unsupported_calls import (
    NO_LOGITS_GRADIENT,
    NoGradient,
    PreparedModelError,
    unsupported_method,
)
from megalith.errors import ConfigError, shorten
from megalith.models.default_positions import positions_without_padding
from megalith.models.inputs import TokenInputs
from megalith.models.loss import Loss
from megalith.parallel.data.data_parallel import reshard_parameters
from megalith.parallel.mesh import Mesh
from megalith.planner.memory_choices import with_auto
from megalith.training.build import build_model, build_run_mesh, resolve_config
from megalith.training.process import detect_machine, prepare_process


class MegatronEngine(nn.Module):
    """A prepared model. `engine(**batch)` takes this replica's samples and returns the Hugging Face model's outputs.

    Collective over all ranks; the ranks of one replica pass the same samples.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        plugin: MegatronLMPlugin,
        mixed_precision: str,
        device: torch.device,
        scaler: GradScalerKwargs | None = None,
    ):
        """Shard a transformers model over the ranks. `module` loses its weights. Raises ConfigError if unsupported."""
        super().__init__()
        processes = dist.get_world_size() if dist.is_initialized() else 1
        self.plugin, self.device = plugin, device
        family, hf_config = family_of_module(module)
        reject_extra_outputs({**hf_config, "output_router_logits": False})  # run_config adds a note on it
        self._dtype = next(module.parameters()).dtype
        precision = PRECISIONS[mixed_precision]
        if precision == "fp32" and self._dtype in (torch.bfloat16, torch.float16):
            precision = "bf16" if self._dtype == torch.bfloat16 else "fp16"
        checkpoints = any(getattr(child, "gradient_checkpointing", False) for child in module.modules())
        config, self.notes = run_config(
            plugin, family, hf_config, precision, processes, device.type, checkpoints, scaler
        )
        config = resolve_config(config, None)
        prepare_process(config, device.index or 0)
        machine = detect_machine(config, device)
        # A script's batches differ in size.
        config = config.with_settings({"parallel.moe_static_dispatch": False})
        self.run, auto_notes = with_auto(config, processes, machine)
        self.notes += auto_notes
        self.mesh = self._mesh(self.run, processes)
        self.model = build_model(self.run, self.mesh, device)
        exclude_padding_row(self.model.chunks, getattr(module.get_input_embeddings(), "padding_idx", None))
        patch_save_pretrained()
        self.groups = load_module(module, family, self.run.model, self.model.chunks)
        self._constants = family.stored_constants(self.run.model)
        reshard_parameters(self.model.chunks)
        self.optimizer: EngineOptimizer | None = None
        self._source_parameters = source_parameters(module, family, self.groups)
        if optimizer is not None:
            self.set_optimizer(optimizer)
        sharded = shard_parameters(module, device)
        self._source_parameters = {
            name: [sharded[id(p)] for p in sources] for name, sources in self._source_parameters.items()
        }
        if self.optimizer is not None:
            self.optimizer.trained = {id(sharded[parameter_id]) for parameter_id in self.optimizer.trained}
        self._sharded = dict(module.named_parameters(remove_duplicate=False))
        self._module = [module]  # in a list, so that nn.Module does not register it
        self.train_step: Any = None
        """Makes micro-batches and the loss (train_steps.py); None for decoder models without a custom step."""
        self.sources: list[Any] = []
        """Sources of batches other than the script's dataloaders."""
        self.consumed_samples = 0
        self.loaded_from: str | Path | None = None
        """Folder of the last `load_checkpoint`."""
        self._loaded_step = self._loads = 0
        self._eod = hf_config.get("eos_token_id") if plugin.eod_mask_loss else None
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._ids = TokenIds(self.run.model.vocab_size, WRONG_IDS)

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with the script's optimizer, created with the model's parameters before or after `prepare`."""
        if self.optimizer is not None:
            raise ConfigError(
                "prepare was called with a second optimizer, but one optimizer trains the model; use parameter "
                "groups of one optimizer"
            )
        self.optimizer = EngineOptimizer(
            self.model, optimizer, self.run.optim, self._source_parameters, self.run.train.precision
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield ShardedParameters under the script's names: full shapes and dtypes, no values or gradients."""
        seen: set[int] = set()
        for name, parameter in self._sharded.items():
            if not (remove_duplicate and id(parameter) in seen):
                seen.add(id(parameter))
                yield (f"{prefix}.{name}" if prefix else name), parameter

    @property
    def config(self) -> Any:
        """The Hugging Face model's config."""
        return self._module[0].config

    @property
    def iteration(self) -> int:
        """Optimizer steps so far, including those before a resume."""
        return self._loaded_step + (0 if self.optimizer is None else self.optimizer.steps)

    def _mesh(self, config: RunConfig, processes: int) -> Mesh:
        if processes == 1:
            return Mesh.alone()
        return build_run_mesh(config, processes, self.device.type)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_module", [None])[0]
            if module is None or not hasattr(type(module), name):
                raise
            raise PreparedModelError(
                f"the prepared model has no {name}: its {type(module).__name__} is sharded over the ranks; use "
                f"accelerator.unwrap_model(model).{name}, on every rank, or use {name} before prepare; for "
                "recomputation set MegatronLMPlugin(recompute_granularity=…)"
            ) from None

    state_dict = unsupported_method("state_dict", "use accelerator.get_state_dict(model), on every rank")
    load_state_dict = unsupported_method(
        "load_state_dict", "load before prepare, or use accelerator.load_state"
    )
    apply = unsupported_method("apply", "apply functions before prepare")
    half = unsupported_method("half", 'set mixed_precision="fp16" of Accelerator')
    bfloat16 = unsupported_method("bfloat16", 'set mixed_precision="bf16" of Accelerator')
    double = unsupported_method("double", "use fp32, bf16 or fp16: Accelerator(mixed_precision=…)")
    __deepcopy__ = unsupported_method("deepcopy", "copy accelerator.unwrap_model(model), on every rank")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the step, as the optimizer's zero_grad does."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def forward(self, input_ids: Tensor | None = None, *args: Any, **batch: Any) -> Any:
        """Run the model on this replica's samples.

        In training mode with gradients enabled this runs forward and backward passes, otherwise forward passes only.

        Args:
            input_ids: int64 [batch, seq].
            batch: labels, attention_mask, position_ids and the other inputs of transformers.

        Returns:
            transformers' outputs: `loss`, equal on every rank, if the batch has labels; `logits` [batch, seq, vocab] of
            this replica if it has none, or with the plugin's return_logits.
        """
        if args or isinstance(input_ids, Mapping):
            raise ConfigError(
                f"the model was called with a {type(input_ids).__name__} and {len(args)} more positional arguments, "
                "but only the tensor input_ids can be passed by position; call model(**batch)"
            )
        if input_ids is not None:
            batch["input_ids"] = input_ids
        inputs = check_batch(batch)
        if self.run.model.causal and inputs.get("token_type_ids") is not None:
            self._drop_token_types(inputs.pop("token_type_ids"))
        inputs = {name: self._for_passes(value) for name, value in inputs.items()}
        if inputs["position_ids"] is None:
            inputs["position_ids"] = self._positions(inputs["attention_mask"])
        if not (self.plugin.custom_get_batch_function or self.plugin.custom_train_step_class):
            check_ids(self._ids, inputs, causal=self.run.model.causal)
        is_training = self.training and torch.is_grad_enabled()
        loss = logits = None
        if self.train_step is not None or any(inputs[name] is not None for name in LABELS):
            micro_batches, objective = self._micro_batches(inputs)
            with collective_call("the prepared model, with labels"):
                run_passes = self._train if is_training else self._evaluate
                loss = run_passes(micro_batches, objective)
            if (items := inputs.get("num_items_in_batch")) is not None:
                loss = loss * (self._tokens(micro_batches) / torch.as_tensor(items, device=self.device))
        if loss is None or self.plugin.return_logits:
            logits = NoGradient.apply(self._logits(inputs), self._anchor, NO_LOGITS_GRADIENT)
        return self._outputs(loss, logits, batch.get("return_dict"))

    def _drop_token_types(self, types: Tensor) -> None:
        reject_token_types(self._on_host(types), self._module[0])
        if TOKEN_TYPES_IGNORED not in self.notes:
            self.notes.append(TOKEN_TYPES_IGNORED)
            PartialState().print(f"note: {TOKEN_TYPES_IGNORED}", flush=True)

    def _for_passes(self, value: Any) -> Any:
        """Move an input to the host, where the forward passes are planned, or to the device for a custom train step."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device) if self.train_step is not None else self._on_host(value)

    def _on_host(self, value: Tensor) -> Tensor:
        return host_copy(value, GradientState().active_dataloader, *self.sources)

    def _outputs(self, loss: Tensor | None, logits: Tensor | None, return_dict: bool | None) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        outputs = CausalLMOutputWithPast(loss=loss, logits=logits)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return outputs if return_dict else outputs.to_tuple()

    def _train(self, micro_batches: Sequence[Batch], objective: Loss | None) -> Tensor:
        if self.optimizer is None:
            raise ConfigError(
                "the model was prepared without an optimizer; pass both to one call of prepare, or call eval()"
            )
        self.model.parameters.clear_gradients()  # the step's gradients are kept in the optimizer
        scale = self.optimizer.loss_scale.scale
        value = self.model.backward(micro_batches, objective, loss_scale=scale)
        gradients = CallGradients(self.optimizer, self.optimizer.gradients.take(), self.model.tallies)
        self.model.parameters.clear_gradients()
        self.consumed_samples += self.mesh.dp.size * sum(len(batch.input_ids) for batch in micro_batches)
        return CallLoss.apply(self._anchor, value.detach(), gradients)

    def _evaluate(self, micro_batches: Sequence[Batch], objective: Loss | None) -> Tensor:
        total, tokens = self.model.evaluate(micro_batches, objective)
        message = "this loss was computed in eval() mode, without a backward pass; call train() first"
        loss = total / tokens
        return NoGradient.apply(loss, self._anchor, message) if torch.is_grad_enabled() else loss

    def _micro_batches(self, batch: Mapping[str, Any]) -> tuple[list[Batch], Loss | None]:
        """Return num_micro_batches micro-batches of equal size, and the loss. None means the model's own loss."""
        rows, count = len(batch["input_ids"]), self.plugin.num_micro_batches
        if self.train_step is not None:
            parts, objective = self.train_step.micro_batches(batch, count)
        else:
            parts, objective = [self._next_token_batch(batch, self._padding_rows(rows), self._eod)], None
        micro_batches = [pad_sequences(part, token_multiple(self.plugin)) for part in parts]
        if self.train_step is None:
            micro_batches = split_micro_batches(
                micro_batches[0], count, 2 if self.run.parallel.overlaps else 1
            )
        samples = sum(len(part.input_ids) for part in micro_batches)
        first = self.consumed_samples + self.mesh.dp.rank * samples
        for part in micro_batches:
            part.sample_numbers = torch.arange(first, first + len(part.input_ids))
            first += len(part.input_ids)
        return micro_batches, objective

    def _next_token_batch(self, batch: Mapping[str, Any], masked_rows: int, eod: int | None) -> Batch:
        """Convert the batch. Raises ConfigError for a mask that the model or the layout does not support."""
        converted = next_token_batch(batch, masked_rows, eod)
        if converted.padding is not None and converted.document_ends is None:
            reject_inner_padding(self.run, converted.padding)
        return converted

    def _positions(self, mask: Tensor | None) -> Tensor | None:
        """Return the position ids that transformers derives from a mask, or None if transformers numbers all tokens."""
        if mask is None or not self.run.model.positions_skip_padding:
            return None
        return positions_without_padding(self.run.model, mask.bool())

    def _padding_rows(self, rows: int) -> int:
        """Return the number of padding samples at the end of the current dataloader's batch."""
        return num_padding_rows(GradientState().active_dataloader, rows)

    def _tokens(self, micro_batches: Sequence[Batch]) -> Tensor:
        local = sum(batch.loss_mask.sum(dtype=torch.float64) for batch in micro_batches)
        return all_reduce_no_grad(local.to(self.device), self.mesh.dp).float()

    @torch.no_grad()
    def _logits(self, batch: Mapping[str, Any]) -> Tensor:
        converted = self._next_token_batch(batch, 0, None)
        is_masked = converted.document_ends is not None or converted.padding is not None
        seq = converted.input_ids.shape[1]
        positions = converted.position_ids
        has_default_positions = bool((positions == torch.arange(seq, device=positions.device)).all())
        right_padded = is_right_padded(batch.get("attention_mask"))
        self.model.eval()
        # With padding at the end, causal attention never reads it.
        if has_default_positions and (not is_masked or right_padded):
            return self.model(converted.input_ids)
        if self.mesh.pp.size * self.mesh.cp.size > 1:
            raise ConfigError(
                "logits of packed or left-padded sequences are not supported with pipeline or context parallelism; pad "
                "at the end, or leave return_logits out"
            )
        local = converted.to(self.device)
        inputs = TokenInputs(
            position_ids=local.position_ids, document_ends=local.document_ends, padding=local.padding
        )
        return self.model.chunks[0](local.input_ids, token_inputs=inputs)

    def published_state(self) -> dict[str, Tensor]:
        """Return the full model's tensors under Hugging Face's file names, float32 on every rank's CPU."""
        reshard_parameters(self.model.chunks)
        state = gather_state(self.groups, self.model.chunks, self.mesh.world, self.device)
        return state | {name: torch.tensor(value) for name, value in self._constants.items()}

    def hugging_face_module(self) -> nn.Module:
        """Return the script's model with the current weights, on the CPU in its dtype. Collective over all ranks."""
        module, state, version = self._module[0], self.published_state(), self._weights_version

        def is_outdated() -> bool:
            return self._weights_version != version

        fill_module(module, state, self._dtype, self._sharded, self._has_gradients, is_outdated)
        return module.train(self.training)

    @property
    def _weights_version(self) -> tuple[int, int]:
        return self._loads, 0 if self.optimizer is None else self.optimizer.steps

    def _has_gradients(self) -> bool:
        gradients = () if self.optimizer is None else self.optimizer.gradients.sums
        return self.training and any(grad is not None for grad in gradients)

    def optimizer_of(self, parameters: Any) -> EngineOptimizer:
        """Return the optimizer of these parameters.

        Args:
            parameters: all trained parameters: of this model, of the model before `prepare`, or of
                `hugging_face_module`.

        Raises:
            ConfigError: a trained parameter is missing.
        """
        if self.optimizer is None:
            raise ConfigError(
                "there are no gradients to clip; pass model and optimizer to one call of prepare"
            )
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(p.sharded if isinstance(p, GatheredParameter) else p) for p in listed}
        trained = [name for name, p in self._sharded.items() if id(p) in self.optimizer.trained]
        missing = [name for name in trained if id(self._sharded[name]) not in ids]
        if missing:
            raise ConfigError(
                f"clip_grad_norm_ clips the gradients of all parameters together, but {len(missing)} of the model's "
                f"{len(trained)} trained parameters are not among the {len(listed)} passed ({shorten(missing)}); "
                "pass model.parameters()"
            )
        return self.optimizer

    def save_checkpoint(self, output_dir: str | Path) -> None:
        """Save model and optimizer so that any layout can load them.

        Collective over all ranks; Accelerate's save_state calls it.
        """
        save_engine(self, output_dir)

    def load_checkpoint(self, input_dir: str | Path) -> None:
        """Load the checkpoint of `save_checkpoint` in any layout. Collective over all ranks."""
        manifest = load_engine(self, input_dir)
        self._loaded_step = manifest.step - (0 if self.optimizer is None else self.optimizer.steps)
        self.consumed_samples = manifest.consumed_samples
        self.loaded_from, self._loads = input_dir, self._loads + 1
