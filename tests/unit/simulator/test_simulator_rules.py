"""`flowtrain simulate` of a config composes the packs that a launched run of it does, whatever `packing` says."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from flowtrain.allocator import Inventory, make_plan
from flowtrain.cli.main import make_app
from flowtrain.cli.simulate import _subject
from flowtrain.config.loading import load_config
from flowtrain.data.sources import open_source
from flowtrain.errors import DataError
from flowtrain.packing import POLICIES
from flowtrain.packing.trace import composed_steps, endless
from flowtrain.plan import layout_text
from flowtrain.runtime.inputs import Inputs, composition, costs_of
from flowtrain.shapes import read_shape
from flowtrain.simulator import Disturbances
from flowtrain.simulator.planned import Options
from flowtrain.types import SampleMeta, Step

EMOJI = Path(__file__).parents[3] / "examples/emoji/emoji.yaml"
STEPS = 6
PLAIN = ("packing.lookahead=3", "producers.max_unit_patches=256")
LONG = ("data.max_seq_len=600", "packing.on_long_row=own_pack", "packing.max_tokens=200")


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 rows of 40 to 124 tokens of text and none to five images; some have 300 tokens, a few very many patches."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl.sizes.jsonl"
    rows = []
    for number in range(300):
        images = [[32, 32, 16, 64]] * (number % 6)
        text, vision = 40 + 7 * (number % 13) + (260 if number % 20 == 7 else 0), 16 * len(images)
        sizes = {"text_tokens": text, "vision_tokens": vision, "trained_tokens": text // (1 + number % 3)}
        rows.append({"row": number, "id": f"row-{number}", **sizes, "patches": 4 * vision, "images": images})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def simulated(scan: Path, keys: tuple[str, ...]) -> tuple[Any, list[Step]]:
    axes = dict.fromkeys(("mode", "exchange", "policy", "composition", "placement", "dtype"))
    made = _subject(EMOJI, scan, (["cpu"], None, 6), axes, ([], None, None), [*PLAIN, *keys], Options(), Disturbances())
    return made, list(islice(made.planned.steps(made.rows), STEPS))


def launched(made: Any, keys: tuple[str, ...]) -> tuple[Any, list[Step]]:
    """What a run of the same config, under the layouts that the simulation chose, composes of the same rows."""
    system, sync = made.planned.system, made.planned.timing.backbone.candidate.layout
    sides = (
        f"consumers={{layout: {layout_text(sync)}}}",
        f"producers={{layout: r{system.num_producers}, max_unit_patches: 256}}",
        "pool.bytes=4GiB",
        "cluster.oversubscribe=true",
    )
    config = load_config(EMOJI, [PLAIN[0], *keys, *sides]).config
    shape = read_shape(config.model.path)
    plan = make_plan(config, shape, Inventory(cpus=16, gpus=0, memory_bytes=1 << 36, shm_bytes=1 << 34))
    inputs = Inputs(config, Path("unused"), shape, plan, open_source(config.data.train), None, None, None, None)
    spec = composition(inputs)
    # Readers skip what is longer than a row may be; other caps are the composer's.
    kept = [row for row in made.rows if row.tokens <= config.max_row_tokens]
    numbered: list[SampleMeta] = [row._replace(position=place) for place, row in enumerate(kept)]
    return spec, list(islice(composed_steps(spec, costs_of(inputs).of(1).cost, endless(numbered)), STEPS))


def packs_of(steps: list[Step]) -> list[list[list[list[str]]]]:
    """Rows of every unit of every pack, by step."""
    return [
        [[[sample.id for sample in unit.samples] for unit in pack.units] + [[s.id for s in pack.samples]]
         for pack in step.packs] for step in steps
    ]  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("packing.max_images=4",),
        ("packing.max_patches=320",),
        ("packing.max_trained_tokens=150",),
        ("packing.max_wait_steps=12", "packing.lookahead=2"),
        ("packing.max_wait_steps=1", "packing.lookahead=1", "train.step={packs: 2}"),
        LONG,
        ("packing.max_tokens=200", "packing.on_long_row=skip"),
        ("data.max_seq_len=150",),
        ("packing.lookahead=1",),
        ("train.step={packs: 2}",),
        ("train.freeze=[encoder, projector]",),
        *((f"packing.policy={name}",) for name in POLICIES),
    ],
    ids=" ".join,
)
def test_packs_are_those_of_a_launched_run(scan: Path, keys: tuple[str, ...]) -> None:
    made, found = simulated(scan, keys)
    spec, real = launched(made, keys)
    same = {"num_rows": 1, "horizon": None}
    assert made.planned.spec.to_dict() | same == spec.to_dict() | same
    assert packs_of(found) == packs_of(real)


@pytest.mark.parametrize(
    ("keys", "without"),
    [
        (("packing.max_images=4",), ()),
        (("packing.max_patches=320",), ()),
        (("packing.max_trained_tokens=150",), ()),
        (("packing.max_wait_steps=12", "packing.lookahead=2"), ("packing.max_wait_steps=2", "packing.lookahead=2")),
        (LONG, (*LONG[2:], "packing.on_long_row=skip")),
        (("packing.policy=arrival",), ()),
        (("train.step={packs: 2}",), ()),
    ],
    ids=" ".join,
)
def test_each_key_changes_the_packs(scan: Path, keys: tuple[str, ...], without: tuple[str, ...]) -> None:
    assert packs_of(simulated(scan, keys)[1]) != packs_of(simulated(scan, without)[1])


def test_rows_that_a_run_would_skip_are_told(scan: Path) -> None:
    made, steps = simulated(scan, ("packing.max_images=4",))
    assert "50 of 300 rows are left out, as a run would skip them: 50 too-many-images" in made.planned.notes
    assert max(len(sample.images) for step in steps for sample in step.samples) == 4


@pytest.mark.parametrize("size", ["samples", "packs"])
def test_whole_steps_have_room_in_a_segment(scan: Path, size: str) -> None:
    """`barrier_step` keeps all packs of a step in the pool."""
    sizes = [
        simulated(scan, (f"pool.exchange={exchange}", f"train.step={{{size}: 6}}"))[0].planned.system.segment_bytes
        for exchange in ("pool", "barrier_step")
    ]
    assert sizes[1] >= 2 * sizes[0]


def test_a_long_row_stops_where_it_would_stop_a_run(scan: Path) -> None:
    with pytest.raises(DataError, match=r"rows have more than 200 tokens, the first is row-\d+ with \d+, and a run"):
        simulated(scan, ("packing.max_tokens=200", "packing.on_long_row=error"))


def test_the_mode_of_the_command_line_leaves_the_keys_of_a_config(scan: Path, tmp_path: Path) -> None:
    data, rates = tmp_path / "out.json", []
    for keys in ((), ("--set", "pool.exchange=pool", "--set", "packing.policy=dynamic")):
        arguments = (EMOJI, "--trace", scan, "--device", "cpu", "--devices-per-node", 4, "--mode", "disaggregated")
        command = ["simulate", *map(str, arguments), "--steps", "4", "--json", str(data), *keys]
        make_app()(command, standalone_mode=False)
        rates.append(json.loads(data.read_text())["samples_per_second"])
    assert rates[0] != rates[1]
