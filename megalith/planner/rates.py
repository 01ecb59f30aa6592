"""Rates of a chip, measured by `megalith plan calibrate` or scaled from another chip by the ratio of datasheets.

A table has the rates of GEMMs and attention by shape, of collectives by kind, link, ranks and bytes, of memory, and of
kernel launches. GEMMs and attention of other sizes are interpolated by the logarithms of their sizes. A collective of
another size has the rate of the measured size whose ratio to it is closest to 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from megalith.config import RunConfig
from megalith.config.rules.auto_settings import Machine
from megalith.errors import ConfigError, nearest_of
from megalith.hardware import DATASHEETS, GIGA, TERA, Datasheet, device_info
from megalith.planner.topology import NVLINK, PCIE

NETWORK = "network"
HOP = {NVLINK: 1e-6, PCIE: 5e-6, NETWORK: 3e-6}  # additional seconds per rank of a ring
START = 8e-6  # latency of a collective, seconds
TILE, SPLIT_K = (128, 256), 4096  # output tile of a GEMM per SM; inner dimension per split


@dataclass(frozen=True)
class Wiring:
    """Links and memory of a chip. Bandwidths are per direction."""

    memory: float
    """GB (10^9 bytes) available to PyTorch."""
    inside: float
    """GB/s from a GPU to all other GPUs of the node together."""
    outside: float
    """GB/s of the GPU's network card to other nodes."""
    link: str = NVLINK
    processors: int = 132
    """Number of SMs."""


# NVLink one way by generation (V100 150, A100 300, H100 450, B200 900; A800 200, H800 200); PCIe 4 and 5 32 and 64.
# Network: the card a GPU that NVIDIA's own systems of the generation have (DGX A100 200 Gb/s, H100 400, B200 400).
# fmt: off
WIRING: dict[str, Wiring] = {
    "Tesla V100-SXM2-16GB":  Wiring(16.9, 150, 12.5, processors=80),
    "Tesla V100-SXM2-32GB":  Wiring(34.0, 150, 12.5, processors=80),
    "NVIDIA A100-SXM4-40GB": Wiring(42.3, 300, 25, processors=108),
    "NVIDIA A100-SXM4-80GB": Wiring(85.0, 300, 25, processors=108),
    "NVIDIA A800-SXM4-80GB": Wiring(85.0, 200, 25, processors=108),
    "NVIDIA A100 80GB PCIe": Wiring(85.0, 32, 12.5, PCIE, 108),
    "NVIDIA H100 80GB HBM3": Wiring(85.0, 450, 50),
    "NVIDIA H800":           Wiring(85.0, 200, 50),
    "NVIDIA H100 PCIe":      Wiring(85.0, 64, 25, PCIE, 114),
    "NVIDIA H200":           Wiring(150.1, 450, 50),
    "NVIDIA H20":            Wiring(102.0, 450, 50, processors=78),
    "NVIDIA B200":           Wiring(191.5, 900, 50, processors=148),
    "NVIDIA GB200":          Wiring(198.0, 900, 50, processors=152),
    "NVIDIA L40S":           Wiring(47.6, 32, 12.5, PCIE, 142),
    "NVIDIA L4":             Wiring(23.6, 32, 6, PCIE, 58),
    "NVIDIA GeForce RTX 4090": Wiring(25.2, 32, 3, PCIE, 128),
    "NVIDIA GeForce RTX 5090": Wiring(33.7, 64, 3, PCIE, 170),
}
# fmt: on
SHORT_NAMES = {
    "v100": "Tesla V100-SXM2-32GB",
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "a800": "NVIDIA A800-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h100-80gb": "NVIDIA H100 80GB HBM3",
}
"""Full name of the chip for each short name that would be ambiguous. Other names are shortened by dropping the maker:
H800, L40S, RTX 4090.
"""
MAKER = ("nvidia", "tesla", "geforce")


