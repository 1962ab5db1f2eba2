"""Agents with real SDKs, in this process and in worker processes: what trains is what was sampled, token by token."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from tests.gateways import RecordingEngine, trained
from tests.rollouts import CALL, FINAL, engine, rollout, save_model, say, tasks
from treadle.config import AgentLoopConfig, FailureConfig, LimitsConfig, RewardConfig
from treadle.errors import BudgetSpent, ConfigError
from treadle.gateway import openai_chat
from treadle.gateway.agent_program import AgentDirectory
from treadle.gateway.agents import CoroutineThread
from treadle.journal import Journal, JournalReader
from treadle.rollout import remote_worker
from treadle.rollout.manager import AgentLoopManager
from treadle.rollout.service import RolloutParts
from treadle.types import Batch, Status, StopReason

AGENTS = "tests.gateway_agents"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


class Recording(RecordingEngine):
    """A whole engine that remembers what it sampled."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def config(loop: str, kwargs: dict[str, Any], **fields: Any) -> Any:
    values: dict[str, Any] = {"response_length": 1000, "max_model_len": 4000, **fields}
    failures = values.pop("failures", FailureConfig(session_retries=0, max_failed_fraction=1.0))
    loops = {loop: AgentLoopConfig(kwargs=kwargs)}
    return rollout(default_agent_loop=loop, loops=loops, failures=failures, **values)


def run(
    section: Any,
    model: Any,
    tmp_path: Path,
    script: Any = None,
    count: int = 2,
    recorder: Any = Recording,
    ground_truth: str | None = None,
) -> tuple[Batch, Any]:
    """The trajectories of a run, as its journal has them, and what its engine sampled."""
    asked = [replace(task, ground_truth=ground_truth) for task in tasks(count)]
    recording = recorder(engine(script or say(CALL, CALL, FINAL)))
    with Journal.open(tmp_path / "run", max_mb=16) as journal:
        for task in asked:
            journal.add_task(task)
        parts = RolloutParts(engines=[recording], journal=journal)
        reward = RewardConfig(environment_weight=1.0)
        with AgentLoopManager.create_blocking(rollout=section, model=model, reward=reward, parts=parts) as manager:
            batch = manager.generate_sequences_blocking(asked)
    return batch, recording


def check_exact(tmp_path: Path, recording: Any, count: int = 2) -> list[Any]:
    """Every sampled token is in the journal once, behind the ids that it was sampled after."""
    with JournalReader.open(tmp_path / "run") as reader:
        kept = [reader.trajectory(f"task{at}", 0).trajectory for at in range(count)]
    assert all(trajectory.outcome.ok for trajectory in kept), kept[0].outcome
    found = sum((trained(trajectory.rows) for trajectory in kept), Counter())
    assert found == Counter(recording.sampled)
    return kept


def function_agent(name: str, **fields: Any) -> Any:
    return config("function_agent", {"function": f"{AGENTS}:{name}"}, **fields)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["openai_sync", "openai_async", "openai_streaming", "anthropic_sdk"])
def test_an_agent_with_a_real_sdk_trains_what_was_sampled(name: str, workers: int, model: Any, tmp_path: Path) -> None:
    script = say(CALL, FINAL) if name == "openai_streaming" else None
    batch, recording = run(function_agent(name, num_workers=workers), model, tmp_path, script)
    kept = check_exact(tmp_path, recording)
    for trajectory in kept:
        assert "drift" not in trajectory.extra
        counters = trajectory.extra["gateway"]
        assert set(counters["echoes"]) <= {"exact", "equivalent"} and set(counters.get("forks", ())) <= {"sibling"}
        assert trajectory.response_text == FINAL
    rewards = {trajectory.reward.value for trajectory in batch.trajectories}
    assert rewards == ({0.0} if name == "openai_streaming" else {1.0})


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["openai_sync_in_async", "awaited"])
def test_a_coroutine_that_blocks_its_loop_is_answered_all_the_same(
    name: str, workers: int, model: Any, tmp_path: Path
) -> None:
    _, recording = run(function_agent(name, num_workers=workers), model, tmp_path)
    for trajectory in check_exact(tmp_path, recording):
        assert trajectory.response_text == FINAL and len(trajectory.rows) == 1


