"""A small web server on this machine's loopback interface, for downloads in tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Server:
    """What is served, how badly, and what was asked for.

    Attributes:
        files: content by path, such as ``/a.zip``.
        etag: sent with every file; None sends none.
        ranges: whether parts can be asked for.
        cut_after: bytes of body after which the connection is closed, one number per request until they are used up.
        statuses: answers other than the file, one per request until they are used up.
        requests: the path and the header Range of every request.
    """

    files: dict[str, bytes]
    etag: str | None = '"v1"'
    ranges: bool = True
    cut_after: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""

    def url(self, path: str) -> str:
        return f"{self.address}{path}"


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            server.requests.append((self.path, asked))
            if server.statuses:
                self.send_error(server.statuses.pop(0))
                return
            content = server.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            start = 0
            if asked and server.ranges and self.headers.get("If-Range") in (None, server.etag):
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(content) - start))
            if server.etag is not None:
                self.send_header("ETag", server.etag)
            self.end_headers()
            end = start + server.cut_after.pop(0) if server.cut_after else len(content)
            self.wfile.write(content[start:end])
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        server.address = f"http://127.0.0.1:{web.server_address[1]}"
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            web.shutdown()
            thread.join()
