"""How GPUs are and what links them: heat, clocks, power, memory and its errors, asked of the driver by NVML (the
package nvidia-ml-py).

A run reads its GPUs at every log interval, while they work: the figures stand in the line of that step, the hottest,
slowest and least busy GPU's of all ranks, and a GPU that is slowed by heat or power, whose memory fails, or that waits
for memory is named when that begins. One slow GPU slows all: they meet in every collective. `megalith doctor` reads the
same.

`megalith doctor` also measures how fast NCCL (on a CPU machine gloo) is over what links them. Every pair of GPUs
makes an all-reduce of 64 MB, one pair after the other, in a process for each GPU. A pair that is far slower than the
best one is named: its link is what every collective over it waits for.
"""

from __future__ import annotations

import itertools
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalith.comm.collectives import Axis, gather_json
from megalith.hardware import DATASHEETS, local_device_info
from megalith.launch.pool import Pool, RankFailed
from megalith.planner.topology import NVLINK, read_links
from megalith.report.doctor import BAD, GOOD, WARN, Check, check_driver, make_check

SLOWED = {
    0x08: "slowed by hardware (heat or power)",
    0x20: "slowed for heat by the driver",
    0x40: "slowed for heat by hardware",
    0x80: "slowed by the power supply's brake",
}
"""Bits of NVML's reasons for low clocks that are faults. Its power cap (0x04) is how a busy GPU runs, idle is none."""


