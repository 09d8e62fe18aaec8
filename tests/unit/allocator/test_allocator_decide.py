"""What launch decides for itself: keys bind, the pool bounds, the faster placement is taken, plan files are obeyed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from allocator_inputs import config
from profiles import MADE

from flowtrain.allocator import Inventory, NodeRoom, decide, forecast, make_plan
from flowtrain.allocator.bound import bound_scope
from flowtrain.allocator.candidates import Scope, Side, candidate_blocks
from flowtrain.allocator.decide import _setups
from flowtrain.allocator.devices import PCIE_BANDWIDTH, devices_of
from flowtrain.allocator.footprint import device_bytes
from flowtrain.allocator.gpus import Gpu
from flowtrain.allocator.hardware import HARDWARE, NodePool
from flowtrain.allocator.planfile import obey, read_plan_file
from flowtrain.allocator.policies import POLICIES, flow_matching
from flowtrain.allocator.problem import question_of
from flowtrain.allocator.profile import Measured, PackWork, Profile, Timing
from flowtrain.allocator.stats import assumed_stats, known_stats
from flowtrain.config.schema import Config
from flowtrain.errors import ConfigError, PlanError
from flowtrain.plan import layout_text
from flowtrain.shapes import ModelShape, read_shape
from flowtrain.sizes import row_sizes, sizes_file
from flowtrain.types import ImageMeta, Role, SampleMeta, SkippedRow

GIB = 2**30
EXAMPLES = Path(__file__).parents[3] / "examples"
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * 10**9, links=18)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 * 10**9, links=12)


def cores(number: int, **more: Any) -> Inventory:
    return Inventory(cpus=number, gpus=0, memory_bytes=4 * GIB * number, shm_bytes=GIB, **more)


def profile(encode_seconds: float, both_slower: float, colocated_slower: float) -> Profile:
    """One in which a producer's order takes so long, and a consumer's one second."""

    def timing(seconds: float) -> tuple[Timing, ...]:
        return (Timing(work=1.0, seconds=seconds, spread=0.0, num=4),)

    stages = []
    for role, seconds in (("producer", encode_seconds), ("consumer", 1.0)):
        for together, colocated, slower in (
            (False, False, 1.0), (True, False, both_slower), (False, True, colocated_slower),
        ):  # fmt: skip
            stages.append(
                Measured(
                    role=role, device="cpu", threads=2 if colocated else 1, together=together, colocated=colocated,
                    forward=timing(seconds * slower), update_seconds=0.0,
                )
            )  # fmt: skip
    return Profile(
        made=MADE, trainable_encoder=False, consumers=1, read_seconds=0.0, call_seconds=0.0, overhead_seconds=0.0,
        stages=tuple(stages), steps=((PackWork(rows=4, encode=1.0, train=1.0),),),
    )  # fmt: skip


def test_two_cores_stay_one_process_each(emoji: Path, shape: ModelShape) -> None:
    plan = make_plan(config(emoji), shape, cores(2))
    assert [len(side.ranks) for side in (plan.producers, plan.consumers)] == [1, 1]
    assert [side.ranks[0].threads for side in (plan.producers, plan.consumers)] == [1, 1]


def test_one_core_is_shared(emoji: Path, shape: ModelShape) -> None:
    plan = make_plan(config(emoji), shape, cores(1))
    assert [len(side.ranks) for side in (plan.producers, plan.consumers)] == [1, 1]


@pytest.mark.parametrize("number", [3, 8, 24])
def test_cores_are_used_and_keys_bind(emoji: Path, shape: ModelShape, number: int) -> None:
    given = config(emoji, consumers={"num": 2, "threads": 1})
    decided = decide(given, shape, cores(number)).config
    assert (decided.consumers.num, decided.consumers.threads) == (2, 1)
    assert decided.producers.num is not None
    assert decided.producers.threads is not None
    assert decided.producers.num * decided.producers.threads + 2 <= number
    assert decide(decided, shape, cores(number)).config == decided


def test_uniform_and_set_numbers_leave_the_config_alone(emoji: Path, shape: ModelShape) -> None:
    for given in (
        config(emoji, allocation={"policy": "uniform"}),
        config(emoji, producers={"num": 1}, consumers={"layout": "r1"}),
        config(emoji, mode="monolithic"),
    ):
        assert decide(given, shape, cores(8)).config == given


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_makes_a_plan_that_fits(emoji: Path, shape: ModelShape, policy: str) -> None:
    plan = make_plan(config(emoji, allocation={"policy": policy}), shape, cores(8))
    assert sum(rank.threads for side in (plan.producers, plan.consumers) for rank in side.ranks) <= 8


def test_a_small_pool_bounds_the_number_of_processes(emoji: Path, shape: ModelShape) -> None:
    roomy = decide(config(emoji, pool={"bytes": "1GiB"}), shape, cores(16)).config
    assert (roomy.producers.num or 0) * (roomy.consumers.num or 0) > 1
    for mebibytes in (16, 24, 40):
        tight = config(emoji, pool={"bytes": f"{mebibytes}MiB"})
        make_plan(tight, shape, cores(16))


def test_memory_that_holds_no_process_is_told(emoji: Path, shape: ModelShape) -> None:
    starved = Inventory(cpus=16, gpus=0, memory_bytes=GIB, shm_bytes=GIB)
    with pytest.raises(
        PlanError, match=r"2 processes on the CPU and the pool need 1\.\d+ GB, and this machine has 1\.07"
    ):
        make_plan(config(emoji), shape, starved)


def large(emoji: Path, **sections: Any) -> Config:
    """7 billion parameters, all trained."""
    model = {"path": EXAMPLES / "plans/qwen2.5-vl-7b", "dtype": "bfloat16"}
    step = {"samples": 256}
    base = {"model": model, "packing": {"max_tokens": 8192}, "pool": {"bytes": "8GiB"}}
    train = {"step": step, **sections.pop("train", {})}
    return config(emoji, **base, train=train, **sections)


def test_gpus_take_layouts_that_fit_their_memory(emoji: Path) -> None:
    """A backbone that no GPU holds whole is cut, as `flowtrain plan` cuts it, and recomputed where that is faster."""
    given = large(emoji)
    shape = read_shape(given.model.path)
    machine = Inventory(64, 8, 512 * GIB, GIB, (H100,) * 8)
    found = decide(given, shape, machine).config
    plan = make_plan(found, shape, machine)
    assert len(plan.producers.ranks) + len(plan.consumers.ranks) == 8
    assert plan.consumers.layout.world_size > plan.consumers.layout.dp_replicate
    problem = question_of(given, shape, assumed_stats(8192), (NodePool(HARDWARE["h100"], 1),)).problem()
    best = flow_matching(problem, device_bytes, bound_scope(given))
    assert best is not None
    assert found.consumers.layout == layout_text(best.choices[-1].candidate.layout)
    assert bool(found.recompute(Role.PRODUCER)) == bool(best.choices[0].candidate.recompute)
    assert decide(found, shape, machine).config == found
    kept = decide(large(emoji, train={"gradient_checkpointing": False}), shape, machine).config
    assert kept.recompute(Role.PRODUCER) is False, "what is set binds"


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"consumers": {"layout": "r1"}}, r"needs 14\d GB of a device at least, and 7\d.* consumers.layout: r1, which"),
        (
            {"consumers": {"layout": "r1"}, "producers": {"num": 1}},
            r"consumers of layout r1 need 1\d\d GB of a GPU, and 7",
        ),
        ({"mode": "monolithic"}, r"14\d GB of a device at least, and 7\d"),
        (
            {"mode": "monolithic", "producers": {"num": 8}, "consumers": {"num": 8}},
            r"colocated producers and consumers of layout r8 need 1\d\d GB of a GPU, and 7.*placement: disaggregated",
        ),
    ],
)
def test_what_gpus_cannot_hold_is_refused(emoji: Path, sections: dict[str, Any], told: str) -> None:
    given = large(emoji, **sections)
    with pytest.raises(PlanError, match=told):
        make_plan(given, read_shape(given.model.path), Inventory(64, 8, 512 * GIB, GIB, (H100,) * 8))


def test_auto_compares_all_devices_with_all_devices(emoji: Path, shape: ModelShape) -> None:
    """Placements are given the same GPUs, or cores: colocated is as many copies as there are."""
    model = {"path": emoji / "model", "dtype": "bfloat16"}
    machine = Inventory(16, 8, 64 * GIB, GIB, (H100,) * 8)
    step = {"step": {"samples": 256}}
    given = config(emoji, model=model, allocation={"placement": "auto"}, train=step)
    found = decide(given, shape, machine)
    assert [note for note in found.notes if note.startswith("colocated, 8 ranks")]
    alone = decide(config(emoji, model=model, mode="monolithic", train=step), shape, machine).config
    assert (alone.producers.num, alone.consumers.num) == (8, 8)
    on_cores = decide(config(emoji, allocation={"placement": "auto"}, train=step), shape, cores(4))
    assert len(on_cores.notes) == 2
    if on_cores.config.placement == "colocated":
        plan = make_plan(on_cores.config, shape, cores(4))
        assert sum(rank.threads for rank in plan.consumers.ranks) == 4


def test_auto_takes_the_faster_placement_by_the_profile(emoji: Path, shape: ModelShape) -> None:
    given = config(emoji, allocation={"placement": "auto"})
    apart = decide(given, shape, cores(2), profile=profile(1.0, both_slower=1.1, colocated_slower=1.0))
    assert apart.config.placement == "disaggregated"
    together = decide(given, shape, cores(2), profile=profile(0.1, both_slower=1.5, colocated_slower=0.6))
    assert together.config.placement == "colocated"
    assert together.config.allocation.placement == "colocated"
    assert len(together.notes) == 3
    assert together.rate == pytest.approx(4 / (0.66 * 1.0))


def test_auto_takes_colocated_ranks_where_threads_gain_little(emoji: Path, shape: ModelShape) -> None:
    """Two packs of 0.1 + 1 s: one process takes 2.2 s, a consumer 2 packs of 1.1 s, two ranks 1.1 · 1.1 s each."""
    given = config(emoji, allocation={"placement": "auto"})
    made = profile(0.1, both_slower=1.1, colocated_slower=1.0)
    made = made.model_copy(update={"steps": ((PackWork(rows=4, encode=1.0, train=1.0),) * 2,)})
    found = decide(given, shape, cores(2), profile=made)
    assert found.config.placement == "colocated"
    assert (found.config.producers.num, found.config.consumers.num) == (2, 2)
    assert found.rate == pytest.approx(8 / 1.21)
    assert [note for note in found.notes if note.startswith("colocated, 2 ranks: 6.6")]
    plan = make_plan(found.config, shape, cores(2))
    assert [rank.threads for rank in plan.consumers.ranks] == [1, 1]
    bound = config(emoji, allocation={"placement": "auto"}, consumers={"num": 1})
    assert decide(bound, shape, cores(2), profile=made).config.consumers.num == 1
    tight = config(emoji, allocation={"placement": "auto"}, pool={"bytes": "2MiB"})
    assert decide(tight, shape, cores(2), profile=made).config.producers.num in (None, 1)


def test_a_profile_of_gpus_gives_each_process_one(emoji: Path, shape: ModelShape) -> None:
    made = profile(1.0, both_slower=1.0, colocated_slower=1.0)
    stages = tuple(stage.model_copy(update={"device": "cuda:0"}) for stage in made.stages)
    for number in (2, 4):
        there = Inventory(16, number, 64 * GIB, GIB, (H100,) * number)
        found = decide(config(emoji), shape, there, profile=made.model_copy(update={"stages": stages})).config
        assert (found.producers.num or 0) + (found.consumers.num or 0) == number


def test_a_profile_is_asked_for_few_setups_of_many_cores(emoji: Path) -> None:
    assert len(list(_setups(config(emoji), cores(8)))) == 94, "all that fit"
    many = list(_setups(config(emoji), cores(128)))
    assert len(many) < 2000
    assert {(1, 64, 1, 64), (1, 1, 1, 127), (4, 16, 2, 32)} <= set(many)


def test_a_forecast_is_the_rate_that_decided(emoji: Path) -> None:
    """A plan that is made is expected to run as fast as the search said, and drift is told its sides' seconds."""
    given = large(emoji)
    shape, machine = read_shape(given.model.path), Inventory(64, 8, 512 * GIB, GIB, (H100,) * 8)
    stats = assumed_stats(8192)
    found = decide(given, shape, machine, stats)
    expected = forecast(found.config, shape, make_plan(found.config, shape, machine, stats=stats), machine, stats)
    assert expected is not None
    assert expected.samples_per_second == pytest.approx(found.rate, rel=1e-6)
    assert expected.ratios is not None
    assert 0.5 < expected.ratios.seconds_ratio < 2.0, "two producers and six consumers, three of which share packs"
    plan = make_plan(found.config, shape, machine)
    unknown = forecast(found.config, shape, plan, machine)
    assert unknown is not None
    assert unknown.ratios is None, "rows of assumed sizes are no plan to drift from"
    busy = replace(machine, cpus=1, gpus=0, devices=())
    assert forecast(given, shape, plan, busy) is None


