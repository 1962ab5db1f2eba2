"""The `sandbox` sections of a rollout and of rewards: providers, limits of a box, hosts that it may reach (egress)

    pypi.org                    ports 80 and 443 of this name
    pypi.org:443                one port
    mirror.corp:443=10.0.0.5    a name that leads to this address, whatever DNS says
    192.0.2.7:8080              an address; [2001:db8::1]:443 for IPv6

Owns the grammar of these entries, and the spelling by which two names are the same. Asks no DNS.
"""

import re
from dataclasses import dataclass
from ipaddress import ip_address

from treadle.config.section import Section, Strings, key
from treadle.config.validate import Clashes

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


SANDBOX_PROVIDERS = ("auto", "bubblewrap", "landlock", "podman", "docker")
"""The providers that come with treadle; auto is the first of bubblewrap and landlock that works here."""

CONTAINER_PROVIDERS = ("podman", "docker")


class SandboxConfig(Section):
    """A box for commands that a model wrote: no network, a file system of its own, limits that the kernel holds."""

    provider: str = key(
        "auto",
        "what isolates: bubblewrap, or landlock where that cannot run, for auto; a class by import path",
        names=SANDBOX_PROVIDERS,
    )
    image: str | None = key(None, "image of podman's or docker's containers; it must have python3")
    memory_mb: int = key(1024, "memory of a box", ge=32)
    processes: int = key(64, "processes and threads of a box at once", ge=4)
    disk_mb: int = key(256, "bytes that a box may write, in MB", ge=1)
    cpu_time_s: int = key(120, "CPU seconds of one process", ge=1)
    timeout_s: float = key(60.0, "wall clock of one command that has no deadline of its own", gt=0)
    max_output_kb: int = key(1024, "standard output, and standard error, that are kept of one command", ge=1)
    read_only: Strings = key(
        (), "further directories of this machine that a box may read, such as a virtual environment"
    )
    path: Strings = key(
        (), "directories whose programs come first, such as VENV/bin: its python3 is then that of the python tool"
    )
    egress: Strings = key(
        (), "hosts that boxes reach through a proxy, as HOST:PORT, HOST (ports 80 and 443) or HOST:PORT=ADDRESS; none"
    )
    warm: int = key(0, "boxes that are started ahead and wait for sessions", ge=0)


def box_is_whole(place: str, sandbox: SandboxConfig) -> Clashes:
    """What must hold between the keys of a sandbox section."""
    container = sandbox.provider in CONTAINER_PROVIDERS
    if container and sandbox.image is None:
        yield f"{place}.image", f"is needed by provider: {sandbox.provider}", "name an image that is on this machine"
    if sandbox.image is not None and sandbox.provider in ("auto", "bubblewrap", "landlock"):
        yield f"{place}.image", f"is given, but provider is {sandbox.provider}, which has none", "remove one of them"
    for entry in sandbox.egress:
        try:
            parse_egress(entry)
        except ValueError as error:
            yield f"{place}.egress", str(error), None
    for name, paths in (("read_only", sandbox.read_only), ("path", sandbox.path)):
        for path in paths:
            if not path.startswith("/") or ":" in path:
                yield f"{place}.{name}", f"{path!r} is no absolute path", None
