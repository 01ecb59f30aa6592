"""Device checks: every GPU, the links between GPUs, and the measured all-reduce over them.

The all-reduce runs between every pair of GPUs, one pair at a time, with one process per GPU (NCCL; gloo on a machine
without GPUs). A pair far slower than the fastest is reported, because every collective over its link waits for it.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from megalith.doctor.checks import BAD, GOOD, WARN, Check, check_driver, make_check
from megalith.doctor.gpus import gpu_uuid, read_gpu
from megalith.hardware import DATASHEETS, local_device_info
from megalith.launch.pool import Pool, RankFailed
from megalith.planner.topology import NVLINK, read_links

MESSAGE_BYTES = 64 * 2**20  # of an all-reduce
REPEATS = 10
SLOW_PAIR = 0.6  # times the fastest pair's rate
HOT = 85  # °C


def check_devices(timeout: float = 300.0, measured: bool = True) -> Iterator[Check]:
    """Check every GPU and the links between GPUs. On a machine without GPUs, check gloo instead.

    Args:
        timeout: seconds that a measurement may take.
        measured: also measure the all-reduce between every pair of GPUs.
    """
    if not torch.cuda.is_available():
        built = "torch is built for CPUs" if torch.version.cuda is None else "torch sees no CUDA device"
        advice = "a GPU machine: check nvidia-smi, and install a CUDA build of torch"
        yield Check("devices", GOOD, f"{local_device_info('cpu').name}; {built}", advice)
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
    """Return the version of the NVIDIA driver, from the kernel module or else from NVML; None if neither has it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        if match := re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.[\d.]+)", text):
            return match[1]
    except OSError:
        pass
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version if isinstance(version, str) else version.decode()
    except Exception:  # no package, or a container that hides the driver
        return None


def check_gpu(number: int) -> Iterator[Check]:
    """Check one GPU: known model, free memory, temperature, clocks and memory errors."""
    name, properties = f"GPU {number}", torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    capability = f"{properties.major}.{properties.minor}"
    finding = f"{properties.name}, {total / 1e9:.0f} GB, compute capability {capability}"
    is_known = properties.name in DATASHEETS
    yield make_check(
        name, finding, is_known, "its peak FLOP/s is unknown: no MFU is reported, all else works"
    )
    used = (total - free) / total
    advice = "another process uses it: see nvidia-smi, and start the run when it has ended"
    yield make_check(f"{name}: memory", f"{free / 1e9:.1f} GB free", used < 0.1, advice)
    state = read_gpu(gpu_uuid(number))
    if state is None:
        yield Check(
            f"{name}: health",
            WARN,
            "not checked: nvidia-ml-py is missing or the driver does not answer",
            "install the extra [gpu]",
        )
        return
    faults = state.faults()
    if faults:
        yield Check(f"{name}: health", BAD, str(state), "; ".join(faults))
    else:
        hot = state.temperature is not None and state.temperature >= HOT
        ecc = "" if state.ecc_errors is None else f" | {state.ecc_errors} uncorrected memory errors"
        yield make_check(f"{name}: health", f"{state}{ecc}", not hot, "it is hot: check its cooling")


def check_links(count: int) -> Iterator[Check]:
    """Check that all GPUs are linked by NVLink and can access each other's memory."""
    uuids = {number: gpu_uuid(number) for number in range(count)}
    rows, unlinked = [], []
    for number in range(count):
        links = read_links(uuids[number], {peer: uuid for peer, uuid in uuids.items() if peer != number})
        row = [links.get(peer, "?") if peer != number else "-" for peer in range(count)]
        rows.append(f"{number}: {' '.join(row)}")
        unlinked += [f"{number}-{peer}" for peer, link in links.items() if link != NVLINK and number < peer]
    advice = (
        f"no NVLink between {', '.join(unlinked)}: use tensor parallelism only among the other GPUs, or pipeline or "
        "data parallelism"
    )
    yield make_check("NVLink", "; ".join(rows), not unlinked, advice)
    closed = [
        f"{one}-{other}"
        for one, other in itertools.permutations(range(count), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    advice = (
        "NCCL then copies through the host: look at ACS in the BIOS, at MIG, and at the container's devices"
    )
    yield make_check(
        "peer access", f"not between {', '.join(closed)}" if closed else "between all", not closed, advice
    )


def check_gloo(timeout: float) -> Check:
    """Check that two processes on this machine can run an all-reduce over gloo."""
    name, pool = "gloo, 2 processes", Pool(2, timeout)
    try:
        rate = pool.run(all_reduce_rates, [(0, 1)])[0][0, 1]
    except RankFailed as error:
        advice = (
            "a job's processes connect over the loopback interface: check that it exists and has no firewall"
        )
        return Check(name, BAD, str(error).strip().splitlines()[-1], advice)
    finally:
        pool.close()
    return Check(name, GOOD, f"all-reduce of 64 MB at {rate / 1e9:.1f} GB/s")


def check_pairs(count: int, timeout: float) -> Iterator[Check]:
    """Measure an all-reduce between every pair of GPUs, and over all GPUs."""
    pool = Pool(count, timeout, "cuda")
    pairs = list(itertools.combinations(range(count), 2))
    groups = [*pairs, tuple(range(count))] if count > 2 else pairs
    try:
        rank_rates = pool.run(all_reduce_rates, groups)
    except RankFailed as error:
        advice = "set NCCL_DEBUG=INFO and try again; look at peer access and /dev/shm above"
        yield Check("all-reduce", BAD, str(error).strip().splitlines()[-1], advice)
        return
    finally:
        pool.close()
    rates = {group: each[group] for group in groups for each in rank_rates if group in each}
    yield from check_pair_rates({pair: rates[pair] for pair in pairs})
    if count > 2:
        yield Check(f"all-reduce over {count}", GOOD, f"64 MB at {rates[groups[-1]] / 1e9:.1f} GB/s per GPU")


def check_pair_rates(rates: Mapping[tuple[int, int], float]) -> Iterator[Check]:
    """Yield one check with the rates of all pairs (bytes per second), and one for each pair far below the fastest."""
    listed = ", ".join(f"{one}-{other} {rate / 1e9:.0f}" for (one, other), rate in rates.items())
    yield Check("all-reduce by pair", GOOD, f"64 MB in GB/s: {listed}")
    best = max(rates.values())
    for (one, other), rate in rates.items():
        if rate < SLOW_PAIR * best:
            finding = f"GPUs {one} and {other}: {rate / 1e9:.1f} GB/s, the fastest pair has {best / 1e9:.1f}"
            advice = (
                "collectives over this link wait for it: see `nvidia-smi nvlink -s` and `nvidia-smi topo -m`"
            )
            yield Check("slow link", WARN, finding, advice)


def all_reduce_rates(groups: list[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Measure the bus bandwidth (bytes per second) of an all-reduce in each group of ranks, one group at a time.

    Collective over the ranks of a pool. Each gets the rates of its groups. The bandwidth is defined as in
    nccl-tests: 2 (n - 1) / n times the message size over the time, the median of REPEATS.
    """
    rank = dist.get_rank()
    device = (
        torch.device("cuda", rank) if torch.cuda.is_available() and dist.get_backend() != "gloo" else None
    )
    data = torch.zeros(MESSAGE_BYTES // 4, device=device or "cpu")
    rates = {}
    for ranks in groups:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            times = [_timed_all_reduce(data, group, device) for _ in range(REPEATS + 2)][2:]
            rates[ranks] = 2 * (len(ranks) - 1) / len(ranks) * MESSAGE_BYTES / statistics.median(times)
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
