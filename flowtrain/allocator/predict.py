"""Samples per second of a plan on the machine that a profile was made on (pure).

A step is played on the sides' processes, order by order, with the profile's seconds:

    producers   e1 e2 e3 e4 ·· b1  b2  b3  b4 ·          e: encode of a pack's images   b: their backward
    consumers      c1····c2····c3····c4····  u           c: pack, forward and backward  u: reduce and update
                └ fill                 drain ┘

| run | seconds of a step |
|---|---|
| trainable encoder, two sides | from the first encode to the last update: nothing of the next step may begin before |
| frozen encoder, two sides | those of the slower side: producers run ahead across steps |
| one process | the sum of everything, reading rows included |
| several colocated ranks | of the rank that has most: its encodes, packs and backwards; then both updates |

While both sides are busy each is slower, as was measured with both at once; the share of time in which they are follows
from the play itself. On CPUs no step is shorter than all its busy threads divided by the cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowtrain.allocator.profile import Part, Profile
from flowtrain.types import Role

Seconds = list[list[float]]
"""Of every pack's order, step by step."""

ROUNDS = 4
"""Of finding the share of time in which both sides are busy: each corrects the one before, and two would do."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The part of a plan that a prediction depends on."""

    colocated: bool
    producers: int
    producer_threads: int
    consumers: int
    consumer_threads: int
    cores: int
    on_cpu: bool = True


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a mean step: busy seconds are those of one process of the side."""

    samples_per_second: float
    step_seconds: float
    producer_seconds: float
    consumer_seconds: float
    update_seconds: float


def predict(profile: Profile, setup: Setup) -> Prediction:
    """What a steady run of this setup does, start and checkpoints aside."""
    return Predictor(profile).predict(setup)


class Predictor:
    """Predicts any number of setups: what a pack takes by the profile is looked up once for each number of threads."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._found: dict[tuple[Role, Part, int, bool, bool], Seconds] = {}

    def predict(self, setup: Setup) -> Prediction:
        """What a steady run of this setup does, start and checkpoints aside."""
        if setup.colocated:
            return self._colocated(setup) if setup.consumers == 1 else self._ranks(setup)
        both_busy = dict.fromkeys((Role.PRODUCER, Role.CONSUMER), 0.0)
        for _ in range(ROUNDS):
            found = self._apart(setup, both_busy)
            both_busy[Role.PRODUCER] = min(1.0, found.consumer_seconds / found.step_seconds)
            both_busy[Role.CONSUMER] = min(1.0, found.producer_seconds / found.step_seconds)
        return found

    def _colocated(self, setup: Setup) -> Prediction:
        profile, threads = self.profile, setup.consumer_threads

        def mean(role: Role, part: Part) -> float:
            return sum(map(sum, self._seconds(role, part, threads, colocated=True))) / len(profile.steps)

        encode, train = mean(Role.PRODUCER, "forward"), mean(Role.CONSUMER, "forward")
        if profile.trainable_encoder:
            encode += mean(Role.PRODUCER, "backward")
        update = sum(profile.update_seconds(role, threads, colocated=True) for role in (Role.PRODUCER, Role.CONSUMER))
        rest = profile.overhead_seconds + profile.rows_per_step * profile.read_seconds
        step = encode + train + update + rest
        return Prediction(profile.rows_per_step / step, step, encode, train, update)

    def _ranks(self, setup: Setup) -> Prediction:
        """Colocated ranks that all work at once, each as fast as a process whose neighbours are busy."""
        profile, threads, number = self.profile, setup.consumer_threads, setup.consumers

        def seconds(role: Role, part: Part) -> Seconds:
            return self._seconds(role, part, threads, together=True)

        encode, train = seconds(Role.PRODUCER, "forward"), seconds(Role.CONSUMER, "forward")
        back = seconds(Role.PRODUCER, "backward") if profile.trainable_encoder else [[0.0] * len(e) for e in encode]
        update = sum(profile.update_seconds(role, threads) for role in (Role.PRODUCER, Role.CONSUMER))
        step_seconds = 0.0
        for packs, e, t, b in zip(profile.steps, encode, train, back, strict=True):
            ranks = [0.0] * number
            for of_pack in sorted(map(sum, zip(e, t, b, strict=True)), reverse=True):
                ranks[ranks.index(min(ranks))] += of_pack
            played = max(ranks) + update
            if setup.on_cpu:
                reading = profile.read_seconds * sum(pack.rows for pack in packs)
                played = max(played, ((sum(ranks) + number * update) * threads + reading) / setup.cores)
            step_seconds += played
        step = step_seconds / len(profile.steps)
        producing, consuming = (sum(map(sum, of)) / len(profile.steps) / number for of in (encode, train))
        return Prediction(profile.rows_per_step / step, step, producing, consuming, update)

    def _apart(self, setup: Setup, both_busy: Mapping[Role, float]) -> Prediction:
        """`both_busy`: share of a side's busy time in which the other side is busy, too."""
        profile = self.profile
        threads = {Role.PRODUCER: setup.producer_threads, Role.CONSUMER: setup.consumer_threads}

        def seconds(role: Role, part: Part) -> Seconds:
            alone, both = (self._seconds(role, part, threads[role], together=together) for together in (False, True))
            share = both_busy[role]
            return [[a + (b - a) * share for a, b in zip(*step, strict=True)] for step in zip(alone, both, strict=True)]

        updates = [profile.update_seconds(role, number) for role, number in threads.items()]
        update = max(updates)
        encode, train = seconds(Role.PRODUCER, "forward"), seconds(Role.CONSUMER, "forward")
        back = seconds(Role.PRODUCER, "backward") if profile.trainable_encoder else [[0.0] * len(e) for e in encode]
        step_seconds = producer_seconds = consumer_seconds = 0.0
        for packs, e, t, b in zip(profile.steps, encode, train, back, strict=True):
            producing, consuming = sum(e) + sum(b), sum(t)
            producer, consumer = producing / setup.producers, consuming / setup.consumers
            if profile.trainable_encoder:
                played = play(e, t, b, setup.producers, setup.consumers, profile.call_seconds) + update
            else:
                played = max(producer, consumer + updates[1])
            if setup.on_cpu:
                busy = producing * setup.producer_threads + consuming * setup.consumer_threads
                reading = profile.read_seconds * sum(pack.rows for pack in packs)
                played = max(played, (busy + reading) / setup.cores)
            step_seconds += played
            producer_seconds += producer
            consumer_seconds += consumer
        num = len(profile.steps)
        step = step_seconds / num
        return Prediction(profile.rows_per_step / step, step, producer_seconds / num, consumer_seconds / num, update)

    def _seconds(
        self, role: Role, part: Part, threads: int, *, colocated: bool = False, together: bool = False
    ) -> Seconds:
        key = role, part, threads, colocated, together
        if key not in self._found:
            self._found[key] = [
                [
                    self.profile.seconds(
                        role,
                        part,
                        pack.encode if role is Role.PRODUCER else pack.train,
                        threads=threads,
                        colocated=colocated,
                        together=together,
                    )
                    for pack in step
                ]
                for step in self.profile.steps
            ]
        return self._found[key]


def play(
    encode: Sequence[float],
    train: Sequence[float],
    back: Sequence[float],
    num_producers: int,
    num_consumers: int,
    call_seconds: float = 0.0,
) -> float:
    """Seconds of one step of packs in this order, from the first encode to the end of the last backward.

    Pack k is encoded by the producer that is free first, trained by consumer k mod `num_consumers` behind the pack
    before it there, and its backward runs on the producer that encoded it, behind that one's encodes and backwards.

    >>> play([1.0, 1.0], [2.0, 2.0], [0.5, 0.5], 1, 1)
    5.5
    """
    free = [0.0] * num_producers
    owner, ready = [], []
    for seconds in encode:
        producer = free.index(min(free))
        free[producer] += seconds
        owner.append(producer)
        ready.append(free[producer] + (call_seconds if seconds else 0.0))
    at = [0.0] * num_consumers
    end = 0.0
    for k, seconds in enumerate(train):
        rank = k % num_consumers
        at[rank] = max(at[rank], ready[k]) + seconds
        end = max(end, at[rank])
        if back[k]:
            free[owner[k]] = max(free[owner[k]], at[rank] + call_seconds) + back[k]
            end = max(end, free[owner[k]])
    return end
