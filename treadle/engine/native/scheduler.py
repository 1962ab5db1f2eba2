"""Who gets a row when: the queue, prefill, running rows and what is kept of those that ended.

Owns every ticket from `add` to its answer. Runs in one thread, which calls `turn` as long as there is work; knows
nothing of threads and event loops. Tickets are admitted in order, between two steps, as slots come free.
Invariant: a slot is free, in prefill or running, never two of these; a request's tokens depend on its own session only.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from treadle.config.rollout import RolloutConfig
from treadle.engine.native.cache import round_up
from treadle.engine.native.decoder import Decoder
from treadle.engine.native.parking import Parked, Parking, shared_prefix
from treadle.engine.native.plans import Piece
from treadle.engine.native.rows import Response
from treadle.engine.native.ticket import Answer, Ticket
from treadle.errors import EngineFailure
from treadle.types import Completion, StopReason

_SPARSE = 0.75
"""Rows are moved together when fewer than this fraction of those computed would do."""


@dataclass(slots=True)
class _Prefill:
    """Tokens on their way into a slot, and the tickets that need exactly these: the first one's slot is computed."""

    start: int
    ids: tuple[int, ...]
    tickets: list[Ticket]
    fresh: bool
    """Whether all of `ids` is computed here, so that siblings and later comers can have it."""

    def next_piece(self, limit: int | None) -> Piece:
        end = len(self.ids) if limit is None else min(len(self.ids), self.start + limit)
        return Piece(self.tickets[0].slot, self.start, self.ids[self.start : end])