@dataclass(frozen=True)
class GpuState:
    """One GPU at one moment. What the driver does not tell is None."""

    name: str
    temperature: int | None = None
    """°C."""
    utilization: int | None = None
    """Per cent of the last moments in which a kernel ran."""
    power: float | None = None
    """W."""
    power_limit: float | None = None
    memory_used: int | None = None
    """Bytes, of all processes."""
    memory_total: int | None = None
    clock: int | None = None
    """MHz of the SMs."""
    max_clock: int | None = None
    slowed: int = 0
    """Bits of SLOWED."""
    ecc_errors: int | None = None
    """Memory errors that could not be corrected since the driver was loaded."""
    rows_pending: bool = False
    """A row of the memory is replaced at the next reset."""
    rows_failed: bool = False
    """A row of the memory could not be replaced."""
    alloc_retries: int | None = None
    """Times since the last look that PyTorch found no memory, gave back what it kept free, and asked again."""

    def __str__(self) -> str:
        """`NVIDIA H200 | 60 °C, 100 % | 80161 / 143771 MB | 612 / 700 W | 1755 / 1980 MHz`"""
        pairs = [
            (self.memory_used and self.memory_used // 2**20, self.memory_total and self.memory_total // 2**20, "MB"),
            (self.power and round(self.power), self.power_limit and round(self.power_limit), "W"),
            (self.clock, self.max_clock, "MHz"),
        ]  # fmt: skip
        parts = [f"{used} / {most} {unit}" for used, most, unit in pairs if None not in (used, most)]
        heat = f"{self.temperature} °C, {self.utilization} %"
        return " | ".join([self.name, heat.replace("None", "?"), *parts])

    def faults(self) -> list[str]:
        """What is wrong with it, each with what to do; none of a healthy one."""
        found = []
        if reasons := [text for bit, text in SLOWED.items() if self.slowed & bit]:
            found.append(
                f"{' and '.join(reasons)}, at {self.temperature} °C and {self.clock} of {self.max_clock} MHz: look at "
                "its cooling and power supply"
            )
        if self.ecc_errors:
            found.append(
                f"{self.ecc_errors} memory errors that ECC could not correct: reset it, and replace it if they return"
            )
        if self.rows_failed:
            found.append("a row of its memory could not be replaced: replace the GPU")
        elif self.rows_pending:
            found.append("a row of its memory waits to be replaced: reset it")
        if self.alloc_retries:
            found.append(
                f"its memory is full or in pieces, and all its kernels waited {self.alloc_retries} times while PyTorch "
                "gave back what it kept free and asked anew: recompute more (parallel.recompute_granularity), or make "
                "train.micro_batch_size smaller"
            )
        return found


def read_gpu(uuid: str) -> GpuState | None:
    """The state of the GPU with this UUID (`GPU-…`); None without nvidia-ml-py or where the driver does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # no package, no driver, a container or MIG slice that is not shown
        return None

    def ask(function: str, *arguments: object) -> Any:
        try:
            return getattr(pynvml, function)(gpu, *arguments)
        except (pynvml.NVMLError, AttributeError):  # not supported by this GPU, driver or version
            return None

    rates, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    _, _, pending, failed = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # its name before driver 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    name = ask("nvmlDeviceGetName") or "GPU"
    return GpuState(
        name=name if isinstance(name, str) else name.decode(),
        temperature=ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
        utilization=rates and rates.gpu,
        power=power and power / 1000,
        power_limit=limit and limit / 1000,
        memory_used=memory and memory.used,
        memory_total=memory and memory.total,
        clock=ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
        max_clock=ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
        slowed=(reasons or 0) & sum(SLOWED),
        ecc_errors=ask(
            "nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
        rows_pending=bool(pending),
        rows_failed=bool(failed),
    )


def gpu_uuid(device: torch.device | int) -> str:
    """As NVML names the GPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class GpuMonitor:
    """`read` at each log interval, on every rank. `tell` is called with what begins to be wrong, on the first."""

    def __init__(self, device: torch.device, world: Axis, tell: Callable[..., None]):
        """A collective call, where the ranks have GPUs."""
        self._world, self._tell = world, tell
        self._device = device
        self._uuid = gpu_uuid(device) if device.type == "cuda" else None
        self._retries = 0  # until the last look
        self._told: set[tuple[int, str]] = set()
        self._shown = False
        first = self._uuid and read_gpu(self._uuid)
        self.enabled = device.type == "cuda" and all(gather_json(first is not None, world))

    def read(self, step: int) -> dict[str, float]:
        """The keys that the step's line has besides; on the first rank alone. A collective call where `enabled`."""
        if not self.enabled:
            return {}
        own = replace(read_gpu(self._uuid) or GpuState("GPU"), alloc_retries=self._new_retries())
        states = gather_json([socket.gethostname(), asdict(own)], self._world, to_first=True)
        gpus = [(host, GpuState(**state)) for host, state in states]
        if gpus and not self._shown:
            self._shown = True
            self._tell(f"[0] {gpus[0][1]}", event="gpu_state", step=step)
        for rank, (host, gpu) in enumerate(gpus):
            self._name(step, rank, host, gpu)
        return gpu_metrics([gpu for _, gpu in gpus]) if gpus else {}

    def begin(self) -> None:
        """After the first step, whose compilation and searches for kernels ask for memory that no other step does."""
        if self.enabled:
            self._new_retries()

    def _new_retries(self) -> int:
        before, stats = self._retries, torch.cuda.memory_stats(self._device)
        self._retries = stats.get("num_alloc_retries", 0)
        return self._retries - before

    def _name(self, step: int, rank: int, host: str, gpu: GpuState) -> None:
        faults = gpu.faults()
        for fault in faults:
            kind = fault.partition(",")[0]  # of one that lasts the figures change
            if (rank, kind) not in self._told:
                self._told.add((rank, kind))
                text = f"warning: the GPU of rank {rank} on {host} ({gpu.name}): {fault}"
                self._tell(text, event="gpu", step=step, rank=rank, host=host)
        if not faults:
            self._told = {told for told in self._told if told[0] != rank}


def gpu_metrics(gpus: Sequence[GpuState]) -> dict[str, float]:
    """The worst of all GPUs by each measure, as far as the driver tells it."""
    columns = {
        "gpu_temperature": (max, [gpu.temperature for gpu in gpus]),
        "gpu_utilization": (min, [gpu.utilization for gpu in gpus]),
        "gpu_power_w": (max, [gpu.power for gpu in gpus]),
        "gpu_memory_gb": (max, [gpu.memory_used and gpu.memory_used / 1e9 for gpu in gpus]),
        "gpu_clock_mhz": (min, [gpu.clock for gpu in gpus]),
        "gpu_ecc_errors": (sum, [gpu.ecc_errors for gpu in gpus]),
        "gpu_alloc_retries": (max, [gpu.alloc_retries for gpu in gpus]),
    }
    return {
        name: worst(known)
        for name, (worst, values) in columns.items()
        if (known := [value for value in values if value is not None])
    }


MESSAGE = 64 * 2**20  # bytes of an all-reduce
REPEATS = 10
SLOW_PAIR = 0.6  # of the fastest pair's rate
HOT = 85  # °C


def check_devices(timeout: float = 300.0, measured: bool = True) -> Iterator[Check]:
    """Of every GPU and, where `measured`, pair of GPUs; of a machine without, that gloo works."""
    if not torch.cuda.is_available():
        built = "torch is built for CPUs" if torch.version.cuda is None else "torch sees no CUDA device"
        do = "a GPU machine: look at nvidia-smi, and install a CUDA build of torch"
        yield Check("devices", GOOD, f"{local_device_info('cpu').name}; {built}", do)
        if measured:
            yield check_gloo(timeout)
        return
    count = torch.cuda.device_count()
    yield check_driver(driver_version(), torch.version.cuda or "0")
    for number in range(count):
        yield from check_gpu(number)
    yield Check("NCCL", GOOD, ".".join(map(str, torch.cuda.nccl.version())))
    if count == 1:
        return
    yield from check_links(count)
    if measured:
        yield from check_pairs(count, timeout)


def driver_version() -> str | None:
    """NVIDIA's driver's, as the kernel module, else NVML, tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        if found := re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.[\d.]+)", text):
            return found[1]
    except OSError:
        pass
    try:
        import pynvml

        pynvml.nvmlInit()
        told = pynvml.nvmlSystemGetDriverVersion()
        return told if isinstance(told, str) else told.decode()
    except Exception:  # no package, or a container that does not show it
        return None


def check_gpu(number: int) -> Iterator[Check]:
    """One GPU: whether it is known and free, its heat, clocks and memory errors."""
    name, properties = f"GPU {number}", torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    capability = f"{properties.major}.{properties.minor}"
    found = f"{properties.name}, {total / 1e9:.0f} GB, compute capability {capability}"
    known = properties.name in DATASHEETS
    yield make_check(name, found, known, "its peak is not known: no MFU is reported, all else works")
    used = (total - free) / total
    do = "another process uses it: look at nvidia-smi, and start the run when it is gone"
    yield make_check(f"{name}: memory", f"{free / 1e9:.1f} GB free", used < 0.1, do)
    state = read_gpu(gpu_uuid(number))
    if state is None:
        yield Check(
            f"{name}: health", WARN, "the driver is not asked", "install nvidia-ml-py, the extra [gpu]"
        )
        return
    faults = state.faults()
    if faults:
        yield Check(f"{name}: health", BAD, str(state), "; ".join(faults))
    else:
        hot = state.temperature is not None and state.temperature >= HOT
        ecc = "" if state.ecc_errors is None else f" | {state.ecc_errors} uncorrected memory errors"
        yield make_check(f"{name}: health", f"{state}{ecc}", not hot, "it is hot: look at its cooling")


def check_links(count: int) -> Iterator[Check]:
    """What links the GPUs, and whether each reads the others' memory."""
    uuids = {number: gpu_uuid(number) for number in range(count)}
    rows, plain = [], []
    for number in range(count):
        links = read_links(uuids[number], {peer: uuid for peer, uuid in uuids.items() if peer != number})
        told = [links.get(peer, "?") if peer != number else "-" for peer in range(count)]
        rows.append(f"{number}: {' '.join(told)}")
        plain += [f"{number}-{peer}" for peer, link in links.items() if link != NVLINK and number < peer]
    do = f"no NVLink between {', '.join(plain)}: keep tensor parallelism to the others, or use pipeline or data"
    yield make_check("NVLink", "; ".join(rows), not plain, do)
    closed = [
        f"{one}-{other}"
        for one, other in itertools.permutations(range(count), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    do = "NCCL then copies through the host: look at ACS in the BIOS, at MIG, and at the container's devices"
    yield make_check(
        "peer access", f"not between {', '.join(closed)}" if closed else "between all", not closed, do
    )


def check_gloo(timeout: float) -> Check:
    """Two processes of this machine meet and make an all-reduce."""
    name, pool = "gloo, 2 processes", Pool(2, timeout)
    try:
        rate = pool.run(all_reduce_rates, [(0, 1)])[0][0, 1]
    except RankFailed as error:
        do = "the processes of a job meet on the loopback interface: look whether this machine has one, and a firewall"
        return Check(name, BAD, str(error).strip().splitlines()[-1], do)
    finally:
        pool.close()
    return Check(name, GOOD, f"all-reduce of 64 MB at {rate / 1e9:.1f} GB/s")


def check_pairs(count: int, timeout: float) -> Iterator[Check]:
    """The all-reduce between every pair of GPUs, and over all."""
    pool = Pool(count, timeout, "cuda")
    pairs = list(itertools.combinations(range(count), 2))
    groups = [*pairs, tuple(range(count))] if count > 2 else pairs
    try:
        found = pool.run(all_reduce_rates, groups)
    except RankFailed as error:
        do = "set NCCL_DEBUG=INFO and try again; look at peer access and /dev/shm above"
        yield Check("all-reduce", BAD, str(error).strip().splitlines()[-1], do)
        return
    finally:
        pool.close()
    rates = {group: each[group] for group in groups for each in found if group in each}
    yield from check_pair_rates({pair: rates[pair] for pair in pairs})
    if count > 2:
        yield Check(f"all-reduce over {count}", GOOD, f"64 MB at {rates[groups[-1]] / 1e9:.1f} GB/s a GPU")


def check_pair_rates(rates: Mapping[tuple[int, int], float]) -> Iterator[Check]:
    """Rates in bytes a second by pair: a line of all, and one for each that is far below the fastest."""
    told = ", ".join(f"{one}-{other} {rate / 1e9:.0f}" for (one, other), rate in rates.items())
    yield Check("all-reduce by pair", GOOD, f"64 MB in GB/s: {told}")
    best = max(rates.values())
    for (one, other), rate in rates.items():
        if rate < SLOW_PAIR * best:
            found = f"GPUs {one} and {other}: {rate / 1e9:.1f} GB/s, the fastest pair has {best / 1e9:.1f}"
            do = "every collective over this link waits for it: look at `nvidia-smi nvlink -s` and `nvidia-smi topo -m`"
            yield Check("slow link", WARN, found, do)


def all_reduce_rates(groups: list[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Bus bandwidth, bytes a second, of an all-reduce in each group of ranks, one group after the other.

    A job of a pool: every rank calls it, and gets those of its own groups. The convention is NCCL's tests':
    2 (n - 1) / n times the message over the time, the median of REPEATS.
    """
    rank = dist.get_rank()
    device = (
        torch.device("cuda", rank) if torch.cuda.is_available() and dist.get_backend() != "gloo" else None
    )
    data = torch.zeros(MESSAGE // 4, device=device or "cpu")
    rates = {}
    for ranks in groups:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            times = [_timed_all_reduce(data, group, device) for _ in range(REPEATS + 2)][2:]
            rates[ranks] = 2 * (len(ranks) - 1) / len(ranks) * MESSAGE / statistics.median(times)
        dist.barrier()
    return rates


def _timed_all_reduce(data: torch.Tensor, group: dist.ProcessGroup, device: torch.device | None) -> float:
    if device is not None:
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    dist.all_reduce(data, group=group)
    if device is not None:
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
