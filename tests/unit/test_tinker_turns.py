"""Turns in shared weights: who computes with which adapter, and when."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from treadle.tinker.adapters import AdapterShape, AdapterWeights
from treadle.tinker.refusals import RequestFailed
from treadle.tinker.turns import WeightTurns

A, B = AdapterWeights(AdapterShape(1), {}), AdapterWeights(AdapterShape(1), {})


class Users:
    """Holders by name, each until it is let go."""

    def __init__(self) -> None:
        self.turns = WeightTurns()
        self.inside: list[str] = []
        self.log: list[str] = []
        self._let_go: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def add(
        self, name: str, adapter: AdapterWeights | None, *, alone: bool = False, timeout_s: float = 60
    ) -> None:
        self._let_go[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._use(name, adapter, alone, timeout_s))
        await asyncio.sleep(0)

    async def _use(self, name: str, adapter: AdapterWeights | None, alone: bool, timeout_s: float) -> None:
        async with self.turns.take(adapter, alone=alone, timeout_s=timeout_s):
            self.inside.append(name)
            self.log.append(name)
            await self._let_go[name].wait()
            self.inside.remove(name)

    async def let_go(self, *names: str) -> None:
        for name in names:
            self._let_go[name].set()
            await self._tasks[name]
        for _ in range(5):
            await asyncio.sleep(0)

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)

    def task(self, name: str) -> asyncio.Task[None]:
        return self._tasks[name]


def run(use: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(use, 30))


def test_samplers_of_one_adapter_share_and_others_wait() -> None:
    async def main() -> None:
        users = Users()
        await users.add("a1", A)
        await users.add("a2", A)
        await users.add("b1", B)
        await users.add("base", None)
        assert users.inside == ["a1", "a2"]
        await users.let_go("a1")
        assert users.inside == ["a2"]
        await users.let_go("a2")
        assert users.inside == ["b1"]
        await users.let_go("b1")
        assert users.inside == ["base"]

    run(main())


def test_a_newcomer_does_not_pass_one_that_waits_but_comes_along_with_its_group() -> None:
    async def main() -> None:
        users = Users()
        await users.add("a1", A)
        await users.add("train", B, alone=True)
        await users.add("a2", A)
        await users.add("b1", B)
        await users.add("a3", A)
        assert users.inside == ["a1"]
        await users.let_go("a1")
        assert users.inside == ["train"]
        await users.let_go("train")
        assert users.inside == ["a2", "a3"]
        await users.let_go("a2", "a3")
        assert users.inside == ["b1"]

    run(main())


def test_training_is_alone_even_with_the_same_adapter() -> None:
    async def main() -> None:
        users = Users()
        await users.add("one", A, alone=True)
        await users.add("two", A, alone=True)
        await users.add("sample", A)
        assert users.inside == ["one"]
        await users.let_go("one")
        assert users.inside == ["two"]
        await users.let_go("two")
        assert users.inside == ["sample"]

    run(main())


def test_one_that_gives_up_leaves_its_place_to_the_next() -> None:
    async def main() -> None:
        users = Users()
        await users.add("a1", A)
        await users.add("b1", B)
        await users.add("a2", A)
        await users.cancel("b1")
        await users.add("late", B, timeout_s=0.001)
        with pytest.raises(RequestFailed, match="was given up"):
            await users.task("late")
        await users.let_go("a1")
        assert users.inside == ["a2"] and users.turns.num_waiting == 0
        await users.cancel("a2")
        await users.add("b2", B)
        assert users.inside == ["a2", "b2"]  # a2 was cancelled inside: its turn is over, its name is still noted

    run(main())
