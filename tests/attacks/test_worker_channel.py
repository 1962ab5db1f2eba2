"""What a tool writes to the channel of its agent worker: never code for the driver, never the end of the run."""

import pickle
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from tests.attacks.hostile import FORGERY
from tests.attacks.test_worker_processes import HOSTILE, call, outcomes, run
from tests.rollouts import rollout, save_model, say
from tests.unit.test_journal_codec import full_trajectory
from treadle.config import AgentLoopConfig, FailureConfig
from treadle.errors import ConfigError, LoopFailure, Mistake, RequestRefused
from treadle.observe import Wait
from treadle.process import codec
from treadle.process.child_main import read_started, write_not_started
from treadle.process.codec import DecodeError
from treadle.process.rpc import RpcCancel, RpcError, RpcNotify, RpcReply, RpcRequest
from treadle.rollout.protocol import Dropped
from treadle.rollout.worker_process import WORKER_CODEC, WaitReport
from treadle.types import Request, SamplingParams, Score, Trajectory

encode, decode = WORKER_CODEC.encode, WORKER_CODEC.decode

TWICE = FailureConfig(max_failed_fraction=1.0, session_retries=2)
REQUEST = Request(
    "a/b", 1, (1, 2, 3), SamplingParams(7, stop_token_ids=(5,), stop=("x",)), messages=({"role": "user"},)
)


OUTCOME = full_trajectory().outcome


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def framed(body: bytes) -> bytes:
    return struct.pack("!Q", len(body)) + body


@pytest.mark.parametrize("kind", ["pickle", "noise", "endless", "another type", "half"])
def test_foreign_bytes_end_their_worker_and_nothing_else(kind, model, tmp_path, monkeypatch):
    ran, forgery = tmp_path / "ran", tmp_path / "forgery"
    whole = encode(RpcNotify(WaitReport(())))
    forgery.write_bytes(
        {
            "pickle": framed(pickle.dumps(Touch(ran))),
            "noise": framed(random.Random(0).randbytes(4000)),
            "endless": b"\xff" * 400,
            "another type": framed(whole.replace(b'"RpcNotify"', b'"RpcRequest"')),
            "half": framed(whole[:-3]),
        }[kind]
    )
    monkeypatch.setenv(FORGERY, str(forgery))
    config = rollout(
        default_agent_loop="tool_agent",
        tools=(f"{HOSTILE}:forge",),
        num_workers=None,
        failures=TWICE,
        tool_timeout_s=600,
    )
    found = outcomes(run(config, model, call("forge")))
    assert not forgery.exists(), "the tool has done it"
    assert {uid: outcome.ok for uid, outcome in found.items()} == {"task0": True, "task1": True, "task2": True}
    assert not ran.exists(), "what it wrote was run by the driver"


def test_a_worker_cannot_score_its_trajectories(model, tmp_path, monkeypatch):
    """Numbers of questions are easy to guess; a score is not a worker's to give."""
    forgery = tmp_path / "forgery"
    scored = [Trajectory(f"task{at}", 0, (), OUTCOME, reward=Score(1e9)) for at in range(3)]
    frames = [framed(encode(RpcReply(number, one))) for number in range(3) for one in scored]
    forgery.write_bytes(b"".join(frames))
    monkeypatch.setenv(FORGERY, str(forgery))
    config = rollout(
        default_agent_loop="tool_agent", tools=(f"{HOSTILE}:forge",), num_workers=None, failures=TWICE, tool_timeout_s=5
    )
    batch = run(config, model, call("forge"))
    assert all(trajectory.reward is None for trajectory in batch.trajectories)
    assert len(batch.trajectories) == 3


