"""One model for many adapters where requests are cancelled and merges fail: nothing is computed with a mixture."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny
from treadle.config import ModelConfig, loads
from treadle.model.load import load_causal_model
from treadle.policy.network import DecoderNetwork
from treadle.tinker import adapters, futures
from treadle.tinker.adapters import AdapterBase, AdapterShape, AdapterWeights
from treadle.tinker.futures import FutureStore, OrderedRequests, PendingResult
from treadle.tinker.protobuf import Datum
from treadle.tinker.refusals import RequestFailed
from treadle.tinker.shared_model import SampleSpec, SharedModel
from treadle.tinker.trained_model import AdamParams, TrainedModel

IDS = tuple(range(5, 40))


def run(use: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(use, 60))


def adapter_with_effect(base: AdapterBase, seed: int) -> AdapterWeights:
    shape = AdapterShape(4)
    generator = torch.Generator().manual_seed(seed)

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator) * 0.3

    created = base.create(shape, seed)
    return AdapterWeights(shape, {name: (draw(part.down), draw(part.up)) for name, part in created.items()})


def weights_of(base: AdapterBase) -> dict[str, Tensor]:
    return {name: part.weight.detach().clone() for name, part in base.linears.items()}


def holds(base: AdapterBase, weights: dict[str, Tensor]) -> bool:
    return all(torch.equal(part.weight, weights[name]) for name, part in base.linears.items())


class Slow:
    """A merge that waits inside, once, until it is let go."""

    def __init__(self, base: AdapterBase) -> None:
        self.begun, self.let_go = Event(), Event()
        self._merge, self._waits = base.merge, True

    def __call__(self, adapter: AdapterWeights | None) -> bool:
        if self._waits:
            self._waits = False
            self.begun.set()
            assert self.let_go.wait(120)
        return self._merge(adapter)


def on_shared_model(use: Callable[[SharedModel], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        text = "model: {path: treadle/tiny-calculator}\nrollout: {prompt_length: 128, response_length: 128}"
        shared = await SharedModel.create(loads(text, "a test"))
        try:
            await use(shared)
        finally:
            await shared.close()

    run(main())


@pytest.mark.parametrize("times", [1, 2])
def test_a_sample_cancelled_while_its_adapter_is_merged_leaves_no_stale_keys_and_values(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(shared: SharedModel) -> None:
        adapter, spec = adapter_with_effect(shared.base, 1), SampleSpec("first", IDS, 3, 8, seed=1)
        expected = [item.logprobs for item in (await shared.sample(spec, adapter)).sequences]
        await shared.sample(SampleSpec("base", IDS, 3, 8, seed=1), None)
        slow = Slow(shared.base)
        monkeypatch.setattr(shared.base, "merge", slow)
        cancelled = asyncio.create_task(shared.sample(SampleSpec("cancelled", IDS, 3, 8, seed=1), adapter))
        assert await asyncio.to_thread(slow.begun.wait, 120)
        for _ in range(times):
            cancelled.cancel()
            await asyncio.sleep(0)
        again = asyncio.create_task(shared.sample(spec, adapter))
        slow.let_go.set()
        found = [item.logprobs for item in (await again).sequences]
        assert found == expected
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    on_shared_model(use)


def test_a_merge_that_fails_leaves_the_base_and_the_next_request_its_own_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(shared: SharedModel) -> None:
        first, second = adapter_with_effect(shared.base, 1), adapter_with_effect(shared.base, 2)
        spec = SampleSpec("spec", IDS, 3, 8, seed=1)
        expected = [item.logprobs for item in (await shared.sample(spec, first)).sequences]
        names = list(second.factors)
        broken = {**second.factors, names[-1]: (torch.ones(1, 1), torch.ones(1, 1))}
        with pytest.raises(RuntimeError):
            await shared.sample(spec, AdapterWeights(second.shape, broken))
        assert shared.base.merged is None
        found = [item.logprobs for item in (await shared.sample(spec, first)).sequences]
        assert found == expected

    on_shared_model(use)


def tiny_base(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> AdapterBase:
    tiny("qwen3", **changes).save_pretrained(directory)
    config = ModelConfig(path=str(directory))
    return AdapterBase(load_causal_model(config, dtype=dtype, device=torch.device("cpu"), longest=64))


def test_the_checksum_of_a_base_is_the_same_in_fp32_and_bf16_and_names_its_weights(tmp_path: Path) -> None:
    wide, narrow = tiny_base(tmp_path), tiny_base(tmp_path, torch.bfloat16)
    assert wide.checksum == narrow.checksum != tiny_base(tmp_path, seed=1).checksum


def test_a_merge_that_runs_out_of_memory_restores_every_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base(tmp_path)
    frozen = weights_of(base)
    old, new = adapter_with_effect(base, 1), adapter_with_effect(base, 2)
    base.merge(old)
    merge_factors, calls = adapters.merge_factors, list[int]()

    def fails_at_the_fifth(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no room")
        return merge_factors(*args)

    monkeypatch.setattr(adapters, "merge_factors", fails_at_the_fifth)
    with pytest.raises(torch.OutOfMemoryError):
        base.merge(new)
    assert base.merged is None and holds(base, frozen)


def datum(seed: int, **changes: Tensor) -> Datum:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 96, (40,), generator=generator)
    return Datum(ids, {"target_tokens": ids.roll(-1), **changes})


def test_a_forward_backward_that_fails_midway_leaves_no_gradients_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base(tmp_path)
    network = DecoderNetwork(base.module)
    trained = TrainedModel(base, network, AdapterShape(4), seed=3)
    base.merge(trained.weights)

    def forward(*data: Datum, loss_fn: str = "cross_entropy", backward: bool = True) -> None:
        trained.forward(data, loss_fn, {}, longest=64, backward=backward, recompute=False)

    forward(datum(1))
    with pytest.raises(RequestFailed, match="is not supported"):
        forward(datum(2), loss_fn="unknown")
    assert trained.has_gradients, "nothing was computed: the gradients stay"
    logprobs, calls = network.logprobs, list[int]()

    def fails_at_the_second(*args: Any) -> Any:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise torch.OutOfMemoryError("no room")
        return logprobs(*args)

    monkeypatch.setattr(network, "logprobs", fails_at_the_second)
    monkeypatch.setattr("treadle.tinker.trained_model.TOKENS_PER_FORWARD", 40)
    with pytest.raises(torch.OutOfMemoryError):
        forward(datum(2), datum(3), backward=False)
    assert trained.has_gradients, "a forward alone has none to lose"
    calls.clear()
    with pytest.raises(RequestFailed, match=r"no room.*gradients since the last optim_step are gone"):
        forward(datum(2), datum(3))
    assert all(not adapter.up.grad.any() for adapter in trained._adapters.values() if adapter.up.grad is not None)
    with pytest.raises(RequestFailed, match="has no gradients"):
        trained.step(AdamParams())
    monkeypatch.undo()
    forward(datum(4))
    norm = trained.step(AdamParams())["grad_norm"]
    fresh = TrainedModel(base, network, AdapterShape(4), seed=3)
    base.merge(fresh.weights)
    fresh.forward([datum(4)], "cross_entropy", {}, longest=64, backward=True, recompute=False)
    assert fresh.step(AdamParams())["grad_norm"] == norm


class Queue:
    """A model's requests, which note their number when they run, and wait until they are let go."""

    def __init__(self) -> None:
        self.store = FutureStore()
        self.requests = OrderedRequests(self.store, first=1)
        self.ran: list[int] = []
        self.let_go, self.begun = asyncio.Event(), asyncio.Event()

    def submit(self, number: int) -> PendingResult:
        entry = self.store.add(str(number), "owner")

        async def work() -> dict[str, Any]:
            self.ran.append(number)
            self.begun.set()
            await self.let_go.wait()
            return {}

        self.requests.submit(number, entry, work)
        return entry


