"""A discriminative reward model at work: a trajectory in, its score out.

Owns places, deadlines and the choice of where a classifier computes. Knows neither torch nor HTTP.
Who waits for whom: a score waits for a place (`max_concurrency`, first come, first served) and for its turn under the
rate limit; from then on `timeout_s` runs, while its text waits for the batch before it and then computes.
"""

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from treadle.config.reward import ClassifierConfig, RewardConfig
from treadle.errors import RunError
from treadle.reward.classifier.batches import Backend, Batches
from treadle.reward.classifier.endpoint import ClassifierEndpoint
from treadle.reward.classifier.process import ClassifierProcess
from treadle.reward.classifier.transcript import Transcript
from treadle.reward.failure import Fault, ScoreFailure
from treadle.reward.rate import RateLimit
from treadle.reward.surroundings import Surroundings
from treadle.reward.verdict import read_number
from treadle.types import Score, Task, Trajectory

GRACE_S = 5.0
"""A process that is late ends itself first, since it knows more of the reason."""

HELLO = (0,)
"""A text to see whether a server answers."""


class Head(Protocol):
    """Whatever gives ids a number."""

    async def score(self, ids: tuple[int, ...]) -> float: ...

    async def close(self) -> None: ...


class Classifier:
    """Built by `start`, when it is ready to score."""

    def __init__(
        self, name: str, classifier: ClassifierConfig, transcript: Transcript, head: Head, rate: RateLimit
    ) -> None:
        self._name, self._classifier = name, classifier
        self._transcript, self._head, self._rate = transcript, head, rate
        self._places = asyncio.Semaphore(classifier.max_concurrency)

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """The classifier's score. Raises ScoreFailure."""
        ids = self._transcript.read(task, trajectory)
        timeout_s = self._classifier.timeout_s
        async with self._places:
            await self._rate.turn()
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    return Score(read_number(await self._head.score(ids)))
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                problem = f"gave no score within reward.classifiers.{self._name}.timeout_s={timeout_s:g}"
                raise ScoreFailure(Fault.TIMEOUT, problem) from error

    async def close(self) -> None:
        await self._head.close()


async def start_head(name: str, classifier: ClassifierConfig, reward: RewardConfig, surroundings: Surroundings) -> Head:
    """A classifier that is loaded, or a server that answers. ConfigError or RunError otherwise."""
    if classifier.placement == "endpoint":
        key = surroundings.api_keys.get(classifier.endpoint.api_key_env)
        head: Head = ClassifierEndpoint.create(classifier, key, reward.retries)
        start: Awaitable[object] = head.score(HELLO)
    else:
        gpus = surroundings.gpus.get(name, ())
        device = f"cuda:{gpus[0].number}" if gpus else classifier.device
        batches = Batches(f"classifier {name}", _choose_backend(classifier, device), classifier.max_num_batched_tokens)
        grace_s = GRACE_S if classifier.placement == "process" else 0.0
        head, start = batches, batches.start(classifier.launch_timeout_s + grace_s)
    try:
        await start
    except BaseException as error:
        await asyncio.shield(head.close())
        if isinstance(error, ScoreFailure):
            raise RunError(f"reward.classifiers.{name} did not start: it {error.problem}") from error
        raise
    return head


def _choose_backend(classifier: ClassifierConfig, device: str) -> Backend:
    if classifier.placement == "process":
        return ClassifierProcess(classifier, device)
    from treadle.reward.classifier.network import Network  # torch comes with it

    return Network(classifier.path, device=device, dtype=classifier.dtype)
