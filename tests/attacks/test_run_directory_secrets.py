"""What a run directory and the terminal are given: no secret in any spelling, nothing others may read, no escapes."""

import logging
import os
import stat
import sys
from pathlib import Path

import pytest
import torch

import treadle
from tests.rollouts import save_model
from treadle.cli import serve
from treadle.config import loads, to_yaml
from treadle.config.show import hide_in_words
from treadle.journal import Journal, logging_to, read_starts
from treadle.weights.disk import DiskTransport
from treadle.weights.transfer import CastTensors

SERVERS = "rollout.multi_turn.mcp_servers"
WORDS = [
    f'{SERVERS}={{"x": {{"command": ["python", "s.py"], "env": {{"GITHUB_TOKEN": "ghp_s3cr3t"}}}}}}',
    f"{SERVERS}.x={{command: [python, s.py], env: {{GITHUB_TOKEN: ghp_s3cr3t}}}}",
    f"{SERVERS}.x={{command: [python, s.py], env: {{MODE: s3cr3t}}}}",
    "rollout.openai.extra_body={headers: {Authorization: s3cr3t}, max_tokens: 7}",
    "rollout.openai.extra_body={a: [{api_key: s3cr3t}]}",
    "rollout.openai.extra_body={private_key: s3cr3t, passphrase: s3cr3t, webhook_url: 'https://hooks/s3cr3t'}",
    "rollout.openai.base_url=https://host/v1?model=a&api_key=s3cr3t",
    "rollout.agent.loops.program_agent.kwargs.argv=[agent, --api-key, s3cr3t, '{{messages}}']",
    "rollout.agent.loops.program_agent.kwargs.argv=[agent, --auth-token=s3cr3t]",
    "rollout.agent.loops.program_agent.kwargs.argv=[sh, -c, 'OPENAI_API_KEY=s3cr3t agent --password s3cr3t']",
    f"{SERVERS}.x.command=[curl, -H, 'Authorization: Bearer s3cr3t-s3cr3t', 'https://me:s3cr3t@host/']",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_secret_inside_a_value_is_in_no_word_and_no_origin(word):
    assert "s3cr3t" not in str(hide_in_words(["treadle", "rollout", word]))
    text = to_yaml(loads("model: {path: unused}", "test", (word,)), origins=True, secrets=False)
    assert "s3cr3t" not in text and "(hidden)" in text


def test_words_without_a_secret_stay_as_they_were_written():
    words = ["rollout.multi_turn.tools=[a:b,  c:d]", "x={a:   1}", "--fresh", "x=[1, {y: z}]"]
    words += [
        "x=[agent, --max-tokens, 5, --token-limit=7, --keys, a]",
        "x=https://host/?page=2&monkey=1",
        "x=a basic arithmetic: token",
    ]
    assert hide_in_words(words) == words


@pytest.mark.parametrize("words", [["--key", "s3cr3t"], ["--key=s3cr3t"]])
def test_the_key_of_a_served_gateway_is_in_no_record(tmp_path, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["treadle", "serve", "--gateway", *words])
    config = loads("model: {path: unused}", "test", (f"logging.run_dir={tmp_path / 'run'}",))
    with serve._open_journal(config):
        pass
    assert all("s3cr3t" not in path.read_text("latin-1") for path in (tmp_path / "run").iterdir())
    assert read_starts(tmp_path / "run")[0].command[-1].endswith("(hidden)")


def test_the_directory_of_a_call_from_python_and_all_in_it_are_private(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model")
    treadle.rollout(
        model="model",
        tasks=[{"prompt": "1+1?", "answer": "2"}],
        reward=lambda response, answer: 1.0,
        rollout={"name": "scripted"},
        run_dir="runs/one",
    )
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (Path("runs/one"), *Path("runs/one").rglob("*"))}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


@pytest.mark.parametrize(("mode", "is_open"), [(0o755, True), (0o710, True), (0o777, True), (0o700, False)])
def test_a_directory_made_beforehand_that_others_can_open_is_said_and_left(tmp_path, caplog, mode, is_open):
    directory = tmp_path / "run"
    directory.mkdir()
    directory.chmod(mode)
    with Journal.open(directory, max_mb=16):
        pass
    assert stat.S_IMODE(directory.stat().st_mode) == mode, "it is the user's"
    assert (f"chmod 700 {directory}" in caplog.text) is is_open
    assert (f"mode {mode:04o}" in caplog.text) is is_open
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in directory.iterdir())


def test_weights_on_disk_are_closed_to_others(tmp_path):
    before = os.umask(0o022)
    try:
        transport = DiskTransport(tmp_path / "weights")
        transport.publish(1, CastTensors({"a": torch.zeros(2)}, None))
        found = [tmp_path / "weights", *(tmp_path / "weights").rglob("*")]
        assert [stat.S_IMODE(path.stat().st_mode) for path in found] == [0o700, 0o700, 0o600]
    finally:
        os.umask(before)


def test_what_is_logged_holds_no_escape_sequence(tmp_path, capfd, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with logging_to(tmp_path):
        try:
            raise ValueError("cannot close after \x1b]52;c;eA==\x07")
        except ValueError:
            logging.getLogger("treadle.test").warning("task %s failed", "\x1b[2J\u202e", exc_info=True)
    for text in (capfd.readouterr().err, (tmp_path / "run.log").read_text()):
        assert "cannot close after" in text and "\\x1b]52;c;eA==\\x07" in text
        assert not {"\x1b", "\x07", "\u202e"}.intersection(text)
