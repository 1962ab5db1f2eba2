"""The share of its tests that a program passes, or 1.0 only where it passes all; graded in a fresh box.

    correct: {path: code_tests, kwargs: {language: python, timeout_s: 4, all_or_nothing: false, tolerance: 1.0e-6}}

The program is a file that the agent handed in by `submit` (`artifact: FILE`), or the last fenced block of the response,
or the whole response without one. The ground truth is a map, or its JSON text:

    inputs, outputs             programs that read standard input and print (APPS, TACO); words are compared, numbers
                                with a point or an exponent by `tolerance`, relative or absolute
    inputs, outputs, fn_name    a Python function, or a method of a class `Solution`, that is called
    tests                       Python: asserts as a list of lines or as text, functions test_…, classes of unittest, or
                                HumanEval's check(candidate); the program is there as `solution`, too
    entry_point                 with `tests`: a name of the program, or a list of them, that a builtin has, too, or that
                                `check` is called with
    language                    what the program is written in, where it is not that of kwargs

The program runs in a box that was started for this grading (`reward.sandbox`). What is expected never enters it: output
is compared here, and tests run in a second box, from which calls of the program's functions are carried over. A program
that fails, prints something else or takes longer than `timeout_s` has not passed; one that was late is not run again,
and what is left has not passed either. A box that cannot be had or breaks is a failure of the reward, and no zero.
The score tells how many tests `passed`, of how many `tests`, and how many more than `max_tests` were `left_out`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isclose
from typing import Any

from treadle.errors import SandboxFailure
from treadle.reward.builtin.unit_tests import UnitTests
from treadle.reward.result import Fault, ScoreFailure
from treadle.sandbox.pool import take_box
from treadle.sandbox.protocol import BoxSettings, ExecResult, Sandbox
from treadle.types import Score, Trajectory

_BLOCK = re.compile(r"```[ \t]*(?:\w[\w+#.-]*[ \t]*)?\n(.*?)(?:```|\Z)", re.DOTALL)
_CALL = """

