"""The dashboard in a thread of its own, beside a launcher that watches its run or a command that only waits."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from flowtrain.errors import PlanError
from flowtrain.telemetry import streams
from flowtrain.telemetry.dashboard.guard import is_loopback, new_token
from flowtrain.telemetry.dashboard.server import make_app

EVERYWHERE = ("0.0.0.0", "::", "")
"""Addresses to listen on that nobody can open."""

START_SECONDS = 30.0
STOP_SECONDS = 5.0
LAST_LOOK_SECONDS = 1.0
"""Between the end of what is shown and the end of the server, so that open pages see how it ended."""


@contextmanager
def serving(
    run_dirs: Sequence[Path],
    host: str = "127.0.0.1",
    port: int = 0,
    tell: Callable[[str], object] = streams.tell,
    ended: threading.Event | None = None,
) -> Iterator[str]:
    """Serve while the block runs; yields the address to open, with its token where `host` is not loopback.

    `port` 0: a free one. `tell`: takes a line when the server fails, while the block goes on; `ended` is set when it no
    longer serves. PlanError where the address cannot be had, ConfigError for a folder that no run wrote.
    """
    token = None if is_loopback(host) else new_token()
    app = make_app(run_dirs, host, token, tell)
    started: Future[tuple[int, asyncio.Event, asyncio.AbstractEventLoop]] = Future()
    ended = ended or threading.Event()
    thread = threading.Thread(target=_run, args=(app, host, port, started, ended, tell), name="dashboard", daemon=True)
    thread.start()
    try:
        port, stop, loop = started.result(timeout=START_SECONDS)
    except TimeoutError as error:
        raise PlanError(f"the dashboard did not start within {START_SECONDS:g} s: is the machine busy?") from error
    except (OSError, UnicodeError, OverflowError) as error:  # the latter by what is no name of a host
        what = f"the dashboard cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}"
        raise PlanError(f"{what}; choose another --port, or an address of this machine") from error
    shown = socket.gethostname() if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{port}/" + (f"?token={token}" if token is not None else "")
    finally:
        with suppress(RuntimeError):  # it has ended before
            loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=STOP_SECONDS + LAST_LOOK_SECONDS)


def _run(
    app: web.Application,
    host: str,
    port: int,
    started: Future[tuple[int, asyncio.Event, asyncio.AbstractEventLoop]],
    ended: threading.Event,
    tell: Callable[[str], object],
) -> None:
    async def serve() -> None:
        runner = web.AppRunner(app, access_log=None, logger=_log(), handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            stop = asyncio.Event()
            started.set_result((runner.addresses[0][1], stop, asyncio.get_running_loop()))
            await stop.wait()
            if runner.server is not None and runner.server.connections:
                await asyncio.sleep(LAST_LOOK_SECONDS)
        finally:
            await runner.cleanup()

    try:
        asyncio.run(serve())
    except BaseException as error:
        if started.done():
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            tell(f"warning: the dashboard has ended ({what}); `flowtrain dashboard RUN_DIR` starts another")
        else:
            started.set_exception(error)  # told by the thread that asked
    finally:
        ended.set()


def _log() -> logging.Logger:
    """Of the server, on the terminal of the run: what is no HTTP is answered with 400 and is no news there."""
    log = logging.getLogger(__name__)
    log.addFilter(_is_news)
    return log


def _is_news(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
