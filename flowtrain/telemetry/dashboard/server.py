"""Serves the page: one reader a run, any number of browsers up to a bound.

    follow(run): poll ▶ version moved on? ──notify──▶ every stream: the newest state, or nothing while it is behind
    browser ──GET /api/runs/N/columns──▶ what it shows of the history, from where it left off

| who waits | for | at most |
|---|---|---|
| a stream | a change | `BEAT_SECONDS`, then a comment line shows whether anybody listens |
| its sending | the browser to take it | `SEND_SECONDS`, then it is dropped |
| a request | the lump that the reader is reading | `SILENT_SECONDS`, then it is told to come again |

A reader that fails, or whose files do not answer, is told on the page and once on the terminal, and goes on.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from aiohttp import web

from flowtrain.telemetry.dashboard.guard import HEADERS, Faults, guard
from flowtrain.telemetry.dashboard.view import RunView

POLL_SECONDS = 0.25
PACE_SECONDS = 0.3
"""Between two events of a stream: what happens meanwhile is one change."""

BEAT_SECONDS = 10.0
SEND_SECONDS = 10.0
SILENT_SECONDS = 5.0
"""A folder that has not answered for so long is out of reach."""

AGAIN_SECONDS = 1.0
"""Between two tries of a reader that fails."""

MOST_STREAMS = 64
MOST_NAMES = 400
MOST_TIMELINE_STEPS = 50

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(slots=True)
class Followed:
    """A run and its reader's lock; `trouble`: why the reader does not get on; `server`: by which a page knows that it
    has another server than before, with other runs."""

    view: RunView
    server: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    trouble: str | None = None

    @property
    def version(self) -> tuple[int, str | None]:
        return self.view.version, self.trouble

    def state(self) -> dict[str, Any]:
        state = self.view.state()
        return {
            **state,
            "server": self.server,
            "problems": [*([self.trouble] if self.trouble else []), *state.get("problems", ())],
        }

    def about(self) -> dict[str, Any]:
        return {**self.view.about(), "state": self.state()}

    async def poll(self) -> bool:
        async with self.lock:
            return await asyncio.to_thread(self.view.poll)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[RunView]:
        """The view, which nobody else uses meanwhile."""
        try:
            await asyncio.wait_for(self.lock.acquire(), SILENT_SECONDS)
        except TimeoutError:
            told = f"the files of {self.view.name} do not answer: is its disk there?"
            raise web.HTTPServiceUnavailable(reason=told) from None
        try:
            yield self.view
        finally:
            self.lock.release()


class Dashboard:
    """The application for some runs; `make_app` serves it."""

    def __init__(self, run_dirs: Sequence[Path], faults: Faults) -> None:
        server = secrets.token_hex(8)
        self._runs = [Followed(RunView(path), server) for path in run_dirs]
        self._faults = faults
        self._changed = asyncio.Condition()
        self._num_streams = 0
        folder = resources.files(__package__) / "assets"
        self._assets = {
            entry.name: entry.read_bytes() for entry in folder.iterdir() if Path(entry.name).suffix in TYPES
        }

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Readers, for as long as the application lives."""
        readers = [asyncio.create_task(self._follow(run)) for run in self._runs]
        yield
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    async def _follow(self, run: Followed) -> None:
        told = run.version
        while True:
            poll = asyncio.create_task(run.poll())
            pause = POLL_SECONDS
            while not (await asyncio.wait({poll}, timeout=SILENT_SECONDS))[0]:
                run.trouble = f"The files of {run.view.name} do not answer: is its disk there? What is shown may be old"
                told = await self._tell(run, told)
            try:
                pause = 0 if poll.result() else POLL_SECONDS
                run.trouble = None
            except Exception as error:
                run.trouble = f"Not all can be read: {self._faults.tell(error)}"
                pause = AGAIN_SECONDS
            told = await self._tell(run, told)
            await asyncio.sleep(pause)

    async def _tell(self, run: Followed, told: tuple[int, str | None]) -> tuple[int, str | None]:
        """Wake the streams where there is news; returns what they know now."""
        if run.version != told:
            async with self._changed:
                self._changed.notify_all()
        return run.version

    def _versions(self) -> list[tuple[int, str | None]]:
        return [run.version for run in self._runs]

    def _named(self, request: web.Request) -> Followed:
        number = request.match_info["run"]
        if not number.isdecimal() or len(number) > 4 or int(number) >= len(self._runs):
            raise web.HTTPNotFound(reason="no such run")
        return self._runs[int(number)]

    # --- answers ------------------------------------------------------------------------------------------------------

    async def page(self, request: web.Request) -> web.Response:
        return self._asset("index.html")

    async def asset(self, request: web.Request) -> web.Response:
        return self._asset(request.match_info["name"])

    def _asset(self, name: str) -> web.Response:
        if name not in self._assets:
            raise web.HTTPNotFound(reason="no such file")
        kind = TYPES[Path(name).suffix]
        return web.Response(body=self._assets[name], content_type=kind, charset="utf-8", headers=HEADERS)

    async def runs(self, request: web.Request) -> web.Response:
        """What is known of every run."""
        found = []
        for run in self._runs:
            async with run.held():
                found.append(await asyncio.to_thread(run.about))
        return await _json(request, found)

    async def columns(self, request: web.Request) -> web.Response:
        """`?names=a,b&start=0&generation=0`: history of these metrics."""
        run = self._named(request)
        names = [name for name in request.query.get("names", "").split(",") if name][:MOST_NAMES]
        start, generation = _number(request, "start", 1 << 30), _number(request, "generation", 1 << 30)
        async with run.held() as view:
            found = view.columns(names, start, generation)
        return await _json(request, found)

    async def timeline(self, request: web.Request) -> web.Response:
        """`?steps=3`: who did what in the last steps."""
        run = self._named(request)
        async with run.held() as view:
            found = view.timeline(max(1, _number(request, "steps", MOST_TIMELINE_STEPS)))
        return await _json(request, found)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the state of all runs, whenever one has changed."""
        if self._num_streams >= MOST_STREAMS:
            raise web.HTTPServiceUnavailable(reason=f"{MOST_STREAMS} pages are open already: close one")
        stream = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        self._num_streams += 1
        try:
            await stream.prepare(request)
            seen: list[tuple[int, str | None]] = []
            while True:
                now, states = self._versions(), [run.state() for run in self._runs]
                text = f"data: {json.dumps(states)}\n\n" if now != seen else ": still here\n\n"
                seen = now
                await asyncio.wait_for(stream.write(text.encode()), SEND_SECONDS)
                await asyncio.sleep(PACE_SECONDS)
                await self._change(seen)
        except (ConnectionError, TimeoutError):
            return stream  # gone, or too slow: the browser comes back by itself
        finally:
            self._num_streams -= 1

    async def _change(self, seen: list[tuple[int, str | None]]) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._versions() != seen), BEAT_SECONDS)
            except TimeoutError:
                return


def make_app(run_dirs: Sequence[Path], host: str, token: str | None, tell: Callable[[str], object]) -> web.Application:
    """The application; ConfigError for a folder that no run wrote. `tell`: takes each fault of our own, once."""
    faults = Faults(tell)
    board = Dashboard(run_dirs, faults)
    app = web.Application(middlewares=[guard(host, token, faults)])
    app.cleanup_ctx.append(board.run)
    app.router.add_get("/", board.page)
    app.router.add_get("/assets/{name}", board.asset)
    app.router.add_get("/api/runs", board.runs)
    app.router.add_get("/api/runs/{run}/columns", board.columns)
    app.router.add_get("/api/runs/{run}/timeline", board.timeline)
    app.router.add_get("/api/events", board.events)
    return app


def _number(request: web.Request, name: str, most: int) -> int:
    text = request.query.get(name, "0")
    if not text.isdecimal() or len(text) > 12:
        raise web.HTTPBadRequest(reason=f"{name} is not a number")
    return min(int(text), most)


async def _json(request: web.Request, content: Any) -> web.Response:
    body = await asyncio.to_thread(lambda: json.dumps(content, allow_nan=False, separators=(",", ":")).encode())
    return web.Response(body=body, content_type="application/json", headers=HEADERS)
