"""What every engine promises, whatever it is made of.

To add an engine, add a `Stage` to `STAGES`: how to open one, which loop runs it, and what it cannot do.
A request made by `long` runs until it is ended; one made by `short` ends soon.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tests import virtual_time
from tests.fake_endpoint import FakeEndpoint
from tests.letters import STOP, ask, decode, encode, go_on
from treadle.config.rollout import FailureConfig, LimitsConfig, OpenAIConfig, RolloutConfig, ScriptedConfig
from treadle.engine.native.engine import NativeEngine
from treadle.engine.openai_client import OpenAIEngine
from treadle.engine.protocol import Engine, WeightUpdate
from treadle.engine.remote import RemoteEngine
from treadle.engine.replica_supervisor import ReplicaSupervisor
from treadle.engine.router import Router
from treadle.engine.scripted import ScriptedEngine
from treadle.errors import EngineFailure, MisuseError
from treadle.types import Completion, Request, StopReason

Body = Callable[[Engine], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Stage:
    """Where an engine is put to the test."""

    open: Callable[[], AbstractAsyncContextManager[Engine]]
    run: Callable[[Coroutine[Any, Any, None]], None]
    settle_s: float
    """Time after which something wrong would have happened; and after which a request without a model surely runs."""
    keeps_tokens: bool = True
    takes_weights: bool = True
    has_model: bool = False

    def play(self, body: Body) -> None:
        async def main() -> None:
            async with self.open() as engine:
                try:
                    await body(engine)
                finally:
                    await engine.close()

        self.run(main())

    async def settle(self) -> None:
        await asyncio.sleep(self.settle_s)

    async def sampled(self, engine: Engine) -> None:
        """Until each request made before has a token: one of a single token, made after them, has been answered."""
        if self.has_model:
            await asyncio.ensure_future(engine.generate(short("behind", max_tokens=1)))
        else:
            await self.settle()


def letters(request: Request, rng: random.Random) -> str:
    length = 12 if request.sampling.max_tokens < 100 else 200
    return "".join(rng.choice("abcdefgh") for _ in range(length))


def scripted(name: str) -> ScriptedEngine:
    return ScriptedEngine.create(
        ScriptedConfig(latency_s=100.0), name=name, encode=encode, decode=decode, seed=7, script=letters
    )


@asynccontextmanager
async def open_scripted() -> AsyncIterator[Engine]:
    yield scripted("scripted-0")


@asynccontextmanager
async def open_router() -> AsyncIterator[Engine]:
    replicas = [scripted("scripted-0"), scripted("scripted-1")]
    yield Router(replicas, limits=LimitsConfig(), failures=FailureConfig(), rng=random.Random(0))


@asynccontextmanager
async def open_openai() -> AsyncIterator[Engine]:
    with FakeEndpoint() as endpoint:
        endpoint.delay_s = lambda body: 30.0 if body["max_tokens"] >= 100 else 0.0
        yield await OpenAIEngine.create(OpenAIConfig(base_url=endpoint.base_url), RolloutConfig(), encode=encode)


def slow_letters() -> PreTrainedModel:
    """A model that writes letters by chance, takes its time, and stops when the text has a certain length."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=600, n_embd=32, n_layer=1, n_head=2, eos_token_id=STOP)
    module = GPT2LMHeadModel(config).eval()
    enough = len("hello") - 1 + 14
    with torch.no_grad():
        words, places = module.transformer.wte.weight, module.transformer.wpe.weight
        words[STOP] = torch.linspace(-1, 1, 32)
        places[:enough] -= words[STOP]
        places[enough:] += 10 * words[STOP]
    module.transformer.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    return module


@asynccontextmanager
async def open_native() -> AsyncIterator[Engine]:
    rollout = RolloutConfig(prompt_length=32, response_length=512, max_num_seqs=48)
    yield await NativeEngine.create(rollout, slow_letters(), decode=decode, checksum=lambda tensors: "checksum")


async def start_native() -> Engine:
    """In a process of its own."""
    async with open_native() as engine:
        return engine


@asynccontextmanager
async def open_apart() -> AsyncIterator[Engine]:
    yield await RemoteEngine.create(start_native, name="apart-0", limits=LimitsConfig())


