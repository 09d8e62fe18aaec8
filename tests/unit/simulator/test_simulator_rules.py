"""`flowtrain simulate` of a config composes the packs that a launched run of it does, whatever the config says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest

from flowtrain.allocator import Inventory, make_plan
from flowtrain.cli.main import make_app
from flowtrain.cli.simulate import Subject, _subject
from flowtrain.config.loading import load_config
from flowtrain.data.blocks import BlockRead
from flowtrain.data.reader import ReaderStage
from flowtrain.data.sources import open_source
from flowtrain.data.stream import BLOCK_ROWS, ReadRequest, SampleStream
from flowtrain.errors import DataError
from flowtrain.packing import POLICIES, Composer
from flowtrain.plan import layout_text
from flowtrain.runtime.inputs import Inputs, composition, costs_of, schedule_of
from flowtrain.runtime.rows import BadShare, Payloads, RowFeed
from flowtrain.shapes import read_shape
from flowtrain.simulator import Control, Disturbances, Simulation, System
from flowtrain.simulator.planned import Options, without_long
from flowtrain.types import Phase, SampleMeta, SkippedRow, Step

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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 rows of the emoji job, which lie beside their pictures, and three that cannot be used."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").symlink_to(EMOJI.parent / "data/images")
    rows = (EMOJI.parent / "data/train.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    gone = json.dumps({**json.loads(rows[0]), "id": "gone", "images": ["images/gone.png"]})
    path = folder / "train.jsonl"
    path.write_text("\n".join([*rows[:20], gone, *rows[20:40], "{}", *rows[40:], gone]) + "\n", encoding="utf-8")
    return path


def subject(scan: Path | None, keys: Sequence[str], seed: int | None = None, save_every: int | None = None) -> Subject:
    axes = dict.fromkeys(("mode", "exchange", "policy", "composition", "placement", "dtype"))
    flags = ([], None, None)
    options = Options(save_every=save_every)
    return _subject(EMOJI, scan, (["cpu"], None, 6), axes, flags, [*PLAIN, *keys], options, Disturbances(), seed)


def simulated(scan: Path | None, keys: Sequence[str], seed: int | None = None) -> tuple[Subject, list[Step]]:
    made = subject(scan, keys, seed)
    return made, list(islice(made.planned.steps(made.rows, made.order), STEPS))


def run_of(made: Subject, keys: Sequence[str]) -> Inputs:
    """A run of the same config under the layouts that the simulation chose."""
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
    return Inputs(config, Path("unused"), shape, plan, open_source(config.data.train), None, None, None, None)


Reader = Callable[[ReadRequest], BlockRead]


def reader_of(inputs: Inputs) -> Reader:
    """The reader of the run itself."""
    stage = ReaderStage(inputs.config)
    return lambda request: stage.read(Phase.TRAIN, request.start, request.count, request.block)[0]


def reader_of_sizes(inputs: Inputs, made: Subject) -> Reader:
    """One that has these sizes instead of rows: it skips what is longer than a row may be, other caps are those of the
    composer."""
    rows = without_long(made.sizes, inputs.config.max_row_tokens)

    def read(request: ReadRequest) -> BlockRead:
        found = [
            rows[made.order.row(position)]._replace(position=position)
            for position in range(request.start, request.start + request.count)
        ]
        return BlockRead(Phase.TRAIN, request.block, request.start, tuple(found))

    return read


def launched(inputs: Inputs, read: Reader, end: int | None = None) -> list[Step]:
    """What the feed of a run composes of what is read: some steps, or all of the rows before position `end`."""
    stream = SampleStream(len(inputs.train), BLOCK_ROWS, num_readers=1, end=end)
    composer = Composer(composition(inputs), costs_of(inputs).of(1).cost)
    feed = RowFeed(stream, composer, Payloads(), BadShare(1.0, len(inputs.train)))
    steps: list[Step] = []
    while len(steps) < STEPS or end is not None:
        step = feed.next_step()
        if step is not None:
            steps.append(step)
            continue
        if feed.exhausted:
            break
        for request in list(feed.requests()):
            feed.add(read(request), None)
    return steps


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
    inputs = run_of(made, keys)
    same = {"num_rows": 1, "horizon": None}
    assert made.planned.spec.to_dict() | same == composition(inputs).to_dict() | same
    assert packs_of(found) == packs_of(launched(inputs, reader_of_sizes(inputs, made)))


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("run.seed=5",),
        ("run.seed=5", "data.shuffle=false"),
        ("packing.max_tokens=512", "packing.on_long_row=own_pack", "data.max_seq_len=1024"),
        ("data.max_seq_len=300",),
    ],
    ids=" ".join,
)
def test_a_scan_is_read_in_the_order_of_the_run(data: Path, keys: tuple[str, ...]) -> None:
    """Rows that cannot be used keep their places, and every epoch has an order of its own."""
    keys = (f"data.train={data}", *keys)
    make_app()(["data", "scan", str(EMOJI), *(word for key in keys for word in ("--set", key))], standalone_mode=False)
    made, found = simulated(None, keys)
    inputs = run_of(made, keys)
    real = launched(inputs, reader_of(inputs))
    assert packs_of(found) == packs_of(real)
    assert [step.epoch for step in found] == [step.epoch for step in real]
    assert found[-1].epoch >= 2
    assert any(note.startswith("3 of 63 rows are left out") for note in made.planned.notes) or len(keys) > 1


def test_a_seed_of_the_command_line_holds_over_the_config(scan: Path) -> None:
    config, flag = simulated(scan, ("run.seed=5",)), simulated(scan, ("run.seed=3",), seed=5)
    assert packs_of(config[1]) == packs_of(flag[1]) != packs_of(simulated(scan, ("run.seed=3",))[1])
    assert config[0].disturbances == flag[0].disturbances == Disturbances(seed=5)


@pytest.mark.parametrize("flag", [None, 3])
def test_checkpoints_are_those_of_the_config(scan: Path, flag: int | None) -> None:
    made = subject(scan, ("checkpoint.every=2",), save_every=flag)
    schedule = schedule_of(run_of(made, (f"checkpoint.every={flag or 2}",)))
    steps = made.planned.steps(made.rows, made.order)
    outcome = Simulation(made.planned.system, made.planned.timing, steps).run(5)
    assert outcome.saved == sum(schedule.saves(step) for step in range(1, 6)) == (1 if flag else 2)
    assert f"a checkpoint every {flag or 2} steps stops the ranks for 0 s" in made.planned.notes
    assert subject(scan, ()).planned.system.save_every is None


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("train.freeze=[encoder, projector]",),
        ("mode=disaggregated",),
        ("pool.exchange=barrier_step",),
    ],
    ids=" ".join,
)
def test_ranks_are_those_of_a_launched_run(scan: Path, keys: tuple[str, ...]) -> None:
    made = subject(scan, keys)
    system, inputs = made.planned.system, run_of(made, keys)
    real = System.of_run(inputs, system.num_devices, Control())
    assert replace(real, segment_bytes=1, payload_bytes=len) == replace(system, segment_bytes=1, payload_bytes=len)
    samples = [row for row in made.rows if isinstance(row, SampleMeta)]
    assert list(map(real.payload_bytes, samples)) == list(map(system.payload_bytes, samples))


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
    assert sum(isinstance(row, SkippedRow) for row in made.rows) == 50
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
    with pytest.raises(DataError, match=r"rows have more than 200 tokens, the first is row-\d+, and a run"):
        simulated(scan, ("packing.max_tokens=200", "packing.on_long_row=error"))


def test_the_mode_of_the_command_line_leaves_the_keys_of_a_config(scan: Path, tmp_path: Path) -> None:
    data, rates = tmp_path / "out.json", []
    for keys in ((), ("--set", "pool.exchange=pool", "--set", "packing.policy=dynamic")):
        arguments = (EMOJI, "--trace", scan, "--device", "cpu", "--devices-per-node", 4, "--mode", "disaggregated")
        command = ["simulate", *map(str, arguments), "--steps", "4", "--json", str(data), *keys]
        make_app()(command, standalone_mode=False)
        rates.append(json.loads(data.read_text())["samples_per_second"])
    assert rates[0] != rates[1]


@pytest.mark.parametrize(
    "keys", [(), LONG, ("packing.max_tokens=200",), ("data.max_seq_len=150",), (*LONG, "data.max_seq_len=330")],
    ids=" ".join,
)  # fmt: skip
def test_a_plan_is_for_the_rows_that_a_run_trains(scan: Path, keys: tuple[str, ...]) -> None:
    made = subject(scan, keys)
    inputs = run_of(made, keys)
    epoch = launched(inputs, reader_of_sizes(inputs, made), end=len(made.sizes))
    trained = [sample for step in epoch for sample in step.samples]
    load = made.planned.timing.backbone.choice.load
    assert load.tokens == pytest.approx(fmean(sample.tokens for sample in trained))
    assert load.longest_tokens == max(sample.tokens for sample in trained)
    assert load.head_tokens == pytest.approx(fmean(sample.trained_tokens for sample in trained))
    assert load.own_pack == (load.longest_tokens > inputs.config.packing.max_tokens)
