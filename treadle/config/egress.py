"""Egress list: the hosts and ports that a box may reach, as a config writes them.

    pypi.org                    ports 80 and 443 of this name
    pypi.org:443                one port
    mirror.corp:443=10.0.0.5    a name that leads to this address, whatever DNS says
    192.0.2.7:8080              an address; [2001:db8::1]:443 for IPv6

Owns the grammar, and the spelling by which two names are the same. Asks no DNS.
"""

import re
from dataclasses import dataclass
from ipaddress import ip_address

DEFAULT_PORTS = (80, 443)

_AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_.-]+))(?::(?P<port>[0-9]{1,5}))?")
_NAME = re.compile(
    r"(?=.{1,253}$)[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?)*"
)
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)")
_EXAMPLE = "write HOST, HOST:PORT or HOST:PORT=ADDRESS"


@dataclass(frozen=True, slots=True)
class EgressHost:
    """One host and port that may be reached."""

    host: str
    port: int
    address: str | None = None
    """Where the name leads; None: DNS says, and may name public addresses alone."""

    def __str__(self) -> str:
        return join_authority(self.host, self.port)


def join_authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_authority(text: str) -> tuple[str, int | None]:
    """The host, in one spelling, and the port, of `HOST[:PORT]`; ValueError where there is none.

    Numbers that some resolvers take for an address (127.1, 0x7f000001) are no host.
    """
    match = _AUTHORITY.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"{text[:200]!r} is no host and port")
    port = None if match["port"] is None else int(match["port"])
    if port is not None and not 0 < port < 65_536:
        raise ValueError(f"{port} is no port")
    if match["v6"] is not None:
        return str(ip_address(match["v6"])), port
    name = match["name"].removesuffix(".")
    if _NUMBER.fullmatch(name.rpartition(".")[2]):
        return str(ip_address(name)), port
    if not _NAME.fullmatch(name):
        raise ValueError(f"{text[:200]!r} is no host name")
    return name, port


def parse_egress(entry: str) -> tuple[EgressHost, ...]:
    """The hosts and ports of an entry; ValueError, with what to write, where it is none."""
    authority, pinned, address = entry.strip().partition("=")
    try:
        host, port = split_authority(authority)
        given = str(ip_address(address.strip("[]"))) if pinned else None
    except ValueError as error:
        raise ValueError(f"{entry!r} is no entry: {error}; {_EXAMPLE}") from None
    if is_address(host):
        if given is not None:
            raise ValueError(f"{entry!r} is an address already, and leads nowhere else; {_EXAMPLE}")
        given = host
    elif given is None and (host == "localhost" or host.endswith(".localhost")):
        raise ValueError(f"{entry!r} is this machine itself; write {entry.strip()}=127.0.0.1 where that is meant")
    return tuple(EgressHost(host, each, given) for each in ((port,) if port is not None else DEFAULT_PORTS))


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
