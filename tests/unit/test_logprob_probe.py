"""The probe after a push: engines that compute what the policy computes pass, any other ends the run by name."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from tests.policies import make_policy, save_tiny_model
from tests.sharded import make_batch, ragged
from treadle.config import load
from treadle.config.rollout import FailureConfig, LimitsConfig, ModelConfig, RolloutConfig
from treadle.config.training import LoraConfig, OptimConfig
from treadle.engine.native.engine import NativeEngine
from treadle.engine.router import Router
from treadle.errors import EngineFailure, RunError
from treadle.policy.policy import SinglePolicy
from treadle.types import Completion, Request, SamplingParams
from treadle.weights.logprob_probe import EXACT_NATS, ROUNDED_NATS, LogprobProbe, ProbeResult
from treadle.weights.sync import PolicySender, WeightLock, WeightSync


class EnginesRollout:
    """A rollout of a router and its engines, as far as a probe needs it."""

    def __init__(self, engines: Sequence[NativeEngine], *, version: int | None = None, failing: bool = False) -> None:
        """`version`: what the answers claim to be of; None for the truth."""
        self._version = version
        self._failing = failing
        limits, failures = LimitsConfig(request_timeout_s=60), FailureConfig()
        self._router = Router(engines, limits=limits, failures=failures, rng=random.Random(0))

    async def probe(self, num_tokens: int) -> tuple[tuple[int, ...], dict[str, Completion]]:
        if self._failing:
            raise EngineFailure("it is gone")
        ids = tuple(3 + at % 50 for at in range(num_tokens))
        answers = await self._router.generate_on_each(Request("probe", 0, ids, SamplingParams(num_tokens)))
        if self._version is None:
            return ids, answers
        return ids, {name: replace(item, versions=(self._version,) * len(item.ids)) for name, item in answers.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def trained(base: Path, lr: float = 3e-2, steps: int = 3) -> SinglePolicy:
    policy = make_policy(base, lora=LoraConfig(r=4), optim=OptimConfig(lr=lr))
    for seed in range(steps):
        policy.train(make_batch(ragged(seed)))
    return policy


async def open_engine(base: Path, name: str = "native-0", dtype: str = "float32") -> NativeEngine:
    rollout = RolloutConfig(prompt_length=64, response_length=64, dtype=dtype)
    engine = await NativeEngine.create(rollout, ModelConfig(path=str(base)))
    engine.name = name
    return engine


def probe_of(policy: SinglePolicy, tolerance: float = EXACT_NATS) -> LogprobProbe:
    return LogprobProbe(policy, WeightLock(), tolerance=tolerance)


def run_probes(
    base: Path,
    policy: SinglePolicy,
    *,
    pushed: Sequence[bool],
    tolerance: float = EXACT_NATS,
    dtype: str = "float32",
    failing: bool = False,
    honest: bool = False,
    times: int = 1,
) -> list[tuple[ProbeResult, ...]]:
    """The results of one probe after another of engines, which were given the policy's weights or keep the frozen."""

    async def run() -> list[tuple[ProbeResult, ...]]:
        engines = [await open_engine(base, f"native-{at}", dtype) for at in range(len(pushed))]
        try:
            for engine, has in zip(engines, pushed, strict=True):
                if has:
                    await WeightSync(PolicySender(policy), timeout_s=60).push_to(engine, policy.version)
                elif not honest:
                    engine.version = policy.version  # the frozen weights, under the version of the merged ones
            claimed = None if honest else policy.version
            rollout = EnginesRollout(engines, version=claimed, failing=failing)
            probe, found = probe_of(policy, tolerance), []
            for _ in range(times):
                found.append(await probe.ask(rollout, policy.version))
                probe.judge(found[-1])
            return found
        finally:
            for engine in engines:
                await engine.close()

    return asyncio.run(run())


def test_merged_weights_are_seen_at_every_replica_and_probes_end_after_two(base: Path) -> None:
    first, second, third = run_probes(base, trained(base), pushed=(True, True), times=3)
    assert [result.replica for result in first] == ["native-0", "native-1"] == [result.replica for result in second]
    assert all(result.nats < 1e-5 and result.verdict == "merged" for result in first)
    assert all(abs(result.share - 1) < 1e-3 for result in first)
    assert third == ()