def test_packs_that_run_together_bound_pipelines_too(emoji: Path) -> None:
    given = large(emoji)
    problem = question_of(given, read_shape(given.model.path), assumed_stats(8192), (NodePool(HARDWARE["h100"], 1),))
    load, pool = problem.problem().loads[-1], NodePool(HARDWARE["h100"], 1)
    for most in (1, 3, 8):
        scope = Scope(consumers=Side(most=most))
        tables = list(candidate_blocks(load, pool, 256, (8192,), scope))
        layouts = [table[row].layout for table in tables for row in range(len(table))]
        assert max(layout.dp_degree * layout.packs_held for layout in layouts) <= most
    assert any(layout.vpp > 1 for layout in layouts)


def test_auto_leaves_numbers_that_are_set(emoji: Path, shape: ModelShape) -> None:
    """Colocated sides are as many processes each."""
    given = config(emoji, allocation={"placement": "auto"}, producers={"num": 2})
    found = decide(given, shape, cores(4)).config
    assert found.producers.num == 2
    assert found.placement == "disaggregated" or found.consumers.num == 2
    unequal = config(emoji, allocation={"placement": "auto"}, producers={"num": 2}, consumers={"num": 1})
    assert decide(unequal, shape, cores(4)).config.allocation.placement == "disaggregated"


