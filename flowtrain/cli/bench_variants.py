"""What `flowtrain bench` compares: values on the axes of the modes (contract C8), each at its own best.

Colocated, encoder and backbone take turns on every device. `{devices}` stands for as many ranks as the config has
producers and consumers, so that all variants have the same devices; cores are divided evenly among them.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowtrain.errors import ConfigError

COLOCATED = (
    "mode=monolithic",
    "allocation.placement=null",
    "producers.num={devices}",
    "producers.layout=null",
    "producers.threads=null",
    "consumers.num={devices}",
    "consumers.layout=null",
    "consumers.threads=null",
)

AUTO = (
    "mode=flow",
    "allocation.placement=auto",
    "allocation.profile=auto",
    "producers.num=null",
    "producers.threads=null",
    "consumers.num=null",
    "consumers.threads=null",
)

ONE_PROCESS = (*COLOCATED, "producers.num=1", "consumers.num=1", "packing.policy=dynamic")

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "flow": ("mode=flow",),
    "disaggregated": ("mode=disaggregated",),
    "barrier_step": ("mode=disaggregated", "pool.exchange=barrier_step"),
    "monolithic": (*COLOCATED, "packing.policy=arrival"),
    "monolithic_dynamic": (*COLOCATED, "packing.policy=dynamic"),
    "one_process": ONE_PROCESS,
    "auto": AUTO,
    "without_pool": ("mode=flow", "pool.exchange=barrier_step"),
    "without_allocator": ("mode=flow", "allocation.policy=uniform"),
    "without_scheduler": ("mode=flow", "packing.policy=arrival"),
}
"""Name in `--modes` → overrides of the config. The last three change one axis of `flow` each, as the paper's
ablations do; `one_process` is `monolithic_dynamic` as one rank with all threads; `auto` is what the allocator chooses
by a profile that it makes first."""


def overrides_of(name: str, devices: int) -> tuple[str, ...]:
    """Those of a variant on so many devices; what stands behind a `+` is an override of its own.

    >>> overrides_of("flow+packing.policy=ffd", devices=2)
    ('mode=flow', 'packing.policy=ffd')

    Raises:
        ConfigError: no variant has this name.
    """
    base, *more = name.split("+")
    if base not in VARIANTS or not all("=" in override for override in more):
        raise ConfigError(
            f"--modes: {name} is not known: give one of {', '.join(VARIANTS)}, or one with keys of its own, such as "
            f"flow+packing.policy=ffd"
        )
    return (*(override.format(devices=devices) for override in VARIANTS[base]), *more)


DEFAULT = "flow,disaggregated,barrier_step,monolithic,monolithic_dynamic"
