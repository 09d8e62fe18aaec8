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
from flowtrain.runtime.exchange import EXCHANGES
from flowtrain.runtime.inputs import Inputs, composition, costs_of, open_rows
from flowtrain.simulator import Control, Outcome, Simulation, System
from flowtrain.sizes import read_sizes
from flowtrain.types import SampleMeta, Step

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
        rows = self._rows()
        return composed_steps(composition(self._inputs()), costs_of(self._inputs()).of(1).cost, rows)

    def system(self, control: Control = FREE) -> System:
        inputs, plan = self._inputs(), self.plan
        consumers = plan.consumers.layout
        return System(
            num_producers=len(plan.producers.leading),
            num_consumers=consumers.dp_degree,
            num_devices=self.emulation.num_devices,
            segment_bytes=plan.producers.ranks[0].segment_bytes,
            payload_bytes=inputs.sample_bytes,
            trainable_encoder=self.config.trainable_encoder,
            reduced_roles=inputs.reduced_roles,
            exchange=EXCHANGES[self.config.exchange],
            consumer_group=consumers.dp_shard,
            producer_group=plan.producers.layout.dp_shard,
            colocated=plan.placement == "colocated",
            control=control,
            packs_held=consumers.packs_held,
        )

    def _inputs(self) -> Inputs:
        train = open_rows(self.config.data.train)
        return Inputs(self.config, self.run_dir, self.emulation.shape, self.plan, train, None, None, None, None)

    def _rows(self) -> Iterator[SampleMeta]:
        """In the order of the run, over and over."""
        pairs = self.emulation.shape.vision.attended_pairs
        rows = [row for row in read_sizes(self.config.data.train, pairs=pairs) if row is not None]
        order = Order(len(rows), self.config.run.seed, self.config.data.shuffle)
        position = 0
        while True:
            yield rows[order.row(position)]._replace(position=position)
            position += 1
