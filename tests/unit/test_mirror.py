"""Files at URLs: fetched whole and once, again when they change, refused in words; and the config around them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from file_site import Site

from flowtrain import mirror
from flowtrain.cli.job import check_visible
from flowtrain.config.loading import config_from_json, config_to_json, dump_resolved, load_config
from flowtrain.config.schema import Config
from flowtrain.data.errors import BadRow
from flowtrain.data.sources import open_source
from flowtrain.errors import ConfigError, DataError, PlanError
from flowtrain.runtime.nodes import check_seen, look


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "site").mkdir()
    with Site(tmp_path / "site") as site:
        yield site


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/flowtrain/urls"


ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]}
LINE = json.dumps(ROW) + "\n"


def test_a_path_of_the_mirror_is_its_address(cache: Path) -> None:
    for url in ("s3://bucket/rows/train.jsonl", "hf://datasets/one/two@v1/a b.parquet", "abfs://box@account/rows"):
        path = mirror.local_path(url)
        assert path.is_relative_to(cache)
        assert mirror.shown(path) == url
    assert mirror.shown(mirror.local_path("gs://bucket/rows/") / "../cats/7.png") == "gs://bucket/cats/7.png"
    assert mirror.local_path("file:///data/train.jsonl") == Path("/data/train.jsonl")
    assert mirror.shown(Path("/data/train.jsonl")) == "/data/train.jsonl"


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hush@host/rows.jsonl",
        "https://hush@host/rows.jsonl",
        "s3://key:hush@bucket/rows.jsonl",
        "https://host/rows.jsonl?signature=hush",
        "https://host/rows.jsonl#hush",
        "https://host//rows.jsonl",
        "https://host/../rows.jsonl",
        "zip://rows.jsonl::s3://bucket/rows.zip",
        "http://[host/rows.jsonl",
    ],
)
def test_an_address_that_holds_a_secret_or_has_no_place_is_refused_without_it(url: str) -> None:
    with pytest.raises(mirror.FetchError) as caught:
        mirror.local_path(url)
    assert "hush" not in str(caught.value)


def test_a_file_is_fetched_once_and_again_when_it_changes(site: Site) -> None:
    site.write("rows.jsonl", LINE)
    path = mirror.local_path(f"{site.url}/rows.jsonl")
    mirror.fetch(path)
    mirror.fetch(path)
    assert site.asked == ["/rows.jsonl"]
    path.write_text(LINE.upper())  # not by a fetch
    mirror.fetch(path)
    assert path.read_text() == LINE
    first = open_source(path).fingerprint
    site.write("rows.jsonl", LINE.replace("Hello", "Goods"))  # of the same length
    mirror.fetch(path)
    assert open_source(path).row(0).messages[1]["content"][0]["text"] == "Goods."
    assert open_source(path).fingerprint != first
    assert not list(path.parent.glob("*.part"))


def test_a_folder_has_the_files_that_are_listed_now(site: Site) -> None:
    for name in ("a.jsonl", "b.jsonl", "notes.bin", "deeper/c.jsonl"):
        site.write(f"rows/{name}", LINE)
    folder = mirror.local_path(f"{site.url}/rows")
    mirror.fetch(folder)
    assert len(open_source(folder)) == 2
    (site.folder / "rows/b.jsonl").unlink()
    (folder / "a.sizes.jsonl").write_text("")  # what `flowtrain data scan` has written stays
    mirror.fetch(folder)
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {"a.jsonl", "a.sizes.jsonl"}


def test_many_fetch_at_once_and_each_reads_a_whole_file(site: Site) -> None:
    site.write("rows.jsonl", LINE * 5000)
    path = mirror.local_path(f"{site.url}/rows.jsonl")
    lengths = []

    def read() -> None:
        mirror.fetch(path)
        lengths.append(len(path.read_bytes()))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert lengths == [len(LINE) * 5000] * 4


def test_what_cannot_be_read_is_told(site: Site) -> None:
    for url, told in (
        (f"{site.url}/gone.jsonl", "gone.jsonl does not exist"),
        (f"{site.url}/gone", "gone does not exist"),
        ("nosuch://host/rows.jsonl", "has a protocol that fsspec does not know"),
        ("smb://host/share/rows.jsonl", "needs a package on every node that reads it: .*smbprotocol"),
    ):
        with pytest.raises(mirror.FetchError, match=told):
            mirror.fetch(mirror.local_path(url))


# --- rows and their pictures ------------------------------------------------------------------------------------------


def source_with(site: Site, image: str) -> Any:
    row = {"messages": [{"role": "user", "content": "<image>"}, ROW["messages"][1]], "images": [image]}
    site.write("rows/train.jsonl", json.dumps(row))
    path = mirror.local_path(f"{site.url}/rows/train.jsonl")
    mirror.fetch(path)
    return open_source(path)


@pytest.mark.parametrize("image", ["../cats/7.png", "gone/../../cats/7.png", "URL/cats/7.png"])
def test_pictures_lie_beside_the_rows_at_their_address(site: Site, image: str) -> None:
    site.write("cats/7.png", b"picture")
    ref = source_with(site, image.replace("URL", site.url)).row(0).images[0]
    assert f"{site.url}/cats/7.png" in ref.label
    assert [ref.read(), ref.read()] == [b"picture"] * 2
    assert site.asked.count("/cats/7.png") == 1


def test_a_picture_that_is_not_there_is_a_bad_row_and_a_server_that_fails_is_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "WAIT_SECONDS", 0.01)
    site.write("rows/7.png", b"picture")
    site.broken.add("/rows/7.png")
    with pytest.raises(BadRow, match=r"rows/gone.png does not exist") as absent:
        source_with(site, "gone.png").row(0).images[0].read()
    assert absent.value.reason == "image-missing"
    with pytest.raises(DataError, match=r"7.png cannot be read: ClientResponseError 500") as failed:
        source_with(site, "7.png").row(0).images[0].read()
    assert not isinstance(failed.value, BadRow)
    assert site.asked.count("/rows/7.png") == mirror.ATTEMPTS
    with pytest.raises(BadRow, match="has a query") as secret:
        source_with(site, f"{site.url}/7.png?key=hush").row(0)
    assert "hush" not in str(secret.value)


# --- configs ----------------------------------------------------------------------------------------------------------


def config_of(site: Site, tmp_path: Path, *overrides: str) -> Config:
    site.write("model/config.json", "{}")
    site.write("rows/train.jsonl", LINE)
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{path: {site.url}/model}}\ndata: {{train: {site.url}/rows/train.jsonl}}\n")
    return load_config(path, overrides).config


def test_a_config_with_urls_reads_local_copies_and_is_written_down_with_urls(
    site: Site, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(site, tmp_path, f"data.eval={site.folder.as_uri()}/rows/train.jsonl")
    assert config.model.path.is_relative_to(cache)
    assert (config.model.path / "config.json").is_file()
    assert len(open_source(config.data.train)) == 1
    assert config.data.eval == site.folder / "rows/train.jsonl"
    assert config_from_json(config_to_json(config)) == config
    resolved = dump_resolved(config)
    assert f"{site.url}/rows/train.jsonl" in resolved
    assert str(cache) not in resolved
    sent = config_to_json(config)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))  # as on another node
    assert config_from_json(sent).data.train.is_relative_to(tmp_path / "another")


def test_a_config_tells_where_a_url_cannot_be_used(site: Site, tmp_path: Path) -> None:
    for override, told in (
        (f"data.train={site.url}/rows/gone.jsonl", r"data.train: .*/rows/gone.jsonl does not exist"),
        (f"model.path={site.url}/rows", r"model.path: .*/rows is no Hugging Face model folder"),
        ("data.eval=https://me:hush@host/a.jsonl", r"data.eval: https://host/a.jsonl names a user or password"),
        ("run.dir=s3://key:hush@bucket/run", r"run.dir: s3://bucket/run is a URL, and what is written needs"),
    ):
        with pytest.raises(ConfigError, match=told) as caught:
            config_of(site, tmp_path, override)
        assert "hush" not in str(caught.value).replace(f"--set {override}", "")


def test_a_node_fetches_for_itself_and_is_named_when_it_cannot(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write("rows.jsonl", LINE)
    wanted = [f"{site.url}/rows.jsonl"]
    here = look(wanted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    check_seen(1, "10.0.0.2", look(wanted), here)
    assert site.asked == ["/rows.jsonl"] * 2
    (site.folder / "rows.jsonl").unlink()
    with pytest.raises(PlanError, match=r"node 1 \(10.0.0.2\): .*/rows.jsonl does not exist") as caught:
        check_seen(1, "10.0.0.2", look(wanted), here)
    assert caught.value.exit_code == 4


def test_a_job_names_the_node_that_cannot_read_a_url(site: Site, tmp_path: Path) -> None:
    config = config_of(site, tmp_path)
    check_visible(config)
    (site.folder / "rows/train.jsonl").unlink()
    with pytest.raises(PlanError, match=r"node .* cannot read data.train: .*/train.jsonl does not exist") as caught:
        check_visible(config)
    assert caught.value.exit_code == 4
