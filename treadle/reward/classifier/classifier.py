"""Classifier: a trajectory in, its score out; ids by its own tokenizer, computed in batches or by a server.

Owns the way from messages to ids (the model's chat template over the conversation, or a prompt of the config's own),
the hand-over between the event loop and the thread that computes, the request to a server that answers
`POST /classify`, places, deadlines, and the choice of where it computes. Knows no torch. Refuses probabilities of a
server: a score is the head's logit.
Waits: a score waits for a place (`max_concurrency`, first come, first served) and for its turn under the rate limit;
from then on `timeout_s` runs, while its text waits for the batch before it and then computes. The thread takes what
arrived while it computed, oldest first, as many tokens as a batch may have, and waits when there is nothing; no text
waits for a batch to fill.
Invariant: at most `max_length` ids, and no special token in them was spelled out by the trajectory. Every text is
answered once, with a number or a failure, also when the thread dies.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from treadle.config.reward import ClassifierConfig, RewardConfig
from treadle.config.rollout import ModelConfig, OpenAIConfig
from treadle.data.chat_template import ChatTemplate
from treadle.data.encoder import Encoder
from treadle.data.renderer import truncate
from treadle.errors import ConfigError, DeadlineError, EngineFailure, Mistake, PromptFailure, RunError
from treadle.model.tokenizer import ChatTokenizer, load_tokenizer
from treadle.reward.classifier.process import ClassifierProcess
from treadle.reward.context import RewardContext
from treadle.reward.prompt import RewardPrompt, SpecialTokenEscaper
from treadle.reward.rate_limit import RateLimit
from treadle.reward.result import Fault, ScoreFailure, describe, read_number
from treadle.types import Score, Task, Trajectory

if TYPE_CHECKING:
    from treadle.engine.http_client import HttpClient

Side = Literal["left", "middle", "right"]


class ClassifierInput:
    """Built by `create`; exactly one of `template` and `prompt` is there."""

    def __init__(
        self,
        classifier: ClassifierConfig,
        tokenizer: ChatTokenizer,
        template: ChatTemplate | None,
        prompt: RewardPrompt | None,
        guard: SpecialTokenEscaper,
    ) -> None:
        self._classifier, self._tokenizer, self._guard = classifier, tokenizer, guard
        self._template, self._prompt = template, prompt
        self._encoder = Encoder(tokenizer)

    @classmethod
    async def create(cls, classifier: ClassifierConfig) -> "ClassifierInput":
        """Load the tokenizer. A ConfigError with keys relative to the classifier's section where it cannot be used."""
        model = ModelConfig(path=classifier.path)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            template = None if classifier.prompt is not None else ChatTemplate.create(tokenizer, model)
        except ConfigError as error:
            raise ConfigError([_move(mistake) for mistake in error.mistakes]) from error
        guard = SpecialTokenEscaper.of(tokenizer)
        prompt = None if classifier.prompt is None else RewardPrompt.create(classifier.prompt, guard)
        return cls(classifier, tokenizer, template, prompt, guard)

    def read(self, task: Task, trajectory: Trajectory) -> tuple[int, ...]:
        """The ids of one trajectory; a ScoreFailure where it cannot be rendered, or is too long."""
        if self._template is not None:
            return self._fit(self._encoder.encode_whole(self._render(self._template, trajectory)))
        assert self._prompt is not None, "one of the two is there"
        text = self._prompt.render(task, trajectory)
        return self._fit(self._tokenizer.encode(text, add_special_tokens=True))

    def _render(self, template: ChatTemplate, trajectory: Trajectory) -> str:
        try:
            return template.render(self._guard.clean(trajectory.messages), ask=False)
        except PromptFailure as failure:
            raise ScoreFailure(Fault.PROMPT, f"cannot read this conversation: {failure}") from failure

    def _fit(self, ids: list[int]) -> tuple[int, ...]:
        most, overlong = self._classifier.max_length, self._classifier.overlong
        if not ids:
            raise ScoreFailure(Fault.PROMPT, "was given an empty text")
        if len(ids) > most and overlong == "error":
            problem = f"was given a text of {len(ids)} tokens; max_length is {most} (overlong: truncate_left cuts it)"
            raise ScoreFailure(Fault.PROMPT, problem)
        return truncate(ids, most, cast(Side, overlong.removeprefix("truncate_")))


