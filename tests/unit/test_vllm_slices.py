"""The vLLM engine samples in slices where tokens are told, or stop strings are looked for; without vLLM."""

import asyncio
from dataclasses import replace

import pytest

from tests.letters import ask, decode
from treadle.engine.vllm.engine import _SLICE, VLLMEngine
from treadle.errors import RequestRefused
from treadle.types import Completion, Request, StopReason

WHOLE = tuple(97 + at % 26 for at in range(80))


class SlicedEngine(VLLMEngine):
    """An engine whose server writes the alphabet."""

    def __init__(self) -> None:
        self.name = "vllm-0"
        self._decode = self._stop_decode = None
        self._load_decode = None

    async def _sample(self, request: Request) -> Completion:
        ids = WHOLE[request.num_begun : request.num_begun + request.sampling.max_tokens]
        stop = StopReason.STOP if request.num_begun + len(ids) == len(WHOLE) else StopReason.LENGTH
        return Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), stop, replica=self.name)


def test_slices_are_told_and_their_sum_is_the_answer() -> None:
    told: list[tuple[int, tuple[int, ...]]] = []
    request = replace(ask(max_tokens=200, stops=()), on_tokens=lambda start, ids: told.append((start, ids)))
    found = asyncio.run(SlicedEngine()._sample_in_slices(request))
    assert found.ids == WHOLE and found.stop is StopReason.STOP
    assert told == [(0, WHOLE[:_SLICE]), (_SLICE, WHOLE[_SLICE : 2 * _SLICE])], "the last comes with the answer"


def test_stop_strings_load_a_tokenizer_once_and_are_refused_without_one() -> None:
    engine, loads = SlicedEngine(), []
    request = ask(max_tokens=200, stops=())
    request = replace(request, sampling=replace(request.sampling, stop=("xyz",)))
    with pytest.raises(RequestRefused, match="tokenizer"):
        asyncio.run(engine._sample_in_slices(request))
    engine._load_decode = lambda: loads.append(1) or decode  # type: ignore[func-returns-value]
    for _ in range(2):
        assert asyncio.run(engine._sample_in_slices(request)).ids == WHOLE[:26]
    assert loads == [1]
