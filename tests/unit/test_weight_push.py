import asyncio
import time
from dataclasses import replace

import pytest
import torch

from tests import virtual_time
from tests.breakable import BreakableEngine, replica, router
from tests.configs import training_config
from tests.letters import decode, encode
from tests.policies import make_policy, save_tiny_model
from treadle.config.rollout import OnWeightUpdate, ScriptedConfig
from treadle.engine.protocol import ConfirmedWeights, WeightUpdate
from treadle.engine.router import Router
from treadle.errors import DeadlineError, EnginesLost, RunError
from treadle.model.checksum import checksum
from treadle.policy.policy import SinglePolicy
from treadle.weights import PolicySender, WeightSync


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> SinglePolicy:
    return make_policy(save_tiny_model(tmp_path_factory.mktemp("model")))


class Receiver:
    """The receiving half of an engine: keeps what arrives, in its own memory."""

    name = "replica-0"

    def __init__(self, own: dict[str, torch.Tensor] | None = None, flip: bool = False, hang: bool = False) -> None:
        self._own = own
        self._flip = flip
        self._hang = hang
        self.update: WeightUpdate | None = None

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        self.update = update
        if self._hang:
            await asyncio.Event().wait()
        held = {name: tensor.clone() for name, tensor in update.tensors.items()} or dict(self._own or {})
        if self._flip:
            next(iter(held.values())).view(-1)[0] += 1
        return ConfirmedWeights(checksum(held))


def test_a_copy_is_confirmed_bit_for_bit(policy: SinglePolicy) -> None:
    engine = Receiver()
    report = asyncio.run(WeightSync(PolicySender(policy), timeout_s=5).push_to(engine, 3))
    assert engine.update is not None and engine.update.version == report.version == 3
    assert report.checksum == checksum(policy.tensors())
    assert report.num_bytes == sum(tensor.nbytes for tensor in policy.tensors().values())
    assert report.metrics()["weights/push_s"] == report.prepare_s + report.update_s > 0


def test_weights_travel_in_the_engines_number_format(policy: SinglePolicy) -> None:
    engine = Receiver()
    report = asyncio.run(WeightSync(PolicySender(policy, dtype=torch.bfloat16), timeout_s=5).push_to(engine, 1))
    narrow = {name: tensor.bfloat16() for name, tensor in policy.tensors().items()}
    assert report.checksum == checksum(narrow) != checksum(policy.tensors())


def test_nothing_travels_to_an_engine_that_holds_the_same_module(policy: SinglePolicy) -> None:
    engine = Receiver(own=dict(policy.module.named_parameters()))
    report = asyncio.run(WeightSync(PolicySender(policy, shared=True), timeout_s=5).push_to(engine, 1))
    assert engine.update is not None and not engine.update.tensors
    assert report.num_bytes == 0 and report.checksum == checksum(policy.tensors())


def test_other_weights_end_the_run_naming_both_checksums(policy: SinglePolicy) -> None:
    with pytest.raises(RunError, match=rf"replica-0 .* version 2 has checksum {checksum(policy.tensors())}.*confirms"):
        asyncio.run(WeightSync(PolicySender(policy), timeout_s=5).push_to(Receiver(flip=True), 2))


def test_an_engine_that_does_not_answer_is_named(policy: SinglePolicy) -> None:
    with pytest.raises(DeadlineError, match=r"replica-0 did not confirm the weights of version 2 within 0\.05 s"):
        asyncio.run(WeightSync(PolicySender(policy), timeout_s=0.05).push_to(Receiver(hang=True), 2))


def test_a_push_that_is_cancelled_while_it_is_prepared_is_taken_back_all_the_same(policy: SinglePolicy) -> None:
    retired = []

    class Slow(PolicySender):
        async def publish(self, version: int) -> WeightUpdate:
            await asyncio.to_thread(time.sleep, 0.05)
            return WeightUpdate(version, "", {})

        async def retire(self, version: int) -> None:
            retired.append(version)

    async def main() -> None:
        pushing = asyncio.ensure_future(WeightSync(Slow(policy), timeout_s=5).push_to(Receiver(), 4))
        await asyncio.sleep(0.01)
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing

    asyncio.run(main())
    assert retired == [4]


class Frozen(BreakableEngine):
    """A replica that hangs as soon as weights are coming."""

    async def pause(self) -> None:
        await asyncio.Event().wait()

    async def resume(self) -> None:
        await asyncio.Event().wait()

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        await asyncio.Event().wait()
        raise AssertionError("nothing wakes it")


class Rollout:
    """What a rollout does with its router when weights come."""

    name = "rollout"

    def __init__(self, router: Router) -> None:
        self.router = router

    async def update_weights(self, update: WeightUpdate, *, running: OnWeightUpdate) -> ConfirmedWeights:
        if running == "recompute":
            await self.router.pause()
        try:
            return await self.router.update_weights(update)
        finally:
            if running == "recompute":
                await self.router.resume()


class Sender:
    async def publish(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, "sum", {})

    async def retire(self, version: int) -> None: ...


@pytest.mark.parametrize("running", ["continue", "recompute"])
def test_a_replica_that_hangs_during_a_push_is_left_out_and_the_run_goes_on(running: str) -> None:
    config = training_config(f"trainer.on_weight_update={running}", "rollout.limits.request_timeout_s=300")

    async def main() -> None:
        good, stuck = replica("good"), Frozen.create(ScriptedConfig(), name="stuck", encode=encode, decode=decode)
        assert isinstance(stuck, Frozen)
        rollout = Rollout(router(good, stuck, timeout_s=300.0))
        report = await WeightSync.of(config, Sender()).push(rollout, 1)
        assert report.version == 1
        states = {state.name: state for state in rollout.router.snapshot()}
        assert states["good"].healthy and not states["stuck"].healthy
        assert "no answer in 300 s" in (states["stuck"].last_error or "")

    virtual_time.run(main())


def test_the_longest_pause_of_a_replica_is_a_metric() -> None:
    class Pausing(BreakableEngine):
        pause_s = 0.0

        async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
            return replace(await super().update_weights(update), pause_s=self.pause_s)

    async def main() -> dict[str, float]:
        engines = [Pausing.create(ScriptedConfig(), name=name, encode=encode, decode=decode) for name in "abc"]
        for engine, pause_s in zip(engines, (0.1, 0.75, 0.2), strict=True):
            assert isinstance(engine, Pausing)
            engine.pause_s = pause_s
        return (await WeightSync(Sender(), timeout_s=5).push_to(router(*engines), 1)).metrics()

    assert virtual_time.run(main())["weights/pause_ms"] == 750


def test_a_push_that_hangs_at_every_replica_ends_the_run_and_names_them() -> None:
    config = training_config("rollout.limits.request_timeout_s=300")

    async def main() -> None:
        stuck = Frozen.create(ScriptedConfig(), name="stuck", encode=encode, decode=decode)
        assert isinstance(stuck, Frozen)
        with pytest.raises(EnginesLost, match=r"version 1 did not arrive: stuck: no answer in 300 s"):
            await WeightSync.of(config, Sender()).push(Rollout(router(stuck, timeout_s=300.0)), 1)

    virtual_time.run(main())
