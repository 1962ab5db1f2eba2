"""Reward functions that misbehave in every way we know, in real worker processes."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.errors import ConfigError, RewardFailure, RunError
from treadle.process.channel import HEADER
from treadle.reward.result import Fault, ScoreFailure
from treadle.reward.sandbox.process import WorkerProcess
from treadle.reward.scorer import Scorer
from treadle.types import Outcome, Score, StopReason, Task, Trajectory

HERE = __name__
PATIENCE_S = 120.0
"""How long to wait for what comes; no test says how fast it comes, on a machine that others use."""
TURNS = count()


# Functions under test. Each does to its worker what its name says.


def well_behaved(response: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"score": len(response), "pid": os.getpid(), "turn": next(TURNS), "torch": "torch" in sys.modules}


async def well_behaved_async(response: str) -> float:
    await asyncio.sleep(0.01)
    return float(len(response))


def misbehave(extra: dict[str, Any], response: str) -> Any:
    return globals()[extra.get("how", "well_behaved")](response=response, extra=extra)


async def misbehave_async(extra: dict[str, Any]) -> float:
    if extra.get("how") == "never_end":
        await asyncio.Event().wait()
    return 1.0


def loop_forever(**_: Any) -> Any:
    while True:
        pass


def loop_in_c(**_: Any) -> Any:
    return sum(iter(int, 1))


def sleep_long(**_: Any) -> None:
    time.sleep(60)


def call_sys_exit(**_: Any) -> None:
    sys.exit(3)


def call_os_exit(**_: Any) -> None:
    os._exit(7)


def segfault(**_: Any) -> None:
    ctypes.string_at(0)


def hog_memory(**_: Any) -> float:
    return float(len(bytearray(3 << 30)))


def hog_memory_slowly(**_: Any) -> float:
    kept = []
    while True:
        kept.append(bytearray(10 << 20))


def print_a_lot(**_: Any) -> float:
    for _line in range(2000):
        print("x" * 1000)
        print("x" * 1000, file=sys.stderr)
    os.write(1, b"y" * 1_000_000)
    return 1.0


def print_a_little(**_: Any) -> float:
    print("one\ntwo \x1b[2J")
    print("to standard error", file=sys.stderr)
    print("no end", end="")
    return 1.0


def read_standard_input(**_: Any) -> float:
    return float(len(sys.stdin.read()))


def leave_child(extra: dict[str, Any], **_: Any) -> float:
    """Leave two children: one plain, one in a session of its own whose parent is already gone."""
    if os.fork() == 0:
        _note(extra)
        time.sleep(60)
    if os.fork() == 0:
        parent = os.getpid()
        if os.fork() == 0:
            os.setsid()
            while os.getppid() == parent:
                time.sleep(0.01)
            _note(extra)
            time.sleep(60)
        os._exit(0)
    while len(Path(extra["note"]).read_text().split() if Path(extra["note"]).exists() else ()) < 2:
        time.sleep(0.01)
    return 1.0


def leave_child_and_hang(extra: dict[str, Any], **_: Any) -> None:
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = subprocess.Popen(program, start_new_session=True)
    Path(extra["note"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(60)


def _note(extra: dict[str, Any]) -> None:
    with open(extra["note"], "a") as note:
        note.write(f"{os.getpid()} ")


def return_nan(**_: Any) -> float:
    return float("nan")


def return_none(**_: Any) -> None:
    return None


def return_text(**_: Any) -> str:
    return "1.0"


def return_huge_map(**_: Any) -> dict[str, Any]:
    return {"score": 1.0, **{f"field {at}": "x" * 100 for at in range(50_000)}}


def raise_error(**_: Any) -> None:
    raise RuntimeError("as told")


def raise_interrupt(**_: Any) -> None:
    raise KeyboardInterrupt


def forge_answers(**_: Any) -> float:
    """Write a reply of our own to every descriptor that takes it, and one for the next score."""
    forged = b'{"score": 99, "parts": {}, "extra": {}}'
    for descriptor in range(3, 200):
        try:
            os.write(descriptor, (HEADER.pack(len(forged)) + forged) * 2)
        except OSError:
            continue
    return 1.0


def flood_channel(**_: Any) -> float:
    for descriptor in range(3, 200):
        try:
            os.write(descriptor, b"\xff" * (4 << 20))
        except OSError:
            continue
    return 1.0


def fail_once(extra: dict[str, Any], **_: Any) -> float:
    if not Path(extra["note"]).exists():
        Path(extra["note"]).write_text("was here")
        os._exit(1)
    return 1.0


def vandal(extra: dict[str, Any], response: str, messages: Any) -> float:
    messages[0]["content"] = "gone"
    extra.clear()
    return 1.0


def witness(extra: dict[str, Any], messages: Any) -> float:
    return float(extra == {"kept": True} and messages[0]["content"] == "?")


def start_slowly(response: str, seconds: float = 0.0) -> float:
    time.sleep(seconds)
    return 1.0


# What the tests share.


def make_task(how: str = "well_behaved", **extra: Any) -> Task:
    return Task("t", (), "42", extra={"how": how, **extra})


def make_trajectory(text: str = "four") -> Trajectory:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": text})
    return Trajectory("t", 0, (), Outcome.ended(StopReason.STOP), messages=messages)


def make_config(*names: str, kwargs: dict[str, Any] | None = None, **keys: Any) -> RewardConfig:
    paths = {name: name if name in ("math", "reasoning_gym", "number_match") else f"{HERE}:{name}" for name in names}
    functions = {
        name: RewardFunctionConfig(path=path, kwargs=kwargs or {}, sandbox=False) for name, path in paths.items()
    }
    return RewardConfig(**{"functions": functions, "retries": 0, "timeout_s": 20.0, **keys})


async def score_after(reward: RewardConfig, task: Task) -> tuple[Score | ScoreFailure, Score]:
    """What came of `task`, and a good score from the same scorer afterwards."""
    async with await Scorer.create(reward) as scorer:
        try:
            first: Score | ScoreFailure = await scorer.score(task, make_trajectory())
        except ScoreFailure as failure:
            first = failure
        return first, await scorer.score(make_task(), make_trajectory())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("how", "fault", "words"),
    [
        ("call_sys_exit", Fault.CRASH, "called sys.exit(3)"),
        ("call_os_exit", Fault.CRASH, "ended its process with status 7"),
        ("segfault", Fault.CRASH, "was killed by SIGSEGV"),
        ("raise_interrupt", Fault.CRASH, "was killed by SIGINT"),
        ("hog_memory", Fault.MEMORY, "reward.memory_mb"),
        ("hog_memory_slowly", Fault.MEMORY, "reward.memory_mb"),
        ("return_nan", Fault.NOT_A_NUMBER, "returned nan"),
        ("return_none", Fault.NO_RESULT, "returned NoneType"),
        ("return_text", Fault.NO_RESULT, "returned str '1.0'"),
        ("return_huge_map", Fault.TOO_LARGE, "bytes of fields"),
        ("raise_error", Fault.EXCEPTION, "raised RuntimeError: as told ("),
        ("flood_channel", Fault.TOO_LARGE, "flooded its worker's channel"),
    ],
)
def test_a_function_that_breaks_fails_its_score_and_no_other(how: str, fault: Fault, words: str) -> None:
    failure, score = asyncio.run(score_after(make_config("misbehave", memory_mb=256), make_task(how)))
    assert isinstance(failure, RewardFailure)
    assert isinstance(failure, ScoreFailure)
    assert failure.fault is fault
    assert words in str(failure)
    assert "'misbehave'" in str(failure)
    assert score.value == 4.0


@pytest.mark.parametrize("how", ["loop_forever", "loop_in_c", "sleep_long"])
def test_a_function_that_never_returns_is_killed_at_its_deadline(how: str) -> None:
    failure, score = asyncio.run(score_after(make_config("misbehave", timeout_s=1.0), make_task(how)))
    assert isinstance(failure, ScoreFailure)
    assert str(failure) == "timeout: reward function 'misbehave' ran past reward.timeout_s=1"
    assert score.value == 4.0


@pytest.mark.parametrize(("how", "attempts"), [("loop_forever", 1), ("sleep_long", 2)])
def test_a_deadline_spent_computing_is_not_tried_again_and_one_spent_waiting_is(
    how: str, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = WorkerProcess.ask

    async def counted(self: WorkerProcess, payload: bytes, names: tuple[str, ...]) -> dict[str, Score]:
        asked.append(names)
        return await ask(self, payload, names)

    monkeypatch.setattr(WorkerProcess, "ask", counted)
    monkeypatch.setattr("treadle.reward.sandbox.process.MOSTLY", 0.05)  # others may want the CPU of this machine, too
    failure, score = asyncio.run(score_after(make_config("misbehave", timeout_s=2.0, retries=1), make_task(how)))
    assert isinstance(failure, ScoreFailure) and failure.past_deadline
    assert len(asked) == attempts + 1, "and one for the good score after it"
    assert score.value == 4.0


def test_a_function_that_is_late_may_have_a_score_and_the_others_have_theirs() -> None:
    config = make_config("misbehave", "number_match", "tells_response", timeout_s=1.0, on_timeout=0.25)
    late, good = asyncio.run(score_after(config, make_task("sleep_long")))
    assert isinstance(late, Score)
    assert (late.parts["misbehave"], late.extra["timed_out"]) == (0.25, True)
    assert late.parts["tells_response"] == 9.0
    assert good.parts["misbehave"] == 4.0


def tells_response(**_: Any) -> float:
    return 9.0


def test_an_async_function_that_never_ends_is_killed_at_its_deadline() -> None:
    failure, score = asyncio.run(score_after(make_config("misbehave_async", timeout_s=1.0), make_task("never_end")))
    assert isinstance(failure, ScoreFailure)
    assert failure.fault is Fault.TIMEOUT
    assert score.value == 1.0


@pytest.mark.parametrize("how", ["loop_forever", "loop_in_c"])
def test_cpu_time_is_bounded_apart_from_the_deadline(how: str) -> None:
    failure, score = asyncio.run(score_after(make_config("misbehave", cpu_time_s=0.2), make_task(how)))
    assert isinstance(failure, ScoreFailure)
    assert failure.fault is Fault.CPU_TIME
    assert score.value == 4.0


def test_cpu_time_is_counted_afresh_for_each_score() -> None:
    async def main() -> set[Any]:
        async with await Scorer.create(make_config("misbehave", cpu_time_s=0.3)) as scorer:
            scores = [await scorer.score(make_task("burn_a_little"), make_trajectory()) for _ in range(6)]
        return {score.extra["pid"] for score in scores}

    assert len(asyncio.run(main())) == 1


def burn_a_little(**_: Any) -> dict[str, Any]:
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    return {"score": 1.0, "pid": os.getpid()}


@pytest.mark.parametrize("how", ["print_a_lot", "read_standard_input", "forge_answers"])
def test_noise_does_not_reach_the_score(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = asyncio.run(score_after(make_config("misbehave"), make_task(how)))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert second.value == 4.0
    if how == "print_a_lot":
        assert isinstance(first, Score)
        assert first.value == 1.0
        assert printed.err.startswith(f"printed by reward misbehave: {'x' * 1000}\n")
        assert "more printed lines left out: at most 100 a second are shown" in printed.err
    else:
        assert printed.err == ""


def test_what_a_function_prints_is_shown_with_its_name_and_obeyed_by_no_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    asyncio.run(score_after(make_config("misbehave"), make_task("print_a_little")))
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "printed by reward misbehave: one",
        "printed by reward misbehave: two \\x1b[2J",
        "printed by reward misbehave: to standard error",
        "printed by reward misbehave: no end",
    ]


def test_what_a_score_leaves_running_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pids"

    async def main() -> list[bool]:
        async with await Scorer.create(make_config("misbehave")) as scorer:
            await scorer.score(make_task("leave_child", note=str(note)), make_trajectory())
            return [is_running(int(pid)) for pid in note.read_text().split()]

    assert asyncio.run(main()) == [False, False]


def test_a_killed_score_takes_its_children_along(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    task = make_task("leave_child_and_hang", note=str(note))
    failure, _ = asyncio.run(score_after(make_config("misbehave", timeout_s=2.0), task))
    assert isinstance(failure, ScoreFailure)
    left = [int(pid) for pid in note.read_text().split()]
    assert len(left) == 2
    wait_until(lambda: not any(is_running(pid) for pid in left))


def test_other_scores_go_on_while_one_is_stuck() -> None:
    async def main() -> list[Score | BaseException]:
        tasks = [make_task("sleep_long"), *(make_task() for _ in range(20))]
        async with await Scorer.create(make_config("misbehave", num_workers=2, timeout_s=1.5)) as scorer:
            scoring = (scorer.score(task, make_trajectory()) for task in tasks)
            return list(await asyncio.gather(*scoring, return_exceptions=True))

    stuck, *others = asyncio.run(main())
    assert isinstance(stuck, ScoreFailure)
    assert [score.value for score in others if isinstance(score, Score)] == [4.0] * 20


def test_a_cancelled_score_frees_its_worker(tmp_path: Path) -> None:
    note = tmp_path / "pids"

    async def main() -> Score:
        async with await Scorer.create(make_config("misbehave")) as scorer:
            task = make_task("leave_child_and_hang", note=str(note))
            async with asyncio.TaskGroup() as group:
                stuck = group.create_task(scorer.score(task, make_trajectory()))
                await asyncio.to_thread(wait_until, lambda: note.exists() and len(note.read_text().split()) == 2)
                stuck.cancel()
            return await scorer.score(make_task(), make_trajectory())

    assert asyncio.run(main()).value == 4.0
    wait_until(lambda: not any(is_running(int(pid)) for pid in note.read_text().split()))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_scores_are_handed_out_in_order_to_at_most_that_many_workers(num_workers: int) -> None:
    async def main() -> list[Any]:
        async with await Scorer.create(make_config("misbehave", num_workers=num_workers)) as scorer:
            return await asyncio.gather(*(scorer.score(make_task(), make_trajectory("x" * at)) for at in range(40)))

    scores = asyncio.run(main())
    assert [score.value for score in scores] == list(map(float, range(40)))
    assert 1 <= len({score.extra["pid"] for score in scores}) <= num_workers
    for worker in {score.extra["pid"] for score in scores}:
        turns = [score.extra["turn"] for score in scores if score.extra["pid"] == worker]
        assert turns == sorted(turns)


def test_a_scorer_works_on_a_loop_in_any_thread() -> None:
    async def main() -> tuple[Score | ScoreFailure, Score]:
        return await asyncio.to_thread(asyncio.run, score_after(make_config("misbehave"), make_task("call_os_exit")))

    failure, score = asyncio.run(main())
    assert isinstance(failure, ScoreFailure)
    assert score.value == 4.0


def test_arguments_that_cannot_travel_are_a_failure() -> None:
    failure, _ = asyncio.run(score_after(make_config("misbehave"), make_task(knot=lambda: None)))
    assert isinstance(failure, ScoreFailure)
    assert failure.fault is Fault.EXCEPTION


def test_an_attempt_after_a_crash_may_succeed(tmp_path: Path) -> None:
    task = make_task("fail_once", note=str(tmp_path / "note"))
    first, _ = asyncio.run(score_after(make_config("misbehave", retries=1), task))
    assert isinstance(first, Score)
    assert first.value == 1.0


def test_the_rate_holds_across_workers() -> None:
    async def main() -> float:
        reward = make_config("misbehave", num_workers=2, rate_limit_per_s=20.0)
        async with await Scorer.create(reward) as scorer:
            begin = time.monotonic()
            await asyncio.gather(*(scorer.score(make_task(), make_trajectory()) for _ in range(21)))
            return time.monotonic() - begin

    assert asyncio.run(main()) >= 20 / 20 - 0.15


def test_functions_share_a_worker_but_not_their_arguments() -> None:
    async def main() -> Score:
        task, trajectory = Task("t", (), None, extra={"kept": True}), make_trajectory()
        async with await Scorer.create(make_config("vandal", "witness", "well_behaved_async")) as scorer:
            score = await scorer.score(task, trajectory)
        assert task.extra == {"kept": True}
        assert trajectory.messages[0]["content"] == "?"
        return score

    assert asyncio.run(main()).parts == {"vandal": 1.0, "witness": 1.0, "well_behaved_async": 4.0}


def test_a_worker_imports_no_torch() -> None:
    score, _ = asyncio.run(score_after(make_config("misbehave"), make_task()))
    assert score.extra["torch"] is False  # type: ignore[union-attr]


def test_functions_that_cannot_be_loaded_are_reported_with_their_keys() -> None:
    functions = {
        "a": RewardFunctionConfig(path="no.such:thing"),
        "b": RewardFunctionConfig(path=f"{HERE}:well_behaved", kwargs={"nonsense": 1}),
        "c": RewardFunctionConfig(path="format"),
    }
    with pytest.raises(ConfigError) as caught:
        asyncio.run(Scorer.create(RewardConfig(functions=functions)))
    keys = {mistake.key for mistake in caught.value.mistakes}
    assert keys == {"reward.functions.a.path", "reward.functions.b.kwargs.nonsense", "reward.functions.c.path"}
    assert "it takes response, extra" in str(caught.value)
    assert "code (RewardFunctionConfig.kwargs)" in str(caught.value)


def test_a_module_that_ends_its_process_on_import_is_an_error_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly_module.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward = RewardConfig(functions={"a": RewardFunctionConfig(path="deadly_module:score")}, num_workers=2)
    with pytest.raises(RunError, match=r"did not start: crash.*status 9"):
        asyncio.run(Scorer.create(reward))


def test_a_worker_that_something_else_ended_while_it_loaded_is_started_once_more(tmp_path: Path) -> None:
    """The first import is killed from outside, as it were; the second is not."""
    (tmp_path / "killed_once.py").write_text(
        "import os, signal\n"
        f"first = {str(tmp_path / 'first')!r}\n"
        "if not os.path.exists(first):\n"
        "    open(first, 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "def score(response): return 1.0\n"
    )
    functions = {"f": RewardFunctionConfig(path=f"{tmp_path / 'killed_once.py'}:score")}

    async def main() -> float:
        async with await Scorer.create(RewardConfig(functions=functions, num_workers=1)) as scorer:
            return (await scorer.score(make_task(), make_trajectory())).value

    assert asyncio.run(main()) == 1.0


def test_nothing_is_left_open_after_crashes_and_cancellations() -> None:
    async def main() -> None:
        async with await Scorer.create(make_config("misbehave", num_workers=2)) as scorer:
            for how in ("segfault", "call_os_exit", "well_behaved", "sleep_long"):
                with contextlib.suppress(ScoreFailure, TimeoutError):
                    await asyncio.wait_for(scorer.score(make_task(how), make_trajectory()), 1.0)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_ends_the_workers_and_the_scores_that_run() -> None:
    async def main() -> tuple[BaseException | Score, int]:
        scorer = await Scorer.create(make_config("misbehave"))
        pid = (await scorer.score(make_task(), make_trajectory())).extra["pid"]
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            running = group.create_task(_collect(scorer, make_task("sleep_long")))
            await asyncio.sleep(0.2)
            await scorer.close()
        return running.result(), pid

    failure, pid = asyncio.run(main())
    assert isinstance(failure, ScoreFailure)
    assert failure.fault is Fault.CLOSED
    assert not is_running(pid)


async def _collect(scorer: Scorer, task: Task) -> Score | ScoreFailure:
    try:
        return await scorer.score(task, make_trajectory())
    except ScoreFailure as failure:
        return failure


PARENT = """
import asyncio, sys
from treadle.config.reward import RewardConfig, RewardFunctionConfig
from treadle.reward.scorer import Scorer
from treadle.types import Outcome, StopReason, Task, Trajectory

