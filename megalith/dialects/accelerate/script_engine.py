"""The engine behind a prepared model: a call runs the whole schedule, and its loss has a gradient that is real.

Pipelines make forward and backward passes together. So a call in training makes all of them at once, for the factor 1,
and keeps the gradients; the loss that it returns is the output of an autograd function whose backward pass gets
d(the script's loss)/d(this loss), and adds so many times those gradients to the step's. What a script makes of the loss
(`loss * 0.5`, a sum of two calls' losses, the division by the steps of accumulation) is exact in every layout.

The loss is the mean over the valid tokens of the global batch, that of one process with all of its samples.
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

from megalith.checkpoint import RunRecord, load_model, load_optimizer, open_checkpoint
from megalith.checkpoint.saver import Saver
from megalith.checkpoint.shard_files import open_shard_files, save_shard_files
from megalith.checkpoint.state import amax_shards, load_amaxes
from megalith.comm.collectives import all_reduce_no_grad
from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.data.token_ids import TokenIds
from megalith.dialects.accelerate.plugin import MegatronLMPlugin
from megalith.dialects.accelerate.plugin_settings import (
    PRECISIONS,
    require_dense_masks,
    run_config,
    token_multiple,
)
from megalith.dialects.accelerate.process_state import let_main_process_save, on_every_rank
from megalith.dialects.accelerate.published_weights import (
    GatheredParameter,
    family_of_module,
    fill_module,
    gather_state,
    load_module,
    origins,
    shard_parameters,
)
from megalith.dialects.accelerate.replica_loader import filled_up_rows, host_copy
from megalith.dialects.accelerate.script_batches import (
    LABELS,
    TYPES_IGNORED,
    WRONG_IDS,
    check_ids,
    checked_batch,
    filled_up,
    is_right_padded,
    next_tokens,
    require_loss_and_logits_alone,
    require_no_token_types,
    split_rows,
)
from megalith.dialects.accelerate.script_optimizer import EngineOptimizer, Pass, PassLoss
from megalith.errors import CheckpointError, ConfigError, shorten
from megalith.models.loss import Loss
from megalith.parallel.data.data_parallel import reshard_parameters
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.planner.layout import with_auto
from megalith.training.build import build_model, resolve_config, vocabulary_rows
from megalith.training.process import detect_machine, prepare_process

STATE = "megalith"  # the folder of our checkpoint in that of save_state
GROUPS = "optimizer_groups.json"
FROM_LOGITS = (
    "a loss computed from the model's logits has no gradient here: a pipeline makes its backward passes in the call, "
    "and no rank holds whole logits in them; give the model labels and use outputs.loss, or give MegatronLMPlugin a "
    "custom_loss_function"
)


class NotPrepared(ConfigError, AttributeError):
    """A prepared model was asked for what only the script's own one has."""


def _refused(name: str, way: str) -> Any:
    def method(self: MegatronEngine, *args: Any, **options: Any) -> Any:
        raise NotPrepared(
            f"the prepared model's {name} would reach no weights, which are sharded over the ranks; {way}"
        )

    return method


