"""The share of its tests that a Python program passes, or 1.0 only where it passes all.

    correct: {path: code_tests, kwargs: {timeout_s: 4, all_or_nothing: false}}

The program is the last fenced block of the response, or the whole response without one. The ground truth is a map, or
its JSON text, in the form of APPS, TACO and CodeContests: `inputs` and `outputs` of the same length, and `fn_name`
where a function (or a method of a class `Solution`) is called instead of a program that reads standard input. Output is
compared word by word. Each test is a process of its own behind the kernel's fences (`treadle.reward.sandbox`), and what
is expected never enters it. A program that fails, prints something else or takes too long has not passed; that is no
failure of the reward.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.reward.sandbox import run_python

_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[0-9.]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_CALL = """

import json as _json, sys as _sys
_name, _arguments = _json.loads(_sys.stdin.read())
_function = globals().get(_name) or getattr(Solution(), _name)
print("\\n" + _json.dumps(_function(*_arguments)))
"""


def prepare(timeout_s: float = 4.0, all_or_nothing: bool = False, max_tests: int = 10) -> None:
    """Check the limits."""
    if not timeout_s > 0 or not max_tests >= 1:
        raise ValueError(f"timeout_s and max_tests must be above 0, got {timeout_s} and {max_tests}")


def score(
    response: str, ground_truth: Any, timeout_s: float = 4.0, all_or_nothing: bool = False, max_tests: int = 10
) -> float:
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    inputs, outputs = _read_tests(tests)
    source = read_program(response)
    name = tests.get("fn_name")
    passed = 0
    for given, expected in list(zip(inputs, outputs, strict=True))[:max_tests]:
        if _passes(source, name, given, expected, timeout_s):
            passed += 1
        elif all_or_nothing:
            return 0.0
    return passed / min(len(inputs), max_tests)


def read_program(response: str) -> str:
    """The last fenced block, or everything."""
    blocks = _BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def _read_tests(tests: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    if not isinstance(tests, Mapping) or not tests.get("inputs") or "outputs" not in tests:
        raise ValueError(f"the ground truth has no inputs and outputs: {str(tests)[:80]!r}")
    inputs, outputs = tests["inputs"], tests["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    return inputs, outputs


def _passes(source: str, name: str | None, given: Any, expected: Any, timeout_s: float) -> bool:
    if name is None:
        result = run_python(source, stdin=_text(given), timeout_s=timeout_s)
        return result.status == 0 and not result.timed_out and result.stdout.split() == _text(expected).split()
    result = run_python(source + _CALL, stdin=json.dumps([name, given]), timeout_s=timeout_s)
    printed = result.stdout.rstrip("\n").rpartition("\n")[2]
    try:
        found = json.loads(printed)
    except ValueError:
        return False
    return result.status == 0 and not result.timed_out and found in (expected, [expected], _only(expected))


def _only(expected: Any) -> Any:
    """Some data sets wrap the one result of a call in a list."""
    return expected[0] if isinstance(expected, list) and len(expected) == 1 else expected


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