def test_a_coroutine_is_cancelled_at_the_end_of_its_session_and_cleans_up(model: Any, tmp_path: Path) -> None:
    left = tmp_path / "left"
    kwargs = {"function": f"{AGENTS}:endless_async", "kwargs": {"left": str(left)}}
    section = config("function_agent", kwargs, max_assistant_turns=3)
    (trajectory,) = run(section, model, tmp_path, say("Well."), count=1)[0].trajectories
    assert trajectory.outcome.reason is StopReason.TURN_LIMIT and left.read_text() == "cleaned up"


def test_an_agent_that_has_returned_does_not_wait_for_a_thread_that_it_left() -> None:
    release = threading.Event()

    async def agent() -> float:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(release.wait), 0.05)
        return 1.0

    async def main() -> None:
        try:
            assert await asyncio.wait_for(CoroutineThread(agent).run(), 60) == 1.0
        finally:
            release.set()

    asyncio.run(main())


def test_a_worker_of_agent_functions_may_be_silent_for_as_long_as_a_session() -> None:
    longest = function_agent("openai_async", limits=LimitsConfig(session_timeout_s=500.0))
    assert remote_worker._max_silence_s(longest) > 500 > remote_worker._max_silence_s(rollout())


def test_a_run_ends_with_a_line_about_its_agents(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(function_agent("openai_sync"), model, tmp_path)
    assert "gateway: 6 chat requests of 2 sessions in 2 rows; 100% of turns came back" in capsys.readouterr().err
    with JournalReader.open(tmp_path / "run") as reader:
        (event,) = [event for event in reader.events() if event.kind == "gateway"]
    assert event.fields["requests/chat"] == 6


def test_a_function_that_asks_for_nothing_or_breaks_is_a_failure_of_the_loop(model: Any, tmp_path: Path) -> None:
    for name, words in (("silent", "asked for no turn"), ("broken", "own bug"), ("odd", "not a number")):
        batch, _ = run(function_agent(name), model, tmp_path / name, count=1)
        (trajectory,) = batch.trajectories
        assert trajectory.outcome.status is Status.FAILED and trajectory.outcome.boundary == "loop"
        assert words in trajectory.outcome.detail and trajectory.reward is None


def test_an_agents_own_bug_is_its_failure_though_its_last_turn_ended_at_its_own_max_tokens(
    model: Any, tmp_path: Path
) -> None:
    batch, _ = run(function_agent("capped"), model, tmp_path, say("Well, that is that."), count=1)
    (outcome,) = (trajectory.outcome for trajectory in batch.trajectories)
    assert outcome.status is Status.FAILED and "the agent's own bug" in outcome.detail


def test_an_engine_that_fails_is_its_failure_whatever_the_agent_makes_of_it(model: Any, tmp_path: Path) -> None:
    failing = Recording(engine(say(FINAL), failure_rate=1.0))
    section = function_agent(
        "openai_sync", failures=FailureConfig(request_retries=0, session_retries=0, max_failed_fraction=1.0)
    )
    with AgentLoopManager.create_blocking(rollout=section, model=model, parts=RolloutParts(engines=[failing])) as made:
        (trajectory,) = made.generate_sequences_blocking(tasks(1)).trajectories
    assert trajectory.outcome.boundary == "engine"


@pytest.mark.parametrize("broken", ["parse_request", "format_response"])
def test_a_bug_of_the_gateway_fails_the_session_of_an_agent_that_does_not_mind(
    broken: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = getattr(openai_chat, broken), []

    def breaks(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) % 2 == 0:
            raise KeyError("a bug")
        return whole(*arguments)

    monkeypatch.setattr(openai_chat, broken, breaks)
    batch, _ = run(function_agent("unmoved"), model, tmp_path, say("One. ", "Two. "), count=1)
    (trajectory,) = batch.trajectories
    assert trajectory.outcome.status is Status.FAILED and trajectory.outcome.boundary == "loop"
    assert "the gateway broke on a request to /v1/chat/completions: KeyError: 'a bug'" in trajectory.outcome.detail
    assert trajectory.reward is None


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"max_assistant_turns": 3}, StopReason.TURN_LIMIT),
        ({"response_length": 40}, StopReason.LENGTH),
        ({"response_length": 1_000_000, "limits": LimitsConfig(session_timeout_s=3.0)}, StopReason.DEADLINE),
    ],
)
def test_a_limit_ends_an_agent_that_would_not(limit: Any, reason: StopReason, model: Any, tmp_path: Path) -> None:
    batch, recording = run(function_agent("endless", **limit), model, tmp_path, say("Well. " * 3), count=1)
    (trajectory,) = batch.trajectories
    assert trajectory.outcome.status is Status.TRUNCATED and trajectory.outcome.reason is reason
    assert trained(trajectory.rows) <= Counter(recording.sampled)