@dataclass(frozen=True)
class Rates:
    """Rates of one type of GPU: GEMMs, attention, memory, links and host."""

    device: str
    source: str
    """Origin of the rates, printed with a plan."""
    matmuls: dict[str, list[list[float]]]
    """Measured GEMMs by dtype: lists [m, k, n, TFLOP/s] for the product of an m × k and a k × n matrix."""
    attention: list[list[float]]
    """[sequences, heads, sequence length, head dim, forward TFLOP/s, backward TFLOP/s], causal: half of the matrix."""
    memory: float
    """Memory bandwidth in GB/s, counting bytes read plus bytes written."""
    collectives: list[list[Any]]
    """[kind, link, ranks, MB sent per rank, ms]; kind: all_gather, reduce_scatter, all_to_all, copy (copy engine)."""
    launch: float = 5.6
    """Host microseconds per operator."""
    host_link: float = 50
    """GB/s between device and host, one way."""
    host_adam: float = 3.9
    """10^9 parameters per second that the CPU cores of one GPU update with Adam."""
    wiring: Wiring = field(default_factory=lambda: WIRING["NVIDIA H200"])

    def machine(self, gpus: int, gpus_per_node: int) -> Machine:
        """Return the machine that a run on `gpus` of these chips would detect."""
        per_host, memory = min(gpus_per_node, gpus), int(self.wiring.memory * 1e9)
        linked = self.wiring.link == NVLINK
        return Machine(per_host, compiled=True, nvlink=linked, memory=memory, ranks=gpus)

    def matmul(self, m: int, k: int, n: int, dtype: str, factor: float = 1.0) -> float:
        """Return the seconds of a GEMM. `factor` is the GEMM's rate relative to the table's rate."""
        if min(m, k, n) < 1:
            return 0.0
        return _matmul(self.key, m, k, n, dtype) / factor

    def attention_flops(self, seq: float, head_dim: int) -> tuple[float, float]:
        """Return the FLOP/s of causal attention, forward and backward."""
        return _attention_flops(self.key, seq, head_dim)

    def collective_time(self, kind: str, link: str, ranks: int, sent: float, bandwidth: float) -> float:
        """Return the seconds of a collective.

        Args:
            kind: all_gather, reduce_scatter, all_to_all or copy.
            link: the slowest link between the ranks.
            ranks: number of ranks.
            sent: bytes per rank.
            bandwidth: bytes/s to assume for a link that the table does not have.
        """
        if ranks == 1 or sent <= 0:
            return 0.0
        hops = (ranks - 1) * HOP[link]
        rows = _collectives(self.key, kind, link, ranks) if link == self.wiring.link else []
        if not rows:
            return START + hops + sent / bandwidth
        size, seconds = min(rows, key=lambda row: abs(math.log(row[0] / sent)))
        rate = size / max(seconds - START, 1e-9)
        return START + hops + sent / rate

    @property
    def key(self) -> str:
        """Key of this table in the module's caches. If a table is measured again, it gets another key."""
        _TABLES[self.device + self.source] = self
        return self.device + self.source

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


_TABLES: dict[str, Rates] = {}


@cache
def _attention_flops(key: str, seq: float, head_dim: int) -> tuple[float, float]:
    rows = _TABLES[key].attention
    forward, backward = _near([row[2:4] for row in rows], [row[4:6] for row in rows], (seq, head_dim))
    return forward * TERA, backward * TERA


@cache
def _collectives(key: str, kind: str, link: str, ranks: int) -> list[tuple[float, float]]:
    """Return the measured (bytes per rank, seconds) of collectives for the nearest number of ranks."""
    rows = [row for row in _TABLES[key].collectives if row[:2] == [kind, link]]
    nearest = min((row[2] for row in rows), key=lambda size: abs(math.log(size / ranks)), default=0)
    return sorted((row[3] * 1e6, row[4] / 1e3) for row in rows if row[2] == nearest)


@cache
def _matmul(key: str, m: int, k: int, n: int, dtype: str) -> float:
    rates = _TABLES[key]
    rows = rates.matmuls[dtype]
    (tera,) = _near(
        [row[:3] for row in rows], [[row[3] / _waves(rates, *row[:3])] for row in rows], (m, k, n)
    )
    return 2.0 * m * k * n / (tera * TERA * _waves(rates, m, k, n)) + 2e-6


