"""What a tool writes to the channel of its agent worker: never code for the driver, never the end of the run."""

import asyncio
import pickle
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.hostile import FORGERY
from tests.attacks.test_worker_processes import HOSTILE, call, outcomes, run
from tests.rollouts import engine, rollout, save_model, say
from tests.unit.test_journal_codec import full_trajectory
from treadle.config import AgentLoopConfig, FailureConfig, ModelConfig
from treadle.errors import ConfigError, LoopFailure, Mistake, RequestRefused, ToolFailure
from treadle.observe import Wait
from treadle.process import codec
from treadle.process.child_main import read_started, write_not_started
from treadle.process.codec import DecodeError
from treadle.process.launcher import SubprocessLauncher
from treadle.process.rpc import RpcCancel, RpcError, RpcNotify, RpcReply, RpcRequest
from treadle.rollout.protocol import Dropped, Job
from treadle.rollout.remote_worker import RemoteAgentWorker
from treadle.rollout.worker_process import WORKER_CODEC, AgentWorkerSetup, WaitReport
from treadle.types import Request, Row, SamplingParams, Score, Task, Timing, ToolResult, Trajectory

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


NAN, INF = float("nan"), float("inf")
ROW = full_trajectory().rows[0]
TURN = ROW.turns[0]


def with_turn(**fields: Any) -> Row:
    return replace(ROW, turns=(replace(TURN, **fields), *ROW.turns[1:]))


FORGED = {
    "a turn that starts before its row": with_turn(start=-5),
    "a turn that starts beyond its row": with_turn(start=10**7, sampled_end=10**7, end=10**7),
    "a turn that ends beyond its row": with_turn(end=10**9),
    "a turn that is sampled beyond its end": with_turn(sampled_end=4),
    "a turn that ends before it starts": with_turn(start=2, sampled_end=1),
    "a turn's reward of no number": with_turn(reward=NAN),
    "a turn's endless reward": with_turn(reward=-INF),
    "a turn of endless time": with_turn(generate_s=INF),
    "a turn of no time": with_turn(tool_s=NAN),
    "a turn that started never": with_turn(started_s=NAN),
    "a tool's reward of no number": with_turn(results=(ToolResult("2", reward=NAN),)),
    "a tool's time of no number": with_turn(results=(ToolResult("2", seconds=-INF),)),
    "an endless logprob": replace(ROW, logprobs=(-INF, -0.25, 0.0, -0.125)),
    "a logprob above 0": replace(ROW, logprobs=(0.5, -0.25, 0.0, -0.125)),
    "one logprob of a turn unknown": replace(ROW, logprobs=(NAN, -0.25, 0.0, -0.125)),
    "a logprob of what was not sampled": replace(ROW, logprobs=(-0.5, -0.25, NAN, -0.125)),
    "an endless processed logprob": replace(ROW, processed_logprobs=(INF, -0.25, 0.0, -0.125)),
    "a version before the first": replace(ROW, versions=(-2, 3, -1, 4)),
}


@pytest.mark.parametrize("row", FORGED.values(), ids=FORGED)
def test_a_row_that_no_session_makes_is_garbage(row):
    with pytest.raises(DecodeError):
        decode(encode(RpcReply(0, Trajectory("a", 0, (row,), OUTCOME))))


def test_times_of_no_number_are_garbage():
    for message in (
        RpcReply(0, Trajectory("a", 0, (), OUTCOME, timing=Timing(total_s=NAN))),
        RpcNotify(WaitReport((Wait("a", 0, "tools", INF, "x", "y"),))),
    ):
        with pytest.raises(DecodeError, match="finite"):
            decode(encode(message))


def test_rows_of_engines_that_measure_nothing_arrive():
    unmeasured = replace(ROW, logprobs=(NAN, NAN, 0.0, NAN), processed_logprobs=(-0.5, NAN, 0.0, -0.125))
    one_turn = replace(ROW, logprobs=(NAN, NAN, 0.0, -0.125))
    rounded = replace(ROW, logprobs=(1e-4, -0.25, 0.0, -0.125))
    without_turns = Row((8,), (4, 5), (1, 1), (NAN, NAN), (4, 4))
    turn = replace(TURN, start=0, sampled_end=2, end=3)
    broken_off = Row((8,), (4, 5, 6), (1, 1, 1), (NAN, NAN, NAN), (4, 4, 4), turns=(turn,))
    sent = Trajectory("a", 0, (unmeasured, one_turn, rounded, without_turns, broken_off), OUTCOME)
    back = decode(encode(RpcReply(0, sent))).body
    assert [repr(row.logprobs) for row in back.rows] == [repr(row.logprobs) for row in sent.rows]


