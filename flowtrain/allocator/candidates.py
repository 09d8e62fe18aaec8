"""Every candidate of a module on one kind of node, in blocks (vectorised; rules below are the search space, exactly).

| degree | values |
|---|---|
| tp | powers of two that divide the heads, the MLP width and the devices of a node; kv heads may be replicated |
| cp | powers of two, backbone only, such that tp·cp divides the heads |
| pp | powers of two up to the layers, and divisors of the layers; backbone only |
| vpp | 1; 2 and 4 where pp > 1 and pp·vpp divides the layers |
| replicas r·f | every number from 1 to the samples of a step that the devices allow |
| dp_shard f | powers of two that divide the replicas, and the replicas themselves |
| ep | 1; powers of two that divide the experts and f·c |
| pack tokens | those of the job that hold the longest sample, or all where that has a pack of its own |
| recompute | none; full too where a backward runs; what is given |
| threads | on a CPU what is given, else powers of two up to the cores of a node, and all of them; on GPUs 1 |

An encoder is at most a few billion parameters, so cp, pp and ep are the backbone's only. Microbatches ≥ pp is checked
where their number is known (`throughput`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flowtrain.allocator.hardware import NodePool
from flowtrain.allocator.load import RECOMPUTE, CandidateTable, Integers, ModuleLoad
from flowtrain.plan import Layout
from flowtrain.types import Role

VIRTUAL_STAGES = (1, 2, 4)
BLOCK_ROWS = 8192
"""What stays in a core's cache while formulas run over it."""


@dataclass(frozen=True, slots=True)
class Side:
    """What is decided already for a role.

    Attributes:
        threads: of a process on a CPU.
        most: packs that run together at most: copies, times the packs that a pipeline holds.
        recompute: whether layers run again in the backward.
        copies_only: candidates that need no cutting of the module (rN).
    """

    layout: Layout | None = None
    threads: int | None = None
    most: int | None = None
    recompute: bool | None = None
    copies_only: bool = False


@dataclass(frozen=True, slots=True)
class Scope:
    """Part of the search space.

    Attributes:
        devices: candidates of just so many; `least`: of so many at least, `least_recomputed` those with full recompute.
        coarse: some numbers of replicas, pp in powers of two and the extremes of ep only: a first look.
        fine: (tp, cp, pp) of which a coarse scope has everything all the same.
    """

    devices: int | None = None
    least: int = 1
    least_recomputed: int = 1
    coarse: bool = False
    fine: frozenset[tuple[int, int, int]] = frozenset()
    producers: Side = Side()
    consumers: Side = Side()

    def side(self, role: Role) -> Side:
        return self.producers if role is Role.PRODUCER else self.consumers


WHOLE = Scope()

COARSE = 24
"""Numbers of replicas of a coarse scope."""


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [1 << k for k in range(max(0, most).bit_length()) if 1 << k <= most]


def tensor_degrees(load: ModuleLoad, devices_per_node: int) -> list[int]:
    return [
        tp
        for tp in powers_of_two(devices_per_node)
        if _divides_heads(load, tp) and load.mlp_width % tp == 0 and devices_per_node % tp == 0
    ]