def _waves(rates: Rates, m: float, k: float, n: float) -> float:
    """Return the utilization of the SMs by the output's tiles, or by split-K tiles if that is higher."""
    tiles = math.ceil(m / TILE[0]) * math.ceil(n / TILE[1])
    at_once = rates.wiring.processors
    return max(
        count / (math.ceil(count / at_once) * at_once) for count in (tiles, tiles * max(k // SPLIT_K, 1))
    )


def _near(
    points: Sequence[Sequence[float]], values: Sequence[Sequence[float]], at: Sequence[float]
) -> list[float]:
    """Interpolate `values`, weighted by the inverse squared distance between logarithms."""
    weights = [
        1 / (sum(math.log(max(a, 1) / max(b, 1)) ** 2 for a, b in zip(point, at)) + 1e-3) for point in points
    ]
    return [
        sum(w * value[i] for w, value in zip(weights, values)) / sum(weights) for i in range(len(values[0]))
    ]


def measured() -> Rates:
    """Return the table that the package includes, measured on an H200."""
    return read_rates((files("megalith.planner") / "h200.json").read_text(encoding="utf-8"), "h200.json")


def read_rates(text: str, name: str) -> Rates:
    """Read a table that `calibrate` wrote. Raises ConfigError for any other file."""
    try:
        content = json.loads(text)
        requirements = ("device", "source", "matmuls", "attention", "memory", "collectives")
        if missing := [name for name in requirements if not isinstance(content, dict) or name not in content]:
            raise ValueError(f"it has no {', '.join(missing)}")
        wiring = content.pop("wiring", None)
        if wiring is None:
            wiring = asdict(WIRING.get(content["device"], WIRING["NVIDIA H200"]))
        table = Rates(**content, wiring=Wiring(**wiring))
        if not table.matmuls["bf16"] or not table.attention:
            raise ValueError("it lacks the rates of GEMMs in bf16 or of attention")
        _check_numbers(table)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{name} is not a table of rates: {error}; `megalith plan calibrate --output FILE` writes one"
        ) from None
    return table


def _check_numbers(table: Rates) -> None:
    """Raise ValueError for a row with the wrong length or with values that are not above 0."""
    wiring = table.wiring
    rows = [(f"matmuls.{dtype}", row, 4) for dtype, rows in table.matmuls.items() for row in rows]
    rows += [("attention", row, 6) for row in table.attention]
    rows += [("collectives", row[2:], 3) for row in table.collectives]
    rows += [
        (
            "memory, launch, host_link or host_adam",
            [table.memory, table.launch, table.host_link, table.host_adam],
            4,
        )
    ]
    rows += [("wiring", [wiring.memory, wiring.inside, wiring.outside, wiring.processors], 4)]
    for name, row, count in rows:
        if len(row) != count or not all(
            isinstance(each, int | float) and 0 < each < math.inf for each in row
        ):
            raise ValueError(f"{name} has {row}, not {count} numbers above 0")
    if wiring.link not in (NVLINK, PCIE) or not isinstance(table.device, str):
        raise ValueError(
            f"its device is {table.device!r} and its link {wiring.link!r}, not {NVLINK} or {PCIE}"
        )


def rates_of(device: str | None = None, device_json: str | Path | None = None) -> Rates:
    """Return the rates of a chip.

    Args:
        device: the driver's name, or a short one like H100 or RTX 4090; None: H200.
        device_json: a file written by `plan calibrate`, instead of a name.

    Raises:
        ConfigError: both arguments are set, the file is invalid, or the name is unknown.
    """
    if device and device_json:
        raise ConfigError(
            f"--device is {device} and --device-json is {device_json}, which contains the rates of a GPU too; "
            "pass only one of the two"
        )
    if device_json is not None:
        try:
            return read_rates(Path(device_json).read_text(encoding="utf-8"), str(device_json))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{device_json} cannot be read: {error}; pass a file written by `megalith plan calibrate`"
            ) from None
    names = {_short(name): name for name in WIRING} | SHORT_NAMES
    name = names.get(_short("H200" if device is None else device))
    shipped = measured()
    if name == shipped.device:
        return shipped
    if name is None:
        suggestions = nearest_of(_short(device).upper(), [name.upper() for name in names])
        raise ConfigError(
            f"there is no GPU {device!r} in the planner's tables{suggestions}; or measure it with "
            "`megalith plan calibrate` and pass the file as --device-json"
        )
    return _by_ratio(shipped, name)


def _short(name: str) -> str:
    """Shorten a GPU's name: `NVIDIA GeForce RTX 4090` → `rtx-4090`."""
    return "-".join(word for word in name.lower().replace("-", " ").split() if word not in MAKER)


def _by_ratio(table: Rates, name: str) -> Rates:
    """Scale measured rates to another chip: GEMMs and attention by peak FLOP/s, memory and links by bandwidth."""
    here, there = DATASHEETS[table.device], DATASHEETS[name]
    wiring, measured_wiring = WIRING[name], table.wiring
    compute = _peak(there) / _peak(here)
    matmuls = {"bf16": [[*row[:3], row[3] * compute] for row in table.matmuls["bf16"]]}
    if there.fp8 is not None and here.fp8 is not None:
        matmuls["fp8"] = [[*row[:3], row[3] * there.fp8 / here.fp8] for row in table.matmuls["fp8"]]
    return replace(
        table,
        device=name,
        source=(
            f"{table.device}'s measured rates scaled by the ratio of the datasheets, not measured on {name}"
        ),
        matmuls=matmuls,
        attention=[[*row[:4], row[4] * compute, row[5] * compute] for row in table.attention],
        memory=table.memory * there.bandwidth / here.bandwidth,
        collectives=[
            [row[0], wiring.link, *row[2:4], row[4] * measured_wiring.inside / wiring.inside]
            for row in table.collectives
            if wiring.link == NVLINK or row[0] != "copy"
        ],
        host_link=min(table.host_link, 50 if there.bandwidth > 3000 else 25),
        wiring=wiring,
    )


def _peak(sheet: Datasheet) -> float:
    return sheet.bf16 or sheet.fp16


def check_precision(config: RunConfig, rates: Rates) -> None:
    """Raise ConfigError if the run uses FP8 and the chip has no FP8 matmuls."""
    if config.train.fp8_format is not None and "fp8" not in rates.matmuls:
        raise ConfigError(
            f"train.fp8_format is {config.train.fp8_format}, but {rates.device} has no FP8 matmuls; leave "
            "train.fp8_format out to train in bf16, or choose another --device"
        )


def peak_flops(rates: Rates, dtype: str) -> float | None:
    """Return the dense FLOP/s of the chip's datasheet, or None if unknown."""
    return device_info(rates.device).peak(dtype)


def bytes_per_second(rates: Rates, link: str) -> float:
    """Return the bandwidth of a link without measured collectives, in bytes/s: 90 % of the datasheet."""
    return 0.9 * GIGA * (rates.wiring.outside if link == NETWORK else rates.wiring.inside)
