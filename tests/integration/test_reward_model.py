"""Reward models for real: processes that die, servers over HTTP, and a rollout that is scored by all kinds at once."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fake_endpoint import FakeEndpoint
from tests.reward_models import make_task, make_trajectory, save_causal, save_classifier
from tests.rollouts import renderer, save_model
from treadle.config import ModelConfig, OpenAIConfig
from treadle.config.reward import ClassifierConfig, JudgeConfig, JudgeEngineConfig, RewardConfig
from treadle.errors import ConfigError, RunError
from treadle.journal import JournalReader
from treadle.process.tree import list_children
from treadle.reward.classifier.model import ClassifierModel
from treadle.reward.classifier.process import ClassifierProcess
from treadle.reward.context import NO_CONTEXT, RewardContext
from treadle.reward.result import Fault, ScoreFailure
from treadle.reward.scorer import Scorer
from treadle.rollout.engines import start_engines
from treadle.types import Score

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0
ANSWERS = ("42", "no idea", "x" * 200)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


def config(directory: Path, **keys: Any) -> ClassifierConfig:
    return ClassifierConfig(path=str(directory), **keys)


def wait_until(there: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


async def score(reward: RewardConfig, context: RewardContext = NO_CONTEXT) -> list[Score]:
    async with await Scorer.create(reward, context) as scorer:
        trajectories = [make_trajectory(answer, sample=at) for at, answer in enumerate(ANSWERS)]
        return list(await asyncio.gather(*(scorer.score(make_task(), item) for item in trajectories)))


def network_scores(directory: Path) -> list[float]:
    """The same, computed in a thread of this process."""
    reward = RewardConfig(classifiers={"c": config(directory, placement="thread")})
    return [one.value for one in asyncio.run(score(reward))]


def test_a_process_scores_as_a_thread_does_survives_its_death_and_leaves_nothing_behind(directory):
    before = list_children(os.getpid())

    async def main() -> tuple[list[float], list[float]]:
        reward = RewardConfig(classifiers={"c": config(directory)}, retries=1)
        async with await Scorer.create(reward) as scorer:
            trajectories = [make_trajectory(answer) for answer in ANSWERS]
            first = [(await scorer.score(make_task(), item)).value for item in trajectories]
            (pid,) = list_children(os.getpid()) - before
            os.kill(pid, signal.SIGKILL)
            again = [(await scorer.score(make_task(), item)).value for item in trajectories]
        return first, again

    first, again = asyncio.run(main())
    assert first == pytest.approx(network_scores(directory), abs=1e-5)
    assert first == again
    assert list_children(os.getpid()) == before


def test_a_batch_that_takes_too_long_ends_with_its_process(directory):
    process = ClassifierProcess(config(directory, timeout_s=0.001), "cpu")
    before = list_children(os.getpid())
    process.load()
    with pytest.raises(ScoreFailure) as caught:
        process.score([(1,) * 2000] * 8)
    assert caught.value.fault is Fault.TIMEOUT
    assert list_children(os.getpid()) == before
    process.close()


def test_a_process_that_dies_says_how(directory):
    process = ClassifierProcess(config(directory), "cpu")
    before = list_children(os.getpid())
    process.load()
    (pid,) = list_children(os.getpid()) - before
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    os.kill(pid, signal.SIGSTOP)
    killer.start()
    with pytest.raises(ScoreFailure) as caught:
        process.score([(1, 2, 3)])
    assert (caught.value.fault, "SIGKILL" in caught.value.problem) == (Fault.CRASH, True)
    process.close()


def test_memory_is_bounded(tmp_path):
    large = save_classifier(tmp_path, vocab_size=6_000_000)
    with pytest.raises(RunError, match=r"did not start: it ran out of memory \(memory_mb\)"):
        asyncio.run(score(RewardConfig(classifiers={"c": config(large, memory_mb=512)})))


def test_a_wrong_model_is_a_mistake(tmp_path):
    wrong = save_causal(tmp_path, num_labels=1)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(score(RewardConfig(classifiers={"c": config(wrong)})))
    assert [mistake.key for mistake in caught.value.mistakes] == ["reward.classifiers.c.path"]


def test_a_classifier_that_cannot_be_loaded_again_is_given_up(directory, tmp_path, monkeypatch):
    """With a wait between attempts; later batches fail at once, and load nothing."""
    model, waits = tmp_path / "model", list[float]()
    shutil.copytree(directory, model)
    process = ClassifierProcess(config(model), "cpu")
    process.load()
    monkeypatch.setattr(process._interrupted, "wait", waits.append)
    shutil.rmtree(model)
    process._process.kill()
    process._process.child.exited.result(60)
    with pytest.raises(ScoreFailure, match="could not be loaded again, and was given up"):
        process.score([(5, 6, 7)])
    assert waits == [0.0, 1.0, 2.0]
    with pytest.raises(ScoreFailure, match="was given up"):
        process.score([(5, 6, 7)])
    assert len(waits) == 3, "it is not tried again"
    process.close()


ALONE_WITH_CLASSIFIER = """
import asyncio, sys, time
from tests.rollouts import renderer
from treadle.config import ModelConfig
from treadle.config.reward import ClassifierConfig, JudgeConfig, JudgeEngineConfig, RewardConfig
from treadle.reward.scorer import Scorer
from treadle.reward.context import RewardContext
from treadle.rollout.engines import start_engines
from treadle.types import Outcome, StopReason, Task, Trajectory