def test_gpus_are_divided_as_far_as_they_are_known(emoji: Path, shape: ModelShape) -> None:
    known = Inventory(16, 8, 64 * GIB, GIB, (H100,) * 8)
    decided = decide(config(emoji, model={"path": emoji / "model", "dtype": "bfloat16"}), shape, known).config
    assert 2 < (decided.producers.num or 0) + (decided.consumers.num or 0) <= 8
    for others in ((Gpu("Some Other GPU", 80 * 10**9),) * 8, (H100,) * 7 + (A100,), ()):
        assert decide(config(emoji), shape, Inventory(16, 8, 64 * GIB, GIB, others)).config.producers.num is None


def test_gpus_are_divided_as_the_smallest_of_them(emoji: Path, shape: ModelShape) -> None:
    """One of eight has next to no memory, or no direct link."""
    given = config(emoji, model={"path": emoji / "model", "dtype": "bfloat16"})
    small = Inventory(16, 8, 64 * GIB, GIB, (*(H100,) * 7, replace(H100, memory_bytes=10**6)))
    with pytest.raises(PlanError, match=r"GB of a device at least, and 0 GB of it may be taken"):
        decide(given, shape, small)
    apart = (*(H100,) * 7, replace(H100, links=0))
    (pool,) = devices_of(given, Inventory(16, 8, 64 * GIB, GIB, apart), None) or ()
    assert pool.node.link_bandwidth == PCIE_BANDWIDTH


