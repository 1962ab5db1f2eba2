"""The `sandbox` sections of a rollout and of rewards: what runs what a model writes, and the limits of a box."""

from treadle.config.egress import parse_egress
from treadle.config.section import Section, Strings, key
from treadle.config.validate import Clashes

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