@asynccontextmanager
async def open_steady() -> AsyncIterator[Engine]:
    start = partial(RemoteEngine.create, start_native, name="steady-0", limits=LimitsConfig())
    yield await ReplicaSupervisor(1).add("steady-0", start)


STAGES = {
    "scripted": Stage(open_scripted, virtual_time.run, settle_s=40.0),
    "router": Stage(open_router, virtual_time.run, settle_s=40.0),
    "native": Stage(open_native, asyncio.run, settle_s=0.12, has_model=True),
    "apart": Stage(open_apart, asyncio.run, settle_s=0.12, has_model=True),
    "steady": Stage(open_steady, asyncio.run, settle_s=0.12, has_model=True),
    "openai": Stage(open_openai, asyncio.run, settle_s=0.05, keeps_tokens=False, takes_weights=False),
}


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest) -> Stage:
    return STAGES[request.param]


def short(uid: str = "task", sample: int = 0, max_tokens: int = 16) -> Request:
    return ask(uid=uid, sample=sample, max_tokens=max_tokens)


def long(uid: str = "task", sample: int = 0, max_tokens: int = 500) -> Request:
    """No token ends it, so that with a model which takes 0.02 s for each it surely runs for ten seconds."""
    return ask(uid=uid, sample=sample, max_tokens=max_tokens, stops=())


def check(completion: Completion, request: Request) -> None:
    """What holds for any completion."""
    assert len(completion.ids) == len(completion.logprobs) == len(completion.versions)
    assert len(completion.ids) <= request.sampling.max_tokens
    assert completion.stop in (StopReason.STOP, StopReason.LENGTH, StopReason.ABORT)
    if completion.stop is StopReason.LENGTH:
        assert len(completion.ids) == request.sampling.max_tokens
    assert not {*request.sampling.stop_token_ids} & {*completion.ids[:-1]}


async def ended(task: "asyncio.Task[Completion]") -> Completion:
    """What a task returned; not to return soon is a failure."""
    async with asyncio.timeout(60):
        return await task


