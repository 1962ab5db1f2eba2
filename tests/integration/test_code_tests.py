"""Programs that a model wrote are scored by running their tests, each in a fenced process."""

import asyncio
import json
import shutil
import sys

import pytest

from tests.boxes import each_provider, why_not
from treadle.config import loads
from treadle.errors import ConfigError, RewardFailure
from treadle.reward.builtin import by_source, code_tests
from treadle.reward.result import ScoreFailure
from treadle.reward.scorer import Scorer
from treadle.sandbox import pool
from treadle.sandbox.protocol import BoxSettings
from treadle.types import Outcome, Row, StopReason, Task, ToolResult, Trajectory, Turn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fences are Linux's")

TESTS = {"inputs": ["1 2\n", "5 5\n", "-1 1\n"], "outputs": ["3\n", "10\n", "0\n"]}
RIGHT = "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."


def grade(*arguments: object, **named: object) -> float:
    return asyncio.run(code_tests.score(*arguments, **named)).value


def test_a_program_is_scored_by_the_share_of_tests_it_passes() -> None:
    assert grade(RIGHT, json.dumps(TESTS)) == 1.0
    wrong = "```python\nprint(3)\n```"
    assert grade(wrong, TESTS) == pytest.approx(1 / 3)
    assert grade(wrong, TESTS, all_or_nothing=True) == 0.0
    assert asyncio.run(by_source.score(RIGHT, TESTS, "taco")).value == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    return a + b",
        "class Solution:\n    def add(self, a, b):\n        print('talk')\n        return a + b",
    ],
)
def test_a_function_or_a_method_can_be_called(program: str) -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2], [5, 5]], "outputs": [[3], 10]}
    assert grade(f"```py\n{program}\n```", tests) == 1.0


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "raise SystemExit(3)", "this is no program", "import os; os._exit(0)", "print(10**10**10)"],
)
def test_a_program_that_does_not_answer_has_not_passed(program: str) -> None:
    assert grade(program, {"inputs": ["1 2"], "outputs": ["3"]}, timeout_s=2.0) == 0.0


def test_what_is_expected_is_nowhere_near_the_program() -> None:
    spy = "import os, sys\nfor name in ('environ', 'cmdline'):\n    print(open(f'/proc/{os.getppid()}/{name}').read())"
    assert grade(spy, {"inputs": [""], "outputs": ["secret-answer"]}, timeout_s=5.0) == 0.0


@pytest.mark.parametrize(("truth", "why"), [("{}", "no inputs"), ({"inputs": ["1"], "outputs": []}, "1 inputs and 0")])
def test_a_ground_truth_without_tests_is_an_error(truth: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        grade(RIGHT, truth)


PROGRAMS = {
    "python": "a, b = map(int, input().split())\nprint(a + b)",
    "bash": "read a b; echo $((a + b))",
    "c": '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); return 0; }',
    "c++": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }",
    "perl": "my ($a, $b) = split ' ', <STDIN>; print $a + $b;",
    "awk": "{ print $1 + $2 }",
    "javascript": "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' '); console.log(+a + +b)",
}


@each_provider
@pytest.mark.parametrize("language", PROGRAMS)
def test_a_program_is_graded_in_its_language(language: str, provider: str) -> None:
    if why_not(provider) is not None:
        pytest.skip(f"{provider}: {why_not(provider)}")
    known = code_tests.LANGUAGES[language]
    if shutil.which((known.compiler or known.run)[0]) is None:
        pytest.skip(f"{language} is not installed")
    answer = f"```{language}\n{PROGRAMS[language]}\n```"
    box = BoxSettings(provider, memory_mb=2048)
    assert grade(answer, TESTS, language=language, box=box, timeout_s=20) == 1.0
    assert grade(answer, {**TESTS, "outputs": ["3", "10", "7"]}, language=language, box=box) == pytest.approx(2 / 3)
    if code_tests.LANGUAGES[language].compiler:
        assert grade("no program", TESTS, language=language, box=box) == 0.0


