"""Claude Code, Codex and mini-swe-agent, unmodified: the examples' configs, real programs, and a scripted model.

What they do with their tools, sub-agents, compaction and retries; and that what trains is what was sampled.
"""

import json
import os
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.agents.environment import AGENTS, EXAMPLES, PATH, has, needs
from tests.boxes import why_not
from tests.gateways import trained
from tests.integration.test_gateway_agents import Recording, check_exact, config, run
from tests.rollouts import save_model, turns_of
from treadle.config import FailureConfig, SandboxConfig, load
from treadle.errors import EngineFailure
from treadle.gateway.http_server import ConnectionLost, HttpConnection
from treadle.types import Request, Status, StopReason, Trajectory

PROGRAMS = {"claude_code": "claude", "codex": "codex", "mini_swe_agent": "mini"}
SHELLS = {"claude_code": ("Bash", "command"), "codex": ("exec_command", "cmd"), "mini_swe_agent": ("bash", "command")}
FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo It is 42."
"""How mini-swe-agent is told that the work is done."""

every_agent = pytest.mark.parametrize("name", [pytest.param(n, marks=needs(p)) for n, p in PROGRAMS.items()])
both_clis = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs(PROGRAMS[n])) for n in ("claude_code", "codex")]
)
claude_only, codex_only = needs("claude"), needs("codex")

if has("claude"):
    os.environ["PATH"] = f"{PATH}{os.pathsep}{os.environ['PATH']}"  # programs inherit it


def call(name: str, **arguments: Any) -> str:
    """A tool call in hermes format, spaced as no serializer does."""
    return f'<tool_call>\n{{"name": "{name}",  "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def shell(name: str, command: str) -> str:
    tool, argument = SHELLS[name]
    return call(tool, **{argument: command})


def example(name: str) -> dict[str, Any]:
    """The arguments of an example's agent loop."""
    loops = load(EXAMPLES / "command_line" / f"{name}.yaml").rollout.agent.loops
    return {key: value for key, value in loops["program_agent"].kwargs.items()}


def start(tmp_path: Path, name: str, script: Any, **changes: Any) -> tuple[Trajectory, Any]:
    """One session of an agent, as its journal has it, and what the engine sampled."""
    kwargs = example(name) | changes.pop("kwargs", {})
    recorder = changes.pop("recorder", Recording)
    limits = {"response_length": 200_000, "max_model_len": 400_000, **changes}
    model: Any = save_model(tmp_path / "model")
    batch, recording = run(config("program_agent", kwargs, **limits), model, tmp_path, script, 1, recorder)
    return batch.trajectories[0], recording


def add_twice(name: str) -> Any:
    """Thinks and adds, twice in one file; then says what it is."""

    def script(request: Request, rng: Random) -> str:
        if turns_of(request) < 2:
            return "<think>\nHm, é.\n</think>\n\n" + shell(name, "expr 40 + 2 >> made.txt; cat made.txt")
        return "It is 42." if name != "mini_swe_agent" else "It is 42.\n" + shell(name, FINISH)

    return script


def results_of(trajectory: Trajectory) -> list[str]:
    return [str(message["content"]) for message in trajectory.messages if message["role"] == "tool"]


@every_agent
def test_an_agent_works_in_its_shell_and_trains_what_was_sampled(name: str, tmp_path: Path) -> None:
    trajectory, recording = start(tmp_path, name, add_twice(name))
    check_exact(tmp_path, recording, count=1)
    first, second = results_of(trajectory)
    assert (first.count("42"), second.count("42")) == (1, 2), "commands run, in one directory"
    assert trajectory.extra["agent"]["status"] == 0 and "It is 42." in trajectory.extra["agent"]["stdout"]
    assert len(trajectory.rows) == 1 and trajectory.extra["gateway"]["echoes"] == {"exact": 2}


BOX_PROGRAMS = {
    "claude_code": (AGENTS, *AGENTS.glob("lib/python*/site-packages/claude_agent_sdk/_bundled")),
    "codex": (AGENTS / "npm", AGENTS / "npm/node_modules/.bin"),
}
"""What is shown to a box, and where in it the program is."""


