"""Scheduler: continuous batching with chunked prefill and preemption.

Owns every sequence from `add` to its result: the waiting queue, prefill, and the running batch. Runs in one thread,
which calls `turn` as long as there is work; knows nothing of threads and event loops. Sequences are admitted in order,
between two decode steps, as rows and pages come free. A row that needs a page where there is none takes it from the
prefix cache, and then from the sequence that was admitted last, which is preempted: it goes back to the front of the
queue with what it has and goes on from there, with the same tokens.
Invariant: a sequence waits, is in prefill or runs, never two of these; a request's tokens depend on its session only.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable

from treadle.config.rollout import RolloutConfig
from treadle.engine.native.chunked_prefill import PrefillQueue
from treadle.engine.native.input_batch import RowOutput
from treadle.engine.native.kv_cache import round_up
from treadle.engine.native.kv_cache_manager import COMPACT_BELOW, LOOKAHEAD_STEPS, KVCacheManager, PageSchedule
from treadle.engine.native.model_runner import ModelRunner
from treadle.engine.native.prefix_cache import SwapSpace
from treadle.engine.native.sequence import SequenceResult, SequenceState
from treadle.errors import EngineFailure
from treadle.types import Completion, StopReason

log = logging.getLogger(__name__)


class Scheduler:
    """See the module. `answer` gets every ticket once, with its completion or the reason why there is none."""

    def __init__(
        self,
        rollout: RolloutConfig,
        decoder: ModelRunner,
        parking: SwapSpace,
        answer: Callable[[SequenceState, SequenceResult], None],
        *,
        name: str,
        version: int,
    ) -> None:
        self.version = version
        self.preemptions = 0
        """How often a ticket had to give its pages up."""
        self._rollout = rollout
        self._decoder = decoder
        self._cache = decoder.cache
        caching = rollout.enable_prefix_caching
        self._kv_manager = KVCacheManager(decoder.cache, parking, rollout.max_num_seqs, caching=caching)
        self._answer = answer
        self._name = name
        self._waiting: deque[SequenceState] = deque()
        self._seated: dict[SequenceState, None] = {}
        """Those with a row, in the order of their admission: in prefill, ready or running."""
        self._prefills = PrefillQueue()
        self._ready: list[SequenceState] = []
        self._running: dict[int, SequenceState] = {}
        self._page_schedule = PageSchedule()
        self._blocked: tuple[SequenceState, int] | None = None
        """Who found no room: no use in looking again before something has changed."""
        self._steps = 0
        self._top = 0
        self._lead = 0
        self._filtered = False
        self._penalized = False
        self._stoppable = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefills or self._ready or self._running)

    def add(self, ticket: SequenceState) -> None:
        self._waiting.append(ticket)

    def turn(self) -> None:
        """Admit, prefill up to the token budget, start rows, and give every running row one token."""
        if not self.busy:
            return
        self._cache.acquire()
        self._admit()
        if self._prefills:
            self._prefill()
        if self._ready:
            self._start()
        self._allocate_lookahead()
        if self._running:
            self._cache.upload()
            ended = self._decoder.step(
                self._top, self._lead + self._steps, filtered=self._filtered, penalized=self._penalized
            )
            self._steps += 1
            if ended:
                self._finish([row for row in ended if row in self._running])
            if self._stoppable:
                self._stop_at_strings()

    def abort(self, chosen: Callable[[SequenceState], bool]) -> None:
        """End tickets where they are; those that have sampled keep their tokens."""
        for ticket in [ticket for ticket in self._waiting if chosen(ticket)]:
            self._waiting.remove(ticket)
            ticket.leave_queue()
            self._kv_manager.drop_swapped(ticket, for_session=not ticket.stale)
            self._close(ticket, ticket.said)
        for ticket in [ticket for prefill in self._prefills for ticket in prefill.tickets if chosen(ticket)]:
            tokens = self._prefills.leave(ticket)
            del self._seated[ticket]
            self._kv_manager.stay(ticket, ticket.prefix[:tokens])
            self._close(ticket, ticket.said)
        self._finish_late_rows()
        rows = [row for row, ticket in self._running.items() if chosen(ticket)]
        if rows:
            self._decoder.rows.stop(rows)
            self._finish(rows)

    def change_weights(self, version: int, load: Callable[[], str]) -> str:
        """Let `load` change the weights between two steps; what was computed with the old ones is forgotten.

        Rows that have begun to sample go on with what they have, also those that wait to go on.
        """
        counts = self._decoder.rows.count.tolist() if self._running else []
        for row, ticket in self._running.items():
            ticket.end_version(len(ticket.said.ids) + counts[row], self.version)
            ticket.stale = True
        self._requeue_prefills()
        for ticket in self._waiting:
            if ticket.said.ids:
                ticket.end_version(len(ticket.said.ids), self.version)
                ticket.stale |= ticket.swapped is not None
            else:
                self._kv_manager.drop_swapped(ticket, for_session=False)
        self._kv_manager.prefix_cache.clear()
        confirmed = load()
        self._decoder.refresh()
        self.version = version
        return confirmed

    def _requeue_prefills(self) -> None:
        """Send those in prefill back: their pages may be shared with rows that run on with old keys and values."""
        back = [ticket for ticket in self._seated if ticket.row not in self._running]
        for ticket in back:
            self._prefills.leave(ticket)
            del self._seated[ticket]
            self._kv_manager.leave(ticket)
            ticket.wait()
        self._waiting.extendleft(reversed(back))

    def release(self) -> bool:
        """Give the cache's memory back, with all that is kept; a ticket takes it again. Not while there is work."""
        if self.busy:
            return False
        self._decoder.settle()
        self._kv_manager.prefix_cache.clear()
        self._cache.release()
        return True

    def close(self) -> None:
        """The last call."""
        self.abort(lambda ticket: True)
        self._kv_manager.prefix_cache.clear()
        self._decoder.close()

    def forget(self, session: str) -> None:
        """Free what is kept for a session that is over."""
        self._kv_manager.prefix_cache.forget(session)

    def _admit(self) -> None:
        """Seat tickets that wait, until prefill has enough to do or there is no room."""
        room = self._rollout.max_num_batched_tokens - self._prefills.num_tokens
        while self._waiting and room > 0 and self._kv_manager.free_rows:
            ticket = self._waiting[0]
            if self._blocked == (ticket, self._kv_manager.changes):
                break
            start = self._kv_manager.seat(ticket, self._prefills.sibling(ticket))
            if start is None:
                self._blocked = (ticket, self._kv_manager.changes)
                break
            self._waiting.popleft()
            ticket.leave_queue()
            self._seated[ticket] = None
            if start == len(ticket.prefix):
                self._ready.append(ticket)
            elif self._prefills.join(ticket, start):
                room -= len(ticket.prefix) - start
        self._kv_manager.copy()

    def _prefill(self) -> None:
        """One forward over as many pieces as the token budget takes. Prompts that are done are shared."""
        room = self._rollout.max_num_batched_tokens
        chosen = self._prefills.choose(room, room if self._rollout.enable_chunked_prefill else None)
        self._cache.upload()
        self._decoder.prefill([piece for _, piece in chosen])
        for prefill, piece in chosen:
            prefill.start = piece.end
            if prefill.done:
                self._prefills.drop(prefill)
                first, *others = prefill.tickets
                self._kv_manager.share(first, others, len(prefill.ids))
                if prefill.fresh:
                    self._kv_manager.prefix_cache.offer(prefill.ids, first.pages)
                self._ready += prefill.tickets
        self._kv_manager.copy()

    def _start(self) -> None:
        self._decoder.start([ticket.start_row() for ticket in self._ready])
        for ticket in self._ready:
            ticket.born = self._steps
            self._running[ticket.row] = ticket
            self._schedule_page(ticket)
        self._ready.clear()
        self._update_step_inputs()

    def _schedule_page(self, ticket: SequenceState) -> None:
        places = self._kv_manager.places_of(ticket)
        if places is not None:
            self._page_schedule.plan(ticket, ticket.born + places - len(ticket.prefix))

    def _allocate_lookahead(self) -> None:
        """Give rows the pages that the next steps may need."""
        for ticket in self._page_schedule.next(self._steps):
            places = self._places_of(ticket) + 2 * LOOKAHEAD_STEPS
            if ticket in self._seated and self._make_room(ticket, places):
                self._kv_manager.grow(ticket, self._kv_manager.lacks(ticket, places))
                self._schedule_page(ticket)

    def _make_room(self, ticket: SequenceState, places: int) -> bool:
        """Have the pages free that a ticket lacks; False if the ticket itself has left meanwhile."""
        while self._kv_manager.lacks(ticket, places) > len(self._kv_manager.pages.free):
            if self._kv_manager.evict():
                continue
            if not self._finish_late_rows():
                self._preempt(next(reversed(self._seated)))
            if ticket not in self._seated:
                return False
        return True

    def _preempt(self, ticket: SequenceState) -> None:
        """Take a ticket's row and pages. Everything that its row has sampled is known."""
        if self._running.get(ticket.row) is ticket:
            self._decoder.rows.stop([ticket.row])
            ticket.hear(self._decoder.read([ticket.row])[0])
            del self._running[ticket.row]
            self._page_schedule.drop(ticket)
            tokens = len(ticket.prefix)
        else:
            tokens = self._prefills.leave(ticket)
        del self._seated[ticket]
        self._kv_manager.swap_out(ticket, tokens)
        self._waiting.appendleft(ticket)
        ticket.wait()
        self._update_step_inputs()
        ticket.preemptions += 1
        self.preemptions += 1
        if self.preemptions == 1:
            self._report_preemption()

    def _report_preemption(self) -> None:
        tokens = self._cache.pages * self._cache.page
        log.warning(
            "%s: the KV cache of %s tokens is full, so a sequence waits in host memory; if that happens often, raise "
            "rollout.gpu_memory_utilization, or lower rollout.max_num_seqs (%d) or rollout.max_model_len (%d)",
            *(self._name, f"{tokens:,}", self._rollout.max_num_seqs, self._cache.length),
        )

    def _stop_at_strings(self) -> None:
        """End rows that have written a stop string. On a GPU they may be some tokens further: those are dropped."""
        rows = [row for row, ticket in self._running.items() if ticket.finder and self._wrote_stop(row, ticket)]
        if rows:
            self._decoder.rows.stop(rows)
            self._finish(rows)

    def _wrote_stop(self, row: int, ticket: SequenceState) -> bool:
        assert ticket.finder is not None
        ticket.look(self._decoder.tail(row, ticket.finder.seen - len(ticket.said.ids)))
        return ticket.stopped_at is not None

    def _finish(self, rows: list[int]) -> None:
        for row, response in zip(rows, self._decoder.read(rows), strict=True):
            ticket = self._running.pop(row)
            if ticket.finder is not None:
                response = ticket.cut(response)
            self._page_schedule.drop(ticket)
            del self._seated[ticket]
            self._keep(ticket, response)
            self._close(ticket, ticket.said.then(response))
        self._gather()
        self._update_step_inputs()

    def _finish_late_rows(self) -> bool:
        """Finish rows that ended without our knowing, if there are any: only then may rows change hands."""
        ended = [row for row in self._decoder.settle() if row in self._running]
        if ended:
            self._finish(ended)
        return bool(ended)

    def _keep(self, ticket: SequenceState, response: RowOutput) -> None:
        """Leave what the pages hold to the session: everything but the last token, which no step has read yet."""
        if response.is_broken:
            self._kv_manager.prefix_cache.forget(ticket.request.ids[:-1])
            self._cache.clear(ticket.pages)
            self._kv_manager.leave(ticket)
        elif ticket.stale:
            self._kv_manager.leave(ticket)
        else:
            self._kv_manager.stay(ticket, (*ticket.request.ids, *ticket.said.ids, *response.ids)[:-1])

    def _close(self, ticket: SequenceState, response: RowOutput) -> None:
        ids = response.ids
        if response.is_broken:
            where = f"session {ticket.request.session}, token {ticket.request.position + len(ids) - 1}"
            self._answer(ticket, EngineFailure(f"{self._name}: {where}: the model's logits are not numbers"))
            return
        stop = StopReason.ABORT
        if ticket.stopped_at is not None or (ids and ids[-1] in ticket.request.sampling.stop_token_ids):
            stop = StopReason.STOP
        elif len(ids) >= ticket.limit:
            stop = StopReason.LENGTH
        versions = ticket.versions_of(len(ids), self.version)
        processed = response.processed if ticket.request.sampling.is_processed else ()
        completion = Completion(
            *(ids, response.logprobs, versions, stop),
            replica=self._name,
            preemptions=ticket.preemptions,
            processed_logprobs=processed,
            queue_s=ticket.queue_s,
        )
        self._answer(ticket, completion)

    def _gather(self) -> None:
        """Move running rows together, so that a step computes few rows that are not there."""
        if not self._running:
            return
        step = self._decoder.row_step
        needed = round_up(len(self._running), step)
        if needed > COMPACT_BELOW * round_up(max(self._running) + 1, step):
            return
        if self._finish_late_rows():
            return  # others ended, and the rest was moved together
        holes = self._kv_manager.free_rows.below(needed)
        movers = sorted((row for row in self._running if row >= needed), reverse=True)
        moves = dict(zip(movers, holes, strict=False))
        self._decoder.move(list(moves), list(moves.values()))
        for source, target in moves.items():
            ticket = self._running[target] = self._running.pop(source)
            self._kv_manager.move(ticket, target, self._places_of(ticket))

    def _places_of(self, ticket: SequenceState) -> int:
        """How many places of a running row may be in use."""
        return min(len(ticket.prefix) + self._steps - ticket.born, self._cache.length)

    def _update_step_inputs(self) -> None:
        """What all steps need to know until rows start or end again."""
        running: Iterable[SequenceState] = self._running.values()
        self._top = max(self._running, default=-1) + 1
        self._lead = max((len(ticket.prefix) - ticket.born for ticket in running), default=0)
        self._filtered = any(ticket.request.sampling.is_filtered for ticket in running)
        self._penalized = any(ticket.request.sampling.is_penalized for ticket in running)
        self._stoppable = any(ticket.finder is not None for ticket in running)