async def main():
    reward = RewardConfig(
        classifiers={"c": ClassifierConfig(path=sys.argv[1])},
        judges={"j": JudgeConfig(prompt="Score: 1", engine=JudgeEngineConfig(name="scripted"))},
    )
    lent = RewardContext(ModelConfig(path=sys.argv[1]), renderer(), None, start_engines)
    async with await Scorer.create(reward, lent) as scorer:
        said = ({"role": "assistant", "content": "42"},)
        trajectory = Trajectory("t", 0, (), Outcome.ended(StopReason.STOP), messages=said)
        await scorer.score(Task("t", ()), trajectory)
        print("torch" in sys.modules, flush=True)
        time.sleep(60)

asyncio.run(main())
"""


def test_the_parent_loads_no_torch_and_its_death_is_the_classifiers_too(directory):
    command = [sys.executable, "-c", ALONE_WITH_CLASSIFIER, str(directory)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "False\n"
        (child,) = list_children(parent.pid)
        parent.kill()
    wait_until(lambda: not is_alive(child))


class Classify(BaseHTTPRequestHandler):
    """A server that answers /classify as vLLM does."""

    network: ClassifierModel
    bodies: list[dict[str, Any]]
    labels = 1

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        found = self.path == "/classify"
        logits = self.network.score([body["input"]]) * self.labels
        reply = {"data": [{"index": 0, "label": "LABEL_0", "probs": logits, "num_classes": self.labels}]}
        text = json.dumps(reply if found else {"error": "no such address"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def server(directory) -> Iterator[ThreadingHTTPServer]:
    network = ClassifierModel(str(directory), device="cpu", dtype="auto")
    network.load()
    handler = type("Handler", (Classify,), {"network": network, "bodies": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


def behind(server: ThreadingHTTPServer, directory: Path, path: str = "") -> RewardConfig:
    endpoint = OpenAIConfig(base_url=f"http://127.0.0.1:{server.server_address[1]}{path}", model="m")
    return RewardConfig(classifiers={"c": config(directory, placement="endpoint", endpoint=endpoint)}, retries=0)


def test_a_server_is_sent_ids_and_asked_for_logits(server, directory):
    scores = [one.value for one in asyncio.run(score(behind(server, directory)))]
    assert scores == pytest.approx(network_scores(directory), abs=1e-5)
    body = server.RequestHandlerClass.bodies[-1]
    assert (body["model"], body["use_activation"]) == ("m", False)
    assert all(isinstance(one, int) for one in body["input"])


def test_a_server_that_answers_something_else_is_told_apart_at_the_start(server, directory):
    with pytest.raises(RunError, match="without /v1"):
        asyncio.run(score(behind(server, directory, "/v1")))
    server.RequestHandlerClass.labels = 2
    with pytest.raises(RunError, match="2 labels"):
        asyncio.run(score(behind(server, directory)))


def test_a_judge_behind_an_endpoint_is_sent_messages_and_its_key():
    with FakeEndpoint() as endpoint:
        endpoint.message = {"content": "All in all, Score: 4"}
        openai = OpenAIConfig(base_url=endpoint.base_url, api_key_env="JUDGE_KEY")
        engine = JudgeEngineConfig(name="openai", openai=openai)
        reward = RewardConfig(judges={"j": JudgeConfig(prompt="Rate {{ response }}", engine=engine, n=2)})
        lent = RewardContext(ModelConfig(path=""), renderer(), None, start_engines, {"JUDGE_KEY": "secret"})
        scores = asyncio.run(score(reward, lent))
        assert [one.value for one in scores] == [4.0] * 3
        asked = [chat["messages"][-1]["content"] for chat in endpoint.chats]
        assert sorted(asked) == sorted([f"Rate {answer}" for answer in ANSWERS] * 2)
        assert len({chat["seed"] for chat in endpoint.chats}) == 6
        assert endpoint.headers[-1]["authorization"] == "Bearer secret"


def test_an_endpoint_that_is_not_there_ends_the_start_with_the_judges_name():
    engine = JudgeEngineConfig(name="openai", openai=OpenAIConfig(base_url="http://127.0.0.1:9/v1"))
    reward = RewardConfig(judges={"j": JudgeConfig(prompt="?", engine=engine)}, retries=0)
    lent = RewardContext(ModelConfig(path=""), renderer(), None, start_engines)
    with pytest.raises(RunError, match=r"the engine of reward\.judges\.j did not start"):
        asyncio.run(score(reward, lent))


READER = """
def read(text, ground_truth):
    return float(len(text) % 7) / 7 + float(ground_truth == "#### 2")
