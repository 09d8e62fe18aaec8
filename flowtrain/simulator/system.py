"""What is simulated: the ranks of both sides, what they wait for, the pool, the controller (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowtrain.plan import Layout
from flowtrain.runtime.exchange import EXCHANGES, Exchange, exchange_of
from flowtrain.simulator.shared_cores import Cores
from flowtrain.types import Role, SampleMeta

if TYPE_CHECKING:
    from flowtrain.runtime.inputs import Inputs


@dataclass(frozen=True, slots=True)
class Control:
    """The controller and the way to it: seconds of a message each way, and of the controller for each answer.

    The defaults are those of Ray actors on one machine: 0.75 ms for a call and its answer, 0.2 ms of them the driver's.
    """

    latency_seconds: float = 2.5e-4
    answer_seconds: float = 2e-4


@dataclass(frozen=True, slots=True)
class System:
    """Ranks are data-parallel ones: the devices of a tensor-parallel group or a pipeline are one rank.

    Attributes:
        num_devices: accelerators, or processes, of all ranks together.
        consumer_group: consumers that run their packs in lock-step (parameters are cut over them); 1: each by itself.
        producer_group: producers that encode together.
        trainable_encoder: gradients go back to the producers.
        reduced_roles: sides on which something trains.
        colocated: producer and consumer of a rank take turns on the same devices.
        packs_held: packs that a consumer has at hand before its oldest is done (`Layout.packs_held`).
        segment_bytes: of the pool, of each producer.
        payload_bytes: of a sample's features.
        cores: of a machine whose ranks share them; None: every rank has a device of its own.
        save_every: steps between two checkpoints, None: none; `save_seconds`: for which every rank that trains stops.
    """

    num_producers: int
    num_consumers: int
    num_devices: int
    segment_bytes: int
    payload_bytes: Callable[[SampleMeta], int]
    trainable_encoder: bool
    reduced_roles: frozenset[Role]
    exchange: Exchange = EXCHANGES["pool"]
    consumer_group: int = 1
    producer_group: int = 1
    colocated: bool = False
    packs_held: int = 1
    control: Control = Control()
    cores: Cores | None = None
    save_every: int | None = None
    save_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert min(self.num_producers, self.num_consumers, self.num_devices, self.segment_bytes) > 0, self
        assert self.num_consumers % self.consumer_group == 0, self
        assert self.num_producers % self.producer_group == 0, self
        assert not self.colocated or self.num_producers == self.num_consumers, self
        assert not self.colocated or self.exchange.within_step, self

    @classmethod
    def of(
        cls,
        *,
        producers: Layout,
        consumers: Layout,
        colocated: bool,
        exchange: str,
        prefill: int = 0,
        num_devices: int,
        segment_bytes: int,
        payload_bytes: Callable[[SampleMeta], int],
        trainable_encoder: bool,
        reduced_roles: frozenset[Role],
        control: Control,
        cores: Cores | None = None,
        save_every: int | None = None,
        save_seconds: float = 0.0,
    ) -> System:
        """The ranks that these layouts make: what a layout says of them is read here only."""
        return cls(
            num_producers=producers.dp_degree,
            num_consumers=consumers.dp_degree,
            num_devices=num_devices,
            segment_bytes=segment_bytes,
            payload_bytes=payload_bytes,
            trainable_encoder=trainable_encoder,
            reduced_roles=reduced_roles,
            exchange=exchange_of(exchange, colocated=colocated, prefill=prefill),
            consumer_group=consumers.dp_shard,
            producer_group=producers.dp_shard,
            colocated=colocated,
            packs_held=consumers.packs_held,
            control=control,
            cores=cores,
            save_every=save_every,
            save_seconds=save_seconds,
        )

    @classmethod
    def of_run(cls, inputs: Inputs, num_devices: int, control: Control, cores: Cores | None = None) -> System:
        """Of a run by its plan; its checkpoints take no time."""
        config, plan = inputs.config, inputs.plan
        return cls.of(
            producers=plan.producers.layout,
            consumers=plan.consumers.layout,
            colocated=plan.placement == "colocated",
            exchange=config.exchange,
            prefill=config.pool.prefill,
            num_devices=num_devices,
            segment_bytes=min(rank.segment_bytes for rank in plan.producers.leading),
            payload_bytes=inputs.sample_bytes,
            trainable_encoder=config.trainable_encoder,
            reduced_roles=inputs.reduced_roles,
            control=control,
            cores=cores,
        )

    def device(self, role: Role, rank: int) -> int:
        """Number of what the rank works on: shared by both sides where they are colocated."""
        return rank if role is Role.PRODUCER or self.colocated else self.num_producers + rank

    @property
    def num_queues(self) -> int:
        return self.num_consumers + (0 if self.colocated else self.num_producers)

    def members(self, role: Role) -> int:
        return self.num_producers if role is Role.PRODUCER else self.num_consumers
