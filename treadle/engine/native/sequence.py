"""Sequence: one request inside the native engine, from the waiting queue to its result.

Owns what the scheduler knows of it: its row and pages, what it sampled before a preemption, the policy version of each
token, and the search for stop strings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from treadle.engine.native.input_batch import RowOutput, RowStart
from treadle.engine.native.prefix_cache import SwappedTokens
from treadle.engine.requests import StopStringFinder
from treadle.engine.rng import stream_of
from treadle.types import Completion, Request

SequenceResult = Completion | Exception

_NOTHING = RowOutput((), ())


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request, who waits for it, and the row it has. `room` is the longest sequence that the engine holds."""

    request: Request
    deliver: Callable[[SequenceResult], None]
    room: int
    row: int = -1
    pages: list[int] = field(default_factory=list)
    born: int = 0
    """The step before which its row started."""
    stale: bool = False
    """Whether its keys and values mix several weights: then nobody may use them later."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """How many tokens were out when which version left."""
    said: RowOutput = _NOTHING
    """What it sampled before it was preempted."""
    swapped: SwappedTokens | None = None
    """What it had computed when it was preempted."""
    preemptions: int = 0
    waits_since: float = field(default_factory=lambda: monotonic())
    queue_s: float = 0.0
    """How long it has waited for a row, before it began and after preemptions."""
    finder: StopStringFinder | None = None
    """Looks for stop strings, where the request has any."""
    stopped_at: int | None = None
    """How many tokens the answer has, once it has written a stop string."""
    prefix: tuple[int, ...] = field(init=False)
    """What must be in its pages before the row can start: all but the last token."""

    def __post_init__(self) -> None:
        self.prefix = self.request.ids[:-1]

    @property
    def limit(self) -> int:
        """How many tokens the answer may have."""
        return min(self.request.sampling.max_tokens, self.room - len(self.request.ids))

    @property
    def places(self) -> int:
        """How many places it may come to need: the last token of an answer needs none."""
        return len(self.request.ids) - 1 + self.limit

    def start_row(self) -> RowStart:
        request, sampling, said = self.request, self.request.sampling, self.said.ids
        begun = len(request.ids) - request.said
        seen = (request.ids[:begun], request.ids[begun:] + said) if sampling.is_penalized else ((), ())
        return RowStart(
            row=self.row,
            last_id=said[-1] if said else request.ids[-1],
            length=len(self.prefix),
            left=self.limit - len(said),
            stream=stream_of(request),
            draw=request.position + len(said),
            temperature=sampling.own_temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stops=sampling.stop_token_ids,
            min_p=sampling.min_p,
            penalties=sampling.penalties,
            prompt=seen[0],
            answer=seen[1],
        )

    def look(self, ids: Sequence[int]) -> None:
        """Look for stop strings in the tokens that have not been looked at."""
        assert self.finder is not None
        if self.stopped_at is None:
            self.stopped_at = self.finder.feed(ids)

    def cut(self, response: RowOutput) -> RowOutput:
        """What the row sampled, up to the end of a stop string."""
        assert self.finder is not None
        before = len(self.said.ids)
        self.look(response.ids[self.finder.seen - before :])
        return response if self.stopped_at is None else response.cut(self.stopped_at - before)

    def hear(self, response: RowOutput) -> None:
        """Take in what the row sampled before it was preempted; the ticket goes on from there."""
        if self.finder is not None:
            response = self.cut(response)
        self.said = self.said.then(response)
        self.prefix = (*self.request.ids, *self.said.ids)[:-1]

    def wait(self) -> None:
        """It is in the queue again."""
        self.waits_since = monotonic()

    def leave_queue(self) -> None:
        self.queue_s += monotonic() - self.waits_since

    def end_version(self, tokens: int, version: int) -> None:
        """New weights sample what follows these tokens."""
        self.versions.append((tokens, version))

    def versions_of(self, tokens: int, version: int) -> tuple[int, ...]:
        """The version of each token, where `version` sampled the last ones."""
        versions: tuple[int, ...] = ()
        for until, earlier in self.versions:
            versions += (earlier,) * (until - len(versions))
        return versions[:tokens] + (version,) * (tokens - len(versions))