PROGRAM = """
import json, os, sys, urllib.request

def ask(history):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": history}).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

history = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    history += [ask(history), {"role": "user", "content": "Go on."}]
print("done", sorted(os.environ), os.getcwd(), open("settings.json").read())
print("trouble", file=sys.stderr)
"""


def program(code: str = PROGRAM, **kwargs: Any) -> dict[str, Any]:
    return {"argv": ["python", "-c", code, "{{prompt}}"], **kwargs}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_program_runs_in_a_directory_and_an_environment_of_its_own(
    workers: int, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_SECRET", "hidden")
    kwargs = program(
        files={"settings.json": '{"url": "{{base_url}}", "uid": "{{task.uid}}"}'}, env={"MODE": "{{model}}"}
    )
    _, recording = run(config("program_agent", kwargs, num_workers=workers), model, tmp_path)
    kept = check_exact(tmp_path, recording)
    said = kept[0].extra["agent"]["stdout"]
    assert "'MODE'" in said and "JUDGE_SECRET" not in said and '"uid": "task0"' in said and os.getcwd() not in said
    assert kept[0].extra["agent"] | {"stdout": ""} == {"status": 0, "stdout": "", "stderr": "trouble\n"}
    assert len(kept[0].rows) == 1 and kept[0].extra["gateway"]["requests"] == {"chat": 3}
    directory = said.split("] ")[1].split(" ")[0]
    assert not Path(directory).exists()


def test_a_program_that_fails_is_a_failure_with_the_end_of_what_it_wrote(model: Any, tmp_path: Path) -> None:
    code = PROGRAM + "\nprint('x' * 100_000); sys.exit('out of luck')"
    kwargs = program(code, files={"settings.json": ""})
    (trajectory,) = run(config("program_agent", kwargs), model, tmp_path, count=1)[0].trajectories
    assert trajectory.outcome.boundary == "loop" and "status 1; stderr: " in trajectory.outcome.detail
    assert "out of luck; stdout: xxx" in trajectory.outcome.detail
    assert len(trajectory.extra["agent"]["stdout"]) == 20_000


GIVES_UP = PROGRAM.replace("range(3)", "range(9**9)").replace('"Go on."', '"Go on." * 20')


@pytest.mark.parametrize("limit", [{"response_length": 300}, {"response_length": 40}])
def test_a_program_that_breaks_because_the_context_is_full_has_not_failed(
    limit: dict[str, int], model: Any, tmp_path: Path
) -> None:
    section = config("program_agent", program(GIVES_UP), **limit)
    batch, recording = run(section, model, tmp_path, say("Well. " * 5), count=1)
    (trajectory,) = batch.trajectories
    assert trajectory.outcome.status is Status.TRUNCATED and trajectory.outcome.reason is StopReason.LENGTH
    assert trained(trajectory.rows) == Counter(recording.sampled)


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid}")
""" + PROGRAM.replace("range(3)", "range(9**9)")


def test_a_program_that_ignores_its_end_is_killed_with_all_it_started(model: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    kwargs = program(STUBBORN, env={"PIDS": str(pids)})
    section = config("program_agent", kwargs, max_assistant_turns=2)
    (trajectory,) = run(section, model, tmp_path, count=1)[0].trajectories
    assert trajectory.outcome.reason is StopReason.TURN_LIMIT
    for pid in pids.read_text().split():
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)


LOST = """
import os, sys, time
if sys.argv[1] == "task0":
    open(os.environ["PID"], "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists(os.environ["PID"]):
    time.sleep(0.01)
sys.exit("out of luck")
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_programs_that_fail_too_often_end_the_run_and_those_that_still_work(
    workers: int, model: Any, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    failures = FailureConfig(session_retries=0, max_failed_fraction=0.5, min_finished=3)
    kwargs = {"argv": ["python", "-c", LOST, "{{task.uid}}"], "env": {"PID": str(pid)}}
    section = config("program_agent", kwargs, num_workers=workers, failures=failures)
    with pytest.raises(BudgetSpent, match=r"3 of 3 trajectories failed(.|\n)*3 × loop: (.|\n)*out of luck"):
        run(section, model, tmp_path, count=4)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid.read_text()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


SPY = (
    PROGRAM
    + """
import glob, re
found = []
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try:
        found += re.findall(rb"[0-9a-f]{32}", open(path, "rb").read())
    except OSError:
        pass
print("secrets", sorted({text.decode() for text in found} - {os.environ["OPENAI_API_KEY"]}))
for key in found:
    os.environ["OPENAI_API_KEY"] = key.decode()
"""
)


def test_the_key_for_rewards_is_in_no_environment_and_no_command_line(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.gateway.server import GatewayServer

    opened, real = [], GatewayServer.open

    def spy(self: Any, conversation: Any) -> Any:
        opened.append(real(self, conversation))
        return opened[-1]

    monkeypatch.setattr(GatewayServer, "open", spy)
    batch, _ = run(config("program_agent", program(SPY, files={"settings.json": ""})), model, tmp_path, count=1)
    (trajectory,) = batch.trajectories
    assert trajectory.outcome.ok, trajectory.outcome
    assert "secrets" in trajectory.extra["agent"]["stdout"]
    assert opened[0].notes_key not in trajectory.extra["agent"]["stdout"]


GRADED = """
import json, os, pathlib, sys, urllib.request
assert "TREADLE_NOTES_URL" not in os.environ and not sys.stdin.read()
pathlib.Path("answer.txt").write_text("3")
pathlib.Path(".local").mkdir()
pathlib.Path("json.py").write_text("raise SystemExit('the code of the agent')")
body = {"model": "policy", "messages": [{"role": "user", "content": "Add."}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
urllib.request.urlopen(request).read()
"""
GRADER = """
import json, os, pathlib, sys, urllib.request
directory, truth = sys.argv[1:]
assert not any(pathlib.Path.cwd().iterdir()) and "OPENAI_API_KEY" not in os.environ
said = (pathlib.Path(directory) / "answer.txt").read_text()
body = json.dumps({"reward": 0.75 if said == truth else 0.0, "notes": {"said": said}}).encode()
request = urllib.request.Request(os.environ["TREADLE_NOTES_URL"], body)
request.add_header("authorization", "Bearer " + sys.stdin.readline().strip())
urllib.request.urlopen(request).read()
"""


def graded(grader: str) -> Any:
    last = ["python", "-c", grader, "{{directory}}", "{{task.ground_truth}}"]
    return config("program_agent", {"argv": ["python", "-c", GRADED], "grader": last})


def test_a_grader_gives_the_reward_with_the_second_key_after_the_agent_has_ended(model: Any, tmp_path: Path) -> None:
    batch, _ = run(graded(GRADER), model, tmp_path, say("Well."), count=1, ground_truth="3")
    (trajectory,) = batch.trajectories
    assert trajectory.outcome.ok, trajectory.outcome
    assert trajectory.reward is not None and trajectory.reward.value == 0.75
    assert trajectory.extra["notes"] == {"said": "3"}


def test_a_grader_that_fails_is_a_failure_of_the_reward(model: Any, tmp_path: Path) -> None:
    batch, _ = run(graded("raise SystemExit('no tests')"), model, tmp_path, say("Well."), count=1, ground_truth="3")
    (trajectory,) = batch.trajectories
    assert trajectory.outcome.boundary == "reward" and "no tests" in trajectory.outcome.detail


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({}, "missing a required argument: 'argv'"),
        ({"argv": "echo hi"}, "must be a list"),
        ({"argv": ["x", "{{basurl}}"]}, "did you mean 'base_url'"),
        ({"argv": ["x"], "files": {"../y": ""}}, "inside the session's directory"),
        ({"argv": ["x"], "shell": True}, "unexpected keyword argument"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_in_the_arguments_is_found_before_anything_starts(
    kwargs: dict[str, Any], words: str, workers: int, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(config("program_agent", kwargs, num_workers=workers), model, tmp_path)


def test_a_sample_has_the_same_directory_each_time_unless_it_is_in_use_or_kept() -> None:
    first = AgentDirectory.make("a task", 3, keep=False)
    (first.path / "left").touch()
    other = AgentDirectory.make("a task", 3, keep=False)
    kept = AgentDirectory.make("a task", 3, keep=True)
    assert len({first.path, other.path, kept.path}) == 3
    assert first.lock is not None
    os.close(first.lock)  # as if its process was killed
    again = AgentDirectory.make("a task", 3, keep=False)
    assert again.path == first.path and not any(again.path.iterdir())
    for made in (other, again, kept):
        made.remove()
    assert not any(made.path.exists() for made in (first, other, again, kept))


KILLED = """
import asyncio, os, sys
from pathlib import Path
from treadle.gateway.agent_program import AgentDirectory, AgentProgram

made = AgentDirectory.make("a killed task", 0, keep=False)
code = "import os, time\\nwhile True: open('left', 'w').write('x'); open('part', 'w'); os.rename('part', 'begun')"
asyncio.run(AgentProgram([sys.executable, "-c", code], dict(os.environ), made.path, made.lock).run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a killed process of this test stays a zombie elsewhere too")
@pytest.mark.skipif(sys.platform != "linux", reason="descendants are read in /proc")
def test_the_directory_of_a_killed_worker_is_free_when_its_program_has_ended() -> None:
    fresh = AgentDirectory.make("a killed task", 0, keep=False)
    path = fresh.path
    fresh.remove()
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=Path(__file__).parents[2]) as worker:
        deadline = time.monotonic() + 60
        while not (path / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        guard, program = descendants(worker.pid)
        os.kill(guard, signal.SIGSTOP)  # it takes its time
        worker.kill()
    goes_on = Timer(0.3, os.kill, (guard, signal.SIGCONT))
    goes_on.start()
    again = AgentDirectory.make("a killed task", 0, keep=False)
    assert not Path(f"/proc/{program}").exists(), "the program of the killed worker has ended"
    assert again.path == path, "and this one has its directory, so that it asks what that one asked"
    again.remove()
    goes_on.join()


WORKER = """
import asyncio, os, sys
from pathlib import Path
from treadle.gateway.agent_program import AgentProgram

child = "import subprocess; subprocess.call(['sleep', '600'])"
asyncio.run(AgentProgram([sys.executable, "-c", child], dict(os.environ), Path(".")).run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="descendants are read in /proc")
def test_a_program_dies_with_a_worker_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], cwd=Path(__file__).parents[2]) as worker:
        deadline = time.monotonic() + 60
        while len(started := descendants(worker.pid)) < 3:  # guard, program, and what that has started
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker.kill()
    for pid in started:
        while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [found for child in children for found in descendants(child)]


def test_files_of_an_agent_are_written_as_utf_8_in_any_locale(tmp_path: Path) -> None:
    code = "import sys, pathlib; from treadle.gateway.agent_program import write_files; "
    code += "write_files(pathlib.Path(sys.argv[1]), {'a/b.txt': '\\u6f22\\u00e9'})"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-X", "utf8=0", "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[2])
    assert (tmp_path / "a" / "b.txt").read_bytes() == "漢é".encode()


def test_python_of_a_program_is_the_one_that_runs_treadle(model: Any, tmp_path: Path) -> None:
    code = PROGRAM + "\nprint('runs', sys.executable)"
    batch, _ = run(config("program_agent", program(code, files={"settings.json": ""})), model, tmp_path, count=1)
    assert f"runs {sys.executable}" in batch.trajectories[0].extra["agent"]["stdout"]
