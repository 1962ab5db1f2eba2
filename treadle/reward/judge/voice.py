"""What a judge speaks through: an engine and the renderer that goes with it.

Owns the start and the end of a judge's own replicas, behind a router of their own. With `engine: {name: policy}` it
starts nothing, and leaves alone what it was lent.
Invariant: a mistake found while an engine starts is told under the judge's own keys.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from treadle.config.reward import JudgeConfig, RewardConfig
from treadle.config.rollout import FailureConfig
from treadle.data.renderer import Renderer
from treadle.engine.router import Router
from treadle.errors import ConfigError, EngineFailure, Mistake, RunError
from treadle.model.tokenizer import load_tokenizer
from treadle.reward.guard import Guard
from treadle.reward.surroundings import Generator, Surroundings

_PLACES = {"model.": "", "rollout.limits.": "engine.", "rollout.": "engine."}
"""Where a judge has the keys of the sections that engines know; the first that fits."""


@dataclass(frozen=True, slots=True)
class Voice:
    """An engine that answers, and who turns messages into its ids. `router` is the judge's own, if it has one."""

    engine: Generator
    renderer: Renderer
    router: Router | None = None

    async def close(self) -> None:
        """End the replicas that are the judge's own."""
        if self.router is not None:
            await self.router.close()


@dataclass(frozen=True, slots=True)
class Speech:
    """How a judge's questions become ids, and what must not be spelled out in them."""

    renderer: Renderer
    guard: Guard


async def prepare_speech(judge: JudgeConfig, surroundings: Surroundings) -> Speech:
    """The renderer of the judge's model, or the policy's where it has none of its own."""
    own = judge.path is not None
    model = judge.model() if own else surroundings.model
    if own and model is not None:
        with _told_of_judge():
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            return Speech(await asyncio.to_thread(Renderer.create, model, tokenizer), Guard.of(tokenizer))
    if surroundings.renderer is None or model is None:
        fix = "give path, or build the scorer with Surroundings(model=…, renderer=…)"
        raise ConfigError([Mistake("path", "is needed: no rollout lends its tokenizer", fix=fix)])
    known = judge.engine.name == "policy"
    guard = Guard.of(await asyncio.to_thread(load_tokenizer, model)) if known else Guard.usual()
    return Speech(surroundings.renderer, guard)


async def start_voice(
    name: str, judge: JudgeConfig, reward: RewardConfig, speech: Speech, surroundings: Surroundings
) -> Voice:
    """The engine of a judge, started; a ConfigError or RunError within the launch deadline."""
    engine = judge.engine
    if engine.name == "policy":
        if surroundings.policy is None:
            fix = "give the judge an engine of its own, or build the scorer with Surroundings(policy=…)"
            raise ConfigError([Mistake("engine.name", "policy, but no rollout lends its engine", "policy", fix=fix)])
        return Voice(surroundings.policy, speech.renderer)
    if surroundings.start_engines is None:
        fix = "build the scorer with Surroundings(start_engines=treadle.rollout.engines.start_engines)"
        raise ConfigError([Mistake("engine.name", "nothing here starts engines", engine.name, fix=fix)])
    rollout = judge.rollout(FailureConfig(request_retries=reward.retries))
    model = judge.model() if judge.path is not None else surroundings.model
    assert model is not None, "speech was prepared with it"
    api_key = surroundings.api_keys.get(engine.openai.api_key_env)
    gpus = surroundings.gpus.get(name)
    with _told_of_judge():
        try:
            replicas = await surroundings.start_engines(rollout, model, speech.renderer, api_key, gpus)
        except (EngineFailure, RunError) as failure:
            raise RunError(f"the engine of reward.judges.{name} did not start: {failure}") from failure
    router = Router(
        replicas,
        limits=rollout.limits,
        failures=rollout.failures,
        rng=random.Random(judge.seed),
        name=f"router of judge {name}",
    )
    return Voice(router, speech.renderer, router)


@contextmanager
def _told_of_judge() -> Iterator[None]:
    """Engines and tokenizers name keys of `model` and `rollout`; a judge's author knows other names."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([_move(mistake) for mistake in error.mistakes]) from error


def _move(mistake: Mistake) -> Mistake:
    old = next((place for place in _PLACES if mistake.key.startswith(place)), "")
    key = _PLACES.get(old, "") + mistake.key.removeprefix(old)
    return replace(mistake, key=key, origin=None)