async def main():
    function = RewardFunctionConfig(path=sys.argv[1] + ":plain_child_and_hang", sandbox=False)
    scorer = await Scorer.create(RewardConfig(functions={"f": function}, timeout_s=60.0))
    task = Task("t", (), extra={"note": sys.argv[2]})
    await scorer.score(task, Trajectory("t", 0, (), Outcome.ended(StopReason.STOP)))

asyncio.run(main())
"""


def plain_child_and_hang(extra: dict[str, Any]) -> None:
    if os.fork() == 0:
        time.sleep(60)
    _note(extra)
    Path(extra["note"] + ".done").touch()
    sum(iter(int, 1))


def test_the_parents_death_takes_workers_and_their_children_along(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, HERE, str(note)], env=environment)
    try:
        wait_until(Path(f"{note}.done").exists)
    finally:
        worker = int(note.read_text().split()[0]) if note.exists() else 0
        group = [int(at.name) for at in Path("/proc").glob("[0-9]*") if _read_group(at) == worker]
        parent.send_signal(signal.SIGKILL)
        parent.wait(PATIENCE_S)
    assert len(group) == 2
    wait_until(lambda: not any(is_running(pid) for pid in group))


def _read_group(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    except OSError:
        return -1


# Built-ins that evaluate model text.

Judge = Callable[[str, Task], float]


def run_judge(reward: RewardConfig) -> Iterator[Judge]:
    """A started scorer behind a plain function, for a whole module: these packages take a second to import."""
    with asyncio.Runner() as runner:
        scorer = runner.run(Scorer.create(reward))
        yield lambda response, task: runner.run(scorer.score(task, make_trajectory(response))).value
        runner.run(scorer.close())


@pytest.fixture(scope="module")
def math() -> Iterator[Judge]:
    pytest.importorskip("math_verify")
    yield from run_judge(make_config("math", timeout_s=2.0))


@pytest.fixture(scope="module")
def gym() -> Iterator[Judge]:
    pytest.importorskip("reasoning_gym")
    yield from run_judge(make_config("reasoning_gym"))


def make_gym_task(dataset: str) -> Task:
    entry = pytest.importorskip("reasoning_gym").create_dataset(dataset, size=1, seed=3)[0]
    return Task("t", (), entry["answer"], f"reasoning_gym:{dataset}", extra={"entry": entry})


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("so $x = 3$", "3", 1.0),
        ("so \\boxed{(1, 2)}", "\\boxed{(1,2)}", 1.0),
        ("it is 1,234", "He has <<1000+234=1234>>\n#### 1,234", 1.0),
        ("so \\boxed{\\frac{1}{3}}", "0.5", 0.0),
        ("no idea", "0.5", 0.0),
        ("", "0.5", 0.0),
    ],
)
def test_math_compares_values_and_not_letters(response: str, truth: str, value: float, math: Judge) -> None:
    assert math(response, Task("t", (), truth)) == value


def test_a_ground_truth_that_is_no_mathematics_is_a_failure(math: Judge) -> None:
    with pytest.raises(ScoreFailure, match="ground truth"):
        math("1", Task("t", (), ""))


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^9}}", "9^{9^{9^{9^9}}} + \\sqrt{2}^{9^{9^9}}!", "(9!)!", "{" * 40 + "1" + "}" * 40]
)
def test_an_answer_that_nobody_could_compute_is_wrong_and_no_failure(answer: str, math: Judge) -> None:
    assert math(f"\\boxed{{{answer}}}", Task("t", (), "3")) == 0.0


@pytest.mark.parametrize(
    ("dataset", "program"),
    [
        ("countdown", "__import__('os').system('touch {}')"),
        ("puzzle24", "__import__('os').system('touch {}')"),
        ("polynomial_multiplication", "open('{}', 'w')"),
        ("spiral_matrix", "[__import__('os').system('touch {}')]"),
        ("n_queens", "[open('{}', 'w')]"),
        ("simple_integration", "__import__('subprocess').run(['touch', '{}'])"),
        ("intermediate_integration", "__import__('subprocess').run(['touch', '{}'])"),
    ],
)
def test_an_answer_that_is_a_program_changes_nothing(dataset: str, program: str, gym: Judge, tmp_path: Path) -> None:
    target = tmp_path / "touched"
    assert gym(f"<answer>{program.format(target)}</answer>", make_gym_task(dataset)) < 0.5
    assert not target.exists()


@pytest.mark.parametrize(
    "dataset",
    [
        "basic_arithmetic",
        "countdown",
        "leg_counting",
        "number_sorting",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    ],
)
def test_reasoning_gym_scores_its_own_answers(dataset: str, gym: Judge) -> None:
    task = make_gym_task(dataset)
    assert gym(f"I think <answer>{task.ground_truth}</answer>", task) == 1.0
    assert gym(task.ground_truth, task) == 1.0
    assert gym("no idea", task) < 0.5
    assert gym("", task) < 0.5


def test_a_task_without_an_entry_is_a_failure(gym: Judge) -> None:
    with pytest.raises(ScoreFailure, match="has no reasoning-gym entry"):
        gym("1", Task("t", (), "1"))