def test_a_program_that_the_box_lacks_is_a_failure_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        code_tests.LANGUAGES, "lisp", code_tests.ProgramLanguage("main.lisp", ("of-no-box", "main.lisp"))
    )
    with pytest.raises(ScoreFailure, match="the box has no program of-no-box"):
        grade("(print 3)", TESTS, language="lisp")


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("0.30000000000000004\n", "0.3", True),
        ("3.0 yes", "3 yes", True),
        ("1e-9", "0.0", True),
        ("0.31", "0.3", False),
        ("3", "4", False),
        ("1000000001", "1000000000", False),
        ("-1000000001", "-1000000000", False),
        ("nan", "0.5", False),
        ("1.0 2.0", "1.0", False),
    ],
)
def test_numbers_with_a_point_may_differ_by_the_tolerance(printed: str, expected: str, same: bool) -> None:
    assert code_tests.is_same_text(printed, expected, 1e-6) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        ([1, [2.0000000001]], [1, [2]], True),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        (True, 1, False),
        (1, True, False),
        (False, 0.0, False),
        ([1], [1, 2], False),
        ({"a": 1}, {"b": 1}, False),
        ("0.3", 0.3, False),
        (10**400, 1.5, False),
        (10**20 + 1, 10**20, False),
    ],
)
def test_values_that_functions_return_are_compared_by_type(found: object, expected: object, same: bool) -> None:
    assert code_tests.is_same_value(found, expected, 1e-6) is same


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ValueError, match="no language 'cobol'; there are python"):
        code_tests.prepare("cobol")


SOLUTION = """```python
def add(a, b):
    return a + b

def sort(items):
    items.sort()

def fail():
    raise KeyError("gone")
```"""
FORMS = {
    "lines": (["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add(1, 1) == 3"], 2 / 3),
    "text": ("x = add((1,), (2,))\nassert x == (1, 2) and type(x) is tuple", 1.0),
    "functions": (
        "from solution import add\ndef test_one():\n    assert add(1, 2) == 3\ndef test_two():\n    assert 0",
        0.5,
    ),
    "changed arguments": (["x = [3, 1]\nsort(x)\nassert x == [1, 3]"], 1.0),
    "exceptions": (["try:\n    fail()\n    assert 0\nexcept KeyError:\n    pass"], 1.0),
    "unittest": (
        "import unittest, solution\nclass T(unittest.TestCase):\n    def test_a(self):\n"
        "        self.assertEqual(solution.add(1, 2), 3)\n    def test_b(self):\n        self.fail()",
        0.5,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_unit_tests_call_the_program_from_a_box_of_their_own(form: str) -> None:
    tests, expected = FORMS[form]
    assert grade(SOLUTION, {"tests": tests}) == pytest.approx(expected)


def test_human_evals_form() -> None:
    check = "def check(candidate):\n    assert candidate(1, 2) == 3"
    assert grade(SOLUTION, {"tests": check, "entry_point": "add"}) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "class add:\n    def __new__(cls, *a): return cls()\n    def __eq__(self, other): return True",
        "class V:\n    def __eq__(self, o): return True\ndef add(a, b): return V()",
        "import os\ndef add(a, b):\n    for fd in range(64):\n"
        "        try: os.write(fd, b'{\"passed\": true}\\n')\n        except OSError: pass\n"
        "    return 0",
        "import builtins\nbuiltins.AssertionError = Exception\ndef add(a, b): raise SystemExit(0)",
        "def add(a, b):\n    while True: pass",
        "import gc, sys\ndef add(a, b):\n    return [f.f_locals for f in sys._current_frames().values()] and 99",
    ],
)
def test_a_program_cannot_answer_for_its_tests(program: str) -> None:
    assert grade(f"```python\n{program}\n```", {"tests": ["assert add(1, 2) == 3"]}, timeout_s=2.0) == 0.0


