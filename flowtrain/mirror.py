"""Files at fsspec URLs, as local files: a folder of this node's cache that is laid out like the addresses themselves.

    https://host/rows/train.jsonl   ◀──▶   CACHE/https/host/rows/train.jsonl

A path in the mirror is its URL and the other way round, by arithmetic: a picture beside a file of rows lies beside it
at its address too, and configs travel between nodes as URLs, whatever the home of each is.

Invariants
1. A file appears whole, by a rename; two processes that fetch one at the same time both write the same whole file.
2. What `fetch` leaves is what the address has: a file is fetched again when size, tag or date at its address differ
   from those noted beside the copy, or tell too little, and files that are gone there are removed.
3. No password, query or fragment is in a URL that is used, in a note beside a file, or in an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowtrain.errors import ConfigError

SUFFIXES = (".json", ".jsonl", ".parquet", ".safetensors", ".jinja", ".txt", ".model", ".py")
"""Files of a folder that are fetched: rows, and what a Hugging Face model folder needs. No pickled weights."""

_ADDRESS = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*)://")
_TELLS_NOTHING = {"name", "url", "size", "type", "mimetype", "partial", "islink", "mode"}
"""Of what fsspec tells of a file: the same for two contents of one length, or another for each request."""

_CONTAINERS = ("abfs", "abfss", "az")
"""Protocols in which what stands before an @ is a container and no user."""

ATTEMPTS = 4
WAIT_SECONDS = 1.0
"""Tries to fetch a file, and the wait after the first that failed, doubled after each: a run of days outlives a fault
of its storage that lasts seconds."""
_CONNECT_SECONDS, _READ_SECONDS = 20.0, 60.0


class FetchError(ConfigError):
    """An address cannot be read (exit 2); the sentence names it."""


class AbsentError(FetchError):
    """There is nothing at the address."""


def is_url(text: str) -> bool:
    return _ADDRESS.match(text) is not None


def root() -> Path:
    """The mirror of this node and user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.abspath(os.path.expanduser(base))) / "flowtrain" / "urls"


def local_path(url: str) -> Path:
    """Where the file of an address is, or will be: for `file://` itself, else in the mirror.

    >>> local_path("s3://bucket/rows/train.jsonl").relative_to(root())
    PosixPath('s3/bucket/rows/train.jsonl')

    Raises:
        FetchError: the address has a password, a query, a fragment or parts that cannot be names of files.
    """
    if url.startswith("file://"):
        return Path(url.removeprefix("file://").removeprefix("localhost"))
    if why := _unfit(url):
        raise FetchError(f"{bare(url)} {why}")
    protocol, _, rest = url.rstrip("/").partition("://")
    return root() / protocol.lower() / rest


def shown(path: Path) -> str:
    """The URL of a path in the mirror; any other path as it is."""
    url = _url(path)
    return str(path) if url is None else url


def bare(text: str) -> str:
    """A text without what may be secret in the addresses in it: user, password, query and fragment."""
    return re.sub(r"(\w://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", re.sub(r"(\w://)[^\s/@'\"]*@", r"\1", text))


def fetch(path: Path) -> None:
    """Bring a path of the mirror up to date with its address, a folder with all its files; other paths stay as is.

    A path whose suffix is one of `SUFFIXES` is a file, any other a folder.

    Raises:
        FetchError: nothing is there, no access, no answer, an unknown protocol, or a package that is not installed.
    """
    url = _url(path)
    if url is None:
        return
    fs, place = _file_system(url)
    fs.invalidate_cache()
    if path.suffix in SUFFIXES:
        _update(fs, place, url, path)
        return
    names = _names(fs, place, url)
    if not names:
        raise AbsentError(f"{url} lists no file that is read ({', '.join(SUFFIXES)}): check the address")
    for name in names:
        _update(fs, f"{place.rstrip('/')}/{name}", f"{url}/{name}", path / name)
    for note in path.glob(".*.version"):
        name = note.name[1 : -len(".version")]
        if name not in names:
            (path / name).unlink(missing_ok=True)
            note.unlink(missing_ok=True)


def fetch_once(path: Path) -> None:
    """Fetch a path of the mirror that is not there yet; any other stays as it is."""
    url = _url(path)
    if url is not None and not path.exists():
        fs, place = _file_system(url)
        _get(fs, place, url, path, None)


