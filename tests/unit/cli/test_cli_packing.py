"""`flowtrain packing`: figures and picture for a trace, for a scanned data set, and for one not scanned yet."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from flowtrain.cli.main import make_app
from flowtrain.cli.packing import _rows_of
from flowtrain.cli.packing_picture import colour, shares_of
from flowtrain.config.loading import load_config
from flowtrain.data.order import Order
from flowtrain.errors import ConfigError, DataError
from flowtrain.types import Pack, Phase, Step

EXAMPLE = Path(__file__).parents[3] / "examples/emoji"


def run(*arguments: object) -> None:
    make_app()(["packing", *map(str, arguments)], standalone_mode=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Rows of very different lengths, every third with pictures."""
    chance = random.Random(0)
    text = [int(chance.lognormvariate(5, 1)) + 8 for _ in range(900)]
    units = [[chance.randrange(10, 90)] * (number % 3) for number in range(900)]
    path = tmp_path / "sizes.parquet"
    parquet.write_table(pa.table({"n_text_tokens": text, "unit_tokens": units}), path)
    return path


def figures(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_a_trace_is_shown_for_two_policies(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, picture = tmp_path / "out.json", tmp_path / "out.png"
    run(
        trace, "--ranks", 3, "--packs", 2, "--steps", 6, "--max-tokens", 4096, "--json", json_file, "--picture", picture
    )
    shown = capsys.readouterr()
    assert "arrival" in shown.out
    assert "dynamic" in shown.out
    assert "rank 2" in shown.out
    assert "7B model" in shown.err
    found = figures(json_file)
    assert found["composition"]["num_consumers"] == 3
    arrival, dynamic = found["policies"]["arrival"], found["policies"]["dynamic"]
    assert dynamic["lock_step"] < 1.02 < arrival["lock_step"]
    assert dynamic["packs_per_rank"] == 2
    for policy in (arrival, dynamic):
        for name, bound in policy["bounds"].items():
            assert 1 <= bound <= policy[name] + 1e-9, f"{name} is better than its lower bound"
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert len(image.getcolors(1 << 16) or []) > 5, "a picture has more than its background"


def test_rows_longer_than_a_pack_are_told(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(trace, "--max-tokens", 256, "--steps", 2, "--policy", "ffd")
    shown = capsys.readouterr()
    assert "tokens are left out" in shown.err
    assert "ffd" in shown.out
    assert "dynamic" not in shown.out


def test_a_scanned_data_set_needs_neither_torch_nor_the_rows(tmp_path: Path) -> None:
    """The data file has no rows to read: the sizes that a scan wrote are all there is."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"messages": []}\n')
    chance = random.Random(1)
    sizes = [
        {"row": n, "id": f"r{n}", "text_tokens": chance.randrange(9, 400), "vision_tokens": 12 * (n % 2)}
        | {"trained_tokens": 4, "images": [[16, 16, 12, 48]] * (n % 2)}
        for n in range(300)
    ]
    skipped = {"row": 300, "id": "r300", "skipped": "too-long"}
    (tmp_path / "train.jsonl.sizes.jsonl").write_text("".join(json.dumps(size) + "\n" for size in (*sizes, skipped)))
    config = tmp_path / "job.yaml"
    config.write_text(
        f"model: {{path: {EXAMPLE / 'model'}}}\ndata: {{train: train.jsonl}}\nconsumers: {{num: 2}}\n"
        "train: {step: {samples: 24}}\npacking: {max_tokens: 1024}\n"
    )
    json_file = tmp_path / "out.json"
    code = (
        "import sys\nfrom flowtrain.cli.main import make_app\n"
        f"make_app()(['packing', {str(config)!r}, '--json', {str(json_file)!r}], standalone_mode=False)\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules), 'heavy modules were loaded'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = figures(json_file)
    assert found["rows"] == 300
    assert any("1 rows cannot be used" in note for note in found["notes"])
    assert found["composition"]["step_samples"] == 24
    assert found["policies"]["dynamic"]["lock_step"] <= found["policies"]["arrival"]["lock_step"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_are_in_the_order_of_the_run(tmp_path: Path, shuffle: bool) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"messages": []}\n')
    sizes = [
        {"row": n, "id": f"r{n}", "text_tokens": 9, "vision_tokens": 0, "trained_tokens": 4, "images": []}
        for n in range(50)
    ]
    (tmp_path / "train.jsonl.sizes.jsonl").write_text("".join(json.dumps(size) + "\n" for size in sizes))
    config = load_config(EXAMPLE / "emoji.yaml", [f"data.train={data}", f"data.shuffle={str(shuffle).lower()}"]).config
    rows, _ = _rows_of(config, 50)
    order = Order(50, config.run.seed, shuffle)
    assert [row.row for row in rows] == [order.row(position) for position in range(50)]
    assert (sorted(row.row for row in rows) == [row.row for row in rows]) != shuffle


def test_rows_are_measured_where_no_scan_was_made(capsys: pytest.CaptureFixture[str]) -> None:
    run(EXAMPLE / "emoji.yaml", "--ranks", 2, "--steps", 2, "--set", "train.step.samples=8")
    assert "rows were measured now" in capsys.readouterr().err


def test_what_cannot_be_shown_is_told(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--policy best: there is none of this name"):
        run(trace, "--policy", "best")
    with pytest.raises(ConfigError, match="does not exist"):
        run(tmp_path / "none.parquet")
    with pytest.raises(ConfigError, match="is no file"):
        run(tmp_path)
    with pytest.raises(DataError, match="none of the 900 rows fits a pack of 8 tokens, the shortest has"):
        run(trace, "--max-tokens", 8)
    other = tmp_path / "other.parquet"
    parquet.write_table(pa.table({"text": ["a"]}), other)
    with pytest.raises(DataError, match="n_text_tokens"):
        run(other)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"n_text_tokens": [5, None]}, "row 1 has None in column `n_text_tokens`"),
        ({"n_text_tokens": [5.5, 6.0]}, "row 0 has 5.5 in column `n_text_tokens`"),
        ({"n_text_tokens": [5, 6], "unit_tokens": [[3, -9], None]}, r"row 0 has \[3, -9\] in column `unit_tokens`"),
        ({"n_text_tokens": [5, 6], "n_vision_tokens": [[3], [4]]}, "give whole numbers from 0"),
        ({"n_text_tokens": [5, 0]}, "row 1 has no token"),
        ({"n_text_tokens": [10**12]}, "from 0 to 2147483648"),
    ],
)
def test_a_trace_of_other_things_than_sizes_is_refused(
    columns: dict[str, list[Any]], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "sizes.parquet"
    parquet.write_table(pa.table(columns), path)
    with pytest.raises(DataError, match=told):
        run(path, "--ranks", 2)


def test_shares_are_of_the_dearest_in_the_slot() -> None:
    packs = [Pack(0, rank, (), (), cost, 0) for rank, cost in enumerate((10, 5))]
    idle = [Pack(1, rank, (), (), 0, 0) for rank in range(2)]
    step = Step(Phase.TRAIN, 1, (tuple(packs), tuple(idle)), 0, 0, {})
    assert shares_of([step]) == [[[1.0, 0.5], [1.0, 1.0]]]
    assert sum(colour(1.0)) < sum(colour(0.9)) < sum(colour(0.5)) < sum(colour(0.0))


def test_a_config_is_shown_as_it_would_run(tmp_path: Path) -> None:
    """Ranks by the data-parallel part of a layout, its way of waiting, what is frozen, the policy it names."""
    json_file = tmp_path / "out.json"
    keys = ("consumers.layout=f2t2", "producers.layout=r2f2", "train.freeze=[encoder]", "packing.policy=ffd")
    run(EXAMPLE / "emoji.yaml", *(part for key in keys for part in ("--set", key)), "--steps", 2, "--json", json_file)
    found = figures(json_file)
    assert list(found["policies"]) == ["arrival", "ffd"]
    expected = {
        "num_consumers": 2,
        "sync": "microbatch",
        "num_producers": 4,
        "producer_shards": 2,
        "trainable_encoder": False,
        "colocated": False,
    }
    assert {name: found["composition"][name] for name in expected} == expected


def test_ranks_of_a_colocated_config_have_producers_each(tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    keys = ("--set", "mode=monolithic", "--set", "packing.max_images=9", "--packs", 2, "--steps", 2)
    run(EXAMPLE / "emoji.yaml", "--ranks", 3, *keys, "--json", data)
    rules = figures(data)["composition"]
    assert (rules["num_consumers"], rules["num_producers"], rules["colocated"]) == (3, 3, True)
    assert (rules["step_packs"], rules["step_samples"], rules["max_images"]) == (2, None, 9)
