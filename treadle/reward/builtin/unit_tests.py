"""Unit tests of a Python program, in two boxes: tests in one, the program in the other, calls carried between them.

    tests' box ── call f(1, [2]) ──► here ──► program's box
               ◄─ value or error ───      ◄──

Neither box holds what is in the other, so a program cannot read, change or answer for its tests: it can give values.
`unit_test_peer` runs in both, and has the rules. Owns the boxes, and the time: the program has `timeout_s` for each
test, and is not run again once it was late; what is left has not passed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from treadle.errors import SandboxFailure
from treadle.sandbox.pool import take_box
from treadle.sandbox.protocol import BoxSettings, ExecResult, Sandbox

START_S = 20.0
"""For an interpreter to start, and for what a test computes itself."""
MAX_CALLS = 100_000
"""Calls of the program in one test."""
PEER = Path(__file__).with_name("unit_test_peer.py").read_text()


class UnitTests:
    """The tests of one program."""

    def __init__(self, source: str, tests: Mapping[str, Any], timeout_s: float, max_tests: int) -> None:
        self._source, self._timeout_s, self._max_tests = source, timeout_s, max_tests
        given, entry = tests["tests"], tests.get("entry_point") or []
        if not isinstance(given, str | list) or not given:
            raise ValueError(f"tests must be text or a list of lines, got {str(given)[:80]!r}")
        self._setup = {
            "tests": given,
            "setup": str(tests.get("setup", "")),
            "entry_points": [entry] if isinstance(entry, str) else [str(name) for name in entry],
        }
        self._program, self._tests = "", ""

    async def run(self, settings: BoxSettings, stop_early: bool = False) -> tuple[int, int, int]:
        """How many tests pass, of how many, and how many were left out. Text that holds asserts alone is one test.

        `stop_early`: end with the first test that does not pass.
        """
        program = await take_box(settings)
        try:
            oracle = await take_box(settings)
            try:
                return await self._run(program, oracle, stop_early)
            finally:
                await oracle.stop()
        finally:
            await program.stop()

    async def _run(self, program: Sandbox, oracle: Sandbox, stop_early: bool) -> tuple[int, int, int]:
        await program.write_file("main.py", self._source.encode(errors="replace"))
        names = await self._start_program(program)
        self._tests = await oracle.spawn(["python3", "-I", "-c", PEER, "tests"])
        opened = await self._converse(program, oracle, {**self._setup, "names": names})
        if "units" not in opened:
            return 0, 1, 0  # the program hung or broke while the tests were loaded
        found = int(opened["units"])
        units = min(found, self._max_tests)
        if opened["error"] or not units:
            if names and opened["error"] and not opened["called"] and self._is_ours(opened["error"]):
                raise ValueError(f"the tests cannot be loaded: {opened['error']}")
            return (0 if opened["error"] else 1), 1, 0
        passed = 0
        for number in range(units):
            verdict = await self._converse(program, oracle, number)
            passed += verdict.get("passed") is True
            if "passed" not in verdict or (stop_early and not verdict["passed"]):
                break
        return passed, units, found - units

    @staticmethod
    def _is_ours(error: str) -> bool:
        """A test file that is no Python is a mistake in the data, whatever the program."""
        return error.startswith(("SyntaxError", "IndentationError", "ModuleNotFoundError"))

    async def _start_program(self, box: Sandbox) -> dict[str, Any]:
        """What the program's names stand for; none where it does not load."""
        try:
            self._program = await box.spawn(["python3", "-I", "-c", PEER, "program"])
        except OSError:  # it left so many processes that there is no room for it
            return {}
        result = await box.ask(self._program, b"null\n", self._timeout_s + START_S)
        names = _read(result).get("names", {})
        return names if isinstance(names, dict) else {}

    async def _converse(self, program: Sandbox, oracle: Sandbox, message: Any) -> dict[str, Any]:
        """What the tests' process says in the end; orders on the way go to the program. Empty where time is over."""
        called, left_s, deadline = False, self._timeout_s, monotonic() + self._timeout_s + START_S
        for _ in range(MAX_CALLS):
            wait_s = max(0.001, deadline - monotonic())
            result = await oracle.ask(self._tests, json.dumps(message).encode() + b"\n", wait_s)
            said = _read(result)
            if not said and not called and not result.timed_out:
                raise SandboxFailure(f"the tests' process ended: {result.text[-300:]}")
            if not said or "units" in said or "passed" in said:
                return {**said, "called": called} if said else {}
            called, began = True, monotonic()
            answer = await program.ask(self._program, json.dumps(said).encode() + b"\n", max(0.001, left_s))
            left_s -= monotonic() - began
            if answer.timed_out:
                return {}
            message = _read(answer)
            if not message:
                if answer.code:
                    await self._start_program(program)
                message = {"error": ["RuntimeError", "RuntimeError", "the program gave no value"]}
        return {}


def _read(result: ExecResult) -> dict[str, Any]:
    """A line as a map; empty where it is none. A program may write what it likes there: it is data."""
    try:
        found = json.loads(result.line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
