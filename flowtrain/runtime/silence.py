"""Why a Ray dashboard does not answer, in one sentence: by what the operating system said, and by its own last words.

| seen | told |
|---|---|
| a time-out | nothing answers within so many seconds |
| refused | nothing listens there: of a dashboard on this machine with the last line of its log |
| no such name, no way there, a proxy, TLS, no HTTP, broken off | which |
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from http.client import BadStatusLine, RemoteDisconnected
from pathlib import Path
from urllib.parse import urlsplit

import requests

from flowtrain.errors import ConfigError

LOGS = "session_2*/logs/dashboard.log"
"""Of all sessions, which are named by the time of their start: the latest may be that of a run on this machine."""

HEAD_BYTES = 1 << 16
TAIL_BYTES = 4096
HERE = ("localhost", "127.0.0.1", "::1")


def check_url(address: str) -> None:
    """Raises `ConfigError` where `address` cannot be the URL of a dashboard."""
    try:
        parts = urlsplit(address)
        well = bool(parts.hostname and parts.hostname.encode("idna")) and parts.port != 0
    except ValueError:  # of a port, or of a name
        well = False
    if not well:
        raise ConfigError(f"{address} is no URL of a dashboard: write http://HEAD:8265")


def silence(address: str, error: BaseException, seconds: float) -> str:
    """What kept the dashboard at `address` from answering within `seconds`, and what to look at."""
    found = list(_chain(error))
    host = urlsplit(address).hostname or ""
    codes = {one.errno for one in found if isinstance(one, OSError)}
    running = "check that the cluster runs"
    if any(isinstance(one, requests.exceptions.ProxyError) for one in found):
        return f"the proxy of HTTP_PROXY or HTTPS_PROXY does not bring {address}: set NO_PROXY={host}"
    if any(isinstance(one, socket.gaierror) for one in found):
        return f"the name {host} of {address} cannot be found: check it, or give the head node's address"
    if any(isinstance(one, ssl.SSLError) for one in found):
        return f"what answers at {address} does not speak TLS as expected: a Ray dashboard's URL begins with http://"
    if errno.ECONNREFUSED in codes:
        listens = "its dashboard listens for others (ray start --head --dashboard-host=0.0.0.0) on this port"
        return f"nothing listens at {address}, the connection is refused: {running} and {listens}{_last_words(address)}"
    if codes & {errno.EHOSTUNREACH, errno.ENETUNREACH}:
        return f"there is no way to {host} of {address} from this machine: check the address and the network"
    if any(isinstance(one, requests.Timeout | TimeoutError) for one in found):
        return f"no Ray dashboard answers at {address} within {seconds:g} s: {running} and no firewall is in between"
    if any(isinstance(one, BadStatusLine) and not isinstance(one, RemoteDisconnected) for one in found):
        other = "the head's own port (6379) is given without http://, as HOST:PORT, on a node of the cluster"
        return f"what answers at {address} does not speak HTTP: give the dashboard's port (8265); {other}"
    what = " ".join(str(found[-1]).split())[:200] or type(found[-1]).__name__
    return f"the connection to {address} broke off ({what}): {running} and this is its dashboard{_last_words(address)}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it came of, outermost first."""
    seen, left = set[int](), [error]
    while left:
        one = left.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        inner = (*one.args, getattr(one, "reason", None), one.__cause__, one.__context__)
        left += [below for below in inner if isinstance(below, BaseException)]


def _last_words(address: str) -> str:
    """The last line in the log of the dashboard that listened there, on this machine; empty where there is none."""
    parts = urlsplit(address)
    if (parts.hostname or "") not in (*HERE, socket.gethostname().lower()) or parts.port is None:
        return ""
    listened = re.compile(rf"http address: \S+:{parts.port}\b")
    root = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray")
    for file in sorted(root.glob(LOGS), reverse=True):
        with suppress(OSError), file.open("rb") as log:
            if not listened.search(log.read(HEAD_BYTES).decode(errors="replace")):
                continue
            log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
            if last := next((line.strip() for line in reversed(lines) if line.strip()), None):
                return f"; the last line of {file} is: {last[:200]}"
    return ""
