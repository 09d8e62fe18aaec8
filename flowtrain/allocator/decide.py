"""Decides what a config leaves open about its processes, so that the plan can be built from keys alone (pure).

    config + shape + machine (+ sizes of rows, + profile) ──decide──▶ config with placement, layouts and threads set

| key | bound when | else |
|---|---|---|
| `allocation.placement` | it names one, or the mode does | `auto`: the one with the higher predicted rate |
| `num`, `layout`, `threads` of a side | set | what the policy gives, of what launch runs (`runnable`); a CPU: copies |
| `gradient_checkpointing` | set | on where the memory asks for it |

With a profile the rates are predictions from what was measured on this machine (`predict`); without one, those of the
throughput model. The result is a config in which nothing is open, so that deciding again changes nothing. On a
cluster it is the driver that decides, once it has joined and knows the nodes. What cannot be searched (a cluster that
is not joined yet, one GPU for two sides, GPUs that are unknown or of several kinds) keeps one process a side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.allocator.bound import SIDES, given_layout, given_threads, has_open_sizes, side_of
from flowtrain.allocator.devices import devices_of
from flowtrain.allocator.inventory import Inventory
from flowtrain.allocator.modelled import MOST_PER_SIDE, Pick, PickedSide, choices, modelled
from flowtrain.allocator.place import NodeRoom
from flowtrain.allocator.predict import Predictor, Setup, predict
from flowtrain.allocator.profile import Profile
from flowtrain.allocator.room import pack_room
from flowtrain.allocator.stats import DataStats
from flowtrain.config.schema import Config
from flowtrain.plan import Layout, layout_text
from flowtrain.shapes import ModelShape
from flowtrain.types import Role

WORTH = 1.02
"""A profile's prediction must be higher by this factor to choose more processes."""


@dataclass(frozen=True, slots=True)
class Decided:
    """`rate` in samples/s as predicted, None where nothing was open; `notes` say what was compared."""

    config: Config
    rate: float | None = None
    notes: tuple[str, ...] = ()


def decide(
    config: Config,
    shape: ModelShape,
    inventory: Inventory,
    stats: DataStats | None = None,
    profile: Profile | None = None,
    nodes: Sequence[NodeRoom] | None = None,
) -> Decided:
    """See the page above; where nothing can be searched the placement is the mode's.

    `nodes`: of a cluster that was joined, the driver's first.

    Raises:
        PlanError: nothing fits the memory of the GPUs; the sentence has both numbers.
    """
    auto = config.allocation.placement == "auto"
    if not auto and not _is_open(config, inventory, nodes):
        return Decided(config)
    picks = _picks(config, shape, inventory, stats, profile, nodes)
    if not picks:
        return Decided(_with_placement(config, config.placement))
    best = max(picks, key=lambda pick: pick.rate)
    return Decided(_with(config, best), best.rate, tuple(_told(pick) for pick in picks) if len(picks) > 1 else ())


def _is_open(config: Config, inventory: Inventory, nodes: Sequence[NodeRoom] | None) -> bool:
    """Whether numbers are to be chosen. One colocated process has all cores, but no more than one GPU."""
    if config.placement != "colocated":
        return has_open_sizes(config)
    if any(given_layout(config, role) is not None for role in SIDES):
        return False
    cluster = devices_of(config, inventory, nodes)
    return cluster is not None and not cluster[0].node.on_cpu


def _told(pick: Pick) -> str:
    number = pick.consumers.layout.world_size
    ranks = f", {number} ranks" if pick.placement == "colocated" and number > 1 else ""
    return f"{pick.placement}{ranks}: {pick.rate:.4g} samples/s predicted"


def _picks(
    config: Config,
    shape: ModelShape,
    inventory: Inventory,
    stats: DataStats | None,
    profile: Profile | None,
    nodes: Sequence[NodeRoom] | None,
) -> list[Pick]:
    """What each placement that is open could do at best."""
    if profile is None:
        cluster = devices_of(config, inventory, nodes)
        return [] if cluster is None else modelled(config, shape, cluster, stats, nodes)
    picks: list[Pick] = []
    auto = config.allocation.placement == "auto"
    alone = all((given_layout(config, role) or Layout()) == Layout() for role in SIDES)
    if (auto and alone) or config.placement == "colocated":
        picks += _colocated_measured(config, shape, inventory, profile)
    if auto or config.placement != "colocated":
        picks += _measured(config, shape, inventory, profile)
    return picks