def context_degrees(load: ModuleLoad, tp: int, devices: int) -> list[int]:
    if load.role is Role.PRODUCER:
        return [1]
    return [cp for cp in powers_of_two(devices // tp) if _divides_heads(load, tp * cp)]


def pipeline_degrees(load: ModuleLoad, most: int) -> list[int]:
    if load.role is Role.PRODUCER:
        return [1]
    divisors = [pp for pp in range(1, min(load.layers, most) + 1) if load.layers % pp == 0]
    return sorted({*powers_of_two(min(load.layers, most)), *divisors})


def _divides_heads(load: ModuleLoad, degree: int) -> bool:
    kv_fits = load.kv_heads % degree == 0 or degree % load.kv_heads == 0
    return load.heads % degree == 0 and kv_fits


def thread_counts(pool: NodePool, given: int | None) -> list[int]:
    """Devices of one process: cores, of which a config may give a number; or one GPU, whatever its CPU threads."""
    if not pool.node.on_cpu:
        return [1]
    return [given] if given else sorted({*powers_of_two(pool.node.devices), pool.node.devices})


def candidate_blocks(
    load: ModuleLoad,
    pool: NodePool,
    step_samples: int,
    pack_tokens: Sequence[int],
    scope: Scope = WHOLE,
) -> Iterator[CandidateTable]:
    """All candidates by the rules above, in blocks of about `BLOCK_ROWS`; a large block is of one model layout, and its
    columns that do not vary have one row."""
    pending: list[_Piece] = []
    rows_pending = 0
    for replicas, shards, fixed in _pieces(load, pool, step_samples, pack_tokens, scope):
        num = len(shards)
        if num >= BLOCK_ROWS // 4:
            for values in fixed:
                columns = [values[n : n + 1] for n in range(len(values))]
                for start in range(0, num, BLOCK_ROWS):
                    rows = slice(start, start + BLOCK_ROWS)
                    yield CandidateTable(replicas[rows], shards[rows], *columns)
            continue
        at_once = BLOCK_ROWS // max(num, 1)
        for first in range(0, len(fixed), at_once):
            part = fixed[first : first + at_once]
            pending.append(_Piece(replicas, shards, part))
            rows_pending += num * len(part)
            if rows_pending >= BLOCK_ROWS:
                yield _joined(pending)
                pending, rows_pending = [], 0
    if pending:
        yield _joined(pending)


class _Piece(NamedTuple):
    """Candidates of one model layout and ep: each row of `fixed`, the columns behind dp_shard, with every dp_replicate
    and dp_shard."""

    replicas: Integers
    shards: Integers
    fixed: Integers


def _joined(pieces: Sequence[_Piece]) -> CandidateTable:
    replicas = np.concatenate([piece.replicas for piece in pieces for _ in piece.fixed])
    shards = np.concatenate([piece.shards for piece in pieces for _ in piece.fixed])
    times = [len(piece.shards) for piece in pieces for _ in piece.fixed]
    fixed = np.repeat(np.concatenate([piece.fixed for piece in pieces]), times, axis=0)
    return CandidateTable(replicas, shards, *(np.ascontiguousarray(column) for column in fixed.T))


def _pieces(
    load: ModuleLoad, pool: NodePool, step_samples: int, pack_tokens: Sequence[int], scope: Scope
) -> Iterator[_Piece]:
    devices, side = scope.devices, scope.side(load.role)
    layout = side.layout
    holding = sorted((size for size in pack_tokens if load.own_pack or size >= load.longest_tokens), reverse=True)
    recomputes = _recomputes(load, side.recompute)
    light, full = ([kind for kind in recomputes if (RECOMPUTE[kind] == "full") == whole] for whole in (False, True))
    for tp, cp, pp, threads in _models(load, pool, side):
        one = tp * cp * pp * threads
        if layout is not None and (tp, cp, pp) != (layout.tp, layout.cp, layout.pp):
            continue
        together = step_samples if side.most is None else side.most // pp
        most = min((devices or pool.devices) // one, step_samples, together)
        fewest = -(-scope.least // one)
        if most < max(1, fewest) or (devices is not None and (devices % one or devices // one > most)):
            continue
        coarse = scope.coarse and (tp, cp, pp) not in scope.fine and layout is None
        if coarse and pp & (pp - 1):
            continue
        replicas, shards = _shards(most, side.copies_only, coarse)
        if devices is not None:
            exact = replicas == devices // one
            replicas, shards = replicas[exact], shards[exact]
        if layout is not None:
            given = (shards == layout.dp_shard) & (replicas == layout.dp_shard * layout.dp_replicate)
            replicas, shards = replicas[given], shards[given]
        if fewest > 1:
            enough = replicas >= fewest
            replicas, shards = replicas[enough], shards[enough]
        degrees = _ep(load, side.copies_only)
        for ep in sorted({1, max(degrees)}) if coarse else degrees:
            divided = shards * cp % ep == 0
            if not divided.any() or (layout is not None and ep != layout.ep):
                continue
            interleaved = _vpp(load, pp) if layout is None else [layout.vpp]
            enough = divided & (replicas >= -(-scope.least_recomputed // one))
            for kinds, rows in ((light, divided), (full, enough)):
                for sections, within in _by_packs_held(interleaved, replicas, pp, side.most):
                    fixed = [(tp, cp, pp, v, ep, *rest, threads) for v, *rest in product(sections, holding, kinds)]
                    kept = rows & within
                    if fixed and kept.any():
                        yield _Piece((replicas // shards)[kept], shards[kept], np.array(fixed, dtype=np.int64))


def _recomputes(load: ModuleLoad, given: bool | None) -> Sequence[int]:
    if not load.needs_backward:
        return [0]
    return range(len(RECOMPUTE)) if given is None else [int(given)]


def _by_packs_held(
    interleaved: Sequence[int], replicas: Integers, pp: int, most: int | None
) -> Iterator[tuple[Sequence[int], npt.NDArray[np.bool_]]]:
    """Values of vpp with the rows whose packs that run together are not too many: all, or those of each apart."""
    every = np.ones(len(replicas), dtype=bool)
    if most is None or pp == 1:
        yield interleaved, every
        return
    for vpp in interleaved:
        yield [vpp], replicas * Layout(pp=pp, vpp=vpp).packs_held <= most


def _models(load: ModuleLoad, pool: NodePool, side: Side) -> Iterator[tuple[int, int, int, int]]:
    """(tp, cp, pp, threads) of one copy of the module."""
    for threads in thread_counts(pool, side.threads):
        if side.copies_only:
            yield 1, 1, 1, threads
            continue
        for tp in tensor_degrees(load, pool.node.devices // threads):
            for cp in context_degrees(load, tp, pool.devices):
                for pp in pipeline_degrees(load, pool.devices // (tp * cp)):
                    yield tp, cp, pp, threads


@lru_cache(maxsize=64)
def _shards(most: int, copies_only: bool, coarse: bool) -> tuple[Integers, Integers]:
    """(replicas, dp_shard) for all numbers of replicas up to `most`, or a coarse choice of them; never written to."""
    if coarse and most > COARSE:
        replicas, shards = _shards(most, copies_only, False)
        some = np.isin(replicas, np.linspace(1, most, COARSE).astype(np.int64))
        return replicas[some], shards[some]
    every = np.arange(1, most + 1, dtype=np.int64)
    if copies_only:
        return every, np.ones_like(every)
    powers = powers_of_two(most)
    multiples = [every[shard - 1 :: shard] for shard in powers]
    others = every[(every & (every - 1)) != 0]
    of_powers = np.repeat(powers, [len(rows) for rows in multiples])
    return np.concatenate([*multiples, others]), np.concatenate([of_powers, others])


def _vpp(load: ModuleLoad, pp: int) -> list[int]:
    return [vpp for vpp in VIRTUAL_STAGES if vpp == 1 or (pp > 1 and load.layers % (pp * vpp) == 0)]


def _ep(load: ModuleLoad, copies_only: bool) -> list[int]:
    if not load.experts or copies_only:
        return [1]
    return [ep for ep in powers_of_two(load.experts) if load.experts % ep == 0]
