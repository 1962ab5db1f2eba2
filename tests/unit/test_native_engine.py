"""The native engine's own promises; what all engines share is in tests/contract."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from tests.tiny import VOCABULARY, tiny
from treadle.config import ModelConfig, RolloutConfig
from treadle.engine.native.engine import NativeEngine
from treadle.engine.protocol import ConfirmedWeights, WeightUpdate
from treadle.engine.remote import EngineCall, EngineServer
from treadle.errors import ConfigError, EngineFailure, MisuseError, RequestRefused
from treadle.model.checksum import checksum
from treadle.types import Request, SamplingParams, StopReason
from treadle.weights.transfer import TensorSpec

ROLLOUT = RolloutConfig(prompt_length=20, response_length=30, max_num_seqs=16)


def ask(ids: tuple[int, ...] = (5, 6, 7), *, uid: str = "a", tokens: int = 8, stops: tuple[int, ...] = ()) -> Request:
    return Request(uid, 0, ids, SamplingParams(tokens, stop_token_ids=stops))


def play(
    body: Callable[[NativeEngine], Awaitable[None]],
    module: torch.nn.Module | None = None,
    rollout: RolloutConfig = ROLLOUT,
) -> None:
    async def main() -> None:
        engine = await NativeEngine.create(rollout, module or tiny())
        try:
            async with asyncio.timeout(20):
                await body(engine)
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (ask(()), "0 tokens"),
        (ask((1,) * 50), "50 tokens"),
        (ask((1, VOCABULARY)), "knows 0 to 95"),
        (ask((-1, 2)), "from -1"),
        (ask(tokens=0), "max_tokens 0"),
        (ask(stops=tuple(range(17))), "17 stop tokens"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_by_themselves(request_: Request, problem: str) -> None:
    async def body(engine: NativeEngine) -> None:
        with pytest.raises(RequestRefused, match=problem):
            await engine.generate(request_)
        assert (await engine.generate(ask())).ids

    play(body)


def test_the_longest_sequence_ends_a_request() -> None:
    async def body(engine: NativeEngine) -> None:
        completion = await engine.generate(ask((1,) * 45, tokens=30))
        assert len(completion.ids) == 5 and completion.stop is StopReason.LENGTH

    play(body)


def test_a_crash_of_the_thread_fails_everyone_with_its_cause() -> None:
    module = tiny()

    async def body(engine: NativeEngine) -> None:
        await engine.health()
        module.register_forward_pre_hook(lambda *_: None)
        module.model.register_forward_pre_hook(lambda *_: 1 / 0)
        results = await asyncio.gather(*(engine.generate(ask(uid=f"t{at}")) for at in range(4)), return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineFailure) and "ZeroDivisionError: division by zero" in str(result)
        with pytest.raises(EngineFailure, match="ZeroDivisionError"):
            await engine.health()
        with pytest.raises(EngineFailure, match="ZeroDivisionError"):
            await engine.generate(ask())

    play(body, module)


def test_new_weights_are_copied_confirmed_and_used() -> None:
    other = tiny(seed=9)

    async def body(engine: NativeEngine) -> None:
        before = await engine.generate(ask())
        tensors = dict(other.named_parameters())
        known = checksum(tensors)
        assert (await engine.update_weights(WeightUpdate(1, known, tensors))).checksum == known
        after = await engine.generate(ask())
        assert after.ids != before.ids and set(after.versions) == {1}
        fresh = await NativeEngine.create(ROLLOUT, other, version=1)
        assert await fresh.generate(ask()) == after, "nothing that the old weights computed is left"
        await fresh.close()

    play(body)


class Passing(dict[str, torch.Tensor]):
    """Tensors from elsewhere: each is gone when the next one comes."""

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        for name in self:
            tensor = self[name].clone()
            yield name, tensor
            tensor.zero_()


def test_weights_that_pass_by_are_read_once() -> None:
    other = tiny(seed=9)

    async def body(engine: NativeEngine) -> None:
        tensors = dict(other.named_parameters())
        known = checksum(tensors)
        update = WeightUpdate(1, known, MappingProxyType(Passing(tensors)))
        assert (await engine.update_weights(update)).checksum == known

    play(body)


class Slow:
    """A map of weights whose tensors arrive once `arrived` is set; and the thread that read them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.asked, self.arrived = threading.Event(), threading.Event()
        self.reader, self.reads = "", 0

    def batches(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        self.reader, self.reads = threading.current_thread().name, self.reads + 1
        self.asked.set()
        assert self.arrived.wait(20), "nobody let the weights in"
        yield list(self._tensors.items())


def test_sampling_goes_on_while_new_weights_arrive_and_every_token_has_its_version() -> None:
    other = dict(tiny(seed=5).named_parameters())

    async def body(engine: NativeEngine) -> None:
        slow, seen = Slow(other), asyncio.Event()
        long = [asyncio.ensure_future(sample_on(engine, f"long-{at}", seen)) for at in range(2)]
        await seen.wait()
        push = asyncio.ensure_future(engine.update_weights(WeightUpdate(1, checksum(other), slow)))
        await asyncio.to_thread(slow.asked.wait, 20)
        early = await engine.generate(ask(uid="early"))
        assert set(early.versions) == {0}, "it was sampled to its end before the weights were there"
        slow.arrived.set()
        assert (await push).checksum == checksum(other) and slow.reader != engine.name
        assert set((await engine.generate(ask(uid="late"))).versions) == {1}
        for task in long:
            task.cancel()

    play(body)


@pytest.mark.parametrize("overlaps", [True, False])
def test_an_update_tells_how_long_nothing_was_sampled(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    """Tensors that arrive beside the old ones cost no pause; those that are copied straight into place do."""
    now, other = 0.0, dict(tiny(seed=5).named_parameters())
    monkeypatch.setattr("treadle.engine.native.scheduler.perf_counter", lambda: now)

    class Late(Slow):
        def batches(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
            nonlocal now
            now += 2.5
            yield from super().batches()

    async def body(engine: NativeEngine) -> None:
        late, seen = Late(other), asyncio.Event()
        late.arrived.set()
        long = asyncio.ensure_future(sample_on(engine, "long", seen))
        await seen.wait()
        confirmed = await engine.update_weights(WeightUpdate(1, "", late))  # type: ignore[arg-type]
        assert confirmed == ConfirmedWeights(checksum(other), 0.0 if overlaps else 2.5)
        long.cancel()

    play(body, rollout=RolloutConfig(**{**ROLLOUT.values(), "overlap_weight_updates": overlaps}))


def test_weights_that_find_no_room_beside_the_old_ones_are_copied_into_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = dict(tiny(seed=5).named_parameters())

    def full(*arguments: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    async def body(engine: NativeEngine) -> None:
        slow, seen = Slow(other), asyncio.Event()
        slow.arrived.set()
        long = asyncio.ensure_future(sample_on(engine, "long", seen))
        await seen.wait()
        with monkeypatch.context() as patch:
            patch.setattr("treadle.engine.native.engine._room_for", full)
            known = checksum(other)
            assert (await engine.update_weights(WeightUpdate(1, known, slow))).checksum == known  # type: ignore[arg-type]
        assert slow.reader == engine.name and slow.reads == 1
        assert "no room for them beside the old ones (CUDA out of memory" in caplog.text
        assert set((await engine.generate(ask(uid="late"))).versions) == {1}
        long.cancel()

    play(body)


def test_memory_that_torch_keeps_unused_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny()
    size = sum(parameter.nbytes for parameter in module.parameters())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size // 2, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * size)
    allocated = 4 * size
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)

    async def body(engine: NativeEngine) -> None:
        nonlocal allocated
        shown = SimpleNamespace(device=torch.device("cuda"), parameters=module.parameters)
        monkeypatch.setattr(engine, "_module", shown)
        assert engine._can_stage(Slow({}))  # type: ignore[arg-type]
        allocated = 5 * size
        assert not engine._can_stage(Slow({}))  # type: ignore[arg-type]

    play(body, module)


async def sample_on(engine: NativeEngine, uid: str, seen: asyncio.Event) -> None:
    """Turn after turn, so that the engine is busy."""
    while True:
        await engine.generate(ask(uid=uid, tokens=30))
        seen.set()


def test_an_engine_that_slept_serves_as_before() -> None:
    async def body(engine: NativeEngine) -> None:
        before = await engine.generate(ask())
        await engine.sleep(level=2)
        assert await engine.generate(ask()) == before

    play(body)


def test_a_shared_module_only_confirms() -> None:
    module = tiny()

    async def body(engine: NativeEngine) -> None:
        before = await engine.generate(ask())
        await engine.pause()
        with torch.no_grad():
            for weight in module.parameters():
                weight.mul_(1.5)
        known = checksum(dict(module.named_parameters()))
        assert (await engine.update_weights(WeightUpdate(1, known, {}))).checksum == known
        await engine.resume()
        assert (await engine.generate(ask())).logprobs != before.logprobs

    play(body, module)


@pytest.mark.parametrize("tensors", [{"nobody.weight": torch.zeros(1)}, {"lm_head.weight": torch.zeros(3, 3)}])
def test_weights_that_do_not_fit_are_refused_and_change_nothing(tensors: dict[str, torch.Tensor]) -> None:
    async def body(engine: NativeEngine) -> None:
        before = await engine.generate(ask())
        with pytest.raises(MisuseError, match=next(iter(tensors))):
            await engine.update_weights(WeightUpdate(1, "", tensors))
        assert engine.version == 0
        assert await engine.generate(ask()) == before

    play(body)


class BreakingOff:
    """Weights that arrive in two batches, of which the second is lost with the sender; they wait for `go` first."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = list(tensors.items())
        self.asked, self.go = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return len(self._tensors)

    def batches(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        self.asked.set()
        assert self.go.wait(20), "nobody let the weights in"
        yield self._tensors[: len(self) // 2]
        raise EngineFailure("the sender of the weights has gone")


def test_weights_that_break_off_halfway_sample_nothing_until_a_whole_update_has_come() -> None:
    other = dict(tiny(seed=9).named_parameters())
    waits = RolloutConfig(**{**ROLLOUT.values(), "overlap_weight_updates": False})

    async def body(engine: NativeEngine) -> None:
        seen, broken = asyncio.Event(), BreakingOff(other)
        running = asyncio.ensure_future(sample_on(engine, "running", seen))
        await seen.wait()
        push = asyncio.ensure_future(engine.update_weights(WeightUpdate(1, "", broken)))  # type: ignore[arg-type]
        await asyncio.to_thread(broken.asked.wait, 20)
        behind = asyncio.ensure_future(engine.generate(ask(uid="behind")))
        await asyncio.sleep(0)
        broken.go.set()
        with pytest.raises(
            EngineFailure, match=r"version 1 broke off after \d+ of \d+ tensors.*the sender .* has gone"
        ):
            await push
        for request in (running, behind, engine.generate(ask(uid="new"))):
            with pytest.raises(EngineFailure, match="broke off"):
                await request
        with pytest.raises(EngineFailure, match="broke off"):
            await engine.health()
        assert engine.version == 0
        known = checksum(other)
        assert (await engine.update_weights(WeightUpdate(2, known, other))).checksum == known
        await engine.health()
        mended = await engine.generate(ask())
        fresh = await NativeEngine.create(ROLLOUT, tiny(seed=9), version=2)
        assert await fresh.generate(ask()) == mended, "nothing of the half update is left"
        await fresh.close()

    play(body, rollout=waits)


def test_an_engine_process_with_half_new_weights_can_serve_no_more() -> None:
    async def body(engine: NativeEngine) -> None:
        server, broken = EngineServer(engine), BreakingOff(dict(tiny(seed=9).named_parameters()))
        broken.go.set()
        with pytest.raises(EngineFailure, match="broke off"):
            await server.handle(EngineCall("update_weights", (WeightUpdate(1, "", broken),)))  # type: ignore[arg-type]
        with pytest.raises(EngineFailure, match=r"can serve no more.*broke off"):
            await server.broken()

    play(body)


class Described:
    """Weights that tell their shapes before they arrive, one of them wrong."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
        self.specs[-1] = self.specs[-1]._replace(shape=(3, 3))

    def batches(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield from ([pair] for pair in self._tensors.items())


def test_shapes_are_checked_before_the_first_tensor_is_copied() -> None:
    other = Described(dict(tiny(seed=9).named_parameters()))

    async def body(engine: NativeEngine) -> None:
        before = await engine.generate(ask())
        with pytest.raises(MisuseError, match=rf"{other.specs[-1].name}.*\(3, 3\) came"):
            await engine.update_weights(WeightUpdate(1, "", other))  # type: ignore[arg-type]
        await engine.health()
        assert await engine.generate(ask()) == before

    play(body)


def test_an_engine_loads_its_model_itself(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)

    async def main() -> None:
        engine = await NativeEngine.create(ROLLOUT, ModelConfig(path=str(tmp_path)))
        shared = await NativeEngine.create(ROLLOUT, tiny())
        assert await engine.generate(ask()) == await shared.generate(ask())
        await engine.close()
        await shared.close()

    asyncio.run(main())


def test_slots_that_do_not_fit_into_memory_are_a_mistake_in_the_config() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"rollout\.max_model_len"):
            await NativeEngine.create(RolloutConfig(max_model_len=1 << 32), tiny())

    asyncio.run(main())


def test_a_forgotten_session_is_served_from_the_start() -> None:
    async def body(engine: NativeEngine) -> None:
        first = await engine.generate(ask())
        engine.forget("a/0")
        second = await engine.generate(ask((5, 6, 7, *first.ids, 3)))
        assert second.ids

    play(body)
