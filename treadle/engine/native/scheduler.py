"""Scheduler: continuous batching with chunked prefill and preemption.

Owns every sequence from `add` to its result: the waiting queue, prefill, and the running batch. Runs in one thread,
which calls `step` as long as there is work; knows nothing of threads and event loops. Sequences are admitted in order,
between two decode steps, as rows and pages come free. A row that needs a page where there is none takes it from the
prefix cache, and then from the sequence that was admitted last, which is preempted: it goes back to the front of the
queue with what it has and goes on from there, with the same tokens.
Invariants: a sequence waits, is in prefill or runs, never two of these; a request's tokens depend on its session only;
weights of which a part is new sample nothing: sequences fail until a whole update has come.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from time import perf_counter

from treadle.config.rollout import RolloutConfig
from treadle.engine.native.chunked_prefill import PrefillQueue
from treadle.engine.native.input_batch import RowOutput
from treadle.engine.native.kv_cache import round_up
from treadle.engine.native.kv_cache_manager import COMPACT_BELOW, LOOKAHEAD_STEPS, KVCacheManager, PageSchedule
from treadle.engine.native.model_runner import ModelRunner
from treadle.engine.native.prefix_cache import CacheCounters, SwapSpace
from treadle.engine.native.sequence import SequenceOutput, SequenceState
from treadle.errors import EngineFailure
from treadle.types import Completion, StopReason

log = logging.getLogger(__name__)


_STEPS_OF_CHUNKS = 2
"""Steps for which chunks are admitted: a long prompt fills one of them, and shorter ones take the other."""


class HalfLoadedWeights(EngineFailure):
    """An update of the weights that broke off: some of the model's tensors are new, the others old."""


