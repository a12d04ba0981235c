"""An S3 endpoint in front of a real one that misbehaves as it is told, request by request."""

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal["slow down", "reset", "hang", "cut", "expired", "stale"]
"""
slow down: 503, and the request is not done. reset: the connection breaks off before an answer, likewise.
hang: no answer, until the client gives up. cut: the request is done, but half of the answer is lost, all of it
where there is no body. expired: the session's token is refused. stale: a listing is the first one ever given.
"""
ANSWERS = {"slow down": (503, "SlowDown"), "expired": (400, "ExpiredToken")}
HOP_BY_HOP = {"connection", "transfer-encoding", "expect", "keep-alive", "content-length"}
PROBE = ("HEAD", "/")
"""What asks whether the endpoint is alive at all."""


class FaultyS3:
    """Use as a context manager.

    Args:
        upstream: endpoint of the real store.

    Attributes:
        url: endpoint of this one.
        choose: (method, path with query) of a request to what goes wrong with it, if anything.
        faults: how many requests went wrong.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.choose: Callable[[str, str], Fault | None] = lambda method, path: None
        self.faults = 0
        self.listings: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "FaultyS3":
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()

    def first(self, count: int, fault: Fault) -> None:
        """From now on, the next requests go wrong, then none; probes are spared."""
        left = iter(range(count))
        self.choose = lambda method, path: fault if (method, path) != PROBE and next(left, None) is not None else None

    def every(self, nth: int, *faults: Fault) -> None:
        """From now on, one request in so many goes wrong, in these ways in turn."""
        seen = iter(range(10**9))

        def choose(method: str, path: str) -> Fault | None:
            number = next(seen) + 1
            return faults[number // nth % len(faults)] if number % nth == 0 else None

        self.choose = choose

    def always(self, fault: Fault | None) -> None:
        """From now on, every request goes wrong, or none."""
        self.choose = lambda method, path: fault

    def decide(self, method: str, path: str) -> Fault | None:
        """What goes wrong with this request."""
        with self.lock:
            fault = self.choose(method, path)
            self.faults += fault is not None
            return fault

    def ask(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The real store's answer: status, headers, body."""
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in HOP_BY_HOP}
        connection.request(handler.command, handler.path, body, headers)
        answer = connection.getresponse()
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP]
        if handler.command == "HEAD":
            kept.append(("Content-Length", answer.getheader("Content-Length", "0")))
        data = answer.read()
        connection.close()
        return answer.status, kept, data

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_request(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = faulty.decide(self.command, self.path)
                if fault in ANSWERS:
                    status, code = ANSWERS[fault]
                    text = f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()
                    self.reply(status, [("Content-Type", "application/xml")], text)
                elif fault == "reset":
                    self.break_off()
                elif fault == "hang":
                    faulty.over.wait(20)
                    self.break_off()
                else:
                    status, headers, data = self.fresh_or_stale(fault, body)
                    self.reply(status, headers, data, cut=fault == "cut")

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

            def fresh_or_stale(self, fault: Fault | None, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
                listing = self.command == "GET" and "prefix=" in self.path
                if fault == "stale" and listing and self.path in faulty.listings:
                    return faulty.listings[self.path]
                answer = faulty.ask(self, body)
                if listing:
                    faulty.listings.setdefault(self.path, answer)
                return answer

            def reply(self, status: int, headers: list[tuple[str, str]], data: bytes, cut: bool = False) -> None:
                if cut and not data:
                    self.break_off()
                    return
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                if "Content-Length" not in dict(headers):
                    self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data[: len(data) // 2] if cut else data)
                if cut:
                    self.wfile.flush()
                    self.break_off()

            def break_off(self) -> None:
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

            def log_message(self, *arguments: Any) -> None:
                """Quiet."""

        return Handler
