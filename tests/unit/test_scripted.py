import asyncio
import random
import statistics
import subprocess
import sys
from typing import Any

import pytest

from tests import virtual_time
from tests.letters import STOP, ask, decode, encode, go_on
from treadle.config.rollout import ScriptedConfig
from treadle.engine.protocol import WeightUpdate
from treadle.engine.scripted import Script, ScriptedEngine
from treadle.errors import ConfigError, EngineFailure
from treadle.types import Completion, Request, StopReason


def make(script: Script | None = None, *, name: str = "s", seed: int = 1, **keys: Any) -> ScriptedEngine:
    return ScriptedEngine.create(
        ScriptedConfig(**keys), name=name, encode=encode, decode=decode, seed=seed, script=script
    )


def noise(request: Request, rng: random.Random) -> str:
    return "".join(rng.choice("xyz") for _ in range(10))


def generate(engine: ScriptedEngine, request: Request) -> Completion:
    return virtual_time.run(engine.generate(request))


def test_without_a_script_the_last_user_message_is_echoed() -> None:
    completion = generate(make(), ask("say this"))
    assert completion.text == "say this"
    assert completion.ids == (*encode("say this"), STOP)
    assert completion.stop is StopReason.STOP
    assert completion.replica == "s"


def test_without_a_conversation_the_prompt_is_echoed() -> None:
    request = Request("t", 0, (65, 66), ask().sampling)
    assert generate(make(), request).ids == (65, 66, STOP)


def test_a_script_is_found_by_import_path() -> None:
    scripted = ScriptedConfig(script="tests.unit.test_scripted:noise")
    by_path = ScriptedEngine.create(scripted, name="s", encode=encode, decode=decode, seed=1)
    assert generate(by_path, ask()) == generate(make(noise), ask())


@pytest.mark.parametrize(
    "path", ["no_such_module:f", "tests.unit.test_scripted:nothing", "just_a_word", ":f", "json:__name__"]
)
def test_a_script_that_cannot_be_found_names_the_key(path: str) -> None:
    with pytest.raises(ConfigError, match=r"\.script: "):
        ScriptedEngine.create(ScriptedConfig(script=path), name="s", encode=encode)


def test_rates_over_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="more than 1"):
        make(failure_rate=0.6, hang_rate=0.6)


def test_an_answer_ends_at_its_first_stop_token_and_the_text_with_it() -> None:
    completion = generate(make(lambda request, rng: (65, STOP, 66)), ask())
    assert completion.ids == (65, STOP) and completion.text == "A"
    completion = generate(make(lambda request, rng: f"A{chr(STOP)}B"), ask())
    assert completion.ids == (65, STOP) and completion.text == "A"


def test_without_stop_tokens_the_answer_ends_where_the_script_ends() -> None:
    completion = generate(make(lambda request, rng: "AB"), ask(stops=()))
    assert completion.ids == (65, 66) and completion.stop is StopReason.STOP


def test_an_answer_that_just_fits_is_no_length_stop() -> None:
    assert generate(make(lambda request, rng: "AB"), ask(max_tokens=3)).stop is StopReason.STOP
    cut = generate(make(lambda request, rng: "AB"), ask(max_tokens=2))
    assert cut.stop is StopReason.LENGTH and cut.ids == (65, 66) and cut.text == "AB"


def test_without_decode_text_comes_only_from_scripts_that_write_text() -> None:
    engine = ScriptedEngine.create(ScriptedConfig(), name="s", encode=encode, script=lambda request, rng: (65,))
    assert generate(engine, ask()).text == ""


def test_answers_and_logprobs_depend_on_the_key_and_nothing_else() -> None:
    request = ask(uid="u", sample=3, position=5)
    first = generate(make(noise), request)
    busy = make(noise, name="other")
    for at in range(50):
        generate(busy, ask(uid=f"v{at}"))
    again = generate(busy, request)
    assert (again.ids, again.logprobs) == (first.ids, first.logprobs)
    near = [
        ask(uid="w", sample=3, position=5),
        ask(uid="u", sample=4, position=5),
        ask(uid="u", sample=3, position=6),
        ask(uid="u", sample=3, position=5, seed=1),
    ]
    others = [generate(busy, other) for other in near]
    assert all(other.ids != first.ids and other.logprobs != first.logprobs for other in others)
    assert generate(make(noise, seed=2), request).ids != first.ids


