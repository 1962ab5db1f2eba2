"""Packed logprobs: one array a step through vLLM's scheduler, instead of three small ones for each token.

vLLM's scheduler cuts the logprobs of a step into pieces, one for each request; each is then encoded, sent to the front
process, decoded and taken apart on its own, which costs more than everything else that is done for a token. Here the
scheduler leaves them whole: the first request of a step carries the logprobs of all, and `LogprobUnpacker` hands them
out in the front process. Requests from elsewhere (vLLM's OpenAI server) get theirs as always.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

PREFIX = "treadle-"
"""What the names of our requests begin with."""

_NOTHING = numpy.empty(0, dtype=numpy.int32)


class WholeLogprobs:
    """Stands in for a step's logprobs: notes which rows a request has, and cuts nothing."""

    def __init__(self, logprobs: LogprobsLists) -> None:
        self.logprobs = logprobs

    def slice_request(self, request: int, count: int) -> range:
        starts = self.logprobs.cu_num_generated_tokens
        start = request if starts is None else starts[request]
        return range(start, start + count)


def pack(outputs: Sequence[Any], logprobs: LogprobsLists) -> None:
    """Give the first of our requests the logprobs of all of them, and other requests what is theirs."""
    ours: list[int] = []
    first = None
    for output in outputs:
        rows: range | None = output.new_logprobs
        if rows is None:
            continue
        if not output.request_id.startswith(PREFIX):
            part = slice(rows.start, rows.stop)
            columns = (logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks)
            output.new_logprobs = LogprobsLists(*(column[part] for column in columns))
            continue
        output.new_logprobs = None
        first = first or output
        ours += rows
    if first is not None:
        first.new_logprobs = LogprobsLists(_NOTHING, logprobs.logprobs[ours, 0], _NOTHING)


class LogprobUnpacker:
    """Hands out what `pack` put together, to the list that `of_request` names for each request that is still open.

    vLLM's front process reads a step in parts and serves others in between: what a later part needs is kept for it.
    """

    def __init__(self, of_request: Callable[[str], list[float] | None]) -> None:
        self._of_request = of_request
        self._left: Iterator[float] = iter(())

    def read(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            if not output.request_id.startswith(PREFIX):
                continue
            if output.new_logprobs is not None:
                self._left = iter(output.new_logprobs.logprobs.tolist())
                output.new_logprobs = None
            values = itertools.islice(self._left, len(output.new_token_ids))
            held = self._of_request(output.request_id)
            if held is None:
                deque(values, maxlen=0)  # aborted meanwhile: its values go nowhere
            else:
                held.extend(values)


class _PackingMixin:
    """What both schedulers of vLLM do differently here."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        logprobs = model_runner_output.logprobs
        if not logprobs:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc, no-any-return]
        model_runner_output.logprobs = WholeLogprobs(logprobs)
        made: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for client in made.values():
            pack(client.outputs, logprobs)
        return made


class PackingScheduler(_PackingMixin, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with whole logprobs."""


class PackingAsyncScheduler(_PackingMixin, AsyncScheduler):  # type: ignore[misc]
    """Packing scheduler for steps that are prepared while the last one runs."""


_OURS = {Scheduler: PackingScheduler, AsyncScheduler: PackingAsyncScheduler}


def install_packing(scheduling: Any) -> bool:
    """Set our scheduler in vLLM's config; False: another one is configured already, and it stays."""
    ours = _OURS.get(scheduling.get_scheduler_cls())
    if ours is not None:
        scheduling.scheduler_cls = f"{ours.__module__}.{ours.__qualname__}"
    return ours is not None


def install_unpacking(front: Any) -> None:
    """Let the front process, vLLM's output processor, hand out what comes packed."""
    process = front.process_outputs

    def of_request(name: str) -> list[float] | None:
        state = front.request_states.get(name)
        return None if state is None else state.logprobs_processor.logprobs.logprobs

    unpacking = LogprobUnpacker(of_request)

    def process_outputs(outputs: Sequence[Any], *others: Any, **named: Any) -> Any:
        unpacking.read(outputs)
        return process(outputs, *others, **named)

    front.process_outputs = process_outputs