def _move(mistake: Mistake) -> Mistake:
    """A mistake about a `model` section, as one about a classifier. It has no key for a chat template, but a prompt."""
    key = "prompt" if mistake.key == "model.custom_chat_template" else mistake.key.removeprefix("model.")
    return replace(mistake, key=key, origin=None, fix=None if key == "prompt" else mistake.fix)


Ids = tuple[int, ...]

CLOSE_TIMEOUT_S = 30.0
"""How long a batch that computes may take to end when its classifier closes."""


class ClassifierBackend(Protocol):
    """What computes. Loaded, used and closed in the thread; `interrupt` comes from outside it."""

    def load(self) -> None: ...

    def score(self, texts: Sequence[Ids]) -> list[float]: ...

    def interrupt(self) -> None:
        """End what computes, if that is possible."""
        ...

    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class _QueuedText:
    ids: Ids
    answer: "asyncio.Future[float]"


class BatchingThread:
    """One backend and the texts on their way to it. All methods are for the event loop that made it."""

    def __init__(self, name: str, backend: ClassifierBackend, max_tokens: int) -> None:
        self._name, self._backend, self._max_tokens = name, backend, max_tokens
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._waiting: list[_QueuedText] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    async def start(self, timeout_s: float) -> None:
        """Start the thread and load the backend in it; raise what went wrong in there, or that it takes too long."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=self._name, daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(timeout_s):
                await ready
        except TimeoutError as error:
            raise DeadlineError(f"{self._name} was not loaded within launch_timeout_s={timeout_s:g}") from error

    async def score(self, ids: Ids) -> float:
        """The score of one text. Cancelling leaves the others of its batch alone."""
        item = _QueuedText(ids, self._loop.create_future())
        with self._wake:
            if self._closing:
                raise ScoreFailure(Fault.CLOSED, "is closed")
            self._waiting.append(item)
            self._wake.notify()
        return await item.answer

    async def close(self) -> None:
        """End the thread and wait for it. Texts that wait fail as closed."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._backend.interrupt()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise DeadlineError(f"{self._name} still computes {CLOSE_TIMEOUT_S:g} s after it was closed")

    def _run(self, ready: "asyncio.Future[None]") -> None:
        try:
            self._backend.load()
        except BaseException as error:  # noqa: BLE001 - it is raised where `start` waits
            self._backend.close()
            self._tell(_fail, ready, error)
            return
        self._tell(_settle, ready, None)
        try:
            while batch := self._take():
                self._tell(_answer, batch, self._compute(batch))
        finally:
            self._backend.close()
            with self._wake:
                self._closing = True
                left, self._waiting = self._waiting, []
            self._tell(_answer, left, ScoreFailure(Fault.CLOSED, "was closed"))

    def _take(self) -> list[_QueuedText]:
        """The next batch; empty when it is time to end."""
        with self._wake:
            while not self._closing:
                self._waiting = [item for item in self._waiting if not item.answer.done()]
                if self._waiting:
                    batch, room = [self._waiting.pop(0)], self._max_tokens
                    room -= len(batch[0].ids)
                    while self._waiting and len(self._waiting[0].ids) <= room:
                        batch.append(self._waiting.pop(0))
                        room -= len(batch[-1].ids)
                    return batch
                self._wake.wait()
        return []

    def _compute(self, batch: Sequence[_QueuedText]) -> "list[float] | ScoreFailure":
        try:
            return self._backend.score([item.ids for item in batch])
        except ScoreFailure as failure:
            return ScoreFailure(Fault.CLOSED, "was closed") if self._closing else failure
        except Exception as error:  # noqa: BLE001 - it is raised where `score` waits
            return ScoreFailure(Fault.EXCEPTION, f"raised {describe(error)}")

    def _tell(self, act: Callable[..., None], *arguments: Any) -> None:
        """Hand something back to the loop, which may be gone when the process ends in disorder."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act, *arguments)


def _answer(batch: Sequence[_QueuedText], answers: "list[float] | ScoreFailure") -> None:
    for at, item in enumerate(batch):
        if isinstance(answers, ScoreFailure):
            _fail(item.answer, answers)
        else:
            _settle(item.answer, answers[at])


def _settle(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


_ADVICE = {
    401: "set the environment variable {api_key_env} to a key of this server",
    403: "the key in {api_key_env} may not do this",
    404: "endpoint.base_url is the address before /classify, without /v1; the server must serve a classifier",
    400: "endpoint.extra_body replaces fields of the request; null leaves one out",
    422: "endpoint.extra_body replaces fields of the request; null leaves one out",
}


class ClassifierEndpoint:
    """One server and the connections to it. Built by `create`."""

    def __init__(self, classifier: ClassifierConfig, server: "HttpClient", retries: int) -> None:
        self._classifier, self._server, self._retries = classifier, server, retries

    @classmethod
    def create(cls, classifier: ClassifierConfig, api_key: str | None, retries: int) -> "ClassifierEndpoint":
        """A server that was not called yet. `api_key` is the value itself."""
        from treadle.engine.http_client import HttpClient  # httpx is slow to import

        endpoint = classifier.endpoint
        advice = {status: text.format(api_key_env=endpoint.api_key_env) for status, text in _ADVICE.items()}
        assert endpoint.base_url is not None, "checked with the config"
        server = HttpClient(endpoint.base_url, api_key=api_key, advice=advice, connections=classifier.max_concurrency)
        return cls(classifier, server, retries)

    async def score(self, ids: tuple[int, ...]) -> float:
        """The logit of one text."""
        classifier = self._classifier
        body = write_body(ids, classifier.endpoint)
        try:
            reply = await self._server.call(
                "POST", "classify", body, timeout_s=classifier.timeout_s, retries=self._retries
            )
        except EngineFailure as failure:
            raise ScoreFailure(Fault.ENGINE, f"has a server that did not answer: {failure}") from failure
        return read_logit(reply, self._server.address)

    async def close(self) -> None:
        await self._server.close()


def write_body(ids: tuple[int, ...], endpoint: OpenAIConfig) -> str:
    """The request as JSON. `extra_body` adds and replaces fields; null leaves one out."""
    body = {"model": endpoint.model, "input": ids, "use_activation": False, **endpoint.extra_body}
    return json.dumps({field: value for field, value in body.items() if value is not None})


def read_logit(reply: Any, address: str) -> float:
    """The one number in an answer."""
    try:
        numbers = reply["data"][0]["probs"]
        (number,) = numbers
    except (KeyError, IndexError, TypeError) as error:
        shown = json.dumps(reply)[:200]
        raise ScoreFailure(Fault.NO_RESULT, f"has a server, {address}, that answered {shown}") from error
    except ValueError as error:
        problem = f"has a server, {address}, whose model gives {len(numbers)} labels; a score is one number"
        raise ScoreFailure(Fault.NO_RESULT, problem) from error
    return read_number(number)


GRACE_S = 5.0
"""A process that is late ends itself first, since it knows more of the reason."""

HELLO = (0,)
"""A text to see whether a server answers."""


class ClassifierHead(Protocol):
    """Whatever gives ids a number."""

    async def score(self, ids: tuple[int, ...]) -> float: ...

    async def close(self) -> None: ...


class Classifier:
    """Built by `start`, when it is ready to score."""

    def __init__(
        self,
        name: str,
        classifier: ClassifierConfig,
        transcript: ClassifierInput,
        head: ClassifierHead,
        rate: RateLimit,
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


async def start_classifier_head(
    name: str, classifier: ClassifierConfig, reward: RewardConfig, context: RewardContext
) -> ClassifierHead:
    """A classifier that is loaded, or a server that answers. ConfigError or RunError otherwise."""
    if classifier.placement == "endpoint":
        key = context.api_keys.get(classifier.endpoint.api_key_env)
        head: ClassifierHead = ClassifierEndpoint.create(classifier, key, reward.retries)
        start: Awaitable[object] = head.score(HELLO)
    else:
        gpus = context.gpus.get(name, ())
        device = f"cuda:{gpus[0].number}" if gpus else classifier.device
        batches = BatchingThread(
            f"classifier {name}", _choose_backend(classifier, device), classifier.max_num_batched_tokens
        )
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


def _choose_backend(classifier: ClassifierConfig, device: str) -> ClassifierBackend:
    if classifier.placement == "process":
        return ClassifierProcess(classifier, device)
    from treadle.reward.classifier.model import ClassifierModel  # torch comes with it

    return ClassifierModel(classifier.path, device=device, dtype=classifier.dtype)
