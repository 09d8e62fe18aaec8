"""Plans as simulations: seconds are the throughput model's, rates come near the plan's, rows change as asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from flowtrain.allocator.candidates import WHOLE, Scope, Side
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.hardware import HARDWARE, NodePool
from flowtrain.allocator.policies import flow_matching
from flowtrain.allocator.problem import Question
from flowtrain.allocator.solve import Problem, Solution
from flowtrain.allocator.stats import assumed_stats
from flowtrain.allocator.throughput import rates
from flowtrain.config.schema import PackingConfig
from flowtrain.data.order import Order
from flowtrain.errors import PlanError
from flowtrain.plan import Layout
from flowtrain.shapes import read_shape
from flowtrain.simulator import Simulation
from flowtrain.simulator.planned import Options, Planned, planned, with_images, with_patches
from flowtrain.types import ImageMeta, Module, SampleMeta, Step

MODEL = Path(__file__).parents[3] / "examples/emoji/model"
BOTH = frozenset({Module.ENCODER, Module.PROJECTOR})


def asked(frozen: frozenset[Module] = frozenset(), placement: str = "disaggregated") -> Question:
    node = replace(HARDWARE["cpu"], devices=8)
    return Question(
        read_shape(MODEL),
        assumed_stats(1024),
        frozen,
        (NodePool(node, 1),),
        dtype="float32",
        step_samples=128,
        pack_tokens=(1024,),
        placements=frozenset({placement}),
    )


def solved(question: Question) -> tuple[Problem, Solution]:
    problem = question.problem()
    found = flow_matching(problem, device_bytes, WHOLE)
    assert found is not None
    return problem, found


def rows(num: int) -> list[SampleMeta]:
    """The sizes of `assumed_stats`, so that the plan's data and the simulation's are the same."""
    stats = assumed_stats(1024)
    found = []
    for number in range(num):
        sample = number % len(stats)
        tokens = stats.image_tokens[stats.image_sample == sample].tolist()
        images = tuple(ImageMeta(0, 0, size, 4 * size, 0) for size in tokens)
        text, trained = int(stats.text_tokens[sample]), int(stats.trained_tokens[sample])
        found.append(SampleMeta.of(number, number, f"row-{number}", text, sum(tokens), trained, images))
    return with_patches(found, read_shape(MODEL))


def steps_of(made: Planned, num: int) -> Iterator[Step]:
    return made.steps(made.judged(rows(num)), Order(num, seed=0))


@pytest.mark.parametrize(("frozen", "most"), [(frozenset(), 0.2), (BOTH, 0.12)])
def test_a_simulated_rate_comes_near_the_plan(frozen: frozenset[Module], most: float) -> None:
    """The plan's sums take the longest sample for every step, which few devices feel most."""
    question = asked(frozen)
    problem, found = solved(question)
    made = planned(question, problem.job, found.choices, Options())
    outcome = Simulation(made.system, made.timing, steps_of(made, 480)).run(8)
    assert outcome.figures()["samples_per_second"] == pytest.approx(found.rate, rel=most)


def test_a_pack_takes_what_the_throughput_model_says() -> None:
    """Over a step, packs of the mean load take the model's beats."""
    question = asked(BOTH)
    problem, found = solved(question)
    made = planned(question, problem.job, found.choices, Options())
    choice = next(choice for choice in found.choices if choice.load.name == "backbone")
    seconds, packs, samples = 0.0, 0, 0
    for step in islice(steps_of(made, 480), 4):
        of_step = made.timing.of(step)
        seconds += float(np.sum(of_step.packs))
        packs += len(step.packs)
        samples += step.rows
    beat = rates(choice.load, choice.candidate, problem.cluster[0].node, problem.job).beat_seconds[0]
    per_sample = beat * choice.packs * choice.candidate.replicas / problem.job.step_samples
    assert seconds / samples == pytest.approx(per_sample, rel=0.1)
    assert packs > 8


def test_flops_are_those_of_the_formula() -> None:
    from flowtrain.flops import step_flops

    question = asked()
    problem, found = solved(question)
    made = planned(question, problem.job, found.choices, Options())
    step = next(steps_of(made, 480))
    assert made.timing.of(step).flops == pytest.approx(step_flops(question.shape, step.samples, frozenset()).total)


def test_a_colocated_rank_encodes_its_own_packs() -> None:
    question = asked(placement="colocated")
    problem, found = solved(question)
    made = planned(question, problem.job, found.choices, Options())
    assert made.system.colocated
    assert made.system.num_devices == found.devices
    step = next(steps_of(made, 480))
    assert all(unit.producer == pack.rank for pack in step.packs for unit in pack.units)


def test_costs_are_those_of_the_config() -> None:
    """Costs of packs, not of devices, whose own efficiencies the throughput model has."""
    question = asked()
    problem, found = solved(question)
    plain, slow = (
        planned(
            question, problem.job, found.choices, Options(packing=PackingConfig(attention_efficiency=share))
        ).cost.coefficients()
        for share in (1.0, 0.5)
    )
    assert slow["token_pair"] == pytest.approx(2 * plain["token_pair"], rel=1e-6)
    assert slow["token"] == plain["token"]


def test_a_pipeline_has_the_packs_of_its_stages_at_hand() -> None:
    """A segment holds what runs together: a pack for each stage of each replica, as the runtime's does."""
    question = asked()
    problem = question.problem()
    layout = Layout(dp_replicate=2, pp=2)
    found = flow_matching(problem, device_bytes, Scope(consumers=Side(layout=layout)))
    assert found is not None
    made = planned(question, problem.job, found.choices, Options())
    assert made.system.packs_held == layout.packs_held == 2
    assert made.system.num_consumers == 2
    assert 2 * 2 * made.spec.max_pack_vision_bytes < made.system.segment_bytes
    outcome = Simulation(made.system, made.timing, steps_of(made, 240)).run(3)
    assert outcome.figures()["samples_per_second"] > 0


def test_a_segment_that_is_too_small_is_refused() -> None:
    question = asked()
    problem, found = solved(question)
    with pytest.raises(PlanError, match=r"a segment of the pool has 4096 bytes and .* tokens each need"):
        planned(question, problem.job, found.choices, Options(segment_bytes=4096))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 2.84])
def test_images_become_more_or_fewer(factor: float) -> None:
    before = rows(480)
    after = with_images(before, factor)
    vision = sum(row.vision_tokens for row in before)
    assert sum(row.vision_tokens for row in after) == pytest.approx(factor * vision, rel=0.01)
    assert [row.text_tokens for row in after] == [row.text_tokens for row in before]
    assert all(row.patches == sum(image.patches for image in row.images) for row in after)
