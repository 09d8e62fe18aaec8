"""Where the figures of a profile made up in a test come from."""

from __future__ import annotations

from flowtrain.allocator.profile import Provenance

MADE = Provenance(
    date="2030-01-01T00:00:00+00:00",
    flowtrain="1",
    python="3",
    torch="2",
    transformers="5",
    device="a processor",
    cores=2,
    config="abc",
    model="m",
    dtype="float32",
    freeze=(),
    data="d",
    rows_measured=(0, 9),
    rows_composed=(10, 19),
    took_seconds=1.0,
)
