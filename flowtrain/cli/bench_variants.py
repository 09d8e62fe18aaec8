"""What `flowtrain bench` compares: values on the axes of the modes (contract C8), each at its own best.

In one process encoder and backbone take turns on all cores; the keys of the sides are left to the plan there.
"""

from __future__ import annotations

from collections.abc import Mapping

ONE_PROCESS = (
    "mode=monolithic",
    "producers.num=null",
    "producers.layout=null",
    "producers.threads=null",
    "consumers.num=null",
    "consumers.layout=null",
    "consumers.threads=null",
)

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "flow": ("mode=flow",),
    "disaggregated": ("mode=disaggregated",),
    "barrier_step": ("mode=disaggregated", "pool.exchange=barrier_step"),
    "monolithic": (*ONE_PROCESS, "packing.policy=arrival"),
    "monolithic_dynamic": (*ONE_PROCESS, "packing.policy=dynamic"),
    "without_pool": ("mode=flow", "pool.exchange=barrier_step"),
    "without_allocator": ("mode=flow", "allocation.policy=uniform"),
    "without_scheduler": ("mode=flow", "packing.policy=arrival"),
}
"""Name in `--modes` → overrides of the config. The last three change one axis of `flow` each, as the paper's
ablations do."""

DEFAULT = "flow,disaggregated,barrier_step,monolithic,monolithic_dynamic"