def test_the_same_answer_in_another_process() -> None:
    program = (
        "import asyncio, tests.unit.test_scripted as t; "
        "c = asyncio.run(t.make(t.noise).generate(t.ask())); print(c.text, c.logprobs[0])"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    here = generate(make(noise), ask())
    assert there == [here.text, str(here.logprobs[0])]


def test_logprobs_are_possible_and_belong_to_positions() -> None:
    engine = make(lambda request, rng: "a" * 9000)
    whole = generate(engine, ask(max_tokens=9000))
    assert len(whole.logprobs) == 9000 and all(-3 < logprob <= 0 for logprob in whole.logprobs)
    assert generate(engine, ask(max_tokens=9000, position=4000)).logprobs[:100] == whole.logprobs[4000:4100]


def test_a_request_takes_its_latency() -> None:
    async def main() -> float:
        await make(latency_s=7.0).generate(ask())
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(7.0)


def test_the_tail_keeps_the_mean_and_the_bound() -> None:
    async def latency(engine: ScriptedEngine, at: int) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await engine.generate(ask(uid=f"t{at}"))
        return loop.time() - began

    async def main() -> list[float]:
        engine = make(latency_s=2.0, latency_tail=5.0)
        return await asyncio.gather(*(latency(engine, at) for at in range(4000)))

    times = virtual_time.run(main())
    assert statistics.mean(times) == pytest.approx(2.0, rel=0.08)
    assert 9.0 < max(times) <= 10.0 + 1e-6
    assert statistics.median(times) < 1.0, "most are quick"
    assert times == virtual_time.run(main())


def test_an_abort_keeps_the_tokens_whose_time_has_come() -> None:
    async def main() -> Completion:
        engine = make(lambda request, rng: "abcdefghi", latency_s=10.0)
        task = asyncio.ensure_future(engine.generate(ask()))
        await asyncio.sleep(4.5)
        await engine.abort("task/0")
        return await task

    completion = virtual_time.run(main())
    assert completion.text == "abcd" and completion.stop is StopReason.ABORT and len(completion.logprobs) == 4


def test_an_answer_interrupted_again_and_again_ends_as_it_would_have() -> None:
    async def main() -> tuple[Completion, list[Completion]]:
        engine = make(lambda request, rng: "".join(rng.choice("xyz") for _ in range(99)), latency_s=100.0)
        request = ask(max_tokens=80)
        whole, parts = await engine.generate(request), list[Completion]()
        for _ in range(3):
            task = asyncio.ensure_future(engine.generate(request))
            await asyncio.sleep(33.0)
            await engine.abort()
            parts.append(await task)
            request = go_on(request, parts[-1].ids)
        return whole, [*parts, await engine.generate(request)]

    whole, parts = virtual_time.run(main())
    assert [part.stop for part in parts] == [StopReason.ABORT] * 3 + [StopReason.LENGTH]
    assert tuple(at for part in parts for at in part.ids) == whole.ids
    assert tuple(logprob for part in parts for logprob in part.logprobs) == whole.logprobs


def test_an_answer_interrupted_before_its_next_token_still_ends_as_it_would_have() -> None:
    async def main() -> list[Completion]:
        engine, request, parts = make(latency_s=10.0), ask("abcdefghi"), list[Completion]()
        for wait_s in (5.5, 0.1):
            task = asyncio.ensure_future(engine.generate(request))
            await asyncio.sleep(wait_s)
            await engine.abort()
            parts.append(await task)
            request = go_on(request, parts[-1].ids)
        return [*parts, await engine.generate(request)]

    parts = virtual_time.run(main())
    assert not parts[1].ids
    assert "".join(part.text for part in parts) == "abcdefghi"


def test_another_request_of_the_session_does_not_get_the_rest() -> None:
    async def main() -> Completion:
        engine = make(latency_s=10.0)
        task = asyncio.ensure_future(engine.generate(ask("abcdefghi")))
        await asyncio.sleep(5)
        await engine.abort()
        kept = (await task).ids
        return await engine.generate(ask("something else", position=len(kept)))

    assert virtual_time.run(main()).text == "something else"


def test_failures_come_at_their_rate_and_name_the_session() -> None:
    async def main() -> int:
        engine, failed = make(failure_rate=0.3), 0
        for at in range(1000):
            try:
                await engine.generate(ask(uid=f"t{at}"))
            except EngineFailure as failure:
                assert f"t{at}/0" in str(failure) and "s:" in str(failure)
                failed += 1
        return failed

    assert 250 < virtual_time.run(main()) < 350


def test_a_failed_request_may_succeed_on_retry_and_elsewhere_with_the_same_answer() -> None:
    async def attempt(engine: ScriptedEngine, request: Request) -> str:
        try:
            return (await engine.generate(request)).text
        except EngineFailure:
            return "failed"

    async def main() -> None:
        here, there, sound = make(noise, failure_rate=0.5), make(noise, name="r", failure_rate=0.5), make(noise)
        requests = [ask(uid=f"t{at}") for at in range(60)]
        fates = [[await attempt(engine, request) for request in requests] for engine in (here, here, there)]
        assert fates[0] != fates[1] and fates[0] != fates[2]
        truth = [(await sound.generate(request)).text for request in requests]
        for row in fates:
            assert all(seen in ("failed", text) for seen, text in zip(row, truth, strict=True))

    virtual_time.run(main())


def test_a_hanging_request_ends_by_abort_or_cancel_only() -> None:
    async def main() -> None:
        engine = make(hang_rate=1.0)
        tasks = [asyncio.ensure_future(engine.generate(ask(uid=uid))) for uid in ("a", "b")]
        await asyncio.sleep(1e5)
        assert not any(task.done() for task in tasks)
        await engine.abort("a/0")
        assert (await tasks[0]).ids == ()
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert tasks[1].cancelled() and not engine._running

    virtual_time.run(main())


def test_versions_follow_updates_in_flight() -> None:
    async def main() -> Completion:
        engine = make(lambda request, rng: "abcdefghi", latency_s=10.0)
        task = asyncio.ensure_future(engine.generate(ask()))
        await asyncio.sleep(2.5)
        await engine.update_weights(WeightUpdate(1, "c", {}))
        await asyncio.sleep(4)
        await engine.update_weights(WeightUpdate(2, "c", {}))
        return await task

    assert virtual_time.run(main()).versions == (0, 0, 1, 1, 1, 1, 2, 2, 2, 2)


def test_a_checksum_is_computed_when_asked_for() -> None:
    engine = ScriptedEngine.create(
        ScriptedConfig(), name="s", encode=encode, checksum=lambda tensors: ",".join(sorted(tensors))
    )
    update = WeightUpdate(1, "other", {"b": 1, "a": 2})
    assert virtual_time.run(engine.update_weights(update)).checksum == "a,b"
