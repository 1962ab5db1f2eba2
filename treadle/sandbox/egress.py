"""Egress proxy: the hosts of a list, reached from a box that has no network; all others are refused, and counted.

    program in the box ─► http_proxy=127.0.0.1:3128 ─► bridge ─► EgressProxy here ─► HOST:PORT of the list

Speaks HTTP's CONNECT, and plain HTTP with a whole address in the request line. Names are looked up here, once for each
connection, and the address that was checked is the one that is connected to: a name of the list that leads to this
machine, to a private network or to a cloud's metadata address is refused, unless its entry says so (NAME:PORT=ADDRESS).
Knows the list and nothing of what is sent: with CONNECT it is encrypted, and a host of the list may be told anything.
Waits: for a request's head, a connection and each next piece, with a deadline for each.
Invariant: no connection leaves to a host, a port or an address that the list does not allow.
"""

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Network, ip_address
from typing import Protocol, runtime_checkable

from treadle.config.sandbox import EgressHost, join_authority, parse_egress, split_authority
from treadle.sandbox.bridge import UnixService, join_streams

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 32 << 10
MAX_NAMES = 100
"""Refused targets that are counted by name; the others are counted together."""
OTHERS = "others"
NO_TARGET = "no host"

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name; OSError where it has none."""

_REQUEST_LINE = re.compile(r"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.[01]")
_HEADER = re.compile(r"[!-9;-~]+:[^\r\n\0]*")
_ABSOLUTE = re.compile(r"http://([^/?#@]+)([/?][\x21-\x7e]*)?", re.IGNORECASE)
_NAT64 = IPv6Network("64:ff9b::/96")
_OF_THIS_HOP = ("connection", "proxy-connection", "proxy-authorization", "keep-alive", "host", "te", "upgrade")


@runtime_checkable
class CountsRefused(Protocol):
    """A box that counts what it was refused."""

    @property
    def egress_refused(self) -> dict[str, int]: ...


def count_refused(box: object) -> dict[str, int]:
    """How often a box asked for which host and port in vain."""
    return box.egress_refused if isinstance(box, CountsRefused) else {}


@dataclass(frozen=True, slots=True)
class ProxyDeadlines:
    """How long the proxy waits, in seconds."""

    head_s: float = 10.0
    """For the whole head of a request, however it trickles in."""
    connect_s: float = 15.0
    idle_s: float = 300.0
    """For the next piece in either direction."""


class _Refusal(Exception):
    """An answer of the proxy's own: `target` is what is counted."""

    def __init__(self, status: int, reason: str, target: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.target = status, reason, target


async def resolve_host(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class EgressProxy(UnixService):
    """The proxy of one box. `entries`: what may be reached, as in a config; ValueError where one is malformed."""

    max_line = MAX_HEAD_BYTES

    def __init__(
        self, entries: Iterable[str], resolve: Resolve = resolve_host, deadlines: ProxyDeadlines | None = None
    ) -> None:
        super().__init__()
        self.entries = tuple(entries)
        self._allowed = {(one.host, one.port): one for entry in self.entries for one in parse_egress(entry)}
        self._resolve, self._deadlines = resolve, deadlines or ProxyDeadlines()
        self.refused: Counter[str] = Counter()
        """What was asked for in vain, by host and port."""

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._open) > MAX_CONNECTIONS:
                raise _Refusal(503, f"more than {MAX_CONNECTIONS} connections at once")
            method, target, headers = await self._read_head(reader)
            allowed, first = self._direct(method, target, headers)
            far_reader, far_writer = await self._connect(allowed)
        except _Refusal as refusal:
            self._count(refusal.target)
            await _answer(writer, refusal.status, refusal.reason)
            return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        if first:
            far_writer.write(first)
        else:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        idle_s, loop = self._deadlines.idle_s, asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout(idle_s) as idle:
                await join_streams(
                    reader, writer, far_reader, far_writer, lambda: idle.reschedule(loop.time() + idle_s)
                )

    async def _read_head(self, reader: asyncio.StreamReader) -> tuple[str, str, list[str]]:
        """The method, the target and the header lines of a request."""
        try:
            async with asyncio.timeout(self._deadlines.head_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise _Refusal(408, f"no request within {self._deadlines.head_s:g} s", NO_TARGET) from None
        except asyncio.LimitOverrunError:
            raise _Refusal(431, f"a request's head is at most {MAX_HEAD_BYTES} bytes", NO_TARGET) from None
        first, *headers = head.decode("latin-1")[:-4].split("\r\n")
        match = _REQUEST_LINE.fullmatch(first)
        if match is None or not all(_HEADER.fullmatch(line) for line in headers):
            raise _Refusal(400, "this is no HTTP request", NO_TARGET)
        return match[1], match[2], headers

    def _direct(self, method: str, target: str, headers: list[str]) -> tuple[EgressHost, bytes]:
        """What of the list is asked for; and the head that goes there, which a tunnel has none of."""
        match = None if method == "CONNECT" else _ABSOLUTE.fullmatch(target)
        if method != "CONNECT" and match is None:
            raise _Refusal(400, "this is a proxy: ask for http://HOST/PATH, or CONNECT HOST:PORT", NO_TARGET)
        try:
            host, port = split_authority(target if match is None else match[1])
        except ValueError as error:
            raise _Refusal(403, str(error), NO_TARGET) from None
        if port is None and match is None:
            raise _Refusal(400, "CONNECT needs HOST:PORT", NO_TARGET)
        port = 80 if port is None else port
        allowed = self._allowed.get((host, port))
        if allowed is None:
            name = join_authority(host, port)
            raise _Refusal(403, f"{name} is not in sandbox.egress ({', '.join(self.entries)})", name)
        if match is None:
            return allowed, b""
        path = match[2] or "/"
        path = f"/{path}" if path.startswith("?") else path
        kept = [line for line in headers if line.partition(":")[0].strip().lower() not in _OF_THIS_HOP]
        authority = str(allowed) if port != 80 else str(allowed).removesuffix(":80")
        lines = [f"{method} {path} HTTP/1.1", f"Host: {authority}", *kept, "Connection: close", "", ""]
        return allowed, "\r\n".join(lines).encode("latin-1")

    async def _connect(self, allowed: EgressHost) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a host of the list, at an address that was looked at."""
        problem = "it has no address"
        try:
            async with asyncio.timeout(self._deadlines.connect_s):
                for address in await self.find_addresses(allowed):
                    try:
                        return await asyncio.open_connection(address, allowed.port)
                    except OSError as error:
                        problem = error.strerror or type(error).__name__
        except TimeoutError:
            raise _Refusal(504, f"{allowed} did not answer within {self._deadlines.connect_s:g} s") from None
        raise _Refusal(502, f"{allowed} cannot be reached: {problem}")

    async def find_addresses(self, allowed: EgressHost) -> Sequence[str]:
        """Where a host of the list is; a name must lead to public addresses alone, unless its entry has its address."""
        if allowed.address is not None:
            return [allowed.address]
        try:
            found = await self._resolve(allowed.host, allowed.port)
        except OSError as error:
            raise _Refusal(502, f"{allowed} has no address: {error.strerror or error}") from None
        inside = [address for address in found if not _is_public(address)]
        if inside:
            fix = f"list it as {allowed}={inside[0]} where that is meant"
            raise _Refusal(403, f"{allowed} leads to {inside[0]}, which is no public address; {fix}", str(allowed))
        return found

    def _count(self, target: str | None) -> None:
        if target is not None:
            self.refused[target if target in self.refused or len(self.refused) < MAX_NAMES else OTHERS] += 1


def _is_public(address: str) -> bool:
    """Whether an address is of the open internet; IPv4 inside of IPv6 is looked at as what it is."""
    found = ip_address(address.partition("%")[0])
    if not found.is_global or found.is_multicast:
        return False
    if isinstance(found, IPv4Address):
        return True
    inner = found.ipv4_mapped or found.sixtofour or (IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else None)
    return inner is None or inner.is_global


async def _answer(writer: asyncio.StreamWriter, status: int, reason: str) -> None:
    body = f"treadle's egress proxy: {reason}\n".encode("latin-1", "replace")
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode("latin-1", "replace") + b"Connection: close\r\n\r\n" + body)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(5.0):
            await writer.drain()