class Scheduler:
    """See the module. `answer` gets every ticket once, with its completion or the reason why there is none."""

    def __init__(
        self,
        rollout: RolloutConfig,
        decoder: Decoder,
        parking: Parking,
        answer: Callable[[Ticket, Answer], None],
        *,
        name: str,
        version: int,
    ) -> None:
        self.version = version
        self._rollout = rollout
        self._decoder = decoder
        self._parking = parking
        self._answer = answer
        self._name = name
        self._waiting: deque[Ticket] = deque()
        self._prefills: list[_Prefill] = []
        self._ready: list[Ticket] = []
        self._running: dict[int, Ticket] = {}
        self._free = list(range(min(decoder.cache.slots, rollout.max_num_seqs)))
        self._steps = 0
        self._lead = 0
        self._filtered = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefills or self._ready or self._running)

    def add(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

    def turn(self) -> None:
        """Admit, prefill up to the token budget, start rows, and give every running row one token."""
        self._admit()
        if self._prefills:
            self._prefill()
        if self._ready:
            self._start()
        if self._running:
            ended = self._decoder.step(max(self._running) + 1, self._lead + self._steps, filtered=self._filtered)
            self._steps += 1
            if ended:
                self._finish([slot for slot in ended if slot in self._running])

    def abort(self, chosen: Callable[[Ticket], bool]) -> None:
        """End tickets where they are; those with a row keep their tokens."""
        for ticket in [ticket for ticket in self._waiting if chosen(ticket)]:
            self._waiting.remove(ticket)
            self._close(ticket, Response((), ()))
        for prefill in list(self._prefills):
            self._leave_prefill(prefill, chosen)
        self._catch_up()
        slots = [slot for slot, ticket in self._running.items() if chosen(ticket)]
        if slots:
            self._decoder.rows.stop(slots)
            self._finish(slots)

    def _leave_prefill(self, prefill: _Prefill, chosen: Callable[[Ticket], bool]) -> None:
        first, gone = prefill.tickets[0], [ticket for ticket in prefill.tickets if chosen(ticket)]
        prefill.tickets = [ticket for ticket in prefill.tickets if ticket not in gone]
        if not prefill.tickets:
            self._prefills.remove(prefill)
        elif first in gone:
            prefill.start = 0  # what was computed is in the slot of the one who left
        for ticket in gone:
            heapq.heappush(self._free, ticket.slot)
            self._close(ticket, Response((), ()))

    def change_weights(self, version: int, load: Callable[[], str]) -> str:
        """Let `load` change the weights between two steps; what was computed with the old ones is forgotten."""
        counts = self._decoder.rows.count.tolist() if self._running else []
        for slot, ticket in self._running.items():
            ticket.versions.append((counts[slot], self.version))
            ticket.stale = True
        for prefill in self._prefills:
            prefill.start = 0
        self._parking.clear()
        confirmed = load()
        self.version = version
        return confirmed

    def forget(self, session: str) -> None:
        """Free what is kept for a session that is over."""
        self._parking.forget(session)

    def _admit(self) -> None:
        limit = self._rollout.max_num_batched_tokens
        while self._waiting and self._free and sum(len(work.ids) - work.start for work in self._prefills) < limit:
            ticket = self._waiting.popleft()
            ticket.slot = heapq.heappop(self._free)
            kept = self._find_kept(ticket)
            if kept is not None:
                self._decoder.cache.put(ticket.slot, kept.kv, min(len(kept.ids), len(ticket.prefix)))
            start = 0 if kept is None else min(len(kept.ids), len(ticket.prefix))
            if start == len(ticket.prefix):
                self._ready.append(ticket)
            else:
                self._join_prefill(ticket, start)

    def _find_kept(self, ticket: Ticket) -> Parked | None:
        """What the session left, if the request goes on from there or repeats it; else what siblings left."""
        if not self._rollout.enable_prefix_caching:
            return None
        for key in (ticket.request.session, ticket.prefix):
            kept = self._parking.find(key)
            if kept and shared_prefix(kept.ids, ticket.prefix) == min(len(kept.ids), len(ticket.prefix)):
                return kept
        return None

    def _join_prefill(self, ticket: Ticket, start: int) -> None:
        """Siblings with the same prompt share its prefill, if they come before it is done."""
        for prefill in self._prefills:
            if start == 0 and prefill.fresh and prefill.ids == ticket.prefix:
                prefill.tickets.append(ticket)
                return
        self._prefills.append(_Prefill(start, ticket.prefix, [ticket], fresh=start == 0))

    def _prefill(self) -> None:
        """One forward over as many pieces as the token budget takes; a piece's length depends on its request alone."""
        room = self._rollout.max_num_batched_tokens
        limit = room if self._rollout.enable_chunked_prefill else None
        chosen: list[tuple[_Prefill, Piece]] = []
        for prefill in self._prefills:
            piece = prefill.next_piece(limit)
            if chosen and len(piece.ids) > room:
                break
            chosen.append((prefill, piece))
            room -= len(piece.ids)
        self._decoder.prefill([piece for _, piece in chosen])
        for prefill, piece in chosen:
            prefill.start = piece.end
            if prefill.start == len(prefill.ids):
                self._share(prefill)

    def _share(self, prefill: _Prefill) -> None:
        """Prefill is done: siblings get copies, and one is kept for those that come later."""
        self._prefills.remove(prefill)
        first, *others = prefill.tickets
        tokens = len(prefill.ids)
        self._decoder.cache.copy(first.slot, [ticket.slot for ticket in others], tokens)
        if prefill.fresh and self._rollout.enable_prefix_caching:
            self._parking.park(prefill.ids, Parked(prefill.ids, self._decoder.cache.take(first.slot, tokens)))
        self._ready += prefill.tickets

    def _start(self) -> None:
        self._decoder.rows.start([ticket.row() for ticket in self._ready])
        for ticket in self._ready:
            ticket.born = self._steps
            self._running[ticket.slot] = ticket
        self._ready.clear()
        self._look_around()

    def _finish(self, slots: list[int]) -> None:
        for slot, response in zip(slots, self._decoder.read(slots), strict=True):
            ticket = self._running.pop(slot)
            self._keep(ticket, response)
            heapq.heappush(self._free, slot)
            self._close(ticket, response)
        self._gather()
        self._look_around()

    def _catch_up(self) -> bool:
        """Finish rows that ended without our knowing, if there are any: only then may slots change hands."""
        ended = [slot for slot in self._decoder.settle() if slot in self._running]
        if ended:
            self._finish(ended)
        return bool(ended)

    def _keep(self, ticket: Ticket, response: Response) -> None:
        """Park what the slot holds: everything but the last token, which no step has read yet."""
        if any(logprob != logprob for logprob in response.logprobs):
            self._decoder.cache.clear(ticket.slot)
        elif self._rollout.enable_prefix_caching and not ticket.stale:
            ids = (*ticket.request.ids, *response.ids)[:-1]
            self._parking.park(ticket.request.session, Parked(ids, self._decoder.cache.take(ticket.slot, len(ids))))

    def _close(self, ticket: Ticket, response: Response) -> None:
        sampling, ids = ticket.request.sampling, response.ids
        if any(logprob != logprob for logprob in response.logprobs):
            where = f"session {ticket.request.session}, token {ticket.request.position + len(ids) - 1}"
            self._answer(ticket, EngineFailure(f"{self._name}: {where}: the model's logits are not numbers"))
            return
        stop = StopReason.ABORT
        if ids and ids[-1] in sampling.stop_token_ids:
            stop = StopReason.STOP
        elif len(ids) >= min(sampling.max_tokens, ticket.room - len(ticket.request.ids)):
            stop = StopReason.LENGTH
        versions = ticket.versions_of(len(ids), self.version)
        self._answer(ticket, Completion(ids, response.logprobs, versions, stop, replica=self._name))

    def _gather(self) -> None:
        """Move running rows together, so that a step computes few rows that are not there."""
        if not self._running:
            return
        step = self._decoder.row_step
        needed = round_up(len(self._running), step)
        if needed > _SPARSE * round_up(max(self._running) + 1, step):
            return
        if self._catch_up():
            return  # others ended, and the rest was moved together
        holes = sorted(slot for slot in self._free if slot < needed)
        movers = sorted((slot for slot in self._running if slot >= needed), reverse=True)[: len(holes)]
        targets = holes[: len(movers)]
        self._decoder.move(movers, targets, self._lead + self._steps)
        self._free = [slot for slot in self._free if slot not in targets] + movers
        heapq.heapify(self._free)
        for source, target in zip(movers, targets, strict=True):
            ticket = self._running.pop(source)
            ticket.slot = target
            self._running[target] = ticket

    def _look_around(self) -> None:
        """What all steps need to know until rows start or end again."""
        running: Iterable[Ticket] = self._running.values()
        self._lead = max((len(ticket.prefix) - ticket.born for ticket in running), default=0)
        self._filtered = any(ticket.filtered for ticket in running)