def test_an_extra_value_that_only_python_can_hold_fails_its_trajectory_by_name(model):
    loops = {"odd": AgentLoopConfig(path=f"{HOSTILE}:UnsendableLoop")}
    once = FailureConfig(max_failed_fraction=1.0, session_retries=0)
    batch = run(rollout(num_workers=1, default_agent_loop="odd", loops=loops, failures=once), model, say("x"))
    found = {trajectory.uid: trajectory for trajectory in batch.trajectories}
    assert "it holds a builtins.object" in found["task1"].outcome.detail
    assert "rollout.agent.num_workers=0" in found["task1"].outcome.detail
    assert found["task0"].outcome.ok
    assert found["task0"].extra["what"] == {"numbers": [1, 2.5]}


MESSAGES = [
    RpcRequest(3, REQUEST),
    RpcNotify(WaitReport((Wait("a", 0, "tools", 1.5, "x", "y\ud800"),))),
    RpcReply(1, Dropped("a", "too long")),
    RpcReply(2, Trajectory("a", 0, (), OUTCOME)),
    RpcCancel(9),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_equal(message):
    assert decode(encode(message)) == message


def test_a_trajectory_with_everything_comes_back_equal():
    trajectory = full_trajectory()
    back = decode(encode(RpcReply(0, trajectory))).body
    assert back.rows == trajectory.rows
    assert replace(back, messages=(), extra={}) == replace(trajectory, messages=(), extra={})
    assert list(back.messages) == [dict(message) for message in trajectory.messages]


def test_failures_and_mistakes_arrive_as_what_they_are():
    failed = decode(encode(RpcReply(1, error=RpcError.of(RequestRefused("no"), "agent worker 0")))).error.rebuild()
    assert (type(failed), str(failed), failed.__notes__) == (RequestRefused, "no", ["raised in agent worker 0"])
    error = ConfigError([Mistake("a.b", "is wrong", 3, "file.yaml:3", "mend it")])
    with pytest.raises(ConfigError) as caught:
        read_started(write_not_started(error, "agent worker 0"))
    assert str(caught.value) == "a.b: is wrong\n    from file.yaml:3\n    mend it"


def test_a_worker_raises_no_other_errors_than_failures():
    for kind in ("RunError", "ConfigError", "KeyboardInterrupt"):
        with pytest.raises(DecodeError, match=f"a reply with a {kind}"):
            decode(encode(RpcReply(1, error=RpcError(kind, "end of the run"))))


def test_no_bytes_are_anything_but_a_message_or_garbage():
    rng, frames = random.Random(1), [encode(message) for message in [*MESSAGES, RpcReply(0, full_trajectory())]]
    refused = 0
    for _ in range(5000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(frame))
            deed = rng.randrange(3)
            if deed == 0:
                frame[at] = rng.randrange(256)
            elif deed == 1:
                del frame[at : at + rng.randrange(1, 9)]
            else:
                frame[at:at] = rng.choice([b"[", b"null", b"1e999", b"{}", b"9" * 400, b'"', b"-1"])
            if not frame:
                break
        try:
            decode(bytes(frame))
        except DecodeError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[" * 200_000, "RecursionError"),
        (b'["RpcCancel",' + b"9" * 5000 + b",null,null]", "4300 digits"),
        (b"[" + b"[]," * 3_000_000 + b"0]", "values; at most 4,000,000 travel"),
    ],
)
def test_json_that_would_take_all_memory_or_stack_is_garbage(text, says):
    with pytest.raises(DecodeError, match=says):
        decode(struct.pack("!I", len(text)) + text)


def test_a_trajectory_that_is_too_large_fails_and_says_how_large_one_may_be(monkeypatch):
    monkeypatch.setattr(codec, "MAX_JSON_BYTES", 1 << 20)
    large = Trajectory("a", 2, (), OUTCOME, messages=({"role": "tool", "content": "x" * (2 << 20)},), attempt=1)
    small = decode(encode(RpcReply(4, large))).body
    assert (small.uid, small.sample, small.attempt, small.outcome.boundary) == ("a", 2, 1, LoopFailure.boundary)
    assert "at most 1 travel" in small.outcome.detail
