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


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """Tokens of a sequence that goes on."""

    start: int
    """How many tokens of the same answer come before them."""
    ids: tuple[int, ...]


SequenceResult = Completion | Exception
SequenceOutput = SequenceResult | TokenUpdate

_NOTHING = RowOutput((), ())


@dataclass(slots=True, eq=False)
class SequenceState:
    """State of one request: its result callback, row and pages. `room` is the engine's maximum sequence length."""

    request: Request
    deliver: Callable[[SequenceOutput], None]
    """Called with its result, and before that with tokens, where the request asks for them."""
    room: int
    row: int = -1
    pages: list[int] = field(default_factory=list)
    start_step: int = 0
    """The step before which its row started."""
    stale: bool = False
    """Whether its keys and values come from several versions of the weights: then they are never reused."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(tokens sampled so far, version) at each change of weights."""
    sampled: RowOutput = _NOTHING
    """What it sampled before it was preempted."""
    swapped: SwappedTokens | None = None
    """What it had computed when it was preempted."""
    preemptions: int = 0
    queued_since: float = field(default_factory=lambda: monotonic())
    queue_s: float = 0.0
    """How long it has waited for a row, before it began and after preemptions."""
    finder: StopStringFinder | None = None
    """Stop-string search, where the request has any."""
    reported: int = 0
    """How many tokens were delivered while it ran."""
    stopped_at: int | None = None
    """Length of the answer in tokens, once it contains a stop string."""
    prefix: tuple[int, ...] = field(init=False)
    """What must be in its pages before the row can start: all but the last token."""

    def __post_init__(self) -> None:
        self.prefix = self.request.ids[:-1]

    @property
    def limit(self) -> int:
        """How many tokens the answer may have."""
        return min(self.request.sampling.max_tokens, self.room - len(self.request.ids))

    @property
    def slots(self) -> int:
        """Slots it may come to need: the last token of an answer needs none."""
        return len(self.request.ids) - 1 + self.limit

    def start_row(self) -> RowStart:
        request, sampling, sampled = self.request, self.request.sampling, self.sampled.ids
        begun = len(request.ids) - request.num_begun
        seen = (request.ids[:begun], request.ids[begun:] + sampled) if sampling.is_penalized else ((), ())
        return RowStart(
            row=self.row,
            last_id=sampled[-1] if sampled else request.ids[-1],
            length=len(self.prefix),
            left=self.limit - len(sampled),
            stream=stream_of(request),
            draw=request.position + len(sampled),
            temperature=sampling.own_temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stops=sampling.stop_token_ids,
            min_p=sampling.min_p,
            penalties=sampling.penalties,
            prompt=seen[0],
            answer=seen[1],
        )

    def report(self, tail: Callable[[int], Sequence[int]]) -> TokenUpdate | None:
        """The tokens that were not delivered yet. `tail`: what its row sampled after so many tokens."""
        before, start = len(self.sampled.ids), self.reported
        ids = (*self.sampled.ids[start:], *tail(max(0, start - before)))
        self.reported += len(ids)
        return TokenUpdate(self.request.num_begun + start, ids) if ids else None

    def find_stop(self, ids: Sequence[int]) -> None:
        """Search the new tokens for stop strings."""
        assert self.finder is not None
        if self.stopped_at is None:
            self.stopped_at = self.finder.feed(ids)

    def trim(self, output: RowOutput) -> RowOutput:
        """What the row sampled, up to the end of a stop string."""
        assert self.finder is not None
        before = len(self.sampled.ids)
        self.find_stop(output.ids[self.finder.seen - before :])
        return output if self.stopped_at is None else output.truncate(self.stopped_at - before)

    def append_output(self, output: RowOutput) -> None:
        """Append what the row sampled before it was preempted; the sequence continues from there."""
        if self.finder is not None:
            output = self.trim(output)
        self.sampled = self.sampled.then(output)
        self.prefix = (*self.request.ids, *self.sampled.ids)[:-1]

    def enter_queue(self) -> None:
        """Start counting queue time."""
        self.queued_since = monotonic()

    def leave_queue(self) -> None:
        self.queue_s += monotonic() - self.queued_since

    def end_version(self, tokens: int, version: int) -> None:
        """New weights sample what follows these tokens."""
        self.versions.append((tokens, version))

    def versions_of(self, tokens: int, version: int) -> tuple[int, ...]:
        """The version of each token, where `version` sampled the last ones."""
        versions: tuple[int, ...] = ()
        for until, earlier in self.versions:
            versions += (earlier,) * (until - len(versions))
        return versions[:tokens] + (version,) * (tokens - len(versions))
