"""The share of its tests that a program passes, or 1.0 only where it passes all; graded in a fresh box.

    correct: {path: code_tests, kwargs: {language: python, timeout_s: 4, all_or_nothing: false}}

The program is a file that the agent handed in by `submit` (`artifact: FILE`), or the last fenced block of the response,
or the whole response without one. The ground truth is a map, or its JSON text:

    inputs, outputs             programs that read standard input and print (APPS, TACO); words are compared
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
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ProgramLanguage:
    """The file a program is written to, the command that runs it, and the one that compiles it to `program`."""

    file: str
    run: tuple[str, ...]
    compiler: tuple[str, ...] = ()


LANGUAGES: Mapping[str, ProgramLanguage] = {
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
) -> None:
    """Check the limits, and that the language is known and its program is here."""
    if not timeout_s > 0 or not max_tests >= 1:
        raise ValueError(f"timeout_s and max_tests must be above 0, got {timeout_s} and {max_tests}")
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
            name = tests.get("fn_name")
            passed = await _run_cases(source, chosen, name, cases, timeout_s, all_or_nothing, settings)
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
    program = (language.compiler or language.run)[0]
    if shutil.which(program) is None:
        raise ValueError(f"language {name} needs the program {program}, which is not here")
    return language


async def _run_cases(
    source: str,
    language: ProgramLanguage,
    name: str | None,
    cases: Sequence[tuple[Any, Any]],
    timeout_s: float,
    all_or_nothing: bool,
    settings: BoxSettings,
) -> int:
    """How many tests a program passes, until it is late."""
    box = await take_box(settings)
    passed = 0
    try:
        if not await _install(box, source + (_CALL if name else ""), language):
            return 0
        for given, expected in cases:
            result = await _run_case(box, language, name, given, timeout_s)
            if _is_expected(result, name, expected):
                passed += 1
            elif all_or_nothing or result.timed_out:
                break
    finally:
        await box.stop()
    return passed


def _read_tests(tests: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    if not tests.get("inputs") or "outputs" not in tests:
        raise ValueError(f"the ground truth has no inputs and outputs, and no tests: {str(tests)[:80]!r}")
    inputs, outputs = tests["inputs"], tests["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    return inputs, outputs


async def _install(box: Sandbox, source: str, language: ProgramLanguage) -> bool:
    """Write the program, and compile it where it has to be; False where it does not compile."""
    await box.write_file(language.file, source.encode(errors="replace"))
    if not language.compiler:
        return True
    # The compiler's own file may lack the right to run, where a box has no chmod.
    await box.write_file("program", b"", executable=True)
    compiled = await box.exec(language.compiler, timeout_s=COMPILE_S)
    return compiled.code == 0 and (await box.exec(["sh", "-c", "cat program.out > program"])).code == 0


async def _run_case(
    box: Sandbox, language: ProgramLanguage, name: str | None, given: Any, timeout_s: float
) -> ExecResult:
    stdin = _text(given) if name is None else json.dumps([name, given])
    return await box.exec(language.run, stdin=stdin.encode(), timeout_s=timeout_s)


def _is_expected(result: ExecResult, name: str | None, expected: Any) -> bool:
    printed = result.stdout.decode(errors="replace")
    if result.code != 0 or result.timed_out or result.dropped:
        return False
    if name is None:
        return printed.split() == _text(expected).split()
    try:
        found = json.loads(printed.rstrip("\n").rpartition("\n")[2])
        return found in (expected, [expected], _only(expected))
    except (ValueError, RecursionError):
        return False


def _only(expected: Any) -> Any:
    """Some data sets wrap the one result of a call in a list."""
    return expected[0] if isinstance(expected, list) and len(expected) == 1 else expected


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
