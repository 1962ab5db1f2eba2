"""Logprob probe: after a push, each replica computes the logprobs that the policy computes, adapter included.

A checksum proves that an engine holds the weights that were sent. The probe proves the rest of the way: that the engine
computes with them what the policy computes. Runs with adapters (LoRA) are probed, where an engine without the adapter
would sample from another model for as long as that is not looked for. Each replica samples some tokens; the policy
computes their logprobs twice, with the merged weights and with the frozen ones alone. By least squares,

    engine - frozen  =  share * (merged - frozen) + rounding

so the share is 1 for an engine with the adapter and 0 for one without, and the residual says how sure that is. Early in
training the adapter changes less than rounding does: then the share is unclear, and later pushes ask again.
Owns what is asked and when, the tolerance, and the error. Knows no engine.
Invariant: a probe that is judged was answered by replicas of the version that was pushed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, sqrt
from typing import Any, Literal, Protocol, runtime_checkable

from treadle.config import TrainConfig
from treadle.errors import Failure, RunError
from treadle.policy.protocol import Policy
from treadle.types import Completion, Row
from treadle.weights.sync import WeightLock

PROBED_TOKENS = 64
"""Tokens of the prompt, which are arbitrary, and of the answer."""

EXACT_NATS = 1e-3
"""How far a mean logprob may be off where both sides compute in fp32."""

ROUNDED_NATS = 0.1
"""The same where one of them computes in bf16: ten times what its rounding does."""

SURE = 5.0
"""Standard errors that the share must be away from the border, to count as seen."""

_BORDER = 0.5
"""How far from 1 the share of an engine with the adapter may be."""
_FEWEST = 8
"""Tokens below which nothing is concluded."""
_EXACT = 1e-6
"""Least rounding that is assumed, in nats: fp32 has that much."""


@runtime_checkable
class SupportsProbe(Protocol):
    """A rollout that lets its engines answer a prompt of no session."""

    async def probe(self, num_tokens: int) -> tuple[tuple[int, ...], Mapping[str, Completion]]:
        """An arbitrary prompt of so many ids, and each replica's answer of as many, sampled as in training."""
        ...


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one replica answered, beside what the policy computes for the same tokens."""

    replica: str
    version: int
    tokens: int
    nats: float
    """Mean distance of the engine's logprobs from the policy's."""
    worst_nats: float
    adapter_nats: float
    """Mean distance of the policy's logprobs with the adapter from those without."""
    share: float
    """How much of the adapter the engine's logprobs have: 1 all of it, 0 nothing."""
    error: float
    """Standard error of the share; infinite where the adapter has no effect."""

    @classmethod
    def of(
        cls, replica: str, version: int, engine: Sequence[float], merged: Sequence[float], frozen: Sequence[float]
    ) -> "ProbeResult":
        """Compare logprobs of the same tokens."""
        gaps = [abs(own - theirs) for own, theirs in zip(merged, engine, strict=True)]
        effects = [own - without for own, without in zip(merged, frozen, strict=True)]
        share, error = _fit([theirs - without for theirs, without in zip(engine, frozen, strict=True)], effects)
        size = len(gaps)
        adapter_nats = sum(map(abs, effects)) / size
        return cls(replica, version, size, sum(gaps) / size, max(gaps), adapter_nats, share, error)

    @property
    def verdict(self) -> Literal["merged", "other", "unclear"]:
        """Whether the engine computes with the adapter, with none or another one, or one cannot tell yet."""
        away, margin = abs(self.share - 1), SURE * self.error
        if away + margin < _BORDER:
            return "merged"
        return "other" if away - margin > _BORDER else "unclear"

    def fields(self) -> dict[str, Any]:
        """For the journal; an infinite error is None."""
        return asdict(self) | {"error": None if self.error == inf else self.error, "verdict": self.verdict}


def _fit(values: Sequence[float], effects: Sequence[float]) -> tuple[float, float]:
    """The least-squares factor of `effects` in `values`, and its standard error."""
    square = sum(effect * effect for effect in effects)
    if len(effects) < _FEWEST or not square:
        return 0.0, inf
    share = sum(value * effect for value, effect in zip(values, effects, strict=True)) / square
    rest = sum((value - share * effect) ** 2 for value, effect in zip(values, effects, strict=True))
    return share, max(sqrt(rest / (len(effects) - 1)), _EXACT) / sqrt(square)


