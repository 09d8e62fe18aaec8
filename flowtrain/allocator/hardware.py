"""Devices as the allocator sees them: peaks, memory, bandwidths (a direction, a device), and where each is from.

| figure | of |
|---|---|
| `peak_flops` | dense, by compute dtype; float32 without TF32; on `cpu` of one core |
| `memory_bytes`, `memory_bandwidth` | one device; on `cpu` a core's share of a usual machine |
| `link_bandwidth` | between devices of a node: NVLink, xGMI, HCCS, PCIe, or memory copies |
| `network_bandwidth` | between nodes, a device |

What share of these a program reaches is assumed, the same for all: `Efficiency`. `flowtrain profile` replaces it by
what was measured. A node type may be changed with `dataclasses.replace`: a machine that is not here needs no code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flowtrain.errors import PlanError

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a peak that are reached (assumed, not measured).

    Attributes:
        gemm: matrix products with many rows; a sustained bf16 product of an H200 is near 0.8, whole layers reach less.
        attention: scores and values in a fused kernel.
        half_rows: rows (tokens of a pack a device) at which a matrix product reaches half of `gemm`.
        link: share of a link's or a network's bandwidth.
        thread: exponent of the speed of a process with several cores on a CPU.
    """

    gemm: float = 0.70
    attention: float = 0.45
    half_rows: float = 128.0
    link: float = 0.80
    thread: float = 0.90


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of machine; `devices` are the accelerators (or cores) of one."""

    name: str
    devices: int
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: Mapping[str, float]
    link_bandwidth: float
    network_bandwidth: float
    source: str
    latency_seconds: float = 1e-5
    context_bytes: float = 2e9
    efficiency: Efficiency = field(default_factory=Efficiency)

    def peak(self, dtype: str) -> float:
        try:
            return self.peak_flops[dtype]
        except KeyError:
            known = ", ".join(sorted(self.peak_flops))
            raise PlanError(
                f"model.dtype is {dtype} and the peak of {self.name} is known for {known} only: set one of these"
            ) from None

    @property
    def on_cpu(self) -> bool:
        return self.name == "cpu"


def _gpu(
    name: str, gigabytes: float, hbm_tera: float, peaks: tuple[float, ...], link: float, net: float, source: str
) -> NodeType:
    """`peaks`: TFLOP/s of bfloat16, float32 and, where it is known, float64."""
    by_dtype = {dtype: peak * TERA for dtype, peak in zip(("bfloat16", "float32", "float64"), peaks, strict=False)}
    return NodeType(name, 8, gigabytes * GIGA, hbm_tera * TERA, by_dtype, link * GIGA, net * GIGA, source)


HARDWARE: dict[str, NodeType] = {
    node.name: node
    for node in (
        _gpu("a100", 80, 2.039, (312, 19.5, 19.5), 300, 25, "NVIDIA A100 80 GB SXM data sheet; 200 Gb/s a device"),
        _gpu("a800", 80, 2.039, (312, 19.5, 19.5), 200, 25, "NVIDIA A800 80 GB SXM data sheet; 200 Gb/s a device"),
        _gpu("h100", 80, 3.35, (989.4, 66.9, 66.9), 450, 50, "NVIDIA H100 SXM data sheet; 400 Gb/s a device"),
        _gpu("h100-nvl", 94, 3.9, (835, 60, 60), 300, 25, "NVIDIA H100 NVL data sheet, pairs by NVLink; 200 Gb/s"),
        _gpu("h100-pcie", 80, 2.0, (756, 51.2, 51.2), 64, 25, "NVIDIA H100 PCIe data sheet, PCIe 5.0 x16; 200 Gb/s"),
        _gpu("h20", 96, 4.0, (148, 44), 450, 50, "NVIDIA H20 data sheet; 400 Gb/s a device"),
        _gpu("h200", 141, 4.8, (989.4, 66.9, 66.9), 450, 50, "NVIDIA H200 SXM data sheet; 400 Gb/s a device"),
        _gpu("b200", 180, 7.7, (2250, 75, 37), 900, 50, "NVIDIA DGX B200 data sheet; 400 Gb/s a device"),
        _gpu("gb200", 186, 8.0, (2500, 80, 40), 900, 50, "NVIDIA GB200 NVL72 data sheet; 400 Gb/s a device"),
        _gpu("mi300x", 192, 5.3, (1307.4, 163.4, 163.4), 448, 50, "AMD Instinct MI300X data sheet, seven xGMI links"),
        _gpu("l40s", 48, 0.864, (362, 91.6), 32, 12.5, "NVIDIA L40S data sheet, PCIe 4.0 x16; 100 Gb/s a device"),
        _gpu("l4", 24, 0.3, (121, 30.3), 32, 12.5, "NVIDIA L4 data sheet, PCIe 4.0 x16; 100 Gb/s a device"),
        _gpu("a10", 24, 0.6, (125, 31.2), 32, 12.5, "NVIDIA A10 data sheet, PCIe 4.0 x16; 100 Gb/s a device"),
        _gpu("a10g", 24, 0.6, (70, 35), 32, 12.5, "NVIDIA A10G data sheet, PCIe 4.0 x16; 100 Gb/s a device"),
        _gpu("ascend910b", 64, 1.6, (320, 80), 196, 25, "public descriptions of Atlas 800T A2, unconfirmed; 200 Gb/s"),
        NodeType(
            "cpu",
            devices=16,
            memory_bytes=4 * GIGA,
            memory_bandwidth=10 * GIGA,
            peak_flops={"bfloat16": 213e9, "float32": 60e9, "float64": 30e9},
            link_bandwidth=5 * GIGA,
            network_bandwidth=1.25 * GIGA,
            source="matrix products of one server core with AVX-512; 10 Gb/s Ethernet",
            context_bytes=0.7e9,
        ),
    )
}
"""Name in `--device` → node of that kind."""


def node_type(name: str) -> NodeType:
    """A row of the table, by its name or by the name that a driver gives (`NVIDIA H100 80GB HBM3`)."""
    words = _words(name)
    for known in sorted(HARDWARE, key=len, reverse=True):
        wanted = _words(known)
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))) and (
            known != "cpu" or len(words) == 1
        ):
            return HARDWARE[known]
    raise PlanError(f"no device is known as {name!r}: choose one of {', '.join(HARDWARE)}")


def _words(name: str) -> list[str]:
    return name.lower().replace("-", " ").split()


@dataclass(frozen=True, slots=True)
class NodePool:
    """`num_nodes` machines of one kind."""

    node: NodeType
    num_nodes: int

    def __post_init__(self) -> None:
        assert self.num_nodes > 0, self
        assert self.node.devices > 0, self

    @property
    def devices(self) -> int:
        return self.node.devices * self.num_nodes


Cluster = tuple[NodePool, ...]

MOST_DEVICES = 2**18
"""Of a cluster: as many as addresses of the pool tell owners apart. A plan for so many takes a minute."""


def num_devices(cluster: Iterable[NodePool]) -> int:
    return sum(pool.devices for pool in cluster)
