"""Sandbox providers: which one a config gets on this machine, what it does not protect from, or why there is none.

Owns the choice. A provider is tried once in each process: a box is started and a command run in it.
Invariant: isolation that was asked for and cannot be had is an error with the reason, never a weaker box in its place;
`auto` takes bubblewrap or else landlock, and says which.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treadle.aio import run_shielded, run_to_end
from treadle.config.plugin import load_object
from treadle.config.sandbox import CONTAINER_PROVIDERS, SandboxConfig
from treadle.errors import ConfigError, Mistake, SandboxFailure
from treadle.sandbox.box import InitBox
from treadle.sandbox.bubblewrap import SYSTEM, BubblewrapBox
from treadle.sandbox.container import DockerBox, PodmanBox
from treadle.sandbox.landlock import LandlockBox
from treadle.sandbox.landlock_init import MIN_ABI, landlock_version
from treadle.sandbox.protocol import BoxSettings, Sandbox

PROVIDERS: dict[str, type[InitBox]] = {
    "bubblewrap": BubblewrapBox,
    "landlock": LandlockBox,
    "podman": PodmanBox,
    "docker": DockerBox,
}
AUTO = ("bubblewrap", "landlock")
"""Those that `auto` tries, the strongest first."""

STOP_S = 60.0
"""For a box that did not start to be stopped."""

MakeBox = Callable[[BoxSettings], Sandbox]
_TRIED: dict[tuple[str, str | None], str | None] = {}


@dataclass(frozen=True, slots=True)
class ChosenProvider:
    """A provider that works on this machine."""

    name: str
    make: MakeBox
    not_protected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Limits that it lacks here."""
    refused: tuple[str, ...] = ()
    """Why stronger ones cannot be had here."""
    egress: tuple[str, ...] = ()
    """Hosts that its boxes reach."""

    def describe(self) -> Iterator[str]:
        """The provider in words, and what it does not protect from."""
        yield self.name + "".join(f"; {reason}" for reason in self.refused)
        if self.not_protected:
            yield f"not protected: {'; '.join(self.not_protected)}"
        if self.egress:
            yield f"network: {', '.join(self.egress)} alone, by a proxy; what is sent there is not looked at"
        yield from self.missing


async def choose_provider(settings: BoxSettings) -> ChosenProvider:
    """The provider of these settings; SandboxFailure, with the reason, where it cannot be had here."""
    if settings.provider not in (*PROVIDERS, "auto"):
        return ChosenProvider(settings.provider, _load_provider(settings), egress=settings.egress)
    refused: list[str] = []
    for name in AUTO if settings.provider == "auto" else (settings.provider,):
        problem, missing = await try_provider(name, settings.image)
        kind = PROVIDERS[name]
        if problem is None and not kind.reaches_out:
            problem = _no_way_out(settings)
        if problem is None:
            return ChosenProvider(name, kind, kind.not_protected, missing, tuple(refused), settings.egress)
        refused.append(f"{name} cannot be had: {problem}")
    raise SandboxFailure("; ".join(refused))


def _no_way_out(settings: BoxSettings) -> str | None:
    """Why a provider whose boxes reach nothing does not do for these settings."""
    if settings.egress:
        return "its boxes have no way to a proxy, and egress is given"
    return "its boxes have no way to a service of this machine" if settings.bridges else None


def _load_provider(settings: BoxSettings) -> MakeBox:
    """A class of the user's; SandboxFailure where it lacks a method of the protocol, or a way out that is asked for."""
    path = settings.provider
    made: MakeBox = load_object(path, "sandbox.provider")
    if (problem := _no_way_out(settings)) and getattr(made, "reaches_out", False) is not True:
        raise SandboxFailure(f"{path}: {problem}; a class whose boxes have one says so: reaches_out = True")
    wanted = [name for name in vars(Sandbox) if not name.startswith("_") and name != "home"]
    if lacking := [name for name in wanted if not hasattr(made, name)]:
        raise SandboxFailure(
            f"{path} has no {', '.join(lacking)}; treadle.sandbox.protocol.Sandbox has what a box does"
        )
    return made


_MISSING: dict[str, tuple[str, ...]] = {}


async def try_provider(name: str, image: str | None = None) -> tuple[str | None, tuple[str, ...]]:
    """Why a provider does not work here, or None; and the limits that it lacks. Tried once."""
    tried = name, image
    if tried not in _TRIED:
        _TRIED[tried], _MISSING[name] = await _try(name, replace(BoxSettings(), image=image))
    return _TRIED[tried], _MISSING[name]


async def _try(name: str, settings: BoxSettings) -> tuple[str | None, tuple[str, ...]]:
    if sys.platform != "linux" and name in AUTO:
        return f"it needs Linux, and this is {sys.platform}", ()
    if name == "landlock" and landlock_version() < MIN_ABI:
        return f"the kernel has version {landlock_version()} of Landlock, and {MIN_ABI} is needed", ()
    box = PROVIDERS[name](settings)
    try:
        await box.start()
        result = await box.exec(["true"])
        return (None if result.code == 0 else f"true ended with {result.code}: {result.text}"), box.missing
    except SandboxFailure as failure:
        return str(failure), ()
    finally:
        await box.stop()


async def open_box(settings: BoxSettings) -> Sandbox:
    """A started box; where its start fails or is cancelled, nothing of it is left."""
    chosen = await choose_provider(settings)
    box = chosen.make(settings)
    try:
        await box.start()
    except BaseException:
        await run_shielded(box.stop(), STOP_S, "stopping a box that did not start")  # a provider of the user's may not
        raise
    return box


def check_provider(key: str, sandbox: SandboxConfig, bridged: bool = False) -> ChosenProvider:
    """The provider of a section; ConfigError names the key where it cannot be had.

    `bridged`: its boxes reach a service of this machine, as those of agent programs do.
    """
    settings = BoxSettings.of(sandbox)
    if mistakes := list(_missing_places(key, sandbox)):
        raise ConfigError(mistakes)
    try:
        return run_to_end(choose_provider(replace(settings, bridges=((0, ""),) if bridged else ())))
    except SandboxFailure as failure:
        fix = "install bubblewrap and allow user namespaces, or name another provider"
        if bridged or settings.egress:
            instead = "sandbox: false" if bridged else f"remove {key}.egress"
            fix = f"set provider: bubblewrap, which must be installed and needs user namespaces, or {instead}"
        origin: Any = sandbox.origin("provider")
        mistake = Mistake(f"{key}.provider", str(failure), sandbox.provider, origin, fix, missing="sandbox")
        raise ConfigError([mistake]) from failure


def _missing_places(key: str, sandbox: SandboxConfig) -> Iterator[Mistake]:
    """Directories that a box is to show or to run programs from, and that are not here or not shown."""
    shown = [os.path.realpath(path) for path in (*sandbox.read_only, *SYSTEM, sys.base_prefix)]
    for path in sandbox.read_only:
        if not os.path.exists(path):
            yield Mistake(f"{key}.read_only", f"there is no {path} on this machine", path, sandbox.origin("read_only"))
    for path in sandbox.path if sandbox.provider not in CONTAINER_PROVIDERS else ():
        origin = sandbox.origin("path")
        if not os.path.isdir(path):
            yield Mistake(f"{key}.path", f"there is no directory {path} on this machine", path, origin)
        elif not any(Path(os.path.realpath(path)).is_relative_to(place) for place in shown):
            fix = f"add it, or the virtual environment it belongs to, to {key}.read_only"
            yield Mistake(f"{key}.path", f"boxes cannot read {path}", path, origin, fix)
