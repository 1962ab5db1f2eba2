"""An agent program in a box trains as without one, and reaches the gateway and nothing else of the run."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.boxes import why_not
from tests.integration.test_gateway_agents import check_exact, config, run
from tests.rollouts import save_model
from treadle.config import SandboxConfig
from treadle.errors import ConfigError

pytestmark = pytest.mark.skipif(why_not("bubblewrap") is not None, reason="bubblewrap cannot run here")

PROGRAM = """
import json, os, socket, urllib.request
found = {}
def attempt(name, work):
    try:
        found[name] = str(work())
    except OSError as error:
        found[name] = None
attempt("journal", lambda: open(os.environ["JOURNAL"], "rb").read(1))
attempt("run", lambda: os.listdir(os.path.dirname(os.environ["JOURNAL"])))
attempt("other port", lambda: socket.create_connection(("127.0.0.1", int(os.environ["OTHER"])), 2))
attempt("network", lambda: socket.create_connection(("192.0.2.1", 80), 2))
found["processes"] = len([name for name in os.listdir("/proc") if name.isdigit()])
found["key"] = "JUDGE_SECRET" in os.environ
messages = [{"role": "user", "content": "Hello"}]
for _ in range(3):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    messages.append({"role": "user", "content": "Go on."})
open("result.txt", "w").write("made in " + os.getcwd())
open("large.bin", "wb").write(bytes(2 << 20))
print(json.dumps(found), open("settings.txt").read())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def service():
    """Something else that listens on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        OTHER["port"] = str(server.getsockname()[1])
        yield


OTHER: dict[str, str] = {}


def boxed(tmp_path: Path, **more: Any) -> dict[str, Any]:
    environment = {"JOURNAL": str(tmp_path / "run" / "journal.sqlite"), "OTHER": OTHER["port"]}
    return {
        "argv": ["python", "-c", PROGRAM],
        "env": environment,
        "files": {"settings.txt": "task {{task.uid}} in {{directory}}"},
        "sandbox": True,
        "artifacts": ["result.txt", "missing.txt", "large.bin"],
        **more,
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_a_boxed_program_trains_what_was_sampled_and_sees_nothing_of_the_run(
    workers: int, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_SECRET", "hidden")
    _, recording = run(config("program_agent", boxed(tmp_path), num_workers=workers), model, tmp_path)
    kept = check_exact(tmp_path, recording)
    said = kept[0].extra["agent"]["stdout"]
    found = json.loads(said[: said.index("}") + 1])
    assert {name: found[name] for name in ("journal", "run", "other port", "network")} == dict.fromkeys(
        ("journal", "run", "other port", "network")
    )
    assert found["processes"] <= 4 and not found["key"] and "task task0 in /workspace" in said
    assert kept[0].extra["files"] == {"result.txt": "made in /workspace"}
    assert [*kept[0].extra["files_missing"]] == ["missing.txt", "large.bin"]


def test_a_boxed_program_that_fails_is_a_failure_of_the_loop(model: Any, tmp_path: Path) -> None:
    kwargs = boxed(tmp_path, argv=["python", "-c", "import sys; sys.exit('out of luck')"])
    (trajectory,) = run(config("program_agent", kwargs), model, tmp_path, count=1)[0].trajectories
    assert trajectory.outcome.boundary == "loop" and "out of luck" in trajectory.outcome.detail


def test_a_provider_without_a_way_to_the_gateway_is_refused(model: Any, tmp_path: Path) -> None:
    section = config("program_agent", boxed(tmp_path), sandbox=SandboxConfig(provider="landlock"))
    with pytest.raises(ConfigError, match="landlock cannot be had: its boxes have no way to a service"):
        run(section, model, tmp_path, count=1)


def test_files_of_a_box_cannot_be_kept_in_place(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name artifacts instead"):
        run(config("program_agent", boxed(tmp_path, keep_directory=True)), model, tmp_path, count=1)


GRADER = """
import json, os, pathlib, sys, urllib.request
directory = pathlib.Path(sys.argv[1])
found = {path.name: path.read_text() for path in directory.iterdir()}
reward = 1.0 if found == {"result.txt": "made in /workspace"} else 0.0
request = urllib.request.Request(os.environ["TREADLE_NOTES_URL"], json.dumps({"reward": reward}).encode())
request.add_header("authorization", "Bearer " + sys.stdin.readline().strip())
urllib.request.urlopen(request).read()
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_the_artifacts_of_a_box_are_graded_outside_of_it_with_the_second_key(
    workers: int, model: Any, tmp_path: Path
) -> None:
    kwargs = boxed(tmp_path, grader=["python", "-c", GRADER, "{{directory}}"])
    batch, _ = run(config("program_agent", kwargs, num_workers=workers), model, tmp_path, count=1)
    (trajectory,) = batch.trajectories
    assert trajectory.outcome.ok, trajectory.outcome
    assert trajectory.reward is not None and trajectory.reward.value == 1.0


@pytest.mark.parametrize(
    ("artifacts", "words"),
    [
        ([], "name the files that it grades in artifacts"),
        (["/etc/passwd"], "not a path inside the session's directory"),
    ],
)
def test_a_grader_of_a_box_needs_artifacts_inside_of_it(
    artifacts: list[str], words: str, model: Any, tmp_path: Path
) -> None:
    kwargs = boxed(tmp_path, artifacts=artifacts, grader=["python", "-c", GRADER, "{{directory}}"])
    with pytest.raises(ConfigError, match=words):
        run(config("program_agent", kwargs), model, tmp_path, count=1)
