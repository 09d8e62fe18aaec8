"""An emulated rank's place: that of a real one, but for what its stage is and what state it has.

Calls, spans, trace, segment and pool are those of `flowtrain.runtime.stages`. A checkpoint holds what a rank of a run
knows beside parameters: how many updates it has made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowtrain.config.schema import Config
from flowtrain.emulate.emulation import FILE, Emulation
from flowtrain.emulate.meeting import enter
from flowtrain.emulate.seconds import Seconds
from flowtrain.emulate.stages import EmulatedConsumer, EmulatedProducer, EmulatedReader
from flowtrain.parallel.mesh import dp_rank
from flowtrain.pool.arrays import ByteArrays
from flowtrain.runtime.executor import StageReport, StageSpec
from flowtrain.runtime.stages import StageSlot
from flowtrain.types import Module, Role


def make_slot(role: Role) -> EmulatedSlot:
    """As `flowtrain.runtime.shared_executor` asks for one."""
    return EmulatedSlot(role, local=False)


class EmulatedSlot(StageSlot):
    """See the module's page; nothing here loads torch."""

    def _prepare(self, config_json: str) -> str:
        return ""

    def _load_modules(self) -> None:
        """They are here: this module has imported them."""

    def _open_store(self, world_size: int, timeout_seconds: float, spread: bool) -> Any:
        return None

    def _regroup(self, world_size: int, store_address: Any) -> None:
        """There are no collectives to join."""

    def _build(self, spec: StageSpec, config: Config, store: Any) -> StageReport:
        emulation, seconds = _emulated(spec.run_dir, (Path(spec.run_dir) / FILE).stat().st_mtime_ns)
        shape = emulation.shape
        role, rank = spec.rank_plan.role, spec.rank_plan.rank
        if role is Role.READER:
            self.stage = EmulatedReader(config, emulation.rows(config.data.train), emulation.byte_scale)
            return StageReport()
        layout = spec.layout
        here = config.producer_modules if role is Role.PRODUCER else set(Module) - config.producer_modules
        pool = self._pool(config, spec, ByteArrays())
        build = EmulatedProducer if role is Role.PRODUCER else EmulatedConsumer
        self.stage = build(
            role,
            dp_rank(layout, rank),
            config,
            seconds,
            pool,
            enter(Path(spec.run_dir), role, layout, rank),
            tuple(sorted(here - config.frozen)),
            emulation.byte_scale,
            shape.features(config.cut),
            layout.leads(rank),
            layout.begins(rank),
            self._span,
        )
        return StageReport(emulation.peak(role), (), pool.handle())

    def _save(self, folder: str) -> None:
        assert self._spec is not None, "a stage is saved once it is built"
        side = Path(folder) / str(self.role)
        side.mkdir(parents=True, exist_ok=True)
        state = json.dumps({"version": self.stage.version})
        (side / f"{self._spec.rank_plan.rank}.json").write_text(state, encoding="utf-8")

    _hand_over = _save

    def _restore(self, folder: str, version: int) -> None:
        saved: Sequence[Path] = sorted((Path(folder) / str(self.role)).glob("*.json"))
        for file in saved:
            found = json.loads(file.read_text(encoding="utf-8"))["version"]
            assert found == version, f"{file} has version {found}, expected {version}"
        self.stage.version = version

    def _leave(self) -> None:
        """There are no process groups to leave."""


@lru_cache(maxsize=1)
def _emulated(run_dir: str, modified_ns: int) -> tuple[Emulation, Seconds]:
    """Once for all ranks of a process: peers have the same packs, and ask for the seconds of each."""
    emulation = Emulation.read(Path(run_dir))
    return emulation, emulation.seconds()
