"""One request inside the embedded engine, from the queue to its answer."""

from collections.abc import Callable
from dataclasses import dataclass, field

from treadle.engine.native.rows import RowStart
from treadle.engine.noise import stream_of
from treadle.types import Completion, Request

Answer = Completion | Exception


@dataclass(slots=True, eq=False)
class Ticket:
    """A request, who waits for it, and the row it has. `room` is the longest sequence that the engine holds."""

    request: Request
    deliver: Callable[[Answer], None]
    room: int
    slot: int = -1
    born: int = 0
    """The step before which its row started."""
    stale: bool = False
    """Whether its keys and values mix several weights: then nobody may use them later."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """How many tokens were out when which version left."""
    prefix: tuple[int, ...] = field(init=False)
    """What must be in the slot before the row can start: all but the last token."""

    def __post_init__(self) -> None:
        self.prefix = self.request.ids[:-1]

    @property
    def filtered(self) -> bool:
        sampling = self.request.sampling
        return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)

    def row(self) -> RowStart:
        request, sampling = self.request, self.request.sampling
        return RowStart(
            slot=self.slot,
            last_id=request.ids[-1],
            length=len(request.ids) - 1,
            left=min(sampling.max_tokens, self.room - len(request.ids)),
            stream=stream_of(request),
            draw=request.position,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stops=sampling.stop_token_ids,
        )

    def versions_of(self, tokens: int, version: int) -> tuple[int, ...]:
        """The version of each token, where `version` sampled the last ones."""
        versions: tuple[int, ...] = ()
        for until, earlier in self.versions:
            versions += (earlier,) * (until - len(versions))
        return versions[:tokens] + (version,) * (tokens - len(versions))