def test_requests_that_are_cancelled_or_forgotten_while_they_wait_never_run() -> None:
    async def main() -> None:
        queue = Queue()
        entries = [queue.submit(number) for number in (1, 2, 3, 4)]
        await queue.begun.wait()
        queue.store.cancel("1")  # runs, and goes to its end: others have been promised what it leaves
        queue.store.cancel("3")
        assert entries[2].failure is not None and "cancelled" in entries[2].failure.reason
        queue.let_go.set()
        await entries[3].done.wait()
        assert queue.ran == [1, 2, 4] and entries[0].failure is None
        started = queue.store.add("sample", "owner")
        queue.store.start(started, lambda: asyncio.sleep(3600, {}))
        queue.store.cancel("sample")  # before its first step
        await started.done.wait()

    run(main())


def test_requests_after_an_expired_gap_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        queue = Queue()
        queue.let_go.set()
        await queue.submit(1).done.wait()
        late = [queue.submit(3), queue.submit(4)]
        monkeypatch.setattr(futures, "GAP_TIMEOUT_S", -1.0)
        queue.requests.expire()
        assert all(entry.failure is not None and "request 2 " in entry.failure.reason for entry in late)
        after = queue.submit(5)
        await after.done.wait()
        assert after.failure is None and queue.ran == [1, 5]
        with pytest.raises(futures.ApiError, match="seq_id 2 is of the past"):
            queue.submit(2)

    run(main())
