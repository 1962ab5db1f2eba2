"""HTTP client for one JSON endpoint: deadlines, retries with back-off, and errors that say what to do.

Owns the connection pool and the decision whether an answer is worth another try. Refuses to know what is asked.
Imported only where an endpoint is used: httpx is slow to import.
Invariant: a call ends by its deadline, with data or with an `EngineFailure` that names the address, and the status and
first line of the answer if there was one. The key is never part of a message. No answer takes more memory than
`MAX_ANSWER_BYTES` and what JSON makes of it.
"""

import asyncio
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from treadle.errors import EngineFailure, RequestRefused

_CONNECT_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 8.0
MAX_ANSWER_BYTES = 32 << 20
"""An answer of 100,000 tokens with their logprobs takes a third of it."""
_AGAIN = frozenset({408, 409, 425, 429})
_HEADERS = ("content-type", "retry-after", "retry-after-ms")
"""What is read of an answer besides its body."""


@dataclass(frozen=True, slots=True)
class RetryableFailure:
    """An attempt that gave nothing and may be repeated."""

    problem: str
    retry_after_s: float | None = None
    busy: bool = False
    """The server works and asks us to wait, which is no failed attempt."""


class HttpClient:
    """An address and the pool of connections to it."""

    def __init__(self, base_url: str, *, api_key: str | None, advice: Mapping[int, str], connections: int) -> None:
        """`advice`: what a user should do about a status."""
        self._base_url = base_url.rstrip("/")
        self.address = re.sub(r"//[^/@]*@", "//", self._base_url)
        """The address as messages show it: without a name and password that may be in it."""
        self._advice = advice
        self._rng = random.Random()
        self._client = httpx.AsyncClient(
            headers={"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {}),
            verify=base_url.startswith("https://"),  # certificates take 0.1 s to load, and plain http has none
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    async def call(
        self, method: str, path: str, body: str | None = None, *, timeout_s: float, retries: int, may_lack: bool = False
    ) -> Any:
        """The JSON of the answer. Waits for a server that is busy, up to the deadline; tries failures again.

        `may_lack`: an address the server does not have is answered with None.
        """
        loop = asyncio.get_running_loop()
        deadline, setbacks = loop.time() + timeout_s, list[RetryableFailure]()
        try:
            async with asyncio.timeout_at(deadline):
                while isinstance(reply := await self._attempt(method, path, body, may_lack), RetryableFailure):
                    setbacks.append(reply)
                    self._check_retries(path, setbacks, retries)
                    wait_s = self._backoff(reply, len(setbacks))
                    if loop.time() + wait_s >= deadline:
                        raise TimeoutError
                    await asyncio.sleep(wait_s)
                return reply
        except TimeoutError:
            last = f"; before that: {setbacks[-1].problem}" if setbacks else ""
            raise EngineFailure(f"{self.address}/{path}: no answer within {timeout_s:g} s{last}") from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _attempt(self, method: str, path: str, body: str | None, may_lack: bool) -> Any:
        """The JSON of the answer, or a RetryableFailure."""
        try:
            async with self._client.stream(method, f"{self._base_url}/{path}", content=body) as stream:
                response = await self._read(stream, path)
        except (httpx.TransportError, httpx.DecodingError) as error:
            return RetryableFailure(f"{type(error).__name__}: {error}".rstrip(": "))
        if response.is_success:
            try:
                return response.json()
            except (ValueError, RecursionError):
                return RetryableFailure(f"{response.status_code}, but not JSON: {_first_line(response)}")
        if may_lack and response.status_code in (404, 405):
            return None
        return self._refusal(response, path)

    async def _read(self, stream: httpx.Response, path: str) -> httpx.Response:
        """The whole answer, unpacked; a failure that is not tried again where it has no end."""
        body = bytearray()
        async for chunk in stream.aiter_bytes():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                limit = f"more than {MAX_ANSWER_BYTES >> 20} MiB, which is no answer of a model"
                raise EngineFailure(f"{self.address}/{path}: {stream.status_code} with {limit}")
        told = {name: stream.headers[name] for name in _HEADERS if name in stream.headers}
        reason = {"reason_phrase": stream.reason_phrase.encode("ascii", "ignore")}
        return httpx.Response(stream.status_code, headers=told, content=bytes(body), extensions=reason)

    def _check_retries(self, path: str, setbacks: list[RetryableFailure], retries: int) -> None:
        failed = sum(not setback.busy for setback in setbacks)
        if failed > retries:
            raise EngineFailure(f"{self.address}/{path}: {setbacks[-1].problem} (attempt {len(setbacks)})")

    def _refusal(self, response: httpx.Response, path: str) -> RetryableFailure:
        status, line = response.status_code, _first_line(response)
        problem = f"{status} {response.reason_phrase}: {line}".rstrip(": ")
        out_of_credit = status == 429 and "insufficient_quota" in response.text
        if (status in _AGAIN or status >= 500) and not out_of_credit:
            retry_after_s = _retry_after(response)
            return RetryableFailure(problem, retry_after_s, busy=status == 429 or retry_after_s is not None)
        advice = self._advice.get(status)
        raise RequestRefused(f"{self.address}/{path}: {problem}" + (f" ({advice})" if advice else ""))

    def _backoff(self, setback: RetryableFailure, attempts: int) -> float:
        """Longer each time; never under what the server asked for; never the same for two clients."""
        longest = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(attempts - 1, 10))
        wait_s = self._rng.uniform(longest / 2, longest)
        if setback.retry_after_s is None:
            return wait_s
        return setback.retry_after_s + 0.1 * wait_s


def _first_line(response: httpx.Response) -> str:
    """What went wrong, in the server's words."""
    text = response.text
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # not OpenAI's shape: the text itself will do
    lines = str(text).strip().splitlines()
    return lines[0][:200] if lines else ""


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds to wait, as the server asked: in milliseconds, in seconds, or as a date."""
    try:
        if millis := response.headers.get("retry-after-ms"):
            return max(0.0, float(millis) / 1000)
        text = response.headers.get("retry-after")
        if text is None:
            return None
        if text.strip().replace(".", "", 1).isdigit():
            return float(text)
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None  # unreadable: as if it were not there
