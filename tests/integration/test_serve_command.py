"""`treadle serve`: a model behind OpenAI's and Anthropic's APIs, and sessions that are recorded."""

import asyncio
import io
import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, BadRequestError, OpenAI

import treadle
from tests.gateway_agents import TOOLS
from tests.rollouts import save_model
from tests.serving import serving
from treadle.cli.check import require_preflight
from treadle.cli.environment import read_notes_key
from treadle.cli.main import build_parser, main
from treadle.cli.serve import _announce, _configure
from treadle.config import Config, load
from treadle.config.rollout import ModelConfig
from treadle.data.renderer import Renderer
from treadle.errors import ConfigError
from treadle.gateway.model_server import ModelServer, ServerKeys, serve_model
from treadle.journal import JournalReader
from treadle.types import Trajectory
from treadle.view.server import Viewer


def test_a_recipes_model_is_served_with_tools_and_streams() -> None:
    with serving("calculator", "rollout.nnodes=0") as (url, key):
        with OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger, pytest.raises(AuthenticationError):
            stranger.models.list()
        with OpenAI(base_url=url, api_key=key) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            asked = {"model": "policy", "messages": [{"role": "user", "content": "12*7="}], "tools": TOOLS}
            whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
            assert whole.usage.completion_tokens > 0
            chunks = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
            assert chunks[-1].choices[0].finish_reason in ("stop", "length", "tool_calls")
            response = client.responses.create(model="policy", input="12*7=", max_output_tokens=5)
            assert response.usage is not None and response.usage.output_tokens <= 5


