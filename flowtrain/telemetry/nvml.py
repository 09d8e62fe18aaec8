"""What the GPUs of this node do, read from NVML by one thread: no device context is made, and no rank waits for it.

    thread, every `seconds` ──▶ newest NodeDevices ◀── latest(): whoever is asked for it, at once

A figure that NVML does not give is None, never 0, and `state` says why: of the node where it has no device to ask, of a
device where some of its figures are missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

OK = "ok"
STARTING = "no figures yet"
NOT_INSTALLED = "nvidia-ml-py is not installed"
NO_DEVICE = "no device: NVML lists none"
MIG = "MIG: NVML does not tell the utilisation of a device that is cut into parts"
LOST = "lost: the device has fallen off the bus"

REASONS: Mapping[str, str] = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "no driver: libnvidia-ml.so.1 is not here",
    "NVML_ERROR_DRIVER_NOT_LOADED": "no driver: its kernel module is not loaded",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "driver mismatch: library and kernel module are of two releases, reboot",
    "NVML_ERROR_NO_PERMISSION": "no permission: this user or container may not ask the device",
    "NVML_ERROR_GPU_IS_LOST": LOST,
    "NVML_ERROR_RESET_REQUIRED": "lost: the device waits for a reset",
}
"""NVML's error → what it means to a user."""

THROTTLES: Mapping[int, str] = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clock reasons that slow a busy device down; the others are idleness and chosen clocks."""

NVLINK_FIELDS = (138, 139)
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX: KiB so far over all links."""

ALL_LINKS = 0xFFFFFFFF
GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device at one moment. `pcie` and `nvlink` are bytes a second, both ways together; `throttled` is 1 while
    something slows the clocks down; `throttle` names what does."""

    state: str = OK
    utilization_percent: float | None = None
    memory_used_gib: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    pcie: float | None = None
    nvlink: float | None = None
    throttled: float | None = None
    throttle: str | None = None


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """`state`: why no device is there; `OK` with devices. `final`: it stays so."""

    state: str
    devices: Mapping[int, DeviceSample] = field(default_factory=dict)
    final: bool = False


FIGURES = tuple(part.name for part in fields(DeviceSample) if part.name != "state")


class DeviceSampler:
    """The thread; `close` ends it. It ends by itself where there is nothing to ask."""

    def __init__(self, seconds: float) -> None:
        assert seconds > 0, f"a device is asked every {seconds} s"
        self._seconds = seconds
        self._newest = NodeDevices(STARTING)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()

    def latest(self) -> NodeDevices:
        return self._newest

    def close(self) -> None:
        """A call of the driver that does not return is left to the end of the process."""
        self._stop.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            import pynvml
        except ImportError:
            self._newest = NodeDevices(NOT_INSTALLED, final=True)
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._newest = NodeDevices(reason(pynvml, error), final=True)
            return
        try:
            self._watch(pynvml)
        except pynvml.NVMLError as error:
            self._newest = NodeDevices(reason(pynvml, error), final=True)
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _watch(self, pynvml: Any) -> None:
        devices = [_Device(pynvml, index) for index in range(int(pynvml.nvmlDeviceGetCount()))]
        if not devices:
            self._newest = NodeDevices(NO_DEVICE, final=True)
            return
        while True:
            self._newest = NodeDevices(OK, {device.index: device.sample() for device in devices})
            if self._stop.wait(self._seconds):
                return


class _Device:
    """One device: what it cannot tell is asked for once."""

    def __init__(self, pynvml: Any, index: int) -> None:
        self.index = index
        self._nvml = pynvml
        self._handle: Any = None
        self._untold: set[str] = set()
        self._problem: str | None = None
        self._links: tuple[float, float] | None = None

    def sample(self) -> DeviceSample:
        nvml, self._problem = self._nvml, None
        if self._handle is None:
            self._handle = self._ask("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(self.index))
            if self._handle is None:
                return DeviceSample(self._problem or REASONS["NVML_ERROR_NO_PERMISSION"])
        handle = self._handle
        mig = self._ask("mig", lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
        told: dict[str, Any] = {
            "utilization_percent": self._ask(
                "utilization", lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            ),
            "memory_used_gib": self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB),
            "power_watts": self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "temperature_celsius": self._ask("temperature", lambda: float(nvml.nvmlDeviceGetTemperature(handle, 0))),
            "pcie": self._ask(
                "pcie", lambda: 1000.0 * sum(nvml.nvmlDeviceGetPcieThroughput(handle, way) for way in (0, 1))
            ),
            "nvlink": self._ask("nvlink", self._nvlink),
        }
        bits = self._ask("throttle", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        if bits is not None:
            names = [name for bit, name in THROTTLES.items() if bits & bit]
            told |= {"throttled": float(bool(names)), "throttle": ", ".join(names) or "none"}
        if self._lost:
            return DeviceSample(self._problem or LOST)  # what was told before it went is of the past
        return DeviceSample(self._problem or (MIG if mig else OK), **told)

    @property
    def _lost(self) -> bool:
        return self._problem is not None and self._problem.startswith("lost")

    def _ask(self, figure: str, call: Callable[[], Any]) -> Any:
        if figure in self._untold or self._lost:
            return None
        try:
            return call()
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self._untold.add(figure)
            else:
                self._problem = reason(self._nvml, error)
            return None

    def _nvlink(self) -> float | None:
        """Bytes a second since the sample before; None for the first one."""
        values = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(name, ALL_LINKS) for name in NVLINK_FIELDS])
        for value in values:
            if value.nvmlReturn != self._nvml.NVML_SUCCESS:
                raise self._nvml.NVMLError(value.nvmlReturn)
        now, total = time.monotonic(), 1024.0 * sum(value.value.ullVal for value in values)
        before, self._links = self._links, (now, total)
        return None if before is None or now <= before[0] else max(total - before[1], 0.0) / (now - before[0])


def reason(pynvml: Any, error: Any) -> str:
    """What an error of NVML means; its own words where it is no known state."""
    known = {getattr(pynvml, name): text for name, text in REASONS.items()}
    return known.get(error.value, f"NVML error: {error}")