def test_a_completion_is_whole(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        request = short()
        completion = await engine.generate(request)
        check(completion, request)
        assert completion.ids and completion.stop is StopReason.STOP
        assert completion.replica
        assert set(completion.versions) == {engine.version}
        assert decode(completion.ids).startswith(completion.text) and completion.text

    stage.play(body)


@pytest.mark.parametrize("limit", [1, 5])
def test_the_token_limit_is_kept_and_reported(stage: Stage, limit: int) -> None:
    async def body(engine: Engine) -> None:
        request = short(max_tokens=limit)
        completion = await engine.generate(request)
        check(completion, request)
        assert completion.stop is StopReason.LENGTH

    stage.play(body)


def test_a_request_gets_the_same_answer_alone_and_among_others(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        alone = await engine.generate(short("x"))
        crowd = [short(f"t{at}") for at in range(20)] + [short("x")] + [short(f"u{at}") for at in range(20)]
        together = await asyncio.gather(*(engine.generate(request) for request in crowd))
        assert together[20].ids == alone.ids and together[20].text == alone.text
        assert len({completion.ids for completion in together}) == len(crowd), "samples differ from each other"

    stage.play(body)


def test_samples_of_one_task_differ(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        first, second = await engine.generate(short(sample=0)), await engine.generate(short(sample=1))
        assert first.ids != second.ids

    stage.play(body)


def test_abort_ends_one_session_and_leaves_the_others(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        async with asyncio.TaskGroup() as group:
            mine = group.create_task(engine.generate(long("mine")))
            other = group.create_task(engine.generate(long("other")))
            await stage.sampled(engine)
            await engine.abort("mine/0")
            completion = await ended(mine)
            check(completion, long())
            assert completion.stop is StopReason.ABORT
            assert bool(completion.ids) is stage.keeps_tokens
            assert not other.done()
            await engine.abort()
            assert (await ended(other)).stop is StopReason.ABORT

    stage.play(body)


def test_abort_with_nothing_to_abort_is_harmless(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        await engine.abort()
        await engine.abort("nobody/0")
        assert (await engine.generate(short())).stop is StopReason.STOP

    stage.play(body)


def test_an_interrupted_answer_goes_on_as_if_nothing_had_happened(stage: Stage) -> None:
    if not stage.keeps_tokens:
        pytest.skip("this engine keeps no tokens of an aborted request")

    async def body(engine: Engine) -> None:
        request = long(max_tokens=100)
        whole = await engine.generate(request)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(request))
            await stage.sampled(engine)
            await engine.abort()
            first = await ended(task)
        rest = await engine.generate(go_on(request, first.ids))
        assert first.ids and rest.ids
        assert first.ids + rest.ids == whole.ids
        assert first.logprobs + rest.logprobs == whole.logprobs

    stage.play(body)


def test_pause_ends_what_runs_and_holds_what_comes(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.generate(long("running")))
            await stage.sampled(engine)
            await engine.pause()
            await engine.pause()
            assert (await ended(running)).stop is StopReason.ABORT
            held = group.create_task(engine.generate(short("held")))
            await asyncio.sleep(5 * stage.settle_s)
            assert not held.done()
            await engine.resume()
            await engine.resume()
            assert (await held).stop is StopReason.STOP

    stage.play(body)


def test_a_held_request_can_be_aborted(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        await engine.pause()
        async with asyncio.TaskGroup() as group:
            held = [group.create_task(engine.generate(short(uid))) for uid in ("a", "b")]
            await stage.settle()
            await engine.abort("a/0")
            completion = await ended(held[0])
            assert completion.stop is StopReason.ABORT and completion.ids == ()
            assert not held[1].done()
            await engine.resume()
            assert (await held[1]).stop is StopReason.STOP

    stage.play(body)


def test_a_cancelled_request_leaves_nothing_behind(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        tasks = [asyncio.ensure_future(engine.generate(long(f"t{at}"))) for at in range(5)]
        await stage.sampled(engine)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        if isinstance(engine, Router):
            assert [state.in_flight for state in engine.snapshot()] == [0, 0]
        assert (await engine.generate(short())).stop is StopReason.STOP

    stage.play(body)


def test_a_held_request_can_be_cancelled(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        await engine.pause()
        held = asyncio.ensure_future(engine.generate(short()))
        await stage.settle()
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        await engine.resume()
        assert (await engine.generate(short())).stop is StopReason.STOP

    stage.play(body)


def test_an_engine_that_serves_is_healthy(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        await engine.health()

    stage.play(body)


def test_new_weights_are_confirmed_and_show_in_the_versions(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        update = WeightUpdate(engine.version + 1, "checksum", {})
        if not stage.takes_weights:
            with pytest.raises(MisuseError, match="cannot be changed"):
                await engine.update_weights(update)
            return
        assert (await engine.update_weights(update)).checksum == "checksum"
        assert engine.version == update.version
        assert set((await engine.generate(short())).versions) == {update.version}

    stage.play(body)


def test_each_token_carries_the_version_that_sampled_it(stage: Stage) -> None:
    if not stage.takes_weights:
        pytest.skip("this engine's weights never change")

    async def body(engine: Engine) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(long()))
            await stage.sampled(engine)
            await engine.update_weights(WeightUpdate(5, "checksum", {}))
            await stage.sampled(engine)
            await engine.abort()
        versions = task.result().versions
        assert set(versions) == {0, 5} and list(versions) == sorted(versions)

    stage.play(body)


def test_close_ends_everything(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.generate(long()))
            await stage.sampled(engine)
            await engine.close()
            assert (await ended(running)).stop is StopReason.ABORT
        with pytest.raises(EngineFailure, match="closed"):
            await engine.generate(short())
        await engine.close()

    stage.play(body)


def test_closing_does_not_leave_held_requests_waiting(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        await engine.pause()
        held = asyncio.ensure_future(engine.generate(short()))
        await stage.settle()
        await engine.close()
        with pytest.raises(EngineFailure, match="closed"):
            await ended(held)

    stage.play(body)


def with_sampling(request: Request, **fields: Any) -> Request:
    return replace(request, sampling=replace(request.sampling, **fields))


def test_a_stop_string_ends_the_answer_after_the_token_that_completes_it(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        whole = await engine.generate(short())
        stop = whole.text[4:6]
        request = with_sampling(short(), stop=(stop, "never said"))
        found = await engine.generate(request)
        check(found, request)
        assert found.stop is StopReason.STOP
        assert found.text == whole.text[: whole.text.index(stop)]
        if stage.keeps_tokens:
            end = whole.text.index(stop) + len(stop)
            assert found.ids == whole.ids[:end] and found.logprobs == whole.logprobs[:end]

    stage.play(body)


def test_a_stop_string_is_found_across_an_interruption(stage: Stage) -> None:
    if not stage.has_model:
        pytest.skip("this engine goes on only with what it was interrupted in")

    async def body(engine: Engine) -> None:
        whole = await engine.generate(short())
        request = with_sampling(short(), stop=(whole.text[4:7],))
        end = whole.text.index(request.sampling.stop[0])
        rest = await engine.generate(go_on(request, whole.ids[: end + 1]))
        assert rest.ids == whole.ids[end + 1 : end + 3] and rest.stop is StopReason.STOP

    stage.play(body)


def test_tokens_are_told_while_they_are_sampled_where_an_engine_can(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        told: list[tuple[int, tuple[int, ...]]] = []
        asked = ask(max_tokens=140, stops=())  # vLLM tells 32 at a time
        request = replace(asked, on_tokens=lambda start, ids: told.append((start, ids)))
        whole = await engine.generate(request)
        assert whole.ids == (await engine.generate(asked)).ids, "it changes nothing about the answer"
        assert [start for start, _ in told] == [sum(len(ids) for _, ids in told[:at]) for at in range(len(told))]
        early = tuple(token for _, ids in told for token in ids)
        assert whole.ids[: len(early)] == early
        assert len(told) > 3 if stage.has_model else not told
        if stage.has_model:
            told.clear()
            rest = await engine.generate(go_on(request, whole.ids[:3]))
            assert told[0][0] == 3 and rest.ids[: len(told[0][1])] == told[0][1], (
                "counted from the answer's first token"
            )

    stage.play(body)


def test_rows_and_attempts_draw_their_own_noise(stage: Stage) -> None:
    async def body(engine: Engine) -> None:
        requests = [replace(short(), row=row, attempt=attempt) for row in (0, 1) for attempt in (0, 1)]
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert len({answer.ids for answer in answers}) == 4

    stage.play(body)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.6},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0.4, "model_temperature": 1.0},
        {"temperature": 0.0, "model_temperature": 1.0, "top_k": 5},
    ],
)
def test_both_logprobs_are_reported_where_the_draw_is_not_from_the_whole_softmax(
    stage: Stage, fields: dict[str, Any]
) -> None:
    if not stage.has_model:
        pytest.skip("this engine has no distribution")

    async def body(engine: Engine) -> None:
        plain = await engine.generate(short())
        assert plain.processed_logprobs == ()
        request = with_sampling(short(), **fields)
        found = await engine.generate(request)
        assert len(found.processed_logprobs) == len(found.ids)
        assert all(value <= 1e-6 for value in found.processed_logprobs)
        if "penalty" not in str(fields) and fields.get("temperature", 1.0) == 1.0:
            pairs = zip(found.processed_logprobs, found.logprobs, strict=True)
            assert all(processed >= full - 1e-5 for processed, full in pairs), "what is left weighs more"
        first = await engine.generate(with_sampling(request, max_tokens=3))
        rest = await engine.generate(go_on(request, first.ids))
        assert first.ids + rest.ids == found.ids
        assert first.processed_logprobs + rest.processed_logprobs == pytest.approx(found.processed_logprobs, abs=1e-5)

    stage.play(body)


def test_a_repetition_penalty_is_felt(stage: Stage) -> None:
    if not stage.has_model:
        pytest.skip("this engine has no distribution")

    async def body(engine: Engine) -> None:
        request = with_sampling(short(), repetition_penalty=1e6, temperature=0.0, stop_token_ids=())
        found = await engine.generate(request)
        assert len(set(found.ids)) == len(found.ids) == 16 and not {*found.ids} & {*encode("hello")}

    stage.play(body)
