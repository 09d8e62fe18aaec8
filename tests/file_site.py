"""A folder as a web site, for what reads URLs."""

from __future__ import annotations

import http.server
import os
import threading
from pathlib import Path
from typing import Any, Self


class Site:
    """A folder served on loopback. `asked`: paths that were read; `broken`: paths answered by 500."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.broken: set[str] = set()
        site = self

        class Answers(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(folder))

            def do_GET(self) -> None:
                site.asked.append(self.path)
                if self.path in site.broken:
                    self.send_error(500)
                else:
                    super().do_GET()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def write(self, name: str, content: bytes | str) -> Path:
        """A file of the site; each writing is a second later than the one before, which is what HTTP dates tell."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        then = path.stat().st_mtime + 1 if path.exists() else None
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        if then is not None:
            os.utime(path, (then, then))
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