class MegatronEngine(nn.Module):
    """A prepared model. `engine(**batch)` takes this replica's samples and gives what the Hugging Face model would.

    Every rank calls it alike; the ranks of a replica with the same samples.
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
        """`module` is emptied: its weights go to the ranks. Raises ConfigError where it cannot be trained so."""
        super().__init__()
        processes = dist.get_world_size() if dist.is_initialized() else 1
        self.plugin, self.device = plugin, device
        family, theirs = family_of_module(module)
        require_loss_and_logits_alone({**theirs, "output_router_logits": False})  # of which there is a note
        self._dtype = next(module.parameters()).dtype
        precision = PRECISIONS[mixed_precision]
        if precision == "fp32" and self._dtype in (torch.bfloat16, torch.float16):
            precision = "bf16" if self._dtype == torch.bfloat16 else "fp16"
        checkpoints = any(getattr(one, "gradient_checkpointing", False) for one in module.modules())
        given, self.notes = run_config(
            plugin, family, theirs, precision, processes, device.type, checkpoints, scaler
        )
        given = resolve_config(given, None)
        prepare_process(given, device.index or 0)
        machine = detect_machine(given, device)
        given = given.with_settings(
            {"parallel.moe_static_dispatch": False}
        )  # a script's batches differ in size
        self.run, chosen = with_auto(given, processes, machine)
        self.notes += chosen
        self.mesh = self._mesh(self.run, processes)
        self.model = build_model(self.run, self.mesh, device)
        let_main_process_save()
        self.groups = load_module(module, family, self.run.model, self.model.chunks)
        reshard_parameters(self.model.chunks)
        self.optimizer: EngineOptimizer | None = None
        self._origins = origins(module, self.groups)
        if optimizer is not None:
            self.set_optimizer(optimizer)
        sharded = shard_parameters(module, device)
        self._origins = {name: [sharded[id(p)] for p in found] for name, found in self._origins.items()}
        if self.optimizer is not None:
            self.optimizer.trained = {id(sharded[own]) for own in self.optimizer.trained}
        self._sharded = dict(module.named_parameters(remove_duplicate=False))
        self._module = [module]  # in a list: it is no part of this module
        self.custom: Any = (
            None  # what makes micro-batches and losses, where the script has its own: train_steps.py
        )
        self.sources: list[Any] = []
        """What yields batches beside the script's dataloaders."""
        self.consumed_samples = 0
        self.loaded_from: str | Path | None = None
        """The folder of the last `load_checkpoint`."""
        self._loaded_step = self._loads = 0
        self._eod = theirs.get("eos_token_id") if plugin.eod_mask_loss else None
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._ids = TokenIds(self.run.model.vocab_size, WRONG_IDS)

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Trains by the script's optimizer, of its parameters before `prepare` or of `parameters()` after it."""
        if self.optimizer is not None:
            raise ConfigError(
                "prepare was given a second optimizer; one trains the model: put its parameters into groups"
            )
        self.optimizer = EngineOptimizer(
            self.model, optimizer, self.run.optim, self._origins, self.run.train.precision
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The whole model's under the script's own names: shapes and dtypes, but neither values nor gradients."""
        seen: set[int] = set()
        for name, parameter in self._sharded.items():
            if not (remove_duplicate and id(parameter) in seen):
                seen.add(id(parameter))
                yield (f"{prefix}.{name}" if prefix else name), parameter

    @property
    def config(self) -> Any:
        """The Hugging Face model's own."""
        return self._module[0].config

    @property
    def iteration(self) -> int:
        """Steps of the optimizer so far, those before a resume included."""
        return self._loaded_step + (0 if self.optimizer is None else self.optimizer.steps)

    def _mesh(self, config: RunConfig, processes: int) -> Mesh:
        if processes == 1:
            return Mesh.alone()
        experts = config.model.num_experts is not None
        return build_mesh(config.parallel, processes, self.device.type, has_experts=experts)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_module", [None])[0]
            if module is None or not hasattr(type(module), name):
                raise
            raise NotPrepared(
                f"the prepared model has no {name}: its {type(module).__name__} is sharded over the ranks; use "
                f"accelerator.unwrap_model(model).{name}, on every rank, or call it before prepare "
                "(recomputation: MegatronLMPlugin(recompute_granularity=…))"
            ) from None

    state_dict = _refused("state_dict", "use accelerator.get_state_dict(model), on every rank")
    load_state_dict = _refused("load_state_dict", "load before prepare, or use accelerator.load_state")
    apply = _refused("apply", "apply functions before prepare")
    half = _refused("half", 'give Accelerator mixed_precision="fp16"')
    bfloat16 = _refused("bfloat16", 'give Accelerator mixed_precision="bf16"')
    double = _refused("double", "there is float32, bf16 and fp16: Accelerator(mixed_precision=…)")
    __deepcopy__ = _refused("deepcopy", "copy accelerator.unwrap_model(model), on every rank")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of the step, as the optimizer's does."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def forward(self, input_ids: Tensor | None = None, *others: Any, **batch: Any) -> Any:
        """The outputs of transformers: `loss` where there are labels, the same on every rank; `logits` [batch, seq,
        vocab] of this replica, where there are none or the plugin's return_logits says so.

        In training (`train()`, gradients enabled) it makes forward and backward passes; else forward passes alone.
        """
        if others or isinstance(input_ids, Mapping):
            raise ConfigError(
                f"the model was called with {1 + len(others)} arguments without names, the first a "
                f"{type(input_ids).__name__}; give input_ids alone so, and the others by name: model(**batch)"
            )
        if input_ids is not None:
            batch["input_ids"] = input_ids
        asked = checked_batch(batch)
        if self.run.model.causal and asked.get("token_type_ids") is not None:
            self._drop_token_types(asked.pop("token_type_ids"))
        asked = {name: self._placed(value) for name, value in asked.items()}
        if asked["position_ids"] is None:
            asked["position_ids"] = self._positions(asked["attention_mask"])
        if not (self.plugin.custom_get_batch_function or self.plugin.custom_train_step_class):
            check_ids(self._ids, asked, causal=self.run.model.causal)
        trains = self.training and torch.is_grad_enabled()
        loss = logits = None
        if self.custom is not None or any(asked[name] is not None for name in LABELS):
            micro_batches, objective = self._micro_batches(asked)
            with on_every_rank("the prepared model, with labels"):
                passes = self._train if trains else self._evaluate
                loss = passes(micro_batches, objective)
            if (items := asked.get("num_items_in_batch")) is not None:
                loss = loss * (self._tokens(micro_batches) / torch.as_tensor(items, device=self.device))
        if loss is None or self.plugin.return_logits:
            logits = _NoGradient.apply(self._logits(asked), self._anchor, FROM_LOGITS)
        return self._outputs(loss, logits, batch.get("return_dict"))

    def _drop_token_types(self, types: Tensor) -> None:
        require_no_token_types(self._on_host(types), self._module[0])
        if TYPES_IGNORED not in self.notes:
            self.notes.append(TYPES_IGNORED)
            PartialState().print(f"note: {TYPES_IGNORED}", flush=True)

    def _placed(self, value: Any) -> Any:
        """What decides the passes is read on the host; a script's own functions get tensors of the device."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device) if self.custom is not None else self._on_host(value)

    def _on_host(self, value: Tensor) -> Tensor:
        return host_copy(value, GradientState().active_dataloader, *self.sources)

    def _outputs(self, loss: Tensor | None, logits: Tensor | None, return_dict: bool | None) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        outputs = CausalLMOutputWithPast(loss=loss, logits=logits)
        whole = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
        return outputs if whole else outputs.to_tuple()

    def _train(self, micro_batches: Sequence[Batch], objective: Loss | None) -> Tensor:
        if self.optimizer is None:
            raise ConfigError(
                "the model was prepared without an optimizer; give both to one call of prepare, or eval()"
            )
        self.model.parameters.clear_gradients()  # of a step, which are kept apart
        scale = self.optimizer.loss_scale.scale
        value = self.model.backward(micro_batches, objective, loss_scale=scale)
        made = Pass(self.optimizer, self.optimizer.gradients.take(), self.model.tallies)
        self.model.parameters.clear_gradients()
        self.consumed_samples += self.mesh.dp.size * sum(len(batch.input_ids) for batch in micro_batches)
        return PassLoss.apply(self._anchor, value.detach(), made)

    def _evaluate(self, micro_batches: Sequence[Batch], objective: Loss | None) -> Tensor:
        total, tokens = self.model.evaluate(micro_batches, objective)
        told = "this loss was made in eval(), without a backward pass; call train() before"
        return (
            _NoGradient.apply(total / tokens, self._anchor, told)
            if torch.is_grad_enabled()
            else total / tokens
        )

    def _micro_batches(self, batch: Mapping[str, Any]) -> tuple[list[Batch], Loss | None]:
        """This replica's samples as num_micro_batches micro-batches of one size, and their loss; None: the model's."""
        rows, count = len(batch["input_ids"]), self.plugin.num_micro_batches
        if self.custom is not None:
            parts, objective = self.custom.micro_batches(batch, count)
        else:
            parts, objective = [self._next_tokens(batch, self._masked_rows(rows), self._eod)], None
        whole = [filled_up(part, token_multiple(self.plugin)) for part in parts]
        if self.custom is None:
            whole = split_rows(whole[0], count, 2 if self.run.parallel.overlaps else 1)
        first = self.consumed_samples + self.mesh.dp.rank * sum(len(part.input_ids) for part in whole)
        for part in whole:
            part.sample_numbers = torch.arange(first, first + len(part.input_ids))
            first += len(part.input_ids)
        return whole, objective

    def _next_tokens(self, batch: Mapping[str, Any], masked_rows: int, eod: int | None) -> Batch:
        """Raises ConfigError for a mask that this model or layout does not have."""
        part = next_tokens(batch, masked_rows, eod)
        if part.padding is not None and part.document_ends is None:
            require_dense_masks(self.run, part.padding)
        return part

    def _positions(self, mask: Tensor | None) -> Tensor | None:
        """Return the positions that the model derives from a mask in transformers; None: it counts all tokens."""
        if mask is None or self.config.model_type != "opt":
            return None
        of_padding = (
            self.run.model.max_position_embeddings - 1
        )  # row −1 + 2 of its table, which stands last in ours
        return (mask.long().cumsum(1) - 1).masked_fill(mask == 0, of_padding)

    def _masked_rows(self, rows: int) -> int:
        """How many samples at the end only fill up the batch of the dataloader that the script loops over."""
        return filled_up_rows(GradientState().active_dataloader, rows)

    def _tokens(self, micro_batches: Sequence[Batch]) -> Tensor:
        own = sum(batch.loss_mask.sum(dtype=torch.float64) for batch in micro_batches)
        return all_reduce_no_grad(own.to(self.device), self.mesh.dp).float()

    @torch.no_grad()
    def _logits(self, batch: Mapping[str, Any]) -> Tensor:
        whole = self._next_tokens(batch, 0, None)
        apart = whole.document_ends is not None or whole.padding is not None
        seq = whole.input_ids.shape[1]
        counted = bool((whole.position_ids == torch.arange(seq, device=whole.position_ids.device)).all())
        ends_padded = is_right_padded(batch.get("attention_mask"))
        self.model.eval()
        if counted and (not apart or ends_padded):  # no token sees what comes after it
            return self.model(whole.input_ids)
        if self.mesh.pp.size * self.mesh.cp.size > 1:
            raise ConfigError(
                "logits of sequences that are padded at their beginning or packed are not had under pipeline or "
                "context parallelism; pad them at the end, or leave return_logits out"
            )
        part = whole.to(self.device)
        chunk = self.model.chunks[0]
        return chunk(
            part.input_ids,
            position_ids=part.position_ids,
            document_ends=part.document_ends,
            padding=part.padding,
        )

    def published_state(self) -> dict[str, Tensor]:
        """The whole model's tensors under the names of Hugging Face's files, float32, on every rank's CPU."""
        reshard_parameters(self.model.chunks)
        return gather_state(self.groups, self.model.chunks, self.mesh.world, self.device)

    def hugging_face_module(self) -> nn.Module:
        """The script's model with the weights of now, on the CPU, in its type. Every rank calls it."""
        module, state, version = self._module[0], self.published_state(), self._weights_version

        def is_outdated() -> bool:
            return self._weights_version != version

        fill_module(module, state, self._dtype, self._sharded, self._has_gradients, is_outdated)
        return module.train(self.training)

    @property
    def _weights_version(self) -> tuple[int, int]:
        return self._loads, 0 if self.optimizer is None else self.optimizer.steps

    def _has_gradients(self) -> bool:
        step = () if self.optimizer is None else self.optimizer.gradients.sums
        return self.training and any(grad is not None for grad in step)

    def optimizer_of(self, parameters: Any) -> EngineOptimizer:
        """What trains these: of this model, those that the script had before `prepare`, or of `hugging_face_module`.

        Raises ConfigError where not all that are trained are among them.
        """
        if self.optimizer is None:
            raise ConfigError(
                "there are no gradients to clip; give model and optimizer to one call of prepare"
            )
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        known = {id(one.sharded if isinstance(one, GatheredParameter) else one) for one in given}
        trained = [name for name, one in self._sharded.items() if id(one) in self.optimizer.trained]
        left_out = [name for name in trained if id(self._sharded[name]) not in known]
        if left_out:
            raise ConfigError(
                f"gradients are clipped together, but of the model's {len(trained)} trained parameters {len(left_out)} "
                f"are not among the {len(given)} that are given ({shorten(left_out)}); give model.parameters()"
            )
        return self.optimizer

    def save_checkpoint(self, output_dir: str | Path) -> None:
        """What `save_state` calls: everything of model and optimizer, for any layout. Every rank calls it."""
        reshard_parameters(self.model.chunks)
        folder, keeps = Path(output_dir) / STATE, self.optimizer is not None and not self.plugin.no_save_optim
        record = RunRecord(
            step=self.iteration,
            consumed_samples=self.consumed_samples,
            config=self.run.to_tree(),
            loss_scale=self.optimizer.loss_scale.state() if keeps else {},
        )
        saver = Saver(folder, self.mesh.world, unpadded_rows=vocabulary_rows(self.run), keep_last=1)
        inner = self.optimizer.inner if keeps else None
        saver.save(record, self.model.chunks, inner, amax_shards(self.model.amaxes, self.mesh.world))
        if saver.last.error is not None:
            raise saver.last.error
        if self.mesh.world.rank == 0:
            self.config.save_pretrained(output_dir)
            if keeps:
                self.optimizer.save_groups(Path(output_dir) / GROUPS)
        if self.plugin.legacy_bin:
            save_shard_files(Path(output_dir), record, self.model, inner, vocabulary_rows(self.run))

    def load_checkpoint(self, input_dir: str | Path) -> None:
        """What `load_state` calls: what `save_checkpoint` saved in whatever layout. Every rank calls it."""
        folder, rows, world = Path(input_dir) / STATE, vocabulary_rows(self.run), self.mesh.world
        loads = self.optimizer is not None and not self.plugin.no_load_optim
        what = ("model", "optimizer") if loads else ("model",)
        checkpoint = open_checkpoint(folder, what, world=world) or open_shard_files(input_dir, what, world)
        if checkpoint is None:
            raise CheckpointError(
                f"there is no checkpoint in {folder}; give load_state the folder of a save_state"
            )
        reshard_parameters(self.model.chunks)
        load_model(checkpoint, self.model.chunks, rows, world)
        if loads:
            load_optimizer(checkpoint, self.optimizer.inner, rows, self.model.chunks, world)
            load_amaxes(checkpoint, self.model.amaxes, world)
            self.optimizer.loss_scale.load_state(checkpoint.manifest.loss_scale)
            self.optimizer.load_groups(Path(input_dir) / GROUPS)
            self.optimizer.zero_grad()
        self._loaded_step = checkpoint.manifest.step - (0 if self.optimizer is None else self.optimizer.steps)
        self.consumed_samples = checkpoint.manifest.consumed_samples
        self.loaded_from, self._loads = input_dir, self._loads + 1


class _NoGradient(torch.autograd.Function):
    """A tensor that no backward pass can start from: it says why."""

    @staticmethod
    def forward(ctx, value: Tensor, anchor: Tensor, told: str) -> Tensor:
        ctx.told = told
        return value.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise ConfigError(ctx.told)
