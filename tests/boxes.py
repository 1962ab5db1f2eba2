"""Sandbox providers of this machine, for tests that run on each: those that cannot run are skipped, with the reason."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from typing import TypeVar

import pytest

from treadle.config.sandbox import CONTAINER_PROVIDERS
from treadle.sandbox.box import InitBox
from treadle.sandbox.bubblewrap import BubblewrapBox
from treadle.sandbox.protocol import BoxSettings
from treadle.sandbox.providers import PROVIDERS, try_provider

T = TypeVar("T")

IMAGE = os.environ.get("PODMAN_IMAGE")
"""An image with python3 and coreutils, as podman names it: boxes of podman are tested as well then."""
LOCAL = ("bubblewrap", "landlock", *(("podman",) if IMAGE else ()))
"""Providers that need no image, and podman where there is one."""

each_provider = pytest.mark.parametrize("provider", LOCAL)


@cache
def why_not(provider: str) -> str | None:
    return asyncio.run(try_provider(provider, image_of(provider)))[0]


def image_of(provider: str) -> str | None:
    return IMAGE if provider in CONTAINER_PROVIDERS else None


def in_box(provider: str, work: Callable[[InitBox], Awaitable[T]], **settings: object) -> T:
    """What `work` gives in a box of this provider, which is stopped afterwards."""
    if why_not(provider) is not None:
        pytest.skip(f"{provider}: {why_not(provider)}")

    async def run() -> T:
        box = PROVIDERS[provider](replace(BoxSettings(image=image_of(provider)), **settings))  # type: ignore[arg-type]
        await box.start()
        try:
            return await work(box)
        finally:
            await box.stop()

    return asyncio.run(run())


class OwnBox(BubblewrapBox):
    """A provider by import path."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "OWN": "mine"}


class HalfABox:
    """One that lacks most of the protocol."""

    async def start(self) -> None: ...