class Scheduler:
    """Scheduler of one engine. `on_result` is called once for every sequence, with its completion or the error.

    For a request with `on_tokens` it is called before that, too, with its tokens after each step.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        runner: ModelRunner,
        swap_space: SwapSpace,
        on_result: Callable[[SequenceState, SequenceOutput], None],
        *,
        name: str,
        version: int,
    ) -> None:
        self.version = version
        self.preemptions = 0
        """Number of preemptions so far."""
        self.half_loaded = ""
        """Why the weights are of no version, after an update that broke off; empty while they are whole."""
        self._rollout = rollout
        self._runner = runner
        self._cache = runner.cache
        caching = rollout.enable_prefix_caching
        self._kv_manager = KVCacheManager(runner.cache, swap_space, rollout.max_num_seqs, caching=caching)
        self._on_result = on_result
        self._name = name
        self._waiting: deque[SequenceState] = deque()
        self._admitted: dict[SequenceState, None] = {}
        """Sequences with a row, in order of admission: in prefill, ready or running."""
        self._prefills = PrefillQueue(rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else None)
        self._ready: list[SequenceState] = []
        self._running: dict[int, SequenceState] = {}
        self._page_schedule = PageSchedule()
        self._blocked: tuple[SequenceState, int] | None = None
        """The sequence whose allocation failed, and the manager's `changes` then: retried only once that differs."""
        self._steps = 0
        self._top = 0
        self._lead = 0
        self._filtered = False
        self._penalized = False
        self._stoppable = False
        self._streamed = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._prefills or self._ready or self._running)

    @property
    def cache_counters(self) -> CacheCounters:
        """A copy of the prefix cache's counters."""
        return replace(self._kv_manager.prefix_cache.counters)

    def add(self, sequence: SequenceState) -> None:
        if self.half_loaded:
            self._on_result(sequence, EngineFailure(self.half_loaded))
        else:
            self._waiting.append(sequence)

    def step(self) -> None:
        """Admit, prefill up to the token budget, start rows, and decode one token for every running row."""
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
            ended = self._runner.step(
                self._top, self._lead + self._steps, filtered=self._filtered, penalized=self._penalized
            )
            self._steps += 1
            if ended:
                self._finish([row for row in ended if row in self._running])
            if self._stoppable:
                self._stop_at_strings()
            if self._streamed:
                self._report_tokens()

    def abort(self, chosen: Callable[[SequenceState], bool]) -> None:
        """Abort sequences; those that have sampled keep their tokens."""
        for sequence in [sequence for sequence in self._waiting if chosen(sequence)]:
            self._waiting.remove(sequence)
            sequence.leave_queue()
            self._kv_manager.drop_swapped(sequence, for_session=not sequence.stale)
            self._complete(sequence, sequence.sampled)
        for sequence in [sequence for prefill in self._prefills for sequence in prefill.sequences if chosen(sequence)]:
            tokens = self._prefills.remove(sequence)
            del self._admitted[sequence]
            self._kv_manager.free_and_cache(sequence, sequence.prefix[:tokens])
            self._complete(sequence, sequence.sampled)
        self._finish_late_rows()
        rows = [row for row, sequence in self._running.items() if chosen(sequence)]
        if rows:
            self._runner.batch.stop(rows)
            self._finish(rows)

    def change_weights(self, version: int, load: Callable[[], None]) -> float:
        """Let `load` change the weights between two steps; how many seconds that took. What was computed with the old
        ones is forgotten.

        Rows that have begun to sample go on with what they have, also those that wait to go on. All of them fail where
        `load` breaks off in the middle (HalfLoadedWeights), and so does what comes after, until a `load` succeeds.
        """
        began = perf_counter()
        counts = self._runner.batch.count.tolist() if self._running else []
        for row, sequence in self._running.items():
            sequence.end_version(len(sequence.sampled.ids) + counts[row], self.version)
            sequence.stale = True
        self._requeue_prefills()
        for sequence in self._waiting:
            if sequence.sampled.ids:
                sequence.end_version(len(sequence.sampled.ids), self.version)
                sequence.stale |= sequence.swapped is not None
            else:
                self._kv_manager.drop_swapped(sequence, for_session=False)
        self._kv_manager.prefix_cache.clear()
        try:
            load()
        except HalfLoadedWeights as failure:
            self._finish_late_rows()  # they ended before
            self.half_loaded = str(failure)
            self.abort(lambda sequence: True)
            self._kv_manager.prefix_cache.clear()
            raise
        self._runner.refresh()
        self.version, self.half_loaded = version, ""
        return perf_counter() - began

    def _requeue_prefills(self) -> None:
        """Requeue sequences in prefill: their pages may be shared with rows that keep old keys and values."""
        back = [sequence for sequence in self._admitted if sequence.row not in self._running]
        for sequence in back:
            self._prefills.remove(sequence)
            del self._admitted[sequence]
            self._kv_manager.free(sequence)
            sequence.enter_queue()
        self._waiting.extendleft(reversed(back))

    def release(self) -> bool:
        """Release the KV cache's memory with the prefix cache; the next sequence maps it again. False while busy."""
        if self.busy:
            return False
        self._runner.drain()
        self._kv_manager.release()
        return True

    def close(self) -> None:
        """Abort everything and free the runner. The last call."""
        self.abort(lambda sequence: True)
        self._kv_manager.prefix_cache.clear()
        self._runner.close()

    def forget(self, session: str) -> None:
        """Drop the cached tokens of a session that is over."""
        self._kv_manager.prefix_cache.forget_session(session)

    def _admit(self) -> None:
        """Admit waiting sequences, until there are chunks for the next steps or an allocation fails.

        One with nothing to compute, or whose prompt is being computed, is admitted in any case.
        """
        room = _STEPS_OF_CHUNKS * self._rollout.max_num_batched_tokens - self._prefills.num_tokens
        while self._waiting and self._kv_manager.free_rows:
            sequence = self._waiting[0]
            if self._blocked == (sequence, self._kv_manager.changes):
                break
            sibling = self._prefills.sibling(sequence)
            if room <= 0 and sibling is None and self._kv_manager.count_cached(sequence) < len(sequence.prefix):
                break
            start = self._kv_manager.allocate(sequence, sibling)
            if start is None:
                self._blocked = (sequence, self._kv_manager.changes)
                break
            self._waiting.popleft()
            sequence.leave_queue()
            self._admitted[sequence] = None
            if start == len(sequence.prefix):
                self._ready.append(sequence)
            elif self._prefills.add(sequence, start):
                room -= self._prefills.count_next(len(sequence.prefix) - start)
        self._kv_manager.run_copies()

    def _prefill(self) -> None:
        """One forward over as many chunks as the token budget allows. Finished prompts go to the prefix cache."""
        chosen = self._prefills.next_chunks(self._rollout.max_num_batched_tokens)
        self._cache.upload()
        self._runner.prefill([chunk for _, chunk in chosen])
        for prefill, chunk in chosen:
            prefill.start = chunk.end
            if prefill.done:
                self._prefills.drop(prefill)
                first, *others = prefill.sequences
                self._kv_manager.share(first, others, len(prefill.ids))
                if prefill.fresh:
                    self._kv_manager.prefix_cache.add_prompt(prefill.ids, first.pages)
                self._ready += prefill.sequences
        self._kv_manager.run_copies()

    def _start(self) -> None:
        self._runner.start([sequence.start_row() for sequence in self._ready])
        for sequence in self._ready:
            sequence.start_step = self._steps
            self._running[sequence.row] = sequence
            self._schedule_page(sequence)
        self._ready.clear()
        self._update_step_inputs()

    def _schedule_page(self, sequence: SequenceState) -> None:
        slots = self._kv_manager.num_slots(sequence)
        if slots is not None:
            self._page_schedule.add(sequence, sequence.start_step + slots - len(sequence.prefix))

    def _allocate_lookahead(self) -> None:
        """Allocate the pages that the next steps may need."""
        for sequence in self._page_schedule.next(self._steps):
            slots = self._slots_in_use(sequence) + 2 * LOOKAHEAD_STEPS
            if sequence in self._admitted and self._make_room(sequence, slots):
                self._kv_manager.grow(sequence, self._kv_manager.missing_pages(sequence, slots))
                self._schedule_page(sequence)

    def _make_room(self, sequence: SequenceState, slots: int) -> bool:
        """Free the pages that a sequence is missing: evict, then preempt. False if it was itself preempted or ended."""
        while self._kv_manager.missing_pages(sequence, slots) > len(self._kv_manager.pages.free):
            if self._kv_manager.free_pages():
                continue
            if not self._finish_late_rows():
                self._preempt(next(reversed(self._admitted)))
            if sequence not in self._admitted:
                return False
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        """Preempt a sequence: swap it out and requeue it first. Everything that its row has sampled is known."""
        if self._running.get(sequence.row) is sequence:
            self._runner.batch.stop([sequence.row])
            sequence.append_output(self._runner.read([sequence.row])[0])
            del self._running[sequence.row]
            self._page_schedule.drop(sequence)
            tokens = len(sequence.prefix)
        else:
            tokens = self._prefills.remove(sequence)
        del self._admitted[sequence]
        self._kv_manager.swap_out(sequence, tokens)
        self._waiting.appendleft(sequence)
        sequence.enter_queue()
        self._update_step_inputs()
        sequence.preemptions += 1
        self.preemptions += 1
        if self.preemptions == 1:
            tokens = self._cache.num_pages * self._cache.page_size
            log.warning(
                "%s: the KV cache of %s tokens is full, so a sequence waits in host memory; if that happens often, "
                "raise rollout.gpu_memory_utilization, or lower rollout.max_num_seqs (%d) or "
                "rollout.max_model_len (%d)",
                *(self._name, f"{tokens:,}", self._rollout.max_num_seqs, self._cache.length),
            )

    def _stop_at_strings(self) -> None:
        """Finish rows whose text has a stop string. On a GPU they may be some tokens further: those are dropped."""
        rows = []
        for row, sequence in self._running.items():
            if sequence.finder is not None:
                sequence.find_stop(self._runner.tail(row, sequence.finder.seen - len(sequence.sampled.ids)))
                if sequence.stopped_at is not None:
                    rows.append(row)
        if rows:
            self._runner.batch.stop(rows)
            self._finish(rows)

    def _report_tokens(self) -> None:
        """Deliver the new tokens of rows that go on, to requests that ask for them."""
        for row, sequence in self._running.items():
            if sequence.request.on_tokens is not None:
                new = sequence.report(partial(self._runner.tail, row))
                if new is not None:
                    self._on_result(sequence, new)

    def _finish(self, rows: list[int]) -> None:
        for row, output in zip(rows, self._runner.read(rows), strict=True):
            sequence = self._running.pop(row)
            if sequence.finder is not None:
                output = sequence.trim(output)
            self._page_schedule.drop(sequence)
            del self._admitted[sequence]
            self._free_and_cache(sequence, output)
            self._complete(sequence, sequence.sampled.then(output))
        self._compact_rows()
        self._update_step_inputs()

    def _finish_late_rows(self) -> bool:
        """Finish rows whose end was not yet read from the device, if any: only then may rows be reassigned."""
        ended = [row for row in self._runner.drain() if row in self._running]
        if ended:
            self._finish(ended)
        return bool(ended)

    def _free_and_cache(self, sequence: SequenceState, output: RowOutput) -> None:
        """Free the row; its tokens go to the prefix cache, except the last one, which no step has read yet."""
        if output.has_nan:
            self._kv_manager.prefix_cache.forget(sequence.request.ids[:-1])
            self._cache.clear(sequence.pages)
            self._kv_manager.free(sequence)
        elif sequence.stale:
            self._kv_manager.free(sequence)
        else:
            self._kv_manager.free_and_cache(sequence, (*sequence.request.ids, *sequence.sampled.ids, *output.ids)[:-1])

    def _complete(self, sequence: SequenceState, output: RowOutput) -> None:
        ids = output.ids
        if self.half_loaded:
            self._on_result(sequence, EngineFailure(self.half_loaded))
            return
        if output.has_nan:
            where = f"session {sequence.request.session}, token {sequence.request.position + len(ids) - 1}"
            self._on_result(sequence, EngineFailure(f"{self._name}: {where}: the model's logits are not numbers"))
            return
        stop = StopReason.ABORT
        if sequence.stopped_at is not None or (ids and ids[-1] in sequence.request.sampling.stop_token_ids):
            stop = StopReason.STOP
        elif len(ids) >= sequence.limit:
            stop = StopReason.LENGTH
        versions = sequence.versions_of(len(ids), self.version)
        processed = output.processed if sequence.request.sampling.is_processed else ()
        completion = Completion(
            *(ids, output.logprobs, versions, stop),
            replica=self._name,
            preemptions=sequence.preemptions,
            processed_logprobs=processed,
            queue_s=sequence.queue_s,
        )
        self._on_result(sequence, completion)

    def _compact_rows(self) -> None:
        """Move running rows together, so that a step computes few inactive rows."""
        if not self._running:
            return
        step = self._runner.row_step
        needed = round_up(len(self._running), step)
        if needed > COMPACT_BELOW * round_up(max(self._running) + 1, step):
            return
        if self._finish_late_rows():
            return  # others ended, and the rest was moved together
        holes = self._kv_manager.free_rows.below(needed)
        movers = sorted((row for row in self._running if row >= needed), reverse=True)
        moves = dict(zip(movers, holes, strict=False))
        self._runner.move(list(moves), list(moves.values()))
        for source, target in moves.items():
            sequence = self._running[target] = self._running.pop(source)
            self._kv_manager.move(sequence, target, self._slots_in_use(sequence))

    def _slots_in_use(self, sequence: SequenceState) -> int:
        """How many slots of a running row may be in use."""
        return min(len(sequence.prefix) + self._steps - sequence.start_step, self._cache.length)

    def _update_step_inputs(self) -> None:
        """Inputs that stay the same for all steps until rows start or end."""
        running: Iterable[SequenceState] = self._running.values()
        self._top = max(self._running, default=-1) + 1
        self._lead = max((len(sequence.prefix) - sequence.start_step for sequence in running), default=0)
        self._filtered = any(sequence.request.sampling.is_filtered for sequence in running)
        self._penalized = any(sequence.request.sampling.is_penalized for sequence in running)
        self._stoppable = any(sequence.finder is not None for sequence in running)
        self._streamed = any(sequence.request.on_tokens is not None for sequence in running)
