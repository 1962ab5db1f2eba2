"""Shared model: one decoder on one device that every adapter trains in and samples from, with its engine.

Owns the module, the engine over it and the turns in its weights. Knows adapters and requests for tokens; no HTTP, no
session and no file.
Waits: training and sampling wait for their turn in the weights (`turns`); a training call runs in a thread.
Invariant: what is computed in a turn is computed with that turn's adapter merged, by engine and network alike; logprobs
are of the whole softmax at temperature 1, whatever tokens were drawn with.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from treadle.aio import run_whole
from treadle.config import Config
from treadle.data.renderer import Renderer
from treadle.engine.native.engine import NativeEngine
from treadle.engine.native.input_batch import MAX_STOPS
from treadle.engine.protocol import WeightUpdate
from treadle.errors import ConfigError, Mistake, RequestRefused
from treadle.model.attention import PackedMetadata
from treadle.model.causal_lm import compute_logits, hidden_states
from treadle.model.load import load_causal_model
from treadle.policy.network import CHUNK_BYTES, DecoderNetwork
from treadle.policy.packed_inputs import PackedRows
from treadle.tinker.adapters import AdapterBase, AdapterShape, AdapterWeights
from treadle.tinker.protobuf import SampledSet, SampledTokens, TopLogprobs
from treadle.tinker.refusals import RequestFailed
from treadle.tinker.trained_model import TrainedModel
from treadle.tinker.turns import WeightTurns
from treadle.types import Completion, Request, SamplingParams, StopReason

TURN_TIMEOUT_S = 3600.0
"""How long a request waits for its turn in the weights."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """A request for samples, checked for what needs no model."""

    uid: str
    ids: tuple[int, ...]
    num_samples: int
    max_tokens: int | None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stops_at_eos: bool = True
    prompt_logprobs: bool = False
    last_n: int | None = None
    top_prompt: int = 0
    top_sampled: int = 0
    target_prompt: Tensor | None = None
    """Token ids to score at each prompt position after the first: [prompt - 1, K]; -1 for none."""
    alternatives: int = 0

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs or self.top_prompt > 0 or self.target_prompt is not None or self.alternatives > 0


class SharedModel:
    """One base model with its engine, and the adapters that are merged into it by turns. Built by `create`."""

    def __init__(self, config: Config, base: AdapterBase, engine: NativeEngine, renderer: Renderer) -> None:
        self._rollout = config.rollout
        self._recompute = config.model.enable_gradient_checkpointing
        self.base = base
        self.network = DecoderNetwork(base.module)
        self._engine = engine
        self._renderer = renderer
        self._turns = WeightTurns()
        self._merging = asyncio.Lock()
        self._scoring = asyncio.Lock()
        self._version = 0
        self._is_stale = False
        """Whether the engine may have keys and values of weights that the module no longer has."""

    @classmethod
    async def create(cls, config: Config) -> "SharedModel":
        """Load the model of a config, on a GPU where there is one, and start its engine."""
        rollout = config.rollout
        if rollout.name != "native":
            problem = f"{rollout.name} cannot share its weights with training: adapters take turns in one model"
            fix = "leave it out; native serves the Tinker API"
            raise ConfigError([Mistake("rollout.name", problem, rollout.name, rollout.origin("name"), fix)])
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        renderer = await asyncio.to_thread(Renderer.create, config.model)
        longest = rollout.sequence_length()
        module = await asyncio.to_thread(
            lambda: load_causal_model(config.model, dtype=dtype, device=device, longest=longest)
        )
        base = AdapterBase(module)
        decode, unchecked = renderer.decode, lambda tensors: ""  # the weights are the module's own: nothing travels
        engine = await NativeEngine.create(rollout, module, device=device, decode=decode, checksum=unchecked)
        return cls(config, base, engine, renderer)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self._rollout.sequence_length()

    async def close(self) -> None:
        await self._engine.close()

    @asynccontextmanager
    async def _turn(self, adapter: AdapterWeights | None, *, alone: bool) -> AsyncIterator[None]:
        async with self._turns.take(adapter, alone=alone, timeout_s=TURN_TIMEOUT_S):
            async with self._merging:
                if self._is_stale or self.base.merged is not adapter:
                    await run_whole(self._merge(adapter))
            yield

    async def _merge(self, adapter: AdapterWeights | None) -> None:
        """Merge an adapter, and let the engine forget what it computed with another one, also where the merge fails."""
        self._is_stale = True
        try:
            await asyncio.to_thread(self.base.merge, adapter)
        finally:
            self._version += 1
            await self._engine.update_weights(WeightUpdate(self._version, "", {}))
            self._is_stale = False

    # --- training

    async def create_model(self, shape: AdapterShape, seed: int) -> TrainedModel:
        """A new adapter, without effect yet."""
        return await asyncio.to_thread(TrainedModel, self.base, self.network, shape, seed)

    async def train(self, model: TrainedModel, call: Callable[[], T]) -> T:
        """Run a call of a trained model in a thread, with the weights to itself."""
        async with self._turn(model.weights, alone=True):
            if self.base.device.type == "cuda":
                await self._engine.sleep()  # its KV cache gives way to activations
            return await run_whole(asyncio.to_thread(call))

    @property
    def recompute(self) -> bool:
        """Whether activations are computed again for backward."""
        return self._recompute

    # --- sampling

    async def sample(self, spec: SampleSpec, adapter: AdapterWeights | None) -> SampledSet:
        """Samples of the model with this adapter, and what was asked for of its prompt."""
        sampling = self._sampling(spec)
        async with self._turn(adapter, alone=False):
            scores = SampledSet(())
            if spec.scores_prompt:
                async with self._scoring:
                    scores = await run_whole(asyncio.to_thread(self._score_prompt, spec))
            try:
                async with asyncio.TaskGroup() as group:
                    running = [
                        group.create_task(self._generate(Request(spec.uid, at, spec.ids, sampling)))
                        for at in range(spec.num_samples)
                    ]
            except* RequestRefused as errors:
                raise RequestFailed(str(errors.exceptions[0])) from errors
            done = [task.result() for task in running]
            sequences = [await self._sampled(spec, completion) for completion in done]
        return SampledSet(
            sequences, scores.prompt_logprobs, scores.top_prompt, scores.target_prompt, scores.alternatives
        )

    def _sampling(self, spec: SampleSpec) -> SamplingParams:
        room = self.longest - len(spec.ids)
        wanted = room if spec.max_tokens is None else spec.max_tokens
        if not spec.ids or wanted < 1 or wanted > room:
            raise RequestFailed(
                f"a prompt of {len(spec.ids)} tokens and max_tokens {spec.max_tokens} do not fit the model's "
                f"{self.longest} tokens"
            )
        vocab_size = self.base.head.out_features
        if not 0 <= min(spec.ids) <= max(spec.ids) < vocab_size:
            raise RequestFailed(f"prompt: a token is outside of the vocabulary of {vocab_size}")
        stops = (*spec.stop_token_ids, *(self._renderer.stop_token_ids if spec.stops_at_eos else ()))
        stops = tuple(dict.fromkeys(stops))
        if len(stops) > MAX_STOPS:
            raise RequestFailed(f"stop: {len(stops)} tokens with the model's own; at most {MAX_STOPS}")
        return SamplingParams(
            wanted,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            stop_token_ids=stops,
            stop=spec.stop,
            seed=self._rollout.seed if spec.seed is None else spec.seed,
            model_temperature=1.0,
        )

    async def _generate(self, request: Request) -> Completion:
        try:
            done = await self._engine.generate(request)
        finally:
            self._engine.forget(request.session)
        if done.stop is StopReason.ABORT:
            raise RequestFailed("the engine ended this request before its answer", by_user=False)
        return done

    async def _sampled(self, spec: SampleSpec, done: Completion) -> SampledTokens:
        top: TopLogprobs | None = None
        if spec.top_sampled:
            ids = (*spec.ids, *done.ids[:-1])
            async with self._scoring:
                top = await run_whole(asyncio.to_thread(self._score, ids, len(spec.ids) - 1, spec.top_sampled))
        return SampledTokens(done.ids, done.logprobs, done.stop is StopReason.STOP, top)

    # --- scoring, in a thread

    def _score_prompt(self, spec: SampleSpec) -> SampledSet:
        """What a request asked for of its prompt's positions after the first."""
        ids = torch.tensor(spec.ids)
        first = max(1, len(ids) - spec.last_n) if spec.last_n is not None else 1
        logprobs = top = target = drawn = None
        if spec.prompt_logprobs:
            logprobs = torch.full((len(ids),), float("nan"))
            if len(ids) > 1:
                logprobs[first:] = self._prompt_logprobs(ids, first)
        if spec.top_prompt:
            top_ids = torch.zeros(len(ids), spec.top_prompt, dtype=torch.long)
            values = torch.full((len(ids), spec.top_prompt), MASKED)
            if len(ids) > 1:
                found = self._score(spec.ids[:-1], first - 1, spec.top_prompt)
                top_ids[first:], values[first:] = found.ids, found.logprobs
            top = TopLogprobs(top_ids, values)
        if spec.target_prompt is not None:
            target = self._score_targets(spec.ids[:-1], spec.target_prompt)
        if spec.alternatives:
            drawn = self._draw(spec)
        return SampledSet((), logprobs, top, target, drawn)

    @torch.no_grad()
    def _prompt_logprobs(self, ids: Tensor, first: int) -> Tensor:
        """Logprobs of tokens from `first` on, as training computes them."""
        device = self.base.device
        places = torch.arange(first - 1, len(ids) - 1)
        targets = ids[first:].to(device)
        packed = PackedRows(
            ids[:-1].to(device), (len(ids) - 1,), places.to(device), targets, torch.zeros_like(targets), places
        )
        return self.network.logprobs(packed, 1.0).logprobs_T.float().cpu()

    @torch.no_grad()
    def _distributions(self, ids: Sequence[int], first: int) -> Iterator[Tensor]:
        """Log-probabilities of the token after each position from `first` on, some positions at a time."""
        module, device = self.base.module, self.base.device
        plan = PackedMetadata((len(ids),), device)
        hidden = hidden_states(module, torch.tensor(ids, device=device), plan.positions(), plan)[first:]
        rows = max(1, CHUNK_BYTES[device.type] // (4 * self.base.head.out_features))
        for at in range(0, len(hidden), rows):
            yield compute_logits(module, hidden[at : at + rows], wide=True).float().log_softmax(-1)

    def _score(self, ids: Sequence[int], first: int, k: int) -> TopLogprobs:
        """The k most likely tokens after each position from `first` on."""
        k = min(k, self.base.head.out_features)
        found = [values.topk(k) for values in self._distributions(ids, first)]
        return TopLogprobs(
            torch.cat([item.indices for item in found]).cpu(), torch.cat([item.values for item in found]).cpu()
        )

    def _score_targets(self, ids: Sequence[int], targets: Tensor) -> Tensor:
        """The logprob of each asked-for token, 0 where none was."""
        parts, at = [], 0
        for values in self._distributions(ids, 0):
            wanted = targets[at : at + len(values)].to(values.device)
            at += len(values)
            parts.append(values.gather(1, wanted.clamp(min=0)).masked_fill(wanted < 0, 0.0).cpu())
        return torch.cat(parts)

    def _draw(self, spec: SampleSpec) -> TopLogprobs:
        """Draws from the distribution at each prompt position after the first, at the request's temperature."""
        generator = torch.Generator(self.base.device)
        generator.manual_seed(spec.seed if spec.seed is not None else hash(spec.uid) % 2**63)
        ids, logprobs = [], []
        for values in self._distributions(spec.ids[:-1], 0):
            cold = (values / max(spec.temperature, 1e-4)).softmax(-1)
            drawn = torch.multinomial(cold, spec.alternatives, replacement=True, generator=generator)
            ids.append(drawn.cpu())
            logprobs.append(values.gather(1, drawn).cpu())
        return TopLogprobs(torch.cat(ids), torch.cat(logprobs))


MASKED = -99999.0
"""The logprob that the client reads as: nothing here."""
