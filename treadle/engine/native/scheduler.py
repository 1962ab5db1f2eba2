"""Who gets a row when: the queue, prefill, running rows and what is kept of those that ended.

Owns every ticket from `add` to its answer. Runs in one thread, which calls `turn` as long as there is work; knows
nothing of threads and event loops. Tickets are admitted in order, between two steps, as slots come free.
Invariant: a slot is free, in prefill or running, never two of these; a request's tokens depend on its own session only.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from treadle.config.rollout import RolloutConfig
from treadle.engine.native.cache import Move, round_up
from treadle.engine.native.decoder import Decoder
from treadle.engine.native.parking import Parking
from treadle.engine.native.plans import Piece
from treadle.engine.native.residents import Found, Residents
from treadle.engine.native.rows import Response
from treadle.engine.native.slots import FreeSlots
from treadle.engine.native.ticket import Answer, Ticket
from treadle.errors import EngineFailure
from treadle.types import Completion, StopReason

_SPARSE = 0.75
"""Rows are moved together when fewer than this fraction of those computed would do."""


@dataclass(slots=True, eq=False)
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
        self._residents = Residents(decoder.cache, parking, enabled=rollout.enable_prefix_caching)
        self._answer = answer
        self._name = name
        self._waiting: deque[Ticket] = deque()
        self._prefills: list[_Prefill] = []
        self._fresh: dict[tuple[int, ...], _Prefill] = {}
        """Those that compute a whole prompt, which siblings may still join."""
        self._ready: list[Ticket] = []
        self._running: dict[int, Ticket] = {}
        self._slots = min(decoder.cache.slots, rollout.max_num_seqs)
        self._free = FreeSlots(range(self._slots))
        self._steps = 0
        self._top = 0
        self._lead = 0
        self._filtered = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefills or self._ready or self._running)

    def add(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

    def turn(self) -> None:
        """Admit, prefill up to the token budget, start rows, and give every running row one token."""
        if not self.busy:
            return
        self._decoder.cache.acquire()
        self._admit()
        if self._prefills:
            self._prefill()
        if self._ready:
            self._start()
        if self._running:
            ended = self._decoder.step(self._top, self._lead + self._steps, filtered=self._filtered)
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
            self._drop(prefill)
        elif first in gone:
            prefill.start = 0  # what was computed is in the slot of the one who left
        for ticket in gone:
            self._release(ticket.slot)
            self._close(ticket, Response((), ()))

    def change_weights(self, version: int, load: Callable[[], str]) -> str:
        """Let `load` change the weights between two steps; what was computed with the old ones is forgotten."""
        counts = self._decoder.rows.count.tolist() if self._running else []
        for slot, ticket in self._running.items():
            ticket.versions.append((counts[slot], self.version))
            ticket.stale = True
        for prefill in self._prefills:
            prefill.start = 0
        self._residents.clear()
        confirmed = load()
        self._decoder.refresh()
        self.version = version
        return confirmed

    def release(self) -> bool:
        """Give the cache's memory back, with all that is kept; a ticket takes it again. Not while there is work."""
        if self.busy:
            return False
        self._decoder.settle()
        self._residents.clear()
        self._decoder.cache.release()
        return True

    def close(self) -> None:
        """The last call."""
        self.abort(lambda ticket: True)
        self._residents.clear()
        self._decoder.close()

    def forget(self, session: str) -> None:
        """Free what is kept for a session that is over."""
        self._residents.forget(session)

    def _admit(self) -> None:
        """Give slots to tickets that wait, until prefill has enough to do."""
        room = self._rollout.max_num_batched_tokens - sum(len(work.ids) - work.start for work in self._prefills)
        moves: list[Move] = []
        while self._waiting and self._free and room > 0:
            ticket = self._waiting.popleft()
            found = self._residents.find(ticket.request.session, ticket.prefix)
            self._seat(ticket, found, moves)
            start = 0 if found is None else found.tokens
            if start == len(ticket.prefix):
                self._ready.append(ticket)
            elif self._join_prefill(ticket, start):
                room -= len(ticket.prefix) - start
        self._copy(moves)
        self._decoder.cache.flush()

    def _seat(self, ticket: Ticket, found: Found | None, moves: list[Move]) -> None:
        """Give a ticket its slot, with what was found in it; copies between slots are left in `moves`."""
        if found is not None and found.own and found.slot is not None:
            ticket.slot = found.slot
            self._free.remove(found.slot)
            self._residents.wake(found.slot, found.tokens)
            return
        ticket.slot = self._free.take(near=(self._slots - len(self._free) + 1) / _SPARSE)
        if any(ticket.slot == move.source for move in moves):
            self._copy(moves)
        self._residents.vacate(ticket.slot)
        if found is not None and found.parked is not None:
            self._decoder.cache.put(ticket.slot, found.parked.kv, found.tokens)
        elif found is not None and found.slot is not None and found.slot != ticket.slot:
            moves.append(Move(found.slot, ticket.slot, found.tokens))

    def _release(self, slot: int) -> None:
        self._free.add(slot, held=self._residents.holds(slot))

    def _copy(self, moves: list[Move]) -> None:
        if moves:
            self._decoder.cache.copy(moves)
            moves.clear()

    def _join_prefill(self, ticket: Ticket, start: int) -> bool:
        """Siblings with the same prompt share its prefill, if they come in time. Whether this is a new one."""
        joined = self._fresh.get(ticket.prefix) if start == 0 else None
        if joined is not None:
            joined.tickets.append(ticket)
            return False
        prefill = _Prefill(start, ticket.prefix, [ticket], fresh=start == 0)
        self._prefills.append(prefill)
        if prefill.fresh:
            self._fresh[prefill.ids] = prefill
        return True

    def _drop(self, prefill: _Prefill) -> None:
        self._prefills.remove(prefill)
        if prefill.fresh:
            del self._fresh[prefill.ids]

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
        self._share([prefill for prefill, _ in chosen if prefill.start == len(prefill.ids)])

    def _share(self, done: Sequence[_Prefill]) -> None:
        """Prefills are done: siblings get copies, and those that come later can have some too."""
        moves: list[Move] = []
        for prefill in done:
            self._drop(prefill)
            first, *others = prefill.tickets
            moves += [Move(first.slot, ticket.slot, len(prefill.ids)) for ticket in others]
            if prefill.fresh:
                self._residents.offer(first.slot, prefill.ids)
            self._ready += prefill.tickets
        self._copy(moves)

    def _start(self) -> None:
        self._decoder.start([ticket.row() for ticket in self._ready])
        for ticket in self._ready:
            ticket.born = self._steps
            self._running[ticket.slot] = ticket
        self._ready.clear()
        self._look_around()

    def _finish(self, slots: list[int]) -> None:
        for slot, response in zip(slots, self._decoder.read(slots), strict=True):
            ticket = self._running.pop(slot)
            self._keep(ticket, response)
            self._release(slot)
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
        """Leave what the slot holds to the session: everything but the last token, which no step has read yet."""
        if any(logprob != logprob for logprob in response.logprobs):
            self._residents.withdraw(ticket.slot)
            self._decoder.cache.clear(ticket.slot)
        elif not ticket.stale:
            self._residents.stay(ticket.slot, ticket.request.session, (*ticket.request.ids, *response.ids)[:-1])

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
        holes = self._free.below(needed)
        movers = sorted((slot for slot in self._running if slot >= needed), reverse=True)
        moves = [Move(*pair, self._tokens_of(pair[0])) for pair in zip(movers, holes, strict=False)]
        for move in moves:
            self._residents.vacate(move.target)
            self._free.remove(move.target)
        self._decoder.move(moves)
        self._residents.move(moves)
        for move in moves:
            ticket = self._running.pop(move.source)
            ticket.slot = move.target
            self._running[move.target] = ticket
            self._release(move.source)

    def _tokens_of(self, slot: int) -> int:
        """How many places of a running slot may be in use."""
        ticket = self._running[slot]
        return min(len(ticket.prefix) + self._steps - ticket.born, self._decoder.cache.length)

    def _look_around(self) -> None:
        """What all steps need to know until rows start or end again."""
        running: Iterable[Ticket] = self._running.values()
        self._top = max(self._running, default=-1) + 1
        self._lead = max((len(ticket.prefix) - ticket.born for ticket in running), default=0)
        self._filtered = any(ticket.filtered for ticket in running)