def test_the_native_engine_streams_tokens_and_completes_texts_for_openais_sdk() -> None:
    with serving("calculator", "rollout.nnodes=0") as (url, key), OpenAI(base_url=url, api_key=key) as client:
        asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "12*7="}]}
        chunks = list(client.chat.completions.create(**asked, stream=True))
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        assert len(pieces) > 3, "no piece but the last waits for the end"
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].message.content

        renderer = Renderer.create(ModelConfig(path="treadle/tiny-calculator"))
        ids = renderer.prompt(asked["messages"])
        text: dict[str, Any] = {"model": "policy", "prompt": renderer._encoder.decode(ids), "max_tokens": 12}
        answer = client.completions.create(**text, logprobs=1, n=2)
        assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)
        for choice in answer.choices:
            assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
            assert choice.logprobs.tokens and choice.text == "".join(choice.logprobs.tokens)
            assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)
        streamed = list(client.completions.create(**text, stream=True, stream_options={"include_usage": True}))
        assert streamed[-1].usage is not None and streamed[-2].choices[0].finish_reason in ("stop", "length")
        assert len([chunk for chunk in streamed if chunk.choices and chunk.choices[0].text]) > 1
        by_ids = client.completions.create(**{**text, "prompt": [list(ids), [8, 9]]})
        assert len(by_ids.choices) == 2 and by_ids.usage is not None and by_ids.usage.prompt_tokens == len(ids) + 2
        letter = answer.choices[0].text[-1]
        stopped = client.completions.create(**text, stop=[letter])
        assert letter not in stopped.choices[0].text
        for refused in ({"echo": True}, {"logprobs": 5}, {"suffix": "x"}, {"best_of": 3}):
            with pytest.raises(BadRequestError, match=next(iter(refused))):
                client.completions.create(**text, **refused)
        for wrong in ([], "", [1, "a"], [[]], [10**9]):
            with pytest.raises(BadRequestError):
                client.completions.create(**{**text, "prompt": wrong})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> treadle.Run:
    """A run of one step."""
    return treadle.train(
        model="treadle/tiny-calculator",
        tasks=[{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(4)],
        reward="number_match",
        steps=2,
        run_dir=tmp_path_factory.mktemp("served") / "run",
        rollout={"n": 2, "prompt_length": 64, "response_length": 16},
        checkpoint={"save_freq": 1},
    )


def configure(*words: str) -> tuple[Config, str]:
    """What `treadle serve` would serve, and what it calls that."""
    return _configure(build_parser().parse_args(["serve", *words]))


def test_the_port_is_that_of_the_option_else_of_the_config_else_8000(config: Path, trained: treadle.Run) -> None:
    def port(*words: str) -> int:
        return configure(*words)[0].rollout.gateway.port

    said = config.with_name("said.yaml")
    said.write_text(config.read_text().replace("name: scripted", "name: scripted, gateway: {port: 9001}"))
    free = config.with_name("free.yaml")
    free.write_text(config.read_text().replace("name: scripted", "name: scripted, gateway: {port: 0}"))
    assert port(str(config)) == 8000
    assert port(str(said)) == 9001 and port(str(free)) == 0
    assert port(str(said), "--port", "9002") == 9002 and port(str(said), "--port", "0") == 0
    assert port(str(config), "rollout.gateway.port=9003") == 9003
    assert port("treadle/tiny-calculator") == 8000
    assert port("treadle/tiny-calculator", "rollout.gateway.port=9003") == 9003
    assert port(str(trained.run_dir)) == 8000, "its recorded 0 is the default of training"
    assert configure(str(trained.run_dir))[0].logging.run_dir is None, "a server records nothing in the training run"
    assert port(str(trained.run_dir), "rollout.gateway.port=9003") == 9003


def test_the_checkpoint_that_was_asked_for_is_served_as_it_lies_in_the_run(trained: treadle.Run) -> None:
    folder = trained.run_dir / "checkpoints"
    for name, found in (("latest", "0002-step-2"), ("1", "0001-step-1"), ("0001-step-1", "0001-step-1")):
        served, said = configure(str(trained.run_dir), "--checkpoint", name)
        assert Path(served.model.path) == folder / found, "no copy of it is written"
        assert said == f"{found} of {trained.run_dir}"
    best = (folder / "best").resolve()
    assert Path(configure(str(trained.run_dir), "--checkpoint", "best")[0].model.path) == best
    assert Path(configure(str(trained.run_dir))[0].model.path) == folder / "0002-step-2"
    with pytest.raises(ConfigError, match=r"--checkpoint: .*no checkpoint of this name\n.*0001-step-1, 0002-step-2"):
        configure(str(trained.run_dir), "--checkpoint", "7")
    with pytest.raises(ConfigError, match=r"--checkpoint: chooses a checkpoint of a run, and .* is none"):
        configure("treadle/tiny-calculator", "--checkpoint", "best")


def test_a_run_opened_in_python_has_the_checkpoint_that_was_asked_for(trained: treadle.Run) -> None:
    folder = trained.run_dir / "checkpoints"
    assert trained.model_dir == folder / "0002-step-2"
    assert treadle.Run(trained.run_dir, checkpoint="1").model_dir == folder / "0001-step-1"
    assert treadle.Run(trained.run_dir, checkpoint="best").model_dir == (folder / "best").resolve()
    with pytest.raises(ConfigError, match=r"checkpoint: .*no checkpoint of this name"):
        _ = treadle.Run(trained.run_dir, checkpoint="7").model_dir


def test_which_checkpoint_a_run_directory_stands_for_is_printed(
    trained: treadle.Run, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = (trained.run_dir / "checkpoints" / "best").resolve().name
    configure(str(config), f"model.path={trained.run_dir}")
    assert f"model.path {trained.run_dir}: {best}, its best checkpoint" in capsys.readouterr().err
    words = [f"ref.path={trained.run_dir}", "actor.use_kl_loss=true", f"model.path={trained.model_dir}"]
    require_preflight(load("calculator", words))
    said = capsys.readouterr().err
    assert f"ref.path {trained.run_dir}: {best}, its best checkpoint" in said and "model.path" not in said


def test_the_lengths_that_are_served_are_printed(
    trained: treadle.Run, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, name = configure(str(trained.run_dir))
    _announce(served, "first", name, None)("http://127.0.0.1:1")
    assert "context 80 tokens, answers up to 16 (rollout.prompt_length" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["run", "model"])
def test_a_run_and_a_model_are_served_to_openais_sdk(trained: treadle.Run, what: str) -> None:
    """A run's newest checkpoint by the run's directory, and a Hugging Face directory by its path."""
    with (
        serving(str(trained.run_dir if what == "run" else trained.model_dir)) as (url, key),
        OpenAI(base_url=url, api_key=key) as client,
    ):
        asked = {"model": "policy", "messages": [{"role": "user", "content": "3+4="}], "max_tokens": 8}
        whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
        assert whole.choices[0].message.role == "assistant"
        assert 0 < whole.usage.completion_tokens <= 8
        chunks = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = save_model(tmp_path / "model")
    config = tmp_path / "serve.yaml"
    config.write_text(f"model: {{path: {model.path}}}\nrollout: {{name: scripted}}\n")
    return config


def recorded(run_dir: Path) -> dict[str, Trajectory]:
    """What a journal holds, the newest of each session."""
    if not (run_dir / "run.json").exists():
        return {}
    with JournalReader.open(run_dir) as reader:
        return {f"{one.headline.uid}/{one.headline.sample}": one.trajectory for one in reader.trajectories()}


def test_a_session_is_ended_rewarded_and_shown_by_its_name(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, body = (
        tmp_path / "run",
        {"model": "policy", "messages": [{"role": "user", "content": "Hi."}], "top_p": 0.5},
    )
    options = ("--gateway", "--notes-key", "second", f"logging.run_dir={run_dir}")
    with serving(str(config), *options) as (url, key):
        base, mine, grader = url.removesuffix("/v1"), {"x-api-key": key}, {"x-api-key": "second"}
        for _ in range(2):
            early = httpx.post(f"{base}/s/one/v1/notes", json={"reward": 1.0}, headers=grader)
            assert early.status_code == 404, "there is nothing to give a reward to"
            httpx.post(f"{base}/s/one/v1/chat/completions", json=body, headers=mine).raise_for_status()
            own = httpx.post(f"{base}/s/one/v1/notes", json={"reward": 99.0}, headers=mine)
            assert own.status_code == 404, "an agent's key gives no reward"
            assert httpx.post(f"{base}/s/one/v1/chat/completions", json=body, headers=grader).status_code == 403
            given = {"reward": 0.5, "notes": {"tests": 3}}
            httpx.post(f"{base}/s/one/v1/notes", json=given, headers=grader).raise_for_status()
            httpx.delete(f"{base}/s/one", headers=mine).raise_for_status()
        assert httpx.delete(f"{base}/s/one", headers=mine).status_code == 404
    kept = recorded(run_dir)
    assert [*kept] == ["one/0", "one/1"] and {one.reward.value for one in kept.values() if one.reward} == {0.5}
    with pytest.raises(SystemExit) as ended:
        main(["show", str(run_dir), "one"])
    shown = capsys.readouterr().out
    assert not ended.value.code and "one/0: reward 0.5" in shown and "one/1: reward 0.5" in shown
    assert 'notes: {"tests": 3}' in shown and "gateway: requests chat 1; roots 1" in shown
    assert "ignored top_p 1; asked top_p 0.5" in shown


def test_what_agents_did_before_a_kill_is_recorded(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = (str(config), "--gateway", f"logging.run_dir={run_dir}")
    with serving(*options, end=signal.SIGKILL) as (url, key), OpenAI(base_url=url, api_key=key) as client:
        for turns in (1, 2):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": f"{turns}"}])
            deadline = time.monotonic() + 60
            while not (kept := recorded(run_dir)) or kept["default/0"].num_turns < turns:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    with serving(*options) as (url, key), OpenAI(base_url=url, api_key=key) as client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "3"}])
    assert {name: kept.num_turns for name, kept in recorded(run_dir).items()} == {"default/0": 2, "default/1": 1}


def test_the_key_for_rewards_is_printed_apart_from_that_for_agents(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _announce(load(config), "first", "a model", "second")("http://127.0.0.1:1")
    agents, grader = capsys.readouterr().out.split("\n\n")
    assert agents.count("first") == 2 and "second" not in agents
    assert grader.startswith("for the grader alone") and "TREADLE_NOTES_KEY=second" in grader and "first" not in grader


def test_a_served_run_is_shown_and_searched_by_the_viewer(config: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with serving(str(config), "--gateway", "--notes-key", "second", f"logging.run_dir={run_dir}") as (url, key):
        base, grader = url.removesuffix("/v1"), {"x-api-key": "second"}
        for name, reward in (("one", 0.5), ("two", 1.0)):
            with OpenAI(base_url=f"{base}/s/{name}/v1", api_key=key) as client:
                asked = [{"role": "user", "content": f"a zebra, {name}"}]
                client.chat.completions.create(model="policy", messages=asked)  # type: ignore[arg-type]
            httpx.post(f"{base}/s/{name}/v1/notes", json={"reward": reward}, headers=grader).raise_for_status()
    viewer = Viewer({"served": run_dir})

    def ask(page: str, **given: str) -> Any:
        return json.loads(viewer.answer(f"api/{page}", {"run": "served", **given}).body)

    overview = ask("overview")
    assert overview["status"] == "finished" and overview["trajectories"] == 2 and overview["steps"] == []
    assert [(end["status"], end["count"]) for end in ask("ends")["ends"]] == [("completed", 2)]
    while (found := ask("find", q="zebra"))["indexed"] < 1:
        pass
    assert {line["uid"] for line in found["samples"]} == {"one", "two"}
    (best, _) = ask("find", order="best")["samples"]
    assert best["uid"] == "two" and best["reward"] == 1.0
    shown = ask("trajectory", id=str(best["id"]))
    assert "a zebra, two" in json.dumps(shown)


def test_keys_for_agents_and_for_rewards_are_two(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(config), "--gateway", "--key", "k", "--notes-key", "k"])
    assert ended.value.code == 2 and "--notes-key" in capsys.readouterr().err


def test_a_key_for_rewards_is_refused_where_no_session_is_recorded(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], ["--tinker"]):
        for option in ("--notes-key", "--notes-key-file"):
            with pytest.raises(SystemExit) as ended:
                main(["serve", str(config), option, "n", *words])
            assert ended.value.code == 2 and option in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(config), "--gateway", "--notes-key", "n", "--notes-key-file", "n"])
    assert ended.value.code == 2 and "give one of the two" in capsys.readouterr().err