def _url(path: Path) -> str | None:
    base, place = f"{root()}/", os.path.normpath(path)
    if not place.startswith(base):
        return None
    protocol, _, rest = place.removeprefix(base).partition("/")
    return f"{protocol}://{rest}"


def _unfit(url: str) -> str | None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return f"is no address: {error}"
    user, at, _ = parts.netloc.rpartition("@")
    if at and (":" in user or parts.scheme not in _CONTAINERS):
        return "names a user or password: leave them to the environment of each node, as fsspec reads it"
    if parts.query or parts.fragment or "?" in url or "#" in url:
        return "has a query or fragment after ? or #, which may hold a secret: give an address without"
    if "::" in url or "\\" in url:
        return "is a chain of addresses: give that of the file itself"
    names = url.rstrip("/").partition("://")[2].split("/")
    if any(name in ("", ".", "..") or "\0" in name or len(name.encode()) > 200 for name in names):
        return "has an empty part, . or .., or one of more than 200 bytes"
    return None


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of an address, and what it calls the place."""
    import fsspec
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0]
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        import aiohttp

        options["client_kwargs"] = {
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
        }
    if protocol not in fsspec.available_protocols():
        raise FetchError(f"{url} has a protocol that fsspec does not know; it knows s3, gs, hf, http and many more")
    try:
        fs, place = url_to_fs(url, **options)
    except ImportError as error:
        raise FetchError(f"{url} needs a package on every node that reads it: {bare(str(error))}") from error
    except Exception as error:  # every file system has errors of its own
        raise _failed(url, error) from error
    return fs, place


def _names(fs: Any, place: str, url: str) -> list[str]:
    try:
        entries = fs.ls(place, detail=True)
    except Exception as error:
        raise _failed(url, error) from error
    found = set()
    for entry in entries:
        folder, _, name = entry["name"].rpartition("/")
        is_file = entry["type"] == "file" and folder.rstrip("/") == place.rstrip("/")
        if is_file and Path(name).suffix in SUFFIXES and not name.startswith("."):
            found.add(name)
    return sorted(found)


def _update(fs: Any, place: str, url: str, path: Path) -> None:
    """One file, where its copy is not that of the address."""
    try:
        info = fs.info(place)
    except Exception as error:
        raise _failed(url, error) from error
    if info["type"] != "file":
        raise FetchError(f"{url} is a folder, and its name that of a file: rename it")
    note = path.with_name(f".{path.name}.version")
    told = {key: str(value) for key, value in info.items() if key not in _TELLS_NOTHING and value is not None}
    version = hashlib.blake2b(json.dumps([info.get("size"), told], sort_keys=True).encode(), digest_size=16).hexdigest()
    if told and path.is_file() and note.is_file() and note.read_text() == f"{version} {_identity(path)}":
        return
    fetched = _get(fs, place, url, path, info.get("size"))
    whole = note.with_name(f"{note.name}-{uuid.uuid4().hex}")
    whole.write_text(f"{version} {fetched}")
    whole.replace(note)


def _identity(path: Path) -> str:
    """Of the file itself: a note of one that another process has put in its place since holds no longer."""
    status = path.stat()
    return f"{status.st_ino}:{status.st_mtime_ns}"


def _get(fs: Any, place: str, url: str, path: Path, size: int | None) -> str:
    """Puts the file there; returns its identity."""
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(ATTEMPTS):
            try:
                fs.get_file(place, str(part))
                break
            except Exception as error:
                last = isinstance(error, FileNotFoundError | PermissionError) or attempt == ATTEMPTS - 1
                if last:
                    raise _failed(url, error) from error
                time.sleep(WAIT_SECONDS * 2**attempt)
        if size is not None and part.stat().st_size != size:
            raise FetchError(
                f"{url} gave {part.stat().st_size} bytes and told of {size}: it changes while it is read; start again"
            )
        fetched = _identity(part)
        part.replace(path)
        return fetched
    except OSError as error:
        raise FetchError(f"{url} cannot be kept as {path}: {error.strerror or error}; set XDG_CACHE_HOME") from error
    finally:
        part.unlink(missing_ok=True)


def _failed(url: str, error: Exception) -> FetchError:
    if isinstance(error, FileNotFoundError):
        return AbsentError(f"{url} does not exist, or its server does not answer: check the address")
    told = bare(str(error)).splitlines() or [""]
    return FetchError(f"{url} cannot be read: {type(error).__name__} {told[0][:200]}; check address and access")
