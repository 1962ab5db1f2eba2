"""A real HTTP server on this machine that speaks chat completions, well or badly as told.

    with FakeEndpoint() as endpoint:
        endpoint.script.append(Reply(503, "busy"))     # the next chat request meets this; then the model answers

The model's answer depends on the last message and the seed. It takes `delay_s(body)` seconds, unless the client hangs
up first, which `hung_up` counts.
"""

import json
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Reply:
    """A canned answer to one chat request."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


DROP = "drop"
"""Close the connection without a word."""

HALF = "half"
"""Close the connection in the middle of the answer."""


class FakeEndpoint:
    """Everything a test may set or read is a plain attribute."""

    def __init__(self) -> None:
        self.script: deque[Reply | str] = deque()
        self.models = Reply(200, json.dumps({"data": [{"id": "first-model"}, {"id": "second-model"}]}))
        self.delay_s: Callable[[dict[str, Any]], float] = lambda body: 0.0
        self.token_ids = False
        self.message: dict[str, Any] = {}
        self.finish: str | None = None
        self.encoding = "utf-8"
        self.chats: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.hung_up = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.endpoint = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def wait_for_chats(self, count: int) -> None:
        _wait_until(lambda: len(self.chats) == count)

    def wait_for_hang_ups(self, count: int) -> None:
        _wait_until(lambda: self.hung_up == count)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the model says."""
        rng = random.Random(f"{body.get('seed')} {body['messages'][-1]['content']}")
        text = "".join(rng.choice("abcdefgh") for _ in range(12))
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 99
        for stop in body.get("stop", ()):
            text = text.partition(stop)[0]
        cut = text[:limit]
        entries = [{"token": letter, "logprob": -rng.random(), "top_logprobs": []} for letter in cut]
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": cut, **self.message},
            "finish_reason": self.finish or ("stop" if cut == text else "length"),
            "logprobs": {"content": entries} if body.get("logprobs") else None,
        }
        if self.token_ids:
            choice["token_ids"] = [ord(letter) for letter in cut]
        return {"object": "chat.completion", "choices": [choice]}


def _wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not there():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class _Server(ThreadingHTTPServer):
    endpoint: FakeEndpoint
    daemon_threads = False
    block_on_close = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 0.2  # an idle connection must not keep its thread after the test
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._send(self.server.endpoint.models)

    def do_POST(self) -> None:
        endpoint = self.server.endpoint
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        endpoint.chats.append(body)
        endpoint.headers.append({name.lower(): value for name, value in self.headers.items()})
        endpoint.times.append(time.monotonic())
        told = endpoint.script.popleft() if endpoint.script else None
        if self.path != "/v1/chat/completions":
            self._send(Reply(404, "no such address"))
        elif isinstance(told, str):
            self._break_off(told)
        elif told is not None:
            self._send(told)
        else:
            self._send(Reply(200, json.dumps(endpoint.answer(body)), delay_s=endpoint.delay_s(body)))

    def _send(self, reply: Reply) -> None:
        if not self._wait(reply.delay_s):
            return
        body = reply.body.encode(self.server.endpoint.encoding)
        self.send_response(reply.status)
        for name, value in {**reply.headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _wait(self, delay_s: float) -> bool:
        """False: the client is gone, or the server closes."""
        deadline = time.monotonic() + delay_s
        while time.monotonic() < deadline and not self.server.endpoint.closing.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.005)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                with self.server.endpoint.lock:
                    self.server.endpoint.hung_up += 1
                self.close_connection = True
                return False
        self.close_connection = self.close_connection or self.server.endpoint.closing.is_set()
        return not self.server.endpoint.closing.is_set() or not delay_s

    def _break_off(self, how: str) -> None:
        self.close_connection = True
        if how == HALF:
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