class LogprobProbe:
    """The probes of one start of a run. Used on one loop, while the policy does not train.

    Due at the first push, at the first one after a training step, and then at pushes twice as far apart each time,
    until every replica that answers is seen to have the adapter.
    """

    def __init__(self, policy: Policy, lock: WeightLock, *, tolerance: float, enabled: bool = True) -> None:
        self._policy = policy
        self._lock = lock
        self._tolerance = tolerance
        self._enabled = enabled
        self._pushes = 0
        self._open: tuple[ProbeResult, ...] = ()

    @classmethod
    def of(cls, config: TrainConfig, policy: Policy, lock: WeightLock) -> "LogprobProbe":
        """As a config needs it: without adapters there is none."""
        exact = config.actor.dtype == "fp32" and config.rollout.dtype in ("auto", "float32")
        on_gpu = config.trainer.n_gpus_per_node or config.rollout.n_gpus_per_node
        tolerance = EXACT_NATS if exact and not on_gpu else ROUNDED_NATS
        return cls(policy, lock, tolerance=tolerance, enabled=config.actor.lora.r is not None)

    @property
    def open_question(self) -> str:
        """What no probe could tell so far, in words; empty where all was seen."""
        if not self._open:
            return ""
        one = self._open[0]
        return (
            f"no logprob probe could tell whether {', '.join(item.replica for item in self._open)} computes with the "
            f"adapter: at version {one.version} it changes logprobs by {one.adapter_nats:.2g} nats on average, and "
            f"rounding by {one.nats:.2g}. The checksum of the merged weights was confirmed"
        )

    async def ask(self, rollout: object, version: int) -> tuple[ProbeResult, ...]:
        """What each replica answers after a push; nothing where no probe is due."""
        if not self._enabled or not isinstance(rollout, SupportsProbe) or not self._is_due():
            return ()
        try:
            prompt, answers = await rollout.probe(PROBED_TOKENS)
        except Failure as failure:
            raise RunError(f"no engine answered a probe after the push of version {version}: {failure}") from failure
        answers = {name: answer for name, answer in answers.items() if answer.ids}  # none: the run is being stopped
        for name, answer in answers.items():
            if set(answer.versions) != {version}:
                held = ", ".join(map(str, sorted(set(answer.versions))))
                raise RunError(f"version {version} was pushed, but {name} answered a probe with version {held}")
        if not answers:
            return ()
        rows = [
            Row(prompt, answer.ids, (1,) * len(answer.ids), answer.logprobs, answer.versions)
            for answer in answers.values()
        ]
        merged, frozen = await self._compute_alone(rows)
        results, at = [], 0
        for name, row in zip(answers, rows, strict=True):
            end = at + len(row.ids)
            results.append(ProbeResult.of(name, version, row.logprobs, merged[at:end], frozen[at:end]))
            at = end
        return tuple(results)

    def judge(self, results: Sequence[ProbeResult]) -> None:
        """A RunError for a replica that computes another model than the policy."""
        for result in results:
            if not result.nats <= self._tolerance:  # also where it is no number
                raise RunError(
                    f"{result.replica} computes another model than the policy: after the push of version "
                    f"{result.version}, whose checksum it confirmed, the logprobs of {result.tokens} probed tokens "
                    f"differ by {result.nats:.2g} nats on average and up to {result.worst_nats:.2g}; "
                    f"{self._tolerance:g} are allowed. Look at rollout.dtype and actor.dtype, and try "
                    "rollout.name=native"
                )
            if result.verdict == "other":
                raise RunError(
                    f"{result.replica} does not compute with the adapter: after the push of version {result.version}, "
                    f"whose checksum it confirmed, its logprobs of {result.tokens} probed tokens have "
                    f"{result.share:.2f} ± {result.error:.2g} of what the adapter changes "
                    f"({result.adapter_nats:.2g} nats on average); 1 is right, and 0 is the frozen model. "
                    "Try rollout.name=native"
                )
        if results:
            self._open = tuple(result for result in results if result.verdict == "unclear")

    def _is_due(self) -> bool:
        """Count a push; whether it is one to probe after."""
        at, self._pushes = self._pushes, self._pushes + 1
        return at < 2 or (bool(self._open) and not at & (at - 1))

    async def _compute_alone(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        """While nothing reads the weights: the frozen ones take the place of the merged ones meanwhile."""
        async with self._lock.idle():
            computing = asyncio.ensure_future(asyncio.to_thread(self._compute, rows))
            try:
                return await asyncio.shield(computing)
            except asyncio.CancelledError:
                await asyncio.wait({computing})  # a thread cannot be stopped, and must put the merged weights back
                raise

    def _compute(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        """Logprobs with the merged weights, and with the frozen ones alone."""
        merged: list[float] = self._policy.logprobs(rows).tolist()
        frozen = self._policy.frozen_logprobs(rows)
        return merged, merged if frozen is None else frozen.tolist()