@pytest.mark.skipif(why_not("bubblewrap") is not None, reason="bubblewrap cannot run here")
@both_clis
def test_an_agent_works_in_a_box_and_sees_nothing_of_the_machine(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    shown, *path = map(str, BOX_PROGRAMS[name])

    def script(request: Request, rng: Random) -> str:
        look = f"expr 40 + 2 >> made.txt; cat made.txt; pwd; id -u; cat {tmp_path}/secret"
        return shell(name, look) if not turns_of(request) else "It is 42."

    box = SandboxConfig(read_only=(shown,), path=tuple(path))
    trajectory, recording = start(tmp_path, name, script, kwargs={"sandbox": True}, sandbox=box)
    check_exact(tmp_path, recording, count=1)
    (found,) = results_of(trajectory)
    assert all(word in found for word in ("42", "/workspace", "1000", "No such file"))
    assert trajectory.extra["agent"]["status"] == 0 and "It is 42." in trajectory.extra["agent"]["stdout"]


class FailingOnce(Recording):
    """An engine that fails the first request, whichever way the router turns."""

    num_failures = 0

    async def generate(self, request: Request) -> Any:
        if self.num_failures < 2:
            type(self).num_failures += 1
            raise EngineFailure("out of memory")
        return await super().generate(request)


@every_agent
def test_an_engine_that_fails_is_asked_again(name: str, tmp_path: Path) -> None:
    failures = FailureConfig(request_retries=1, session_retries=0, max_failed_fraction=1.0)
    recorder = type("FailingOnce", (FailingOnce,), {})
    trajectory, recording = start(tmp_path, name, add_twice(name), failures=failures, recorder=recorder)
    check_exact(tmp_path, recording, count=1)
    assert trajectory.extra["gateway"]["engine_failures"] == 1 and len(recording.sampled) == 3


@both_clis
def test_a_stream_that_is_cut_is_asked_for_again_and_sampled_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cuts = HttpConnection.send, []

    async def cut_once(connection: HttpConnection, data: bytes, *, is_last: bool = False) -> None:
        if is_last and not cuts:
            cuts.append(data)
            await whole(connection, data[: data.index(b"\n\n") + 2])
            connection.drop()
            raise ConnectionLost
        await whole(connection, data, is_last=is_last)

    monkeypatch.setattr(HttpConnection, "send", cut_once)
    trajectory, recording = start(tmp_path, name, add_twice(name))
    check_exact(tmp_path, recording, count=1)
    assert cuts and len(recording.sampled) == 3, "the answer that was cut is the answer to the same question"
    assert trajectory.extra["gateway"]["replayed"] == 1 and len(trajectory.rows) == 1


# --- Claude Code

ALL_TOOLS = ["claude", "-p", "{{prompt}}", "--output-format", "json", "--permission-mode", "bypassPermissions"]


def delegate(request: Request, rng: Random) -> str:
    """Two sub-agents at once, one of them for another model; each works in the shell."""
    asked = [str(message["content"]) for message in request.messages if message["role"] == "user"]
    turns = turns_of(request)
    if any("Be the helper" in text for text in asked):
        return "Helped." if turns else shell("claude_code", "echo helping")
    if turns:
        return "It is done."
    common = {"description": "help", "subagent_type": "general-purpose"}
    one, two = ({**common, "prompt": f"Be the helper {number}."} for number in ("one", "two"))
    return call("Agent", **one) + "\n" + call("Agent", **two, model="haiku")


@claude_only
def test_sub_agents_are_rows_of_their_own_and_other_models_do_not_train(tmp_path: Path) -> None:
    trajectory, recording = start(tmp_path, "claude_code", delegate, kwargs={"argv": ALL_TOOLS})
    assert trajectory.outcome.status is Status.COMPLETED, trajectory.outcome
    counters = trajectory.extra["gateway"]
    assert counters["auxiliary"] == 2 and all("haiku" in turn["model"] for turn in counters["untrained"])
    assert len(trajectory.rows) == 2 and counters["roots"] == 3 and "forks" not in counters
    left_out = Counter(recording.sampled) - trained(trajectory.rows)
    assert trained(trajectory.rows) <= Counter(recording.sampled) and left_out.total() == 2


@claude_only
def test_a_tool_that_a_search_finds_is_shown_in_the_same_row(tmp_path: Path) -> None:
    seen: list[Any] = []

    def script(request: Request, rng: Random) -> str:
        seen.append((request.messages[-1]["content"], [tool["function"]["name"] for tool in request.tools]))
        turns = turns_of(request)
        return "It is done." if turns else call("ToolSearch", query="select:NotebookEdit", max_results=5)

    trajectory, recording = start(tmp_path, "claude_code", script, kwargs={"argv": ALL_TOOLS})
    check_exact(tmp_path, recording, count=1)
    (_, before), (found, after) = seen
    assert '"name": "NotebookEdit"' in found and '"parameters"' in found
    assert before == after and "NotebookEdit" not in after and len(trajectory.rows) == 1


@claude_only
def test_a_conversation_that_is_too_long_is_compacted_and_goes_on(tmp_path: Path) -> None:
    def script(request: Request, rng: Random) -> str:
        if "Do NOT call any tools" in str(request.messages[-1]["content"]):
            return "<summary>All numbers were counted.</summary>"
        turns = turns_of(request)
        return shell("claude_code", f"seq {turns}00 {turns}99") if turns < 6 else "It is 42."

    trajectory, recording = start(tmp_path, "claude_code", script, response_length=1500)
    check_exact(tmp_path, recording, count=1)
    assert "It is 42." in trajectory.extra["agent"]["stdout"]
    assert trajectory.extra["gateway"]["forks"]["rewound"] == 1, "the summary is asked for further back"
    assert trajectory.extra["gateway"]["roots"] == 2 and len(trajectory.rows) == 3


# --- Codex


@codex_only
def test_a_tool_of_a_namespace_is_called_by_its_own_name(tmp_path: Path) -> None:
    def script(request: Request, rng: Random) -> str:
        asked = [str(message["content"]) for message in request.messages if message["role"] == "user"]
        if any("Be the helper" in text for text in asked):
            return "Helped."
        results = [str(message["content"]) for message in request.messages if message["role"] == "tool"]
        if not results:
            return call("spawn_agent", message="Be the helper.")
        if len(results) == 1:
            return call("wait_agent", targets=[json.loads(results[0])["agent_id"]])
        return "It is done."

    trajectory, recording = start(tmp_path, "codex", script)
    check_exact(tmp_path, recording, count=1)
    assert len(trajectory.rows) == 2 and trajectory.extra["gateway"]["roots"] == 2
    assert "Helped." in results_of(trajectory)[-1] or any("Helped." in str(m) for m in trajectory.messages)


@codex_only
def test_codex_compacts_where_its_config_says_so(tmp_path: Path) -> None:
    long = [0]

    def script(request: Request, rng: Random) -> str:
        if "CONTEXT CHECKPOINT" in str(request.messages[-1]["content"]):
            long[0] += 1
            return "All numbers were counted."
        return "It is 42." if long[0] else shell("codex", "seq 1 400")

    kwargs = example("codex")
    settings = kwargs["files"][".codex/config.toml"].replace("token_limit = 60000", "token_limit = 30500")
    trajectory, recording = start(tmp_path, "codex", script, kwargs={"files": {".codex/config.toml": settings}})
    check_exact(tmp_path, recording, count=1)
    assert long == [1] and "It is 42." in trajectory.extra["agent"]["stdout"]


@codex_only
def test_a_program_that_gives_up_when_the_context_is_full_is_cut_off_and_has_not_failed(tmp_path: Path) -> None:
    def script(request: Request, rng: Random) -> str:
        return shell("codex", "seq 1 400")

    trajectory, recording = start(tmp_path, "codex", script, response_length=500)
    assert trajectory.outcome.status is Status.TRUNCATED and trajectory.outcome.reason is StopReason.LENGTH
    assert trajectory.extra["agent"]["status"] == 1 and "ran out of room" in trajectory.extra["agent"]["stderr"]
    assert trained(trajectory.rows) == Counter(recording.sampled)