def nodes(*cores: float, gpus: float = 0.0, gpu: str | None = None) -> list[NodeRoom]:
    return [NodeRoom(f"10.0.0.{n}", cpus, gpus, 4.0 * GIB * cpus, gpu) for n, cpus in enumerate(cores)]


def test_what_is_open_is_decided_by_the_nodes_of_a_cluster(emoji: Path, shape: ModelShape) -> None:
    """Cores of all nodes are used, and whole processes fit them; a run that is not on it yet decides nothing."""
    given = config(emoji, cluster={"address": "auto"})
    assert decide(given, shape, cores(2)).config == given
    rooms = nodes(3, 3, 3)
    decided = decide(given, shape, cores(2), nodes=rooms).config
    plan = make_plan(given, shape, cores(2), rooms)
    threads = {side.role: [rank.threads for rank in side.ranks] for side in (plan.producers, plan.consumers)}
    assert 3 < sum(map(sum, threads.values())) <= 9
    assert threads[Role.PRODUCER] == [decided.producers.threads] * (decided.producers.num or 0)
    for number in range(3):
        ranks = [rank for side in (plan.producers, plan.consumers) for rank in side.ranks if rank.node == number]
        assert sum(rank.threads for rank in ranks) <= 3
    bound = config(emoji, cluster={"address": "auto"}, producers={"num": 2, "threads": 1}, consumers={"num": 1})
    assert decide(bound, shape, cores(2), nodes=rooms).config == bound


def test_nodes_that_differ_count_as_the_smallest_that_is_used(emoji: Path, shape: ModelShape) -> None:
    given = config(emoji, cluster={"address": "auto"}, model={"path": emoji / "model", "dtype": "bfloat16"})
    (pool,) = devices_of(given, cores(2), nodes(0, 8, 16, 16)) or ()
    assert (pool.node.devices, pool.num_nodes) == (16, 2)
    assert pool.node.memory_bytes == 4 * GIB
    gpus = nodes(64, 64, gpus=8, gpu="H100")
    (pool,) = devices_of(given, cores(2), [*nodes(8), *gpus]) or ()
    assert (pool.node.name, pool.node.devices, pool.num_nodes) == ("h100", 8, 2)
    decided = decide(given, shape, cores(8), nodes=gpus).config
    assert 8 < (decided.producers.num or 0) + (decided.consumers.num or 0) <= 16
    for others in ([*gpus, *nodes(64, gpus=8, gpu="A100")], nodes(64, gpus=1, gpu="H100"), nodes(64, gpus=8, gpu="X9")):
        assert devices_of(given, cores(2), others) is None