@pytest.mark.parametrize("lr", [1e-5, 1e-4, 3e-3])
@pytest.mark.parametrize("tolerance", [EXACT_NATS, ROUNDED_NATS])
def test_an_engine_without_the_adapter_is_found_after_one_step_at_any_learning_rate(
    base: Path, lr: float, tolerance: float
) -> None:
    policy = trained(base, lr, steps=1)
    with pytest.raises(RunError, match=r"native-0 (does not compute with the adapter|computes another model)"):
        run_probes(base, policy, pushed=(False,), tolerance=tolerance)
    ((result,),) = run_probes(base, policy, pushed=(True,), tolerance=tolerance)
    assert result.verdict == "merged"


def test_one_replica_of_several_without_the_adapter_is_named(base: Path) -> None:
    with pytest.raises(RunError, match=r"native-1 .* 0 is the frozen model"):
        run_probes(base, trained(base, 1e-4), pushed=(True, False, True), tolerance=ROUNDED_NATS)


def test_rounding_in_bf16_leaves_a_small_adapter_open_and_hides_no_large_one(base: Path) -> None:
    small, large = trained(base, 1e-6, steps=1), trained(base)
    ((result,),) = run_probes(base, small, pushed=(False,), tolerance=ROUNDED_NATS, dtype="bfloat16")
    assert result.verdict == "unclear" and result.adapter_nats < result.nats
    with pytest.raises(RunError, match="native-0"):
        run_probes(base, large, pushed=(False,), tolerance=inf, dtype="bfloat16")


def test_an_open_question_is_asked_again_at_pushes_ever_farther_apart_and_told_at_the_end(base: Path) -> None:
    policy = make_policy(base, lora=LoraConfig(r=4))  # a new adapter changes nothing
    found = run_probes(base, policy, pushed=(True,), times=18)
    assert [at for at, results in enumerate(found) if results] == [0, 1, 2, 4, 8, 16]
    probe = probe_of(policy)
    assert probe.open_question == ""
    probe.judge(found[0])
    assert "could tell whether native-0 computes with the adapter" in probe.open_question
    assert found[0][0].fields()["error"] is None and found[0][0].fields()["verdict"] == "unclear"


def test_a_wrong_scale_of_the_adapter_is_another_model() -> None:
    rng = random.Random(3)
    frozen = [-3 * rng.random() for _ in range(64)]
    merged = [value + rng.gauss(0, 0.02) for value in frozen]
    noise = [rng.gauss(0, 0.005) for _ in frozen]

    def verdict(share: float) -> str:
        pairs = zip(merged, frozen, noise, strict=True)
        engine = [without + share * (own - without) + off for own, without, off in pairs]
        return ProbeResult.of("a", 1, engine, merged, frozen).verdict

    assert [verdict(share) for share in (0, 1, 2)] == ["other", "merged", "other"]
    assert ProbeResult.of("a", 1, merged[:4], merged[:4], frozen[:4]).verdict == "unclear"  # too few tokens


def test_frozen_logprobs_are_those_before_the_adapter_and_leave_the_policy_as_it_was(base: Path) -> None:
    policy, untrained = trained(base), make_policy(base)
    rows = make_batch(ragged(5)).rows
    before = policy.logprobs(rows)
    frozen = policy.frozen_logprobs(rows)
    assert frozen is not None and frozen.equal(untrained.logprobs(rows)) and not frozen.equal(before)
    assert policy.logprobs(rows).equal(before)
    assert untrained.frozen_logprobs(rows) is None


def test_an_old_version_and_no_answer_are_told_apart(base: Path) -> None:
    policy = trained(base)
    with pytest.raises(RunError, match="version 3 was pushed, but native-0 answered a probe with version 0"):
        run_probes(base, policy, pushed=(False,), honest=True)
    with pytest.raises(RunError, match="no engine answered a probe after the push of version 3: it is gone"):
        run_probes(base, policy, pushed=(True,), failing=True)


def test_only_runs_with_adapters_are_probed(base: Path) -> None:
    policy = make_policy(base)
    full, lora = (load("calculator", words) for words in ((), ("actor.lora.r=4",)))
    narrow = load("calculator", ("actor.lora.r=4", "actor.dtype=bf16"))
    made = [LogprobProbe.of(config, policy, WeightLock()) for config in (full, lora, narrow)]  # type: ignore[arg-type]
    assert [probe._enabled for probe in made] == [False, True, True]
    assert [probe._tolerance for probe in made] == [EXACT_NATS, EXACT_NATS, ROUNDED_NATS]
