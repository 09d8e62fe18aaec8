"""Plans: what is kept, filled, refused with both numbers, warned of, and written and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from allocator_inputs import config

from flowtrain.allocator import (
    Inventory,
    describe_plan,
    make_plan,
    pack_room,
    plan_to_dict,
    plan_warnings,
    room,
)
from flowtrain.allocator.layout import check_layout, parse_layout
from flowtrain.allocator.room import BLOCK_HEADER_BYTES, FENCE_BYTES, PackRoom
from flowtrain.errors import PlanError
from flowtrain.plan import Layout, Plan, layout_text
from flowtrain.pool import arena
from flowtrain.pool.arena import RingArena
from flowtrain.pool.block import HEADER_BYTES
from flowtrain.shapes import Mixer, ModelShape, MoeShape, RecurrentShape, payload_bytes
from flowtrain.types import Role

GIB = 2**30
TWO_CORES = Inventory(cpus=2, gpus=0, memory_bytes=8 * GIB, shm_bytes=GIB)


def threads(plan: Plan) -> tuple[list[int], list[int]]:
    return [rank.threads for rank in plan.producers.ranks], [rank.threads for rank in plan.consumers.ranks]


def test_open_sizes_are_one_each_and_cores_are_divided(emoji: Path, shape: ModelShape) -> None:
    assert threads(make_plan(config(emoji), shape, TWO_CORES)) == ([1], [1])
    many = Inventory(16, 0, 8 * GIB, GIB)
    plan = make_plan(config(emoji, producers={"num": 2}, consumers={"threads": 4}), shape, many)
    assert threads(plan) == ([6, 6], [4])


def test_colocated_is_one_process_with_all_cores(emoji: Path, shape: ModelShape) -> None:
    plan = make_plan(config(emoji, mode="monolithic"), shape, Inventory(6, 0, 8 * GIB, 0))
    assert (plan.placement, threads(plan)) == ("colocated", ([6], [6]))
    assert plan_warnings(config(emoji, mode="monolithic"), plan, Inventory(6, 0, 8 * GIB, 0)) == []


def test_colocated_ranks_share_the_cores_and_the_pool(emoji: Path, shape: ModelShape) -> None:
    two = config(emoji, mode="monolithic", producers={"num": 2}, consumers={"num": 2})
    plan = make_plan(two, shape, Inventory(6, 0, 8 * GIB, 0))
    assert threads(plan) == ([3, 3], [3, 3])
    assert plan_warnings(two, plan, Inventory(6, 0, 8 * GIB, 0)) == []
    assert {rank.segment_bytes for rank in plan.producers.ranks} == {two.pool.bytes // 2}
    assert {rank.segment_bytes for rank in plan.consumers.ranks} == {0}
    with pytest.raises(PlanError, match="for 2 processes and this machine has 1 GPUs"):
        make_plan(
            config(emoji, mode="monolithic", producers={"num": 2, "device": "cuda"}, consumers={"num": 2}),
            shape,
            Inventory(6, 1, 8 * GIB, 0),
        )


def test_more_processes_than_cores(emoji: Path, shape: ModelShape) -> None:
    open_ = config(emoji, producers={"num": 3}, consumers={"num": 2})
    plan = make_plan(open_, shape, TWO_CORES)
    assert [line for line in plan_warnings(open_, plan, TWO_CORES) if "5 threads" in line and "2 cores" in line]
    allowed = config(emoji, producers={"num": 3}, consumers={"num": 2}, cluster={"oversubscribe": True})
    assert plan_warnings(allowed, make_plan(allowed, shape, TWO_CORES), TWO_CORES) == []
    refused = config(emoji, producers={"num": 3}, consumers={"num": 2}, cluster={"oversubscribe": False})
    with pytest.raises(PlanError, match="need 5 cores and this machine has 2") as error:
        make_plan(refused, shape, TWO_CORES)
    assert error.value.exit_code == 4


def test_a_replan_that_cannot_be_is_told(emoji: Path, shape: ModelShape) -> None:
    few = config(emoji, producers={"num": 2}, allocation={"replan": "auto", "max_producers": 1})
    with pytest.raises(PlanError, match=r"allocation\.max_producers is 1 and the plan has 2 producers"):
        make_plan(few, shape, TWO_CORES)
    alone = config(emoji, mode="monolithic", allocation={"replan": "auto"})
    warnings = plan_warnings(alone, make_plan(alone, shape, TWO_CORES), TWO_CORES)
    assert [line for line in warnings if line.startswith("allocation.replan is auto and a colocated run")]


@pytest.mark.parametrize(
    ("address", "ranks", "told"), [("10.0.0.1:6379", 1, 1), ("auto", 1, 0), ("10.0.0.1:6379", 2, 0)]
)
def test_a_cluster_that_one_process_does_not_join_is_told(
    emoji: Path, shape: ModelShape, address: str, ranks: int, told: int
) -> None:
    sides = {name: {"num": ranks, "threads": 1} for name in ("producers", "consumers")}
    alone = config(emoji, mode="monolithic", cluster={"address": address}, **sides)
    warnings = plan_warnings(alone, make_plan(alone, shape, TWO_CORES), TWO_CORES)
    assert len([line for line in warnings if f"cluster.address {address} is not joined" in line]) == told


def test_devices(emoji: Path, shape: ModelShape) -> None:
    def devices(gpus: int, **sections: Any) -> tuple[str, str]:
        plan = make_plan(config(emoji, **sections), shape, Inventory(8, gpus, 8 * GIB, GIB))
        return plan.producers.ranks[0].device, plan.consumers.ranks[0].device

    assert devices(0) == ("cpu", "cpu")
    assert devices(1) == ("cpu", "cuda:0")
    assert devices(2) == ("cuda:0", "cuda:0")
    assert devices(2, consumers={"device": "cpu"}) == ("cuda:0", "cpu")
    assert devices(1, mode="monolithic") == ("cuda:0", "cuda:0")
    with pytest.raises(PlanError, match="ask for 2 GPUs and this machine has 1"):
        devices(1, producers={"device": "cuda"}, consumers={"device": "cuda"})


def test_a_side_left_on_the_cpu_is_told(emoji: Path, shape: ModelShape) -> None:
    one_gpu = Inventory(8, 1, 8 * GIB, GIB)
    plan = make_plan(config(emoji), shape, one_gpu)
    assert [line for line in plan_warnings(config(emoji), plan, one_gpu) if line.startswith("the producers run on")]


def test_pool_is_divided_in_whole_pages(emoji: Path, shape: ModelShape) -> None:
    plan = make_plan(config(emoji, producers={"num": 3}, pool={"bytes": "64MiB"}), shape, TWO_CORES)
    segments = [rank.segment_bytes for rank in plan.producers.ranks]
    assert segments == [64 * 2**20 // 3 // 4096 * 4096] * 3
    assert plan.pool_bytes == sum(segments)
    assert all(rank.segment_bytes == 0 for rank in plan.consumers.ranks)


def test_pool_above_memory_is_refused(emoji: Path, shape: ModelShape) -> None:
    small = Inventory(2, 0, 32 * 2**20, GIB)
    with pytest.raises(PlanError, match=f"{64 * 2**20} and this machine has {32 * 2**20} bytes"):
        make_plan(config(emoji, pool={"bytes": "64MiB"}), shape, small)


@pytest.mark.parametrize("pool_bytes", [1, 1 << 20])
@pytest.mark.parametrize("replan", ["off", "auto"])
@pytest.mark.parametrize("producers", [1, 3])
def test_a_pool_below_a_full_pack_a_rank_is_refused_and_the_figure_named_will_do(
    emoji: Path, shape: ModelShape, pool_bytes: int, replan: str, producers: int
) -> None:
    sides = {"producers": {"num": producers}, "consumers": {"num": 2}}
    full = pack_room(config(emoji), shape).cap

    def plan_with(num_bytes: int) -> Plan:
        given = config(emoji, pool={"bytes": num_bytes}, allocation={"replan": replan}, **sides)
        return make_plan(given, shape, TWO_CORES)

    with pytest.raises(
        PlanError, match=rf"2 packs that run together, .* need {3 * full} bytes: set pool\.bytes to"
    ) as refused:
        plan_with(pool_bytes)
    named = int(str(refused.value).split("set pool.bytes to ")[1].split()[0])
    assert min(rank.segment_bytes for rank in plan_with(named).producers.ranks) >= 3 * full
    with pytest.raises(PlanError, match=f"set pool.bytes to {named} or more"):
        plan_with(named - 4096)


@pytest.mark.parametrize(
    ("cut", "mebibytes"), [("bounded", 3), ("bounded", 6), ("loose", 6), ("loose", 13), ("loose", 40)]
)
def test_the_number_of_producers_never_enters_packs(emoji: Path, shape: ModelShape, mebibytes: int, cut: str) -> None:
    """A small pool divided among more and more producers: refused at some number, and until then the same packs. With
    the patches that the refusal names it is not refused, and packs are those of one producer with that limit."""
    freeze = {"freeze": ["encoder"] if cut == "loose" else []}
    shape = replace(shape, family="llava_next") if cut == "loose" else shape

    def cap(producers: int, patches: int | None = None) -> int:
        packing = {"max_tokens": 512, "max_patches": patches}
        pool = {"bytes": f"{mebibytes}MiB"}
        given = config(emoji, producers={"num": producers}, pool=pool, packing=packing, train=freeze)
        make_plan(given, shape, Inventory(16, 0, 64 * GIB, GIB))
        return pack_room(given, shape).cap

    caps, refused = set(), []
    for producers in range(1, 9):
        try:
            caps.add(cap(producers))
        except PlanError as error:
            refused.append(producers)
            patches = int(str(error).split("packing.max_patches to ")[1].split()[0])
            assert cap(producers, patches) == cap(1, patches)
            with pytest.raises(PlanError, match=f"packing.max_patches to {patches} or less"):
                cap(producers, patches + 1)
    assert len(caps) <= 1
    assert refused == list(range(9 - len(refused), 9)), "once refused, more producers are too"
    assert refused


def test_a_full_pack_of_short_rows_is_within_the_cap(emoji: Path, shape: ModelShape) -> None:
    """Rows of one token of text and few of images have most headers and padding: the token limit is met first."""
    given = config(emoji)
    features, dtype = shape.features(given.cut), given.model.dtype
    tokens, most = given.packing.max_tokens, pack_room(given, shape)
    for vision in (1, 2, 3, 7, 63, tokens - 1):
        patches = vision * shape.projector.patches_per_token
        block = BLOCK_HEADER_BYTES + payload_bytes(features, dtype, vision, patches)
        assert tokens // (vision + 1) * block <= most.cap
        assert block <= most.block


def test_the_least_segment_holds_its_packs_and_no_smaller_one_does() -> None:
    """Fences included: a segment beyond 64 GiB may lose a block at each."""
    for packs, block in ((1, 64), (7, 2**20), (64, 2**30), (63, 2**30), (300, 5 * 2**30)):
        for size in (PackRoom(block, block), PackRoom(3 * block, block)):
            least = size.segment_bytes(packs)
            assert size.holds(packs, least)
            assert not size.holds(packs, least - 64)
            for start in (FENCE_BYTES + 64, 3 * FENCE_BYTES + 64):
                more = size.segment_bytes(packs, start)
                assert more >= start
                assert size.holds(packs, more)


def check_room_from_every_head(segment: int, sizes: list[int]) -> None:
    """Blocks of these sizes fit into an empty ring, wherever its head stands."""
    for lead in range(64, segment, segment // 50 // 64 * 64):
        ring = RingArena(segment)
        first = ring.allocate(lead)
        keep = ring.allocate(64) if lead + 64 <= segment else None
        ring.free(first)
        if keep is not None:
            ring.free(keep)
        assert ring.room(sizes)


def test_slots_within_the_room_fit_wherever_the_ring_stands(emoji: Path, shape: ModelShape) -> None:
    """The bound, tried on the ring itself: the least segment and a slot of the largest blocks, from every head."""
    given = config(emoji, data={"train": emoji / "data/train.jsonl", "max_seq_len": 300})
    most = pack_room(given, shape)
    segment = most.segment_bytes(2)
    sizes = 2 * ([most.block] * (most.cap // most.block) + [most.cap % most.block])
    assert 0 < sizes[-1] < most.block
    check_room_from_every_head(segment, sizes)


def test_blocks_that_tokens_do_not_bound_fit_as_well(emoji: Path, shape: ModelShape) -> None:
    """A family that cuts padding off behind the projector: one block a pack, each as large as a pack may be."""
    frozen = config(emoji, train={"freeze": ["encoder"]})
    most, bounded = pack_room(frozen, replace(shape, family="llava_next")), pack_room(frozen, shape)
    assert most == PackRoom(2 * bounded.cap, 2 * bounded.cap)
    check_room_from_every_head(most.segment_bytes(2), [most.cap, most.cap])


def test_header_is_the_pools() -> None:
    assert BLOCK_HEADER_BYTES == HEADER_BYTES
    assert room.FENCE_BYTES == arena.FENCE_BYTES
    assert [room.gaps(n) for n in (1, arena.FENCE_BYTES, arena.FENCE_BYTES + 1)] == [1, 1, 2]


def test_layouts() -> None:
    assert parse_layout("r3", "producers.layout") == Layout(dp_replicate=3)
    assert layout_text(Layout(dp_replicate=2, cp=4)) == "r2c4"
    assert layout_text(Layout(dp_shard=2)) == "f2"
    assert layout_text(Layout()) == "r1"
    for wrong in ("", "x2", "r0", "r2r2", "2", "r"):
        with pytest.raises(PlanError, match="is no layout"):
            parse_layout(wrong, "consumers.layout")


@pytest.mark.parametrize(
    ("role", "text", "sentence"),
    [
        (Role.CONSUMER, "t3", "t3 divides 4 attention heads of the backbone by 3"),
        (Role.CONSUMER, "t2c3", "t2c3 divides 4 attention heads of the backbone by 6"),
        (Role.CONSUMER, "p5", "p5 cuts 4 layers of the backbone into 5 sections"),
        (Role.CONSUMER, "p2v3", "p2v3 cuts 4 layers of the backbone into 6 sections"),
        (Role.CONSUMER, "v2", "v2 is for the sections of a pipeline's rank, and p is 1"),
        (Role.CONSUMER, "f3e3", "e3 divides 4 experts of the backbone by 3"),
        (Role.CONSUMER, "e4", "e4 borrows its ranks from f1 and c1, which are 1"),
        (Role.PRODUCER, "t3", "t3 divides 4 attention heads of the encoder by 3"),
        (Role.PRODUCER, "p2", "an encoder is cut by r, f and t only"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(
    shape: ModelShape, role: Role, text: str, sentence: str
) -> None:
    experts = MoeShape(experts=4, top_k=2, expert_width=8, layers=(0,))
    four = replace(shape, text=replace(shape.text, heads=4, kv_heads=2, layers=4, moe=experts))
    four = replace(four, encoders=(replace(shape.vision, heads=4),))
    with pytest.raises(PlanError, match=f"^x.layout: {sentence}"):
        check_layout(parse_layout(text, "x.layout"), role, four, "x.layout")


@pytest.mark.parametrize("text", ["t2", "p2", "c2", "f2"])
def test_layers_that_mix_tokens_otherwise_take_copies(shape: ModelShape, text: str) -> None:
    mixers = (Mixer.RECURRENT,) * (shape.text.layers - 1) + (Mixer.FULL,)
    recurrent = replace(shape.text, mixers=mixers, recurrent=RecurrentShape(weights=8, vectors=2))
    other = replace(shape, text=recurrent)
    told = rf"^x.layout: {shape.text.layers - 1} of {shape.text.layers} layers .* use copies, such as r2$"
    with pytest.raises(PlanError, match=told):
        check_layout(parse_layout(text, "x.layout"), Role.CONSUMER, other, "x.layout")
    check_layout(parse_layout("r2", "x.layout"), Role.CONSUMER, other, "x.layout")


@pytest.mark.parametrize(("layout", "packs"), [("r1", 1), ("p2", 2), ("p2v2", 4)])
def test_a_pipeline_needs_room_for_the_packs_under_way(emoji: Path, shape: ModelShape, layout: str, packs: int) -> None:
    least = room.to_pages(pack_room(config(emoji), shape).segment_bytes(packs))
    sides: dict[str, Any] = {"consumers": {"layout": layout}}
    make_plan(config(emoji, pool={"bytes": least}, **sides), shape, TWO_CORES)
    with pytest.raises(PlanError, match=f"and {packs} packs that run together, .* set pool.bytes to {least} or more"):
        make_plan(config(emoji, pool={"bytes": least - room.PAGE_BYTES}, **sides), shape, TWO_CORES)


def test_sharded_copies_are_planned_for_the_backbone(emoji: Path, shape: ModelShape) -> None:
    plan = make_plan(config(emoji, consumers={"layout": "r2f2"}), shape, TWO_CORES)
    assert plan.consumers.layout == Layout(dp_replicate=2, dp_shard=2)
    assert len(plan.consumers.ranks) == 4


def test_plan_survives_plain_data_and_is_told(emoji: Path, shape: ModelShape) -> None:
    plan = make_plan(config(emoji, producers={"num": 2}, consumers={"layout": "r2"}), shape, TWO_CORES)
    told = plan_to_dict(plan)
    assert yaml.safe_load(yaml.safe_dump(told)) == told
    assert told["consumers"]["layout"] == "r2"
    assert [rank["segment_bytes"] for rank in told["producers"]["ranks"]] == [plan.pool_bytes // 2] * 2
    text = describe_plan(plan)
    assert "producer" in text
    assert "r2" in text
    assert "128 MiB" in text


def test_small_shm_is_told(emoji: Path, shape: ModelShape) -> None:
    tight = Inventory(2, 0, 8 * GIB, 64 * 2**20)
    plan = make_plan(config(emoji), shape, tight)
    assert [line for line in plan_warnings(config(emoji), plan, tight) if line.startswith("/dev/shm has")]


def test_producers_that_encode_as_one_have_one_segment(emoji: Path, shape: ModelShape) -> None:
    plan = make_plan(config(emoji, producers={"layout": "t3"}), shape, TWO_CORES)
    assert [rank.segment_bytes > 0 for rank in plan.producers.ranks] == [True, False, False]
    assert [rank.rank for rank in plan.producers.leading] == [0]
    assert plan.pool_bytes == plan.producers.ranks[0].segment_bytes