MBPP = {"tests": ["assert set(sim((3, 4), (5, 4))) == set((4,))", "assert set(sim((1, 2), (2, 3))) == set((2,))"]}
CLOSE = {"tests": "def check(candidate):\n    assert abs(candidate(3.5) - 0.5) < 1e-6", "entry_point": "trunc"}
UNITTEST = {
    "tests": "import unittest\nclass T(unittest.TestCase):\n"
    "    def test_a(self):\n        self.assertEqual(sorted(f([2, 1])), [1, 2])"
}
LYING = "class Lie:\n    def __eq__(self, o): return True\n    __lt__ = __gt__ = __le__ = __ge__ = __eq__\n"
LYING += "    def __contains__(self, o): return True\n    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\n"
LYING += "    def __abs__(self): return 0\n    def __iter__(self): return iter(())\n"
LYING += "    def __exit__(self, *a): return True\n"
LYING += "    def __enter__(self): return self\n    def __float__(self): return 0.5\n"
FORGERIES = {
    "a function called set": ("def sim(a, b): return (9,)\ndef set(x): return 0", MBPP),
    "a function called abs": ("def trunc(x): return 7.0\ndef abs(x): return 0", CLOSE),
    "a function called sorted": ("def f(x): return 5\ndef sorted(x): return [1, 2]", UNITTEST),
    "a class called math": (
        "class math:\n    isclose = staticmethod(lambda a, b: True)\ndef f(x): return 5",
        {"tests": ["assert math.isclose(f(1), 2)"]},
    ),
    "all names of solution": (
        "def f(x): return 5\ndef abs(x): return 0",
        {"tests": "from solution import *\nassert abs(f(1) - 2) < 1"},
    ),
    "a check of its own": ("def trunc(x): return 7.0\ndef check(f): pass", CLOSE),
    "a test of its own": (
        "def f(x): return 5\ndef test_more(): pass",
        {"tests": "def test_f():\n    assert f(1) == 2"},
    ),
    "an object close to everything": (LYING + "def trunc(x): return Lie()", CLOSE),
    "an object that is all sets": (LYING + "def sim(a, b): return Lie()", MBPP),
    "an object that holds everything": (LYING + "def f(x): return Lie()", {"tests": ["assert 3 in f(1)"]}),
    "an object that is more and less": (LYING + "def f(x): return Lie()", {"tests": ["assert f(1) > 2"]}),
    "a context that silences": (
        LYING + "def f(x): return Lie()",
        {"tests": ["with f(1):\n    assert f(1) == 2"]},
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_program_hides_nothing_of_its_tests(forgery: str) -> None:
    program, tests = FORGERIES[forgery]
    assert grade(f"```python\n{program}\n```", tests) == 0.0


def test_a_builtin_that_is_the_task_is_named_as_entry_point() -> None:
    program = "```python\ndef sum(a, b): return 6\n```"
    assert grade(program, {"tests": ["assert sum(10, 15) == 6"], "entry_point": "sum"}) == 1.0
    with pytest.raises(ValueError, match="use the builtin sum and no name of a program; name it in entry_point"):
        grade(program, {"tests": ["assert sum(10, 15) == 6"]})


OBJECTS = """
from enum import Enum
LIMIT = 5
class Color(Enum):
    RED = 1
class Empty(LookupError): pass
class Stack:
    made = 0
    def __init__(self): self.items, Stack.made = [], Stack.made + 1
    def push(self, x): self.items.append(x); return self
    def pop(self):
        if not self.items: raise Empty("nothing is left")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, at): return self.items[at]
    def __repr__(self): return f"Stack({self.items})"
    def __eq__(self, other): return self.items == other.items
    def __add__(self, other): s = Stack(); s.items = self.items + other.items; return s
def count(n):
    yield from range(n)
def apply(g, x): return g(x)
def twice(g): return lambda x: g(g(x))
def big(): return 7 ** 9000
"""
USES = {
    "a class": "s = Stack()\ns.push(1).push(2)\nassert s.pop() == 2 and len(s) == 1 and s[0] == 1 and s.items == [1]",
    "attributes": "s = Stack()\ns.items = [1, 2]\nassert s.pop() == 2 and str(s) == 'Stack([1])' and Stack.made == 1",
    "two objects": "a, b = Stack().push(1), Stack().push(1)\nassert a == b and (a + b).items == [1, 1]",
    "kinds": "assert isinstance(Stack(), Stack) and not isinstance(3, Stack)",
    "its exceptions": "try:\n    Stack().pop()\n    assert 0\nexcept Empty as error:\n    assert 'left' in str(error)",
    "a base of its exceptions": "try:\n    Stack().pop()\n    assert 0\nexcept LookupError:\n    pass",
    "a constant": "assert LIMIT == 5",
    "an enumeration": "assert Color.RED == Color.RED and Color.RED.value == 1",
    "a generator": "assert list(count(3)) == [0, 1, 2] and sum(x for x in count(4)) == 6",
    "a function as argument": "assert apply(lambda x: x + 1, 2) == 3 and apply(len, 'abc') == 3",
    "calls in both directions": "assert apply(lambda n: sum(count(n)), 4) == 6 and twice(lambda x: x * 3)(2) == 18",
    "a long number": "assert big() == 7 ** 9000",
}


@pytest.mark.parametrize("use", USES)
def test_unit_tests_use_what_is_no_plain_data(use: str) -> None:
    assert grade(f"```python\n{OBJECTS}\n```", {"tests": [USES[use]]}) == 1.0
    assert grade(f"```python\n{OBJECTS}\n```", {"tests": f"from solution import *\n{USES[use]}"}) == 1.0


def test_tests_beyond_max_tests_are_counted() -> None:
    program = "```python\ndef f(x): return x if x < 10 else 0\n```"
    tests = {"tests": [f"assert f({number}) == {number}" for number in range(12)]}
    score = asyncio.run(code_tests.score(program, tests))
    assert (score.value, score.extra) == (1.0, {"passed": 10, "tests": 10, "left_out": 2})
    assert grade(program, tests, max_tests=12) == pytest.approx(10 / 12)
    cases = {"inputs": ["1 2"] * 12, "outputs": ["3"] * 12}
    assert asyncio.run(code_tests.score(RIGHT, cases)).extra == {"passed": 10, "tests": 10, "left_out": 2}


def test_tests_that_are_no_python_are_a_mistake_in_the_data() -> None:
    with pytest.raises(ValueError, match="tests cannot be loaded: SyntaxError"):
        grade(SOLUTION, {"tests": "assert ("})


def test_a_submitted_file_is_graded() -> None:
    result = ToolResult(
        "submitted", extra={"submitted": True, "files": {"f.py": "print(sum(map(int, input().split())))"}}
    )
    turn = Turn(0, 1, 1, StopReason.STOP, results=(result,))
    row = Row((1,), (2,), (1,), (0.0,), (0,), (turn,))
    handed = Trajectory("a", 0, (row,), Outcome.ended(StopReason.STOP))
    assert grade("no code here", TESTS, handed, artifact="f.py") == 1.0
    assert grade("no code here", TESTS, handed, artifact="other.py") == 0.0


CONFIG = "model: {path: unused}\nreward: {functions: {tests: {path: code_tests}}, retries: 0}\n"


def score_all(responses: list[str], tests: object, *words: str, breaking: str | None = None) -> list[float]:
    """Scores of a scorer as a run has it; `breaking`: a provider that cannot be had any more once it has started."""
    reward = loads(CONFIG, "test.yaml", words).reward
    task = Task(uid="a", messages=({"role": "user", "content": "go"},), ground_truth=tests)

    async def run() -> list[float]:
        async with await Scorer.create(reward) as scorer:
            if breaking is not None:
                scorer._inline["tests"].kwargs["box"] = BoxSettings(breaking, "localhost/no-such-image")
            ended = [
                Trajectory(
                    "a", at, (), Outcome.ended(StopReason.STOP), messages=({"role": "assistant", "content": text},)
                )
                for at, text in enumerate(responses)
            ]
            scores = await asyncio.gather(*(scorer.score(task, item) for item in ended))
            return [score.value for score in scores if score is not None]

    return asyncio.run(run())


def test_a_program_without_end_is_a_zero_with_default_settings() -> None:
    tests = {"tests": ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]}
    endless = "```python\ndef f(x):\n    while True: pass\n```"
    assert score_all([endless, "```python\nwhile True: pass\n```"], tests) == [0.0, 0.0]
    assert score_all(["```python\nwhile True: pass\n```"], TESTS) == [0.0]


def test_a_program_that_was_late_is_not_run_again() -> None:
    late_once = "```python\na, b = map(int, input().split())\nwhile a == 5: pass\nprint(a + b)\n```"
    score = asyncio.run(code_tests.score(late_once, TESTS, timeout_s=1.0))
    assert score.extra == {"passed": 1, "tests": 3, "left_out": 0}


def test_a_provider_that_cannot_be_had_is_refused_before_the_first_score() -> None:
    words = ("reward.sandbox.provider=podman", "reward.sandbox.image=localhost/no-such-image")
    with pytest.raises(ConfigError, match=r"reward\.sandbox\.provider: podman cannot be had"):
        score_all([RIGHT], TESTS, *words)


def test_a_box_that_cannot_be_had_any_more_is_a_failure_and_no_zero() -> None:
    with pytest.raises(RewardFailure, match="has no box to grade in: podman cannot be had"):
        score_all([RIGHT], TESTS, breaking="podman")


def test_gradings_take_boxes_that_were_started_ahead() -> None:
    assert score_all([RIGHT] * 5, TESTS, "reward.sandbox.warm=2") == [1.0] * 5


@pytest.mark.parametrize("most", [1, 2])
def test_gradings_overlap_up_to_their_limit(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    open_boxes, seen = [0], [0]

    async def take(settings: BoxSettings) -> object:
        open_boxes[0] += 1
        seen[0] = max(seen[0], open_boxes[0])
        box = await pool.take_box(settings)
        stop = box.stop

        async def stopped() -> None:
            open_boxes[0] -= 1
            await stop()

        box.stop = stopped  # type: ignore[method-assign]
        return box

    monkeypatch.setattr(code_tests, "take_box", take)
    assert score_all([RIGHT] * 4, TESTS, f"reward.max_gradings={most}") == [1.0] * 4
    assert seen[0] == most
