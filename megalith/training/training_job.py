"""A complete training run: processes, mesh, restarts and the training loop (trainer.py)."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Store

from megalith.bridge.exporter import export_hf
from megalith.bridge.load import tokenizer_notes
from megalith.checkpoint.memory_snapshots import MemorySnapshots
from megalith.checkpoint.saver import SAVER_THREAD
from megalith.comm.collectives import Axis, any_rank, gather_json
from megalith.config import RunConfig, require_run_config
from megalith.config.rules.auto_settings import Machine
from megalith.config.rules.notes import host_notes, offload_notes, overlap_notes
from megalith.config.rules.run_rules import check_base
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import printable
from megalith.launch.failure import RankLost
from megalith.launch.hang_watch import open_hang_watch
from megalith.launch.heartbeat import Heartbeat, collective_timeout
from megalith.launch.in_process import InProcessRestart
from megalith.launch.launcher import Process, end_distributed, init_distributed, this_process
from megalith.launch.restart import (
    has_saved,
    locked_output_dir,
    pause,
    record_failures,
    this_attempt,
)
from megalith.launch.signals import StopSignals
from megalith.launch.spare import wait_as_spare
from megalith.parallel.apply import compiles
from megalith.planner.fit import memory_warnings, warnings_on_cpu
from megalith.planner.layout import build_layout
from megalith.planner.memory_choices import with_auto
from megalith.planner.micro_batches import micro_batch_notes
from megalith.remote import StorePath
from megalith.report.clock import StartupTimer
from megalith.report.out_of_memory import out_of_memory
from megalith.report.streams import guard_standard_streams
from megalith.training.build import build_run_mesh, prepare
from megalith.training.process import detect_machine, prepare_process
from megalith.training.run_snapshots import RunSnapshots, restarts_in_process
from megalith.training.run_state import Run, Task
from megalith.training.trainer import Trainer, TrainingResult

ABANDON_TIMEOUT = 60.0  # seconds for the snapshots' thread to end after a failure


def train(config: RunConfig, task: Task | None = None) -> TrainingResult:
    """Train a model from its start, or from the checkpoint in `checkpoint.load`.

    Collective over all processes of the run.

    Processes started by torchrun or `launch` connect to each other first.

    Args:
        config: the run's configuration.
        task: the kind of training. Default: pre-training.

    Returns:
        The run's last step, losses and checkpoint.

    Raises:
        ConfigError, DataError, CheckpointError: the run is not possible. Nothing has been written.
    """
    require_run_config(config, "megalith.train")
    settings = config
    wait_as_spare()
    process, attempt, startup_timer = this_process(), this_attempt(), StartupTimer()
    restart = InProcessRestart(process, restarts_in_process(config, task or Task()))
    time.sleep(0 if restart.is_replacement else pause(attempt))
    startup_timer.mark("imports")
    check_base(config)
    config, tokenizer, notes = prepare(config, process.world_size)
    device = prepare_process(config, process.local_rank)
    notes += offload_notes(config, device.type)
    if process.is_first:  # the rank that prints notes
        notes += tokenizer_notes(config.model, tokenizer)
    output, writes = Path(config.train.output_dir), not config.train.skip_train
    with (
        guard_standard_streams() if process.is_first else nullcontext(),
        StopSignals(process.is_first, config.checkpoint.save_when_stopped == "always") as signals,
        locked_output_dir(config, attempt) if process.is_first and writes else nullcontext(False) as resuming,
        record_failures(output, attempt, process.rank),
        restart,
    ):
        job = _Job(
            settings,
            config,
            tokenizer,
            task,
            device,
            process,
            signals,
            restart,
            startup_timer,
            notes,
            resuming,
        )
        while (outcome := job.run()) is None:
            restart.release()
        result, loaded_from = outcome
        end_distributed()
        exported = output / "hf_model"
        is_exported = result.checkpoint == loaded_from and exported.exists()
        if (
            process.is_first
            and writes
            and config.checkpoint.export_hf
            and result.ended == "train_iters"
            and not is_exported
        ):
            written = export_hf(result.checkpoint, exported, replace=True)
            for note in written.notes:
                print(f"note: {printable(note)}", flush=True)
            print(f"wrote {printable(written.path)} ({written.family.architecture})", flush=True)
        return result


@dataclass
class _Job:
    """State that is kept when the run's process groups, model and data loaders are rebuilt."""

    settings: RunConfig
    """The configuration before it was prepared for a number of ranks."""
    config: RunConfig
    tokenizer: Tokenizer | None
    task: Task | None
    device: torch.device
    process: Process
    signals: StopSignals
    restart: InProcessRestart
    startup_timer: StartupTimer
    notes: list[str]
    resuming: bool
    """True on rank 0 if this job is known to have saved a checkpoint, in this attempt or an earlier one."""

    def __post_init__(self) -> None:
        self.snapshots = MemorySnapshots(self.restart.is_aborted) if self.restart.is_active else None

    def run(self) -> tuple[TrainingResult, Path | StorePath | None] | None:
        """Connect the ranks and train.

        Returns the result and the folder of the loaded checkpoint. Returns None to restart in this process because
        another rank has failed.
        """
        try:
            return self._run()
        except Exception as error:
            if not self.restart.survives(error):
                raise
        if any(thread.name == SAVER_THREAD for thread in threading.enumerate()):
            raise RankLost("a save in the background has not ended after another rank's failure")
        # Only now, without the traceback's references to the run, can its memory be released.
        if self.snapshots is not None and not self.snapshots.abandon(ABANDON_TIMEOUT):
            raise RankLost("the snapshot's thread has not ended after another rank's failure")
        self.startup_timer = StartupTimer()
        return None

    def _rendezvous(self) -> Store | None:
        """Wait for the other ranks. Returns the store for the process groups of a restart."""
        store = self.restart.meet()
        if self.process != self.restart.process:  # the job has been resized
            self.process = self.restart.process
            self.config, self.tokenizer, _ = prepare(self.settings, self.process.world_size)
        return store

    def _ranks_that_fail_together(self, machine: Machine, world: Axis) -> int:
        """Return the number of ranks that a failure affects together: those of a host or, if all ranks are on one host,
        of a launcher. Collective.
        """
        if machine.ranks_per_host < world.size:
            return machine.ranks_per_host
        return max(gather_json(self.process.local_world_size, world))

    def _run(self) -> tuple[TrainingResult, Path | StorePath | None]:
        device, restart, runtime = self.device, self.restart, self.config.runtime
        timeout = timedelta(
            minutes=runtime.distributed_timeout_minutes, seconds=self.config.rl.server_timeout
        )
        with self.signals.during_rendezvous() if self.process.world_size > 1 else nullcontext():
            store = self._rendezvous()
            config, process = self.config, self.process
            init_distributed(device, collective_timeout(timeout), store=store)
        writes = not config.train.skip_train
        machine = detect_machine(config, device)
        notes = [*self.notes]
        if process.is_first and self.task is None:
            notes += micro_batch_notes(config, process.world_size, machine)
        config, chosen = with_auto(config, process.world_size, machine)
        notes += chosen + overlap_notes(config, compiles(config, device)) + host_notes(config, machine)
        if machine.memory and writes:
            notes += memory_warnings(build_layout(config, process.world_size), machine.memory)
        elif device.type == "cpu" and writes and process.world_size == process.local_world_size:
            notes += warnings_on_cpu(config, process.world_size)
        mesh = build_run_mesh(config, process.world_size, device.type)
        if self.snapshots is not None:
            self.snapshots.connect(mesh.world, self._ranks_that_fail_together(machine, mesh.world))
        if any_rank(self._resumes(config, mesh.world), mesh.world):
            resume_settings = {
                "checkpoint.load": config.run_folder,
                "checkpoint.load_optim": config.checkpoint.save_optim,
            }
            config = config.with_settings(resume_settings)
        if restart.is_active and config.parallel.symmetric_memory_groups:
            # Their buffers outlive their process groups.
            notes.append("a failure restarts all processes, because parallel.symmetric_memory_groups is set")
            restart = None
        run, heartbeat = None, Heartbeat(mesh, timeout)
        self.startup_timer.mark("settings and processes")
        try:
            with open_hang_watch(heartbeat, process, timeout, Path(config.train.output_dir), restart):
                run = Run(config, self.tokenizer, mesh, device, self.task)
                self.restart.connected()
                memory = RunSnapshots(run, self.snapshots) if self.snapshots is not None else None
                notes = [] if self.restart.generation else notes
                trainer = Trainer(run, heartbeat, self.signals, self.startup_timer, notes, memory, restart)
                return trainer.train(), trainer.loaded_from
        except torch.OutOfMemoryError as error:
            components = (run.model.chunks, run.optimizer) if run else ()
            raise out_of_memory(
                error, config, process.world_size, process.rank, device, *components
            ) from error
        finally:
            self.resuming = self.resuming or (run is not None and run.saver.has_saved)

    def _resumes(self, config: RunConfig, world: Axis) -> bool:
        """Return True on rank 0 if this job has saved a checkpoint. Collective.

        In a restart from memory, the folder is not read, because its storage may be unreachable.
        """
        if self.restart.generation == 0 or self.snapshots.find(world) is not None:
            return self.resuming
        return self.resuming or (self.process.is_first and has_saved(config))