def test_threads_of_a_process_on_a_gpu_take_cores_and_no_more_gpus(emoji: Path, shape: ModelShape) -> None:
    machine = Inventory(64, 8, 64 * GIB, GIB, (H100,) * 8)
    open_sides = config(emoji, model={"path": emoji / "model", "dtype": "bfloat16"})
    free = decide(open_sides, shape, machine).config
    threads = {name: getattr(open_sides, name).model_copy(update={"threads": 4}) for name in ("producers", "consumers")}
    given = decide(open_sides.model_copy(update=threads), shape, machine).config
    assert free.producers.num + free.consumers.num == 8
    assert (given.producers.num, given.consumers.num) == (free.producers.num, free.consumers.num)
    assert given.producers.threads == 4


def test_sizes_beside_the_rows_are_found(tmp_path: Path) -> None:
    rows = tmp_path / "train.jsonl"
    assert known_stats(rows) is None
    kept = SampleMeta.of(0, 0, "a", 10, 8, 3, (ImageMeta(1, 1, 8, 32, 0),))
    lines = [json.dumps(row_sizes(row)) for row in (kept, SkippedRow(1, 1, "b", "too-long", ""))]
    sizes_file(rows).write_text("\n".join(lines))
    stats = known_stats(rows)
    assert stats is not None
    assert (len(stats), stats.lengths.tolist(), stats.image_tokens.tolist()) == (1, [18], [8])


PLAN = """placement: disaggregated
producers: {layout: r2, threads: 1}
consumers:
  layout: r3
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def test_plan_file_is_obeyed(emoji: Path, tmp_path: Path, shape: ModelShape) -> None:
    obeyed = obey(config(emoji), read_plan_file(written(tmp_path, PLAN)), read_shape(emoji / "model"))
    plan = make_plan(obeyed, shape, cores(8))
    assert (len(plan.producers.ranks), len(plan.consumers.ranks)) == (2, 3)
    assert plan.producers.ranks[0].threads == 1


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        (PLAN.replace("r3", "f4p9"), PlanError, "plan.yaml:4:3: consumers.layout: "),
        (PLAN.replace("disaggregated", "mixed"), PlanError, "plan.yaml:1:1: placement: mixed"),
        (PLAN.replace("disaggregated", "colocated"), PlanError, "as many whole copies"),
        (PLAN.replace("layout: r2", "layouts: r2"), ConfigError, "plan.yaml:2:1: producers: a plan says the layout"),
        (PLAN.replace("threads: 1", "threads: none"), ConfigError, "plan.yaml:2:25: producers.threads: 'none'"),
        (PLAN.replace("threads: 1", "ranks: [3]"), ConfigError, "producers.threads: .* is no number of threads"),
        (PLAN.replace("threads: 1", "ranks: [{threads: 1}, {threads: 4}]"), ConfigError, "producers.threads: .*1, 4"),
        (PLAN + "speed: 3\n", ConfigError, "plan.yaml:5:1: speed: a plan has no such key"),
        ("- r2\n", ConfigError, "this is no plan"),
        ("a: [\n", ConfigError, "not YAML"),
    ],
)
def test_plan_file_that_cannot_be_obeyed(
    emoji: Path, tmp_path: Path, text: str, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told.replace("'", ".").replace("[", r"\[")):
        obey(config(emoji), read_plan_file(written(tmp_path, text)), read_shape(emoji / "model"))


def test_plan_file_and_config_must_agree(emoji: Path, tmp_path: Path) -> None:
    plan = read_plan_file(written(tmp_path, PLAN))
    with pytest.raises(PlanError, match=r"plan\.yaml:2:13: producers\.layout: the plan says r2 and the config r1"):
        obey(config(emoji, producers={"num": 1}), plan, read_shape(emoji / "model"))
    with pytest.raises(PlanError, match=r"plan\.yaml:2:25: producers\.threads: the plan says 1 and the config 2"):
        obey(config(emoji, producers={"threads": 2}), plan, read_shape(emoji / "model"))
    with pytest.raises(PlanError, match=r"plan\.yaml:1:1: placement"):
        obey(config(emoji, allocation={"placement": "colocated"}), plan, read_shape(emoji / "model"))