def check(trajectory: Trajectory, vocabulary_size: int | None = 100) -> Trajectory:
    setup = AgentWorkerSetup(rollout(num_workers=1), ModelConfig(path="unused"))
    worker = RemoteAgentWorker("agent worker 0", setup, engine(), SubprocessLauncher, vocabulary_size)
    found = worker._check_result(trajectory, Job(Task("a", ()), 0, SamplingParams(1)))
    assert isinstance(found, Trajectory)
    return found


def made(row: Row = ROW, **extra: Any) -> Trajectory:
    return Trajectory("a", 0, (row,), OUTCOME, extra=extra)


@pytest.mark.parametrize(
    ("trajectory", "says"),
    [
        (made(replace(ROW, ids=(1, 2, 9, 2**31 - 1))), "token ids up to 2147483647; the model knows 0 to 99"),
        (made(replace(ROW, prompt_ids=(5, 100))), "token ids up to 100; the model knows 0 to 99"),
        (made(seats="0"), "extra['seats'] = '0'"),
        (made(seats=7), "extra['seats'] = 7"),
        (made(seats=[0, 1]), "extra['seats']"),
        (made(seats=["0"]), "extra['seats']"),
        (made(seats=[True]), "extra['seats']"),
        (made(seats=[-1]), "extra['seats']"),
        (made(row_positions=[0]), "extra['row_positions']"),
        (made(drift="much"), "extra['drift']"),
        (made(drift=NAN), "extra['drift']"),
        (made(engine_preemptions="9"), "extra['engine_preemptions']"),
        (made(engine_preemptions=10**400), "extra['engine_preemptions']"),
        (made(prompt_tokens_cut=[]), "extra['prompt_tokens_cut']"),
        (made(turn_rewards=3), "extra['turn_rewards']"),
        (made(turn_rewards=[1.0, NAN]), "extra['turn_rewards']"),
        (made(turn_rewards=[10**400]), "extra['turn_rewards']"),
    ],
)
def test_a_trajectory_that_no_session_makes_fails_and_says_why(trajectory, says):
    found = check(trajectory)
    assert (found.outcome.boundary, found.rows) == (LoopFailure.boundary, ())
    assert found.outcome.detail.startswith(f"agent worker 0 answered with {says}")


def test_a_trajectory_that_a_session_makes_is_taken():
    sent = made(
        seats=[1], drift=1.0, engine_preemptions=2, prompt_tokens_cut=4, turn_rewards=[0.5, -1e300], note="mine"
    )
    assert check(sent) is sent
    assert check(made(replace(ROW, prompt_ids=(10**6,))), None).outcome.ok, "the size of its vocabulary is not known"


def test_the_size_of_the_vocabulary_is_that_of_the_model(model, tmp_path):
    known = save_model(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')

    async def size(model: ModelConfig) -> int | None:
        worker = await RemoteAgentWorker.create(rollout=rollout(num_workers=1), model=model, engine=engine(), name="w")
        try:
            return worker._vocabulary_size
        finally:
            await worker.close()

    assert asyncio.run(size(known)) == 512
    assert asyncio.run(size(model)) is None


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        *(({"name": name}, f"session.extra['{name}']") for name in ("seats", "row_positions", "drift")),
        *(({"reward": reward}, f"finite number, got {reward!r}") for reward in (NAN, INF, "1")),
    ],
)
def test_a_loop_that_takes_a_name_or_gives_no_number_fails_by_name(kwargs, says, workers, model):
    loops = {"odd": AgentLoopConfig(path=f"{HOSTILE}:TakesOurNames", kwargs=kwargs)}
    once = FailureConfig(max_failed_fraction=1.0, session_retries=0)
    config = rollout(num_workers=workers, default_agent_loop="odd", loops=loops, failures=once)
    batch = run(config, model, say("x"))
    found = {trajectory.uid: trajectory for trajectory in batch.trajectories}
    assert found["task1"].outcome.boundary == LoopFailure.boundary
    assert says in found["task1"].outcome.detail
    assert "seats" not in found["task1"].extra
    assert found["task0"].outcome.ok and found["task2"].outcome.ok


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tool_that_gives_no_number_fails_by_name(workers, model):
    once = FailureConfig(max_failed_fraction=1.0, session_retries=0)
    config = rollout(
        num_workers=workers, default_agent_loop="tool_agent", tools=(f"{HOSTILE}:rewards_nothing",), failures=once
    )
    batch = run(config, model, call("rewards_nothing"))
    found = {trajectory.uid: trajectory for trajectory in batch.trajectories}
    assert found["task1"].outcome.boundary == ToolFailure.boundary
    assert "rewards_nothing" in found["task1"].outcome.detail and "got nan" in found["task1"].outcome.detail
    assert found["task0"].rows[0].turns[0].results[0].reward == 0.5


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
