"""The search against trying everything, and what must hold of any exact answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import brute_force
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.allocator_instances import random_problem
from flowtrain.allocator.candidates import candidate_blocks
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.load import COLUMNS, Candidate, CandidateTable
from flowtrain.allocator.options import Keep, capacity_bytes, options
from flowtrain.allocator.search import search
from flowtrain.allocator.solve import Problem, Solution
from flowtrain.allocator.throughput import rates


def bytes_of(load: Any, candidates: list[dict[str, int]], job: Any) -> Sequence[float]:
    """The memory model, asked for a list."""
    if not candidates:
        return []
    used = device_bytes(load, CandidateTable.of([Candidate(**candidate) for candidate in candidates]), job)
    return [float(size) for size in np.broadcast_to(used, len(candidates))]


def vars_of(candidate: Candidate) -> list[int]:
    return [getattr(candidate, name) for name in COLUMNS]


def assert_valid(problem: Problem, found: Solution) -> None:
    """Budgets, memory and rates of a plan, each worked out again from its candidates."""
    used = dict.fromkeys(range(len(problem.cluster)), 0)
    for g, group in enumerate(found.partition):
        members = [choice for choice in found.choices if choice.group == g]
        assert len(members) == len(group)
        assert {choice.candidate.devices for choice in members} == {found.group_devices[g]}
        assert len({choice.pool for choice in members}) == 1
        pool = problem.cluster[members[0].pool]
        used[members[0].pool] += found.group_devices[g]
        assert sum(choice.memory_bytes for choice in members) <= capacity_bytes(pool.node, problem.job)
        for choice in members:
            rate = rates(choice.load, choice.candidate, pool.node, problem.job)
            alone = rate.rate if len(members) == 1 else rate.shared_rate
            assert 1.0 / choice.seconds == pytest.approx(float(alone[0]), rel=1e-12)
            assert choice.packs == rate.packs[0] >= choice.candidate.pp
        assert sum(choice.seconds for choice in members) <= found.group_seconds[g] * (1 + 1e-12)
        assert found.rate <= (1 + 1e-8) / found.group_seconds[g]
    for number, devices in used.items():
        assert devices <= problem.cluster[number].devices
    assert found.devices == sum(found.group_devices)


@pytest.mark.parametrize("seeds", [range(n, n + 30) for n in range(0, 120, 30)], ids=lambda seeds: str(seeds.start))
def test_equals_brute_force_over_all_configurations(seeds: range) -> None:
    compared = 0
    for seed in seeds:
        problem = random_problem(seed, 8)
        found = search(problem, device_bytes)
        try:
            best = brute_force.best_of_all(problem.loads, problem.cluster, problem.job, bytes_of, problem.placements)
        except OverflowError:
            continue
        assert (found is None) == (best is None), seed
        if found is None or best is None:
            continue
        compared += 1
        assert found.rate == pytest.approx(best[0], rel=1e-8), seed
        assert found.devices == best[1], seed
        assert_valid(problem, found)
    assert compared >= 15


def test_equals_brute_force_over_pareto_points_on_larger_clusters() -> None:
    for seed in range(1000, 1012):
        problem = random_problem(seed, 48)
        found = search(problem, device_bytes)
        best = brute_force.best_of_all(
            problem.loads, problem.cluster, problem.job, bytes_of, problem.placements, pareto=True
        )
        assert (found is None) == (best is None), seed
        if found is not None and best is not None:
            assert (found.rate, found.devices) == (pytest.approx(best[0], rel=1e-8), best[1]), seed


def test_coarse_bound_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import flowtrain.allocator.search as module

    for seed in range(2000, 2006):
        problem = random_problem(seed, 300)
        whole = search(problem, device_bytes)
        monkeypatch.setattr(module, "LARGE", 1)
        monkeypatch.setattr("flowtrain.allocator.candidates.COARSE", 4)
        bounded = search(problem, device_bytes)
        monkeypatch.undo()
        assert (whole is None) == (bounded is None)
        if whole is not None and bounded is not None:
            assert bounded.rate == pytest.approx(whole.rate, rel=1e-9)
            assert bounded.devices == whole.devices


def test_candidates_are_those_of_the_rules() -> None:
    for seed in range(40):
        problem = random_problem(seed, 12)
        for load in problem.loads:
            for pool in problem.cluster:
                sizes = problem.job.sizes(load)
                blocks = candidate_blocks(load, pool, problem.job.step_samples, sizes)
                mine = sorted(tuple(vars_of(block[row])) for block in blocks for row in range(len(block)))
                all_rules = brute_force.all_candidates(load, pool.node, pool.devices, problem.job)
                assert mine == sorted(tuple(candidate.values()) for candidate in all_rules)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_more_of_anything_is_never_slower(seed: int) -> None:
    problem = random_problem(seed, 12)
    found = search(problem, device_bytes)
    rate = found.rate if found else 0.0
    for change in (
        lambda pool: replace(pool, num_nodes=pool.num_nodes + 1),
        lambda pool: replace(pool, node=replace(pool.node, memory_bytes=1.5 * pool.node.memory_bytes)),
        lambda pool: replace(pool, node=replace(pool.node, link_bandwidth=2 * pool.node.link_bandwidth)),
        lambda pool: replace(pool, node=replace(pool.node, network_bandwidth=2 * pool.node.network_bandwidth)),
        lambda pool: replace(pool, node=replace(pool.node, memory_bandwidth=2 * pool.node.memory_bandwidth)),
    ):
        more = search(replace(problem, cluster=tuple(map(change, problem.cluster))), device_bytes)
        assert (more.rate if more else 0.0) >= rate * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), factor=st.sampled_from([2.0, 10.0]))
def test_devices_of_half_the_speed_give_half_the_rate(seed: int, factor: float) -> None:
    """Doubling all work, communication and updates included, is halving every speed."""
    problem = random_problem(seed, 12)
    found = search(problem, device_bytes)
    slower = tuple(
        replace(
            pool,
            node=replace(
                pool.node,
                peak_flops={dtype: peak / factor for dtype, peak in pool.node.peak_flops.items()},
                memory_bandwidth=pool.node.memory_bandwidth / factor,
                link_bandwidth=pool.node.link_bandwidth / factor,
                network_bandwidth=pool.node.network_bandwidth / factor,
                latency_seconds=pool.node.latency_seconds * factor,
            ),
        )
        for pool in problem.cluster
    )
    other = search(replace(problem, cluster=slower), device_bytes)
    assert (found is None) == (other is None)
    if found is not None and other is not None:
        assert other.rate == pytest.approx(found.rate / factor, rel=1e-9)
        assert other.devices == found.devices


def test_options_that_are_dropped_are_beaten() -> None:
    for seed in range(30):
        problem = random_problem(seed, 16)
        for load in problem.loads:
            for pool in problem.cluster:
                every = options(load, pool, problem.job, device_bytes, Keep(everything=True))
                for keep in (Keep(), Keep(packs=True), Keep(memory=True), Keep(True, True, joint=True)):
                    some = options(load, pool, problem.job, device_bytes, keep)
                    for row in range(len(every)):
                        seconds = some.shared_seconds if keep.memory and not keep.packs else some.seconds
                        mine = every.shared_seconds if keep.memory and not keep.packs else every.seconds
                        better = (some.devices == every.devices[row]) & (seconds <= mine[row])
                        if keep.packs:
                            better &= some.packs >= every.packs[row]
                        if keep.memory:
                            better &= some.memory_bytes <= every.memory_bytes[row]
                        assert better.any(), (seed, load.name, every.table[row])


def test_without_communication_the_rate_is_the_analytic_optimum_up_to_whole_devices() -> None:
    problem = random_problem(3, 8, num_modules=2)
    node = replace(
        problem.cluster[0].node,
        devices=8,
        link_bandwidth=math.inf,
        network_bandwidth=math.inf,
        memory_bandwidth=math.inf,
        latency_seconds=0.0,
        memory_bytes=1e15,
    )
    node = replace(node, efficiency=replace(node.efficiency, half_rows=0.0))
    job = replace(problem.job, step_samples=10**6, imbalance=1.0, unit_imbalance=1.0, headroom=0.0)
    loads = tuple(replace(load, spread=0.0) for load in problem.loads)
    pool = replace(problem.cluster[0], node=node, num_nodes=32)
    found = search(replace(problem, loads=loads, cluster=(pool,), job=job), device_bytes)
    assert found is not None
    eta = node.efficiency
    seconds = sum(
        load.linear_passes * (load.linear_flops + load.outer_flops) / eta.gemm
        + load.attention_passes * load.attention_flops / eta.attention
        for load in loads
    ) / node.peak("bfloat16")
    optimum = pool.devices / seconds
    assert found.rate <= optimum * (1 + 1e-9)
    assert found.rate >= optimum * (1 - 2 / pool.devices - 1e-3)
