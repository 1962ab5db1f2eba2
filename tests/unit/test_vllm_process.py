"""How the server process of a vLLM replica is started, and what is heard of it when it cannot: without vLLM."""

import asyncio
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from treadle.config import ModelConfig, RolloutConfig
from treadle.config.rollout import LimitsConfig
from treadle.engine.vllm.engine import VLLMEngine, require_vllm
from treadle.engine.vllm.process import _variables
from treadle.errors import ConfigError, DeadlineError, EngineFailure

MODEL = ModelConfig(path="treadle/tiny-calculator")

without_vllm = pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here: it would start")


@without_vllm
def test_a_server_that_dies_is_quoted_with_its_status_and_the_first_error() -> None:
    rollout = RolloutConfig(name="vllm", limits=LimitsConfig(launch_timeout_s=60, close_timeout_s=5))
    began = time.monotonic()
    with pytest.raises(EngineFailure) as caught:
        asyncio.run(VLLMEngine.create(rollout, MODEL, name="vllm-7"))
    text = str(caught.value)
    assert text.startswith("vllm-7 died while it started: exit status 1: ModuleNotFoundError: No module named 'vllm'")
    assert "its last lines:\n    " in text and text.count("\n") == 15
    assert time.monotonic() - began < 30


@without_vllm
def test_asking_for_vllm_without_it_is_a_mistake_in_the_config() -> None:
    with pytest.raises(ConfigError, match=r"(?s)rollout\.name: vLLM is not installed.*pip install vllm"):
        require_vllm(RolloutConfig(name="vllm"))


def test_a_model_that_is_not_there_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        asyncio.run(VLLMEngine.create(RolloutConfig(name="vllm"), ModelConfig(path="treadle/no-such-model")))


SILENT_SERVER = f"""#!{sys.executable}
import os, pickle, socket, sys, time
from treadle.engine.vllm.protocol import _FRAME, FrameKind, ServerHello

listener = socket.socket(fileno=int(sys.argv[-1]))
body = pickle.dumps(ServerHello(10, os.getpid()))
end, _ = listener.accept()
end.sendall(_FRAME.pack(len(body), FrameKind.RESULT, 0) + body)
time.sleep(600)
"""
"""It greets, and answers nothing."""


def test_a_server_that_greets_and_then_hangs_is_ended_at_the_launch_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(SILENT_SERVER)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rollout = RolloutConfig(name="vllm", limits=LimitsConfig(launch_timeout_s=10, close_timeout_s=1))

    async def main() -> None:
        async with asyncio.timeout(120):
            await VLLMEngine.create(rollout, MODEL, name="vllm-7")

    with pytest.raises(DeadlineError, match=r"vllm-7 did not start within rollout\.limits\.launch_timeout_s = 10"):
        asyncio.run(main())
    assert list(tmp_path.iterdir()) == [program]


def test_a_server_that_cannot_be_spawned_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*arguments: object, **named: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        asyncio.run(VLLMEngine.create(RolloutConfig(name="vllm"), MODEL))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "device", "present"),
    [
        ({}, "cpu", {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}),
        ({}, "cuda", {}),
        ({"enforce_eager": True}, "cuda", {"TORCHDYNAMO_DISABLE": "1"}),
    ],
)
def test_the_servers_environment_depends_on_the_device(keys: dict, device: str, present: dict) -> None:
    found = dict(word.split("=", 1) for word in _variables(RolloutConfig(name="vllm", **keys), device, {"X": "1"}))
    assert found.pop("X") == "1"
    found.pop("OMP_NUM_THREADS", None)
    assert found == present