def kept_secret(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_for_rewards_comes_from_a_file_that_its_owner_alone_can_read_or_from_standard_input(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kept_secret(tmp_path / "key", "from a file\n")
    with serving(str(config), "--gateway", "--notes-key-file", str(found), f"logging.run_dir={tmp_path / 'run'}") as (
        url,
        key,
    ):
        base = url.removesuffix("/v1")
        body = {"model": "policy", "messages": [{"role": "user", "content": "Hi."}]}
        httpx.post(f"{base}/s/one/v1/chat/completions", json=body, headers={"x-api-key": key}).raise_for_status()
        grader = {"x-api-key": "from a file"}
        httpx.post(f"{base}/s/one/v1/notes", json={"reward": 0.5}, headers=grader).raise_for_status()
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert read_notes_key(None, "-") == "from a pipe"
    monkeypatch.setenv("TREADLE_NOTES_KEY", "from the environment")
    assert read_notes_key(None, None) == "from the environment" and read_notes_key("given", None) == "given"
    monkeypatch.delenv("TREADLE_NOTES_KEY")
    assert read_notes_key(None, None) is None


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [("k", 0o640, "chmod 600"), ("k", 0o604, "chmod 600"), ("\n", 0o600, "is empty"), (None, 0o600, "No such file")],
)
def test_a_file_with_a_key_for_rewards_that_others_can_read_or_without_one_is_a_mistake(
    text: str | None, mode: int, words: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    if text is not None:
        kept_secret(path, text, mode)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(config), "--gateway", "--notes-key-file", str(path)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "--notes-key-file" in said and words in said


def test_requests_that_never_come_whole_open_no_session(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[ModelServer] = []
    listen = ModelServer.listen

    async def noting(self: ModelServer) -> None:
        servers.append(self)
        await listen(self)

    monkeypatch.setattr(ModelServer, "listen", noting)

    async def run() -> None:
        ready = asyncio.Event()
        keys = ServerKeys("k", "n")
        work = asyncio.ensure_future(serve_model(load([str(config)]), keys, None, lambda _: ready.set()))
        await ready.wait()
        (server,) = servers
        for length in (999_999_999, 10):
            _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: k\r\ncontent-length: {length}".encode())
            writer.write(b"\r\n\r\n")
            while not server.num_connections:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            writer.close()
            while server.num_connections:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert not server._named
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    asyncio.run(run())


def test_sessions_are_recorded_by_name(config: Path, tmp_path: Path) -> None:
    with serving(str(config), "--gateway", f"logging.run_dir={tmp_path / 'run'}") as (url, key):
        for name in ("one", "two"):
            with OpenAI(base_url=url.replace("/v1", f"/s/{name}/v1"), api_key=key) as client:
                history = [{"role": "user", "content": f"I am {name}."}]
                for _ in range(2):
                    answer = client.chat.completions.create(model="policy", messages=history)  # type: ignore[arg-type]
                    assert answer.choices[0].message.content == history[-1]["content"], "a scripted echo"
                    history += [answer.choices[0].message, {"role": "user", "content": "Go on."}]  # type: ignore[list-item]
    with JournalReader.open(tmp_path / "run") as reader:
        uids = [headline.uid for headline in reader.headlines()]
        assert uids == ["one", "two"]
        kept = reader.trajectory(uids[0], 0)
    assert kept is not None and kept.trajectory.num_turns == 2 and kept.trajectory.num_rows == 1