import json as _json, sys as _sys
_name, _arguments = _json.loads(_sys.stdin.read())
_function = globals().get(_name) or getattr(Solution(), _name)
print("\\n" + _json.dumps(_function(*_arguments)))
"""
COMPILE_S = 30.0
TOLERANCE = 1e-6
_NUMBER = re.compile(r"[+-]?(\d{1,40}\.?\d{0,40}|\.\d{1,40})([eE][+-]?\d{1,3})?")


@dataclass(frozen=True, slots=True)
class ProgramLanguage:
    """The file a program is written to, the command that runs it, and the one that compiles it to `program`."""

    file: str
    run: tuple[str, ...]
    compiler: tuple[str, ...] = ()


LANGUAGES: dict[str, ProgramLanguage] = {
    "python": ProgramLanguage("main.py", ("python3", "main.py")),
    "bash": ProgramLanguage("main.sh", ("bash", "main.sh")),
    "c": ProgramLanguage("main.c", ("./program",), ("gcc", "-O2", "-o", "program.out", "main.c", "-lm")),
    "c++": ProgramLanguage("main.cc", ("./program",), ("g++", "-O2", "-o", "program.out", "main.cc")),
    "perl": ProgramLanguage("main.pl", ("perl", "main.pl")),
    "awk": ProgramLanguage("main.awk", ("awk", "-f", "main.awk")),
    "javascript": ProgramLanguage("main.js", ("node", "main.js")),
}


def prepare(
    language: str = "python",
    artifact: str | None = None,
    timeout_s: float = 4.0,
    all_or_nothing: bool = False,
    max_tests: int = 10,
    tolerance: float = TOLERANCE,
) -> None:
    """Check the limits, and that the language is known."""
    if not timeout_s > 0 or not max_tests >= 1:
        raise ValueError(f"timeout_s and max_tests must be above 0, got {timeout_s} and {max_tests}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be 0 or more, got {tolerance}")
    _find_language(language)


async def score(
    response: str,
    ground_truth: Any,
    trajectory: Trajectory | None = None,
    language: str = "python",
    artifact: str | None = None,
    timeout_s: float = 4.0,
    all_or_nothing: bool = False,
    max_tests: int = 10,
    tolerance: float = TOLERANCE,
    box: BoxSettings | None = None,
) -> Score:
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Mapping):
        raise ValueError(f"the ground truth has no inputs and outputs, and no tests: {str(tests)[:80]!r}")
    source = read_program(response) if artifact is None else _submitted(trajectory, artifact)
    if source is None:
        return Score(0.0, extra={"passed": 0})  # nothing was handed in
    settings = box or BoxSettings()
    try:
        if "tests" in tests:
            units = UnitTests(source, tests, timeout_s, max_tests)
            passed, total, left_out = await units.run(settings, stop_early=all_or_nothing)
        else:
            chosen = _find_language(str(tests.get("language", language)))
            inputs, outputs = _read_tests(tests)
            cases = list(zip(inputs, outputs, strict=True))[:max_tests]
            total, left_out = len(cases), len(inputs) - len(cases)
            program = Program(source, chosen, tests.get("fn_name"), timeout_s, tolerance)
            passed = await program.count_passed(cases, settings, stop_early=all_or_nothing)
    except SandboxFailure as failure:
        raise ScoreFailure(Fault.CRASH, f"has no box to grade in: {failure}") from failure
    value = float(passed == total) if all_or_nothing else passed / total
    return Score(value, extra={"passed": passed, "tests": total, "left_out": left_out})


def read_program(response: str) -> str:
    """The last fenced block, or everything."""
    blocks = _BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def _submitted(trajectory: Trajectory | None, artifact: str) -> str | None:
    """A file that the agent handed in last, as its session recorded it; its box is gone."""
    kept = trajectory.extra.get("files") if trajectory is not None else None  # those of an agent program
    if isinstance(kept, Mapping) and artifact in kept:
        return str(kept[artifact])
    rows = trajectory.rows if trajectory is not None else ()
    results = [result for row in rows for turn in row.turns for result in turn.results]
    for result in reversed(results):
        files = result.extra.get("files")
        if result.extra.get("submitted") and isinstance(files, Mapping) and artifact in files:
            return str(files[artifact])
    return None


def _find_language(name: str) -> ProgramLanguage:
    language = LANGUAGES.get(name)
    if language is None:
        raise ValueError(f"there is no language {name!r}; there are {', '.join(LANGUAGES)}")
    return language


def _read_tests(tests: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    if not tests.get("inputs") or "outputs" not in tests:
        raise ValueError(f"the ground truth has no inputs and outputs, and no tests: {str(tests)[:80]!r}")
    inputs, outputs = tests["inputs"], tests["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    return inputs, outputs


@dataclass(frozen=True, slots=True)
class Program:
    """What was handed in, and how it is run and judged. `name`: the function that is called, if one is."""

    source: str
    language: ProgramLanguage
    name: str | None
    timeout_s: float
    tolerance: float

    async def count_passed(self, cases: Sequence[tuple[Any, Any]], settings: BoxSettings, *, stop_early: bool) -> int:
        """How many tests it passes in a fresh box, until it is late."""
        box = await take_box(settings)
        passed = 0
        try:
            if not await self._install(box):
                return 0
            for given, expected in cases:
                result = await self._run(box, given)
                if self._is_expected(result, expected):
                    passed += 1
                elif stop_early or result.timed_out:
                    break
        finally:
            await box.stop()
        return passed

    async def _install(self, box: Sandbox) -> bool:
        """Write the program, and compile it where it has to be; False where it does not compile."""
        compiler = self.language.compiler
        needed = (compiler or self.language.run)[0]
        if (await box.exec(["sh", "-c", 'command -v "$0"', needed])).code != 0:
            raise SandboxFailure(f"the box has no program {needed}, which the language of the tests needs")
        await box.write_file(self.language.file, (self.source + (_CALL if self.name else "")).encode(errors="replace"))
        if not compiler:
            return True
        # The compiler's own file may lack the right to run, where a box has no chmod.
        await box.write_file("program", b"", executable=True)
        compiled = await box.exec(compiler, timeout_s=COMPILE_S)
        return compiled.code == 0 and (await box.exec(["sh", "-c", "cat program.out > program"])).code == 0

    async def _run(self, box: Sandbox, given: Any) -> ExecResult:
        stdin = _text(given) if self.name is None else json.dumps([self.name, given])
        return await box.exec(self.language.run, stdin=stdin.encode(), timeout_s=self.timeout_s)

    def _is_expected(self, result: ExecResult, expected: Any) -> bool:
        printed = result.stdout.decode(errors="replace")
        if result.code != 0 or result.timed_out or result.dropped:
            return False
        if self.name is None:
            return is_same_text(printed, _text(expected), self.tolerance)
        wanted = [expected, [expected], _only(expected)]
        try:
            found = json.loads(printed.rstrip("\n").rpartition("\n")[2])
            return any(is_same_value(found, value, self.tolerance) for value in wanted)
        except (ValueError, RecursionError):
            return False


def is_same_text(printed: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs have the same words; numbers of which one has a point or an exponent may differ a little."""
    found, wanted = printed.split(), expected.split()
    return len(found) == len(wanted) and all(
        one == other or _is_close_number(one, other, tolerance) for one, other in zip(found, wanted, strict=True)
    )


def _is_close_number(one: str, other: str, tolerance: float) -> bool:
    if not (_NUMBER.fullmatch(one) and _NUMBER.fullmatch(other) and set(one + other) & set(".eE")):
        return False
    return isclose(float(one), float(other), rel_tol=tolerance, abs_tol=tolerance)


def is_same_value(found: Any, expected: Any, tolerance: float) -> bool:
    """Whether two JSON values are the same: true is no 1, and fractions may differ a little."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(
            is_same_value(one, other, tolerance) for one, other in zip(found, expected, strict=True)
        )
    if isinstance(found, dict) and isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(
            is_same_value(found[key], expected[key], tolerance) for key in found
        )
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if {type(found), type(expected)} in ({float}, {float, int}):
        with suppress(OverflowError):  # an integer that no float holds
            return isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
        return False
    return bool(found == expected)


def _only(expected: Any) -> Any:
    """Some data sets wrap the one result of a call in a list."""
    return expected[0] if isinstance(expected, list) and len(expected) == 1 else expected


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
