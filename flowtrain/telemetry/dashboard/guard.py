"""Who may ask: the Host header, the token where the page is not on loopback, and headers on every answer.

| attack | what stops it |
|---|---|
| another site's name made to point here (DNS rebinding) | Host must be an address, localhost or this machine's name |
| anybody on the network | a token of 192 bits, compared in constant time; by `?token=` once, then by a cookie |
| text of a run that is markup | no inline script or style runs (Content-Security-Policy); the page only sets text |
| another site that embeds or reads us | no framing, no cross-origin reading |
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
import traceback
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from aiohttp import web

HOST = re.compile(r"(\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[\w.-]+))(:\d+)?")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """Not to be guessed."""
    return secrets.token_urlsafe(24)


def host_allowed(header: str, host: str) -> bool:
    """Whether a Host header names this machine rather than somebody's domain. Any port: it may be forwarded by ssh."""
    found = HOST.fullmatch(header)
    if found is None:
        return False
    name = found["address"] or found["name"]
    if is_loopback(host):
        return is_loopback(name.lower())
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() in {"localhost", host.lower(), *_own_names()}
    return True


@cache
def _own_names() -> frozenset[str]:
    """Of this machine; asked once, as a name server may take its time."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def cookie_name(token: str) -> str:
    """Of its own for each server: cookies of one machine are the same for all of its ports."""
    return f"flowtrain-{hashlib.sha256(token.encode()).hexdigest()[:12]}"


class Faults:
    """Our own bugs, as sentences; each place where one happened is told once."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._places: set[str] = set()

    def tell(self, error: Exception) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        what = f"internal error {type(error).__name__} at {place}: {' '.join(str(error).split())[:200]}"
        if place not in self._places:
            self._places.add(place)
            self._tell(f"warning: dashboard: {what}; the page goes on; this is a bug, please report it")
        return what


def guard(host: str, token: str | None, faults: Faults) -> Callable[..., Awaitable[web.StreamResponse]]:
    """A middleware for a server on `host`; `token`: None where everybody who reaches it may look."""
    cookie = cookie_name(token or "")
    if not is_loopback(host):
        _own_names()

    def knows(given: str | None) -> bool:
        return token is None or (
            given is not None and hmac.compare_digest(given.encode(errors="replace"), token.encode())
        )

    @web.middleware
    async def check(request: web.Request, **named: Answer) -> web.StreamResponse:
        (answer,) = named.values()  # aiohttp gives it by a name of its own
        if not host_allowed(request.headers.get("Host", ""), host):
            return refused(421, "this name is not one of the machine's: use its address, or localhost through ssh -L")
        by_link = request.query.get("token")
        if token is not None and by_link is not None and knows(by_link):
            moved = web.Response(status=303, headers={"Location": "/", **HEADERS})
            moved.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
            return moved
        if not knows(request.cookies.get(cookie)):
            return refused(403, "the token is missing or wrong: open the whole address that flowtrain printed")
        try:
            return await answer(request)
        except web.HTTPException as error:
            return refused(error.status, error.reason)
        except ConnectionError:
            raise  # who asked has gone
        except Exception as error:
            return refused(500, faults.tell(error))

    return check


def refused(status: int, reason: str) -> web.Response:
    """One plain sentence."""
    return web.Response(status=status, text=f"{reason}\n", headers=HEADERS)
