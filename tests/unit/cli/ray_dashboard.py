"""What Ray's dashboard answers about one job, for tests of who follows it: no cluster, the same HTTP.

    with RayDashboard(log=["step 1\\n"]) as ray:
        Jobs(ray.url)

`log` grows by what is appended, `end` ends the job, `status` None: there is none. The job is `x`, or one that is sent.
`refusals`: how often a request to stop is answered with 500 first;
`deaf`: submitting is not answered; `agentless`: how often it is refused for want of an agent;
`streams`: whether the log comes by a websocket too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web


class RayDashboard:
    def __init__(
        self,
        log: list[str] | None = None,
        refusals: int = 0,
        deaf: bool = False,
        streams: bool = True,
        agentless: int = 0,
    ) -> None:
        self.log, self.refusals, self.deaf, self.streams = list(log or ()), refusals, deaf, streams
        self.agentless = agentless
        self.status: str | None = "RUNNING"
        self.code: int | None = None
        self.message = ""
        self.known = {"x"}
        self.requests: list[str] = []
        self.on_request: Callable[[str], None] = lambda asked: None
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)
        self._loop.close()

    def end(self, code: int) -> None:
        self.status, self.code = ("SUCCEEDED" if code == 0 else "FAILED"), code

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/api/version", self._version)
        app.router.add_route("*", "/api/packages/{protocol}/{name}", self._package)
        app.router.add_post("/api/jobs/", self._submit)
        app.router.add_get("/api/jobs/{id}", self._job)
        app.router.add_post("/api/jobs/{id}/stop", self._stopped)
        app.router.add_get("/api/jobs/{id}/logs", self._logs)
        app.router.add_get("/api/jobs/{id}/logs/tail", self._tail)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def _note(self, asked: str) -> None:
        self.requests.append(asked)
        self.on_request(asked)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"ray_version": "2.60.0"})

    async def _package(self, request: web.Request) -> web.Response:
        return web.json_response(True)

    async def _submit(self, request: web.Request) -> web.Response:
        told = await request.json()
        self._note(f"submit {told['submission_id']}")
        if self.agentless:
            self.agentless -= 1
            return web.Response(status=500, text="No available agent to submit job, please try again later.")
        self.known.add(told["submission_id"])
        if self.deaf:
            await self._stop.wait()
        return web.json_response({"job_id": told["submission_id"], "submission_id": told["submission_id"]})

    async def _job(self, request: web.Request) -> web.Response:
        if self.status is None or request.match_info["id"] not in self.known:
            return web.Response(status=404, text="Job x does not exist")
        told: dict[str, Any] = {"type": "SUBMISSION", "status": self.status, "entrypoint": "x"}
        return web.json_response(
            {**told, "submission_id": request.match_info["id"], "message": self.message, "driver_exit_code": self.code}
        )

    async def _stopped(self, request: web.Request) -> web.Response:
        self._note(f"stop {request.match_info['id']}")
        if self.refusals:
            self.refusals -= 1
            return web.Response(status=500, text="busy")
        return web.json_response({"stopped": True})

    async def _logs(self, request: web.Request) -> web.Response:
        return web.json_response({"logs": "".join(self.log)})

    async def _tail(self, request: web.Request) -> web.StreamResponse:
        if not self.streams:
            self._note(f"tail {request.match_info['id']}")
            return web.Response(status=403)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self._note(f"tail {request.match_info['id']}")
        for sent in range(10**6):
            while sent >= len(self.log):
                if self.status != "RUNNING" or self._stop.is_set():
                    await socket.close()
                    return socket
                await asyncio.sleep(0.01)
            await socket.send_str(self.log[sent])
        return socket