"""


@pytest.fixture
def folder(tmp_path, directory) -> Path:
    save_model(tmp_path / "model")
    judge = save_causal(tmp_path / "judge")
    # a random model stops at one of many tokens, hence soon
    (judge / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(20, 34))}))
    (tmp_path / "reader_of_this_test.py").write_text(READER)
    rows = [{"question": f"What is {at} + 1?", "answer": "#### 2"} for at in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "model": {"path": "model"},
        "data": {"train_files": "tasks.jsonl", "prompt_key": "question"},
        "rollout": {"name": "scripted", "n": 2},
        "reward": {
            "functions": {"right": {"path": "number_match", "weight": 0.0}},
            "classifiers": {"helpful": {"path": str(directory), "weight": 0.5}},
            "judges": {
                "echo": {"prompt": "It says {{ response }}. Score: 3", "engine": {"name": "scripted"}},
                "self": {"prompt": "Score: 2", "weight": 2.0, "engine": {"name": "policy"}},
                "random": {
                    "path": "judge",
                    "prompt": "Rate {{ response }}",
                    "parser": "reader_of_this_test:read",
                    "n": 2,
                    "response_length": 300,
                    "timeout_s": 400.0,
                    "engine": {"name": "native", "max_model_len": 400, "max_num_seqs": 16},
                },
            },
        },
        "logging": {"run_dir": "run"},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(sections, sort_keys=False))
    return tmp_path


def treadle(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treadle", "rollout", *words, "--json"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def test_a_rollout_is_scored_by_functions_classifiers_and_judges_at_once(folder):
    done = treadle(folder, "my.yaml")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_failed"] == 0
    with JournalReader.open(folder / "run") as reader:
        rewards = [entry.trajectory.reward for entry in reader.trajectories()]
    assert len(rewards) == 4
    for reward in rewards:
        parts = reward.parts
        assert list(parts) == ["right", "helpful", "echo", "self", "random"]
        assert (parts["echo"], parts["self"]) == (3.0, 2.0)
        assert reward.value == pytest.approx(0.5 * parts["helpful"] + 3.0 + 2 * 2.0 + parts["random"])
        assert len(reward.extra["random/answers"]) == 2
    assert len({reward.parts["helpful"] for reward in rewards}) > 1
    assert len({reward.parts["random"] for reward in rewards}) > 1


def test_a_judge_that_cannot_be_read_fails_its_trajectories_and_the_command(folder):
    sections = yaml.safe_load((folder / "my.yaml").read_text())
    sections["reward"] = {"judges": {"echo": {**sections["reward"]["judges"]["echo"], "pattern": "Verdict"}}}
    (folder / "other.yaml").write_text(yaml.safe_dump(sections))
    done = treadle(folder, "other.yaml")
    assert done.returncode == 1, done.stdout
    assert "unreadable: reward model 'echo'" in done.stdout + done.stderr


def test_the_example_in_the_docs_runs(tmp_path, directory):
    page = (ROOT / "docs" / "rollout.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (example,) = [block for block in blocks if "classifiers:" in block]
    (tmp_path / "example.yaml").write_text(example.replace("models/helpful", str(directory)))
    words = [str(tmp_path / "example.yaml"), f"logging.run_dir={tmp_path / 'run'}"]
    done = treadle(ROOT, *words)
    assert done.returncode == 0, done.stderr
    with JournalReader.open(tmp_path / "run") as reader:
        rewards = [entry.trajectory.reward for entry in reader.trajectories()]
    assert {reward.parts["fair"] for reward in rewards} == {10.0}