def _measured(config: Config, shape: ModelShape, inventory: Inventory, profile: Profile) -> Iterator[Pick]:
    """The best setup by the profile; more processes only where they are worth it, and a GPU for each that had one."""
    best: tuple[float, Setup] | None = None
    predictor, room = Predictor(profile), pack_room(config, shape)
    on_gpu = {stage.role for stage in profile.stages if stage.device.startswith("cuda") and not stage.colocated}
    for producers, p_threads, consumers, c_threads in _setups(config, inventory):
        if not room.holds(consumers, config.pool.bytes // producers):
            continue
        if producers * (Role.PRODUCER in on_gpu) + consumers * (Role.CONSUMER in on_gpu) > inventory.gpus:
            continue
        setup = Setup(False, producers, p_threads, consumers, c_threads, inventory.cpus, on_cpu=not on_gpu)
        rate = predictor.predict(setup).samples_per_second
        more = best is not None and producers + consumers > best[1].producers + best[1].consumers
        if best is None or rate > best[0] * (WORTH if more else 1.0):
            best = rate, setup
    if best is not None:
        yield _copies("disaggregated", best[1], best[0])


def _colocated_measured(config: Config, shape: ModelShape, inventory: Inventory, profile: Profile) -> Iterator[Pick]:
    """One process, then more where nothing is said of their number, the cores divided among them."""
    threads = _colocated_threads(config, inventory)
    on_cpu = all(stage.device == "cpu" for stage in profile.stages)
    is_open = on_cpu and all(
        given_layout(config, role) is None and side_of(config, role).threads is None for role in SIDES
    )
    for number in range(1, min(MOST_PER_SIDE, inventory.cpus) + 1 if is_open else 2):
        if number > 1 and not pack_room(config, shape).holds(number, config.pool.bytes // number):
            break
        each = threads if number == 1 else inventory.cpus // number
        setup = Setup(True, number, each, number, each, inventory.cpus, on_cpu)
        rate = predict(profile, setup).samples_per_second
        yield _copies("colocated", setup, rate)


def _copies(placement: str, setup: Setup, rate: float) -> Pick:
    """Colocated, the threads of a process follow from their number."""
    apart = placement != "colocated"
    producers = PickedSide(Layout(setup.producers), setup.producer_threads if apart else None)
    consumers = PickedSide(Layout(setup.consumers), setup.consumer_threads if apart else None)
    return Pick(placement, producers, consumers, rate)


def _setups(config: Config, inventory: Inventory) -> Iterator[tuple[int, int, int, int]]:
    """Numbers and threads of both sides within the cores, fewest processes first; keys that are set bind."""
    cores = max(2, inventory.cpus)
    numbers = [
        [given.world_size] if (given := given_layout(config, role)) else list(range(1, MOST_PER_SIDE + 1))
        for role in SIDES
    ]
    threads = [[side.threads] if side.threads else choices(cores) for side in (config.producers, config.consumers)]
    every = (
        (producers, p_threads, consumers, c_threads)
        for producers in numbers[0]
        for consumers in numbers[1]
        for p_threads in threads[0]
        for c_threads in threads[1]
        if producers * p_threads + consumers * c_threads <= cores
    )
    yield from sorted(every, key=lambda setup: (setup[0] + setup[2], setup))


def _colocated_threads(config: Config, inventory: Inventory) -> int:
    return given_threads(config, Role.CONSUMER, "colocated") or max(1, inventory.cpus)


def _with_placement(config: Config, placement: str) -> Config:
    if config.allocation.placement != "auto":
        return config
    return config.model_copy(update={"allocation": config.allocation.model_copy(update={"placement": placement})})


def _with(config: Config, pick: Pick) -> Config:
    config = _with_placement(config, pick.placement)
    if pick.placement == "colocated" and pick.consumers == PickedSide():
        return config
    update: dict[str, Any] = {}
    for role, picked in ((Role.PRODUCER, pick.producers), (Role.CONSUMER, pick.consumers)):
        side, layout = side_of(config, role), picked.layout
        changed: dict[str, Any] = {}
        if given_layout(config, role) is None:
            copied = layout == Layout(layout.world_size)
            changed |= {"num": layout.world_size} if copied else {"layout": layout_text(layout)}
        if side.threads is None and picked.threads is not None:
            changed["threads"] = picked.threads
        if picked.recompute and config.recompute(role) is None:
            changed["gradient_checkpointing"] = True
        update[f"{role}s"] = side.model_copy(update=changed)
    return config.model_copy(update=update)
