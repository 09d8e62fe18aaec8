"""What an emulated run takes by its schedule alone: the simulator, with the run's own steps and seconds (pure).

Messages and the controller cost nothing here, so what a real run takes longer is what the runtime costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowtrain.config.schema import Config
from flowtrain.data.order import Order
from flowtrain.emulate.emulation import Emulation
from flowtrain.packing.trace import composed_steps
from flowtrain.plan import Plan
from flowtrain.runtime.inputs import Inputs, composition, costs_of, open_rows
from flowtrain.simulator import Control, Outcome, Simulation, System
from flowtrain.types import Step

FREE = Control(latency_seconds=0.0, answer_seconds=0.0)


@dataclass(frozen=True, slots=True)
class Modelled:
    """A run of this config and plan, ready to be simulated."""

    config: Config
    emulation: Emulation
    plan: Plan
    run_dir: Path

    def play(self, num_steps: int, control: Control = FREE) -> Outcome:
        """Seconds are real ones: scaled and disturbed as those of the emulated devices are."""
        return Simulation(self.system(control), self.emulation.seconds(), self.steps()).run(num_steps)

    def steps(self) -> Iterator[Step]:
        """The steps that the run composes."""
        inputs, rows = self._inputs(), self.emulation.rows(self.config.data.train)
        order = Order.of(self.config, len(rows))
        return composed_steps(composition(inputs), costs_of(inputs).of(1).cost, order.rows(rows))

    def system(self, control: Control = FREE) -> System:
        return System.of_run(self._inputs(), self.emulation.num_devices, control)

    def _inputs(self) -> Inputs:
        train = open_rows(self.config.data.train)
        return Inputs(self.config, self.run_dir, self.emulation.shape, self.plan, train, None, None, None, None)
