"""What keys of `rollout.sandbox` and `reward.sandbox` change: in a box, its command line, and the boxes that wait."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.effects.cases import Case, config_cases, configured
from treadle.errors import SandboxFailure, TreadleError
from treadle.sandbox.pool import BoxPool
from treadle.sandbox.protocol import BoxSettings
from treadle.sandbox.providers import PROVIDERS, check_provider, open_box


def section(keys: dict[str, Any]) -> Any:
    config = configured("model: {path: unused}\n", keys)
    return config.rollout.sandbox if next(iter(keys)).startswith("rollout") else config.reward.sandbox


def need_bubblewrap() -> None:
    """Skip where it is not installed: Landlock, which is then used, has the host's disk and no limit of its own."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")


def provided(directory: Path, **keys: Any) -> Any:
    """The provider that is chosen, or why none is."""
    need_bubblewrap()
    try:
        return check_provider("sandbox", section(keys)).name
    except TreadleError as error:
        return str(error).split("\n")[0]


def started(directory: Path, **keys: Any) -> Any:
    """The arguments that start a container: no engine needs to be installed for them."""
    settings = BoxSettings.of(section(keys))
    program = directory / settings.provider
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(directory))
        return [word for word in PROVIDERS[settings.provider](settings).command() if "treadle-box" not in word]


def limited(directory: Path, **keys: Any) -> Any:
    """What the kernel tells a command of its limits; and what is left of a command that is late and talks much."""

    need_bubblewrap()

    async def run() -> Any:
        box = await open_box(BoxSettings.of(section(keys)))
        try:
            size = "df -k --output=size . | tail -n 1"  # what is free changes by itself
            shown = await box.exec(["sh", "-c", f"ulimit -d; ulimit -t; ulimit -f; {size}"])
            is_late = any(key.endswith(".timeout_s") for key in keys)
            bomb = f"for i in $(seq 12); do sleep {1 if is_late else 0.1} & done; head -c 3000 /dev/zero; wait"
            late = await box.exec(["sh", "-c", bomb], timeout_s=None if is_late else 60.0)
            seen = await box.exec(["sh", "-c", "echo $PATH; ls -d /opt /srv 2> /dev/null"])
            return shown.stdout, late.timed_out, len(late.stdout), late.stderr[:20], seen.stdout
        finally:
            await box.stop()

    return asyncio.run(run())


def reached(directory: Path, **keys: Any) -> Any:
    """What `treadle plan` says of the network; or which providers are refused for want of a way out."""
    try:
        return [line for line in check_provider("sandbox", section(keys)).describe() if "network" in line]
    except TreadleError as error:
        return str(error).split("\n")[0]


def waiting(directory: Path, **keys: Any) -> Any:
    """How many boxes wait."""

    async def run() -> int:
        sandbox = section(keys)
        pool = BoxPool(BoxSettings.of(sandbox), sandbox.warm)
        try:
            return len(pool._warm)
        except SandboxFailure as failure:
            raise AssertionError("a pool asks for nothing") from failure
        finally:
            await pool.close()

    return asyncio.run(run())


def _cases(place: str) -> dict[str, Case]:
    container = {f"{place}.provider": "podman"}
    return {
        **config_cases(place, provided, ("provider", "auto", "landlock")),
        **config_cases(place, started, ("image", "one", "other", container)),
        **config_cases(
            place,
            limited,
            ("memory_mb", 100, 200),
            ("processes", 8, 64),
            ("disk_mb", 10, 20),
            ("cpu_time_s", 10, 20),
            ("timeout_s", 0.3, 30.0),
            ("max_output_kb", 1, 100),
            ("read_only", [], ["/srv"]),
            ("path", [], ["/usr/lib"]),
        ),
        **config_cases(place, reached, ("egress", [], ["a.test:80"])),
        **config_cases(place, waiting, ("warm", 0, 2)),
    }


EFFECTS: dict[str, Case] = _cases("rollout.sandbox") | _cases("reward.sandbox")
