"""AsyncLLM adapter: vLLM as the server uses it, and the only module that knows how vLLM's versions differ.

Owns the mapping from our config to vLLM's arguments, from a request to its sampling parameters, and from its outputs to
segments. Runs in the server process; importing it imports vLLM. Tested with 0.24 (CUDA) and 0.32 (CPU).

    0.24   the worker prepares layers for an update, and hands out the loader; 0.32 leaves both to us
    0.24   its second model runner serves some architectures; in 0.32 it serves all, where there is Triton
    0.24   `wake_up` returns nothing; in 0.32 it says whether everything is awake

Logprobs are those of the softmax of logits / temperature before penalties, min-p, top-k and top-p; those of the
distribution sampled from come beside them. The second model runner tells one of the two alone: at a temperature other
than 0 and 1 the latter, else the former. What it does not tell is NaN, so that no trainer takes it for a number.
"""

import asyncio
import dataclasses
import itertools
import os
from collections.abc import Sequence
from math import nan
from typing import Any

import vllm
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.engine.vllm import packed_logprobs
from treadle.engine.vllm.arguments import engine_arguments
from treadle.engine.vllm.protocol import SampleRequest
from treadle.engine.vllm.request_tracker import Segment
from treadle.errors import ConfigError, EngineFailure, Mistake, RequestRefused
from treadle.types import StopReason

SUPPORTED = ((0, 24), (0, 32))
"""The first and the last version this was written for."""

_STOPS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
_KEYED = "treadle.engine.vllm.keyed_sampler:KeyedSampler"


@dataclasses.dataclass(frozen=True, slots=True)
class _SubmittedSegment:
    """A request at vLLM. `first`: the position of its first token."""

    queue: Any
    sample: SampleRequest
    first: int


class AsyncLLMSampler:
    """One AsyncLLM. Built by `start`, whole."""

    def __init__(self, llm: AsyncLLM, *, keyed: bool, room: int, reports_raw: bool = True) -> None:
        self._llm = llm
        self._reports_raw = reports_raw
        """Whether vLLM reports logprobs of the whole softmax; else those after top-k and top-p."""
        self._keyed = keyed
        """Whether our keyed sampler draws; else vLLM does, by seed and position."""
        self._room = room
        self._names = itertools.count()
        self._openai_url: str | None = None
        self._in_place = False
        """Whether the workers know where the next weights are to be written."""
        self._asleep = False
        """Whether memory may have been released: then it is mapped again before weights are loaded."""
        self._half_loaded = False

    @classmethod
    async def start(cls, rollout: RolloutConfig, model: ModelConfig, directory: str) -> "AsyncLLMSampler":
        """Start vLLM's own processes and load the model; ConfigError for what the config asks in vain."""
        check_version(vllm.__version__)
        known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
        arguments = engine_arguments(rollout, model, directory, on_cpu=current_platform.is_cpu(), known=known)
        config = AsyncEngineArgs(**arguments).create_engine_config()
        keyed = not config.use_v2_model_runner
        if keyed:
            changes = {"logits_processors": [_KEYED], "logprobs_mode": "processed_logits"}
            config = AsyncEngineArgs(**arguments | changes).create_engine_config()
        packs = packed_logprobs.install_packing(config.scheduler_config)
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=arguments["disable_log_stats"])
        if packs:
            packed_logprobs.install_unpacking(llm.output_processor)
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        await llm.collective_rpc("treadle_watch", args=(os.getpid(),))
        raw = arguments["logprobs_mode"] == "raw_logprobs"
        return cls(llm, keyed=keyed, room=rollout.sequence_length(), reports_raw=raw)

    @property
    def vocabulary(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    async def begin(self, sample: SampleRequest, kept: Sequence[int]) -> Any:
        ids = [*sample.ids, *kept]
        tokens = min(sample.max_tokens - len(kept), self._room - len(ids))
        try:
            queue = await self._llm.add_request(
                f"{packed_logprobs.PREFIX}{next(self._names)}",
                tokens_input(ids),
                self._parameters(sample, tokens, len(kept)),
            )
            return _SubmittedSegment(queue, sample, sample.position + len(kept))
        except (EngineDeadError, ValueError) as error:
            raise _failure(error) from error

    def _parameters(self, sample: SampleRequest, tokens: int, num_kept: int) -> SamplingParams:
        common: dict[str, Any] = {
            "max_tokens": tokens,
            "stop_token_ids": list(sample.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "skip_clone": True,
        }
        if self._keyed:
            extra: list[Any] = [
                sample.temperature,
                sample.top_p,
                sample.top_k,
                _signed(sample.stream),
                sample.position + num_kept,
            ]
            extra += [sample.min_p, sample.penalties, sample.num_begun + num_kept]
            return SamplingParams(temperature=0.0, extra_args={"treadle": extra}, **common)
        seed = sample.stream >> 1
        top_k = max(sample.top_k, 0)
        repetition, presence, frequency, scale = sample.penalties
        if presence or frequency or scale != 1:
            raise RequestRefused(
                "vLLM's second model runner takes an interrupted answer for a prompt: presence_penalty, "
                "frequency_penalty and a temperature for one turn need the first (VLLM_USE_V2_MODEL_RUNNER=0), or "
                "rollout.name=native"
            )
        filters = {"top_p": sample.top_p, "top_k": top_k, "min_p": sample.min_p, "repetition_penalty": repetition}
        return SamplingParams(temperature=sample.temperature, seed=seed, **filters, **common)

    async def finish(self, handle: "_SubmittedSegment") -> Segment:
        finished, queue = False, handle.queue
        try:
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
        except (EngineDeadError, EngineGenerateError, ValueError) as error:
            raise _failure(error) from error
        finally:
            if not finished:
                await self._llm.abort(queue.request_id, internal=True)
        segment = dataclasses.replace(_read(output.outputs[0]), queue_s=_queued(output.metrics))
        return await self._with_processed(segment, handle) if handle.sample.is_processed else segment

    async def _with_processed(self, segment: Segment, handle: "_SubmittedSegment") -> Segment:
        """The logprobs of the distribution sampled from, too: from the workers, or instead of the others."""
        unknown = [nan] * len(segment.ids)
        if not self._keyed:
            if self._reports_raw:
                return dataclasses.replace(segment, processed=unknown)
            return dataclasses.replace(segment, logprobs=unknown, processed=segment.logprobs)
        asked = (_signed(handle.sample.stream), handle.first, len(segment.ids))
        found = await self._llm.collective_rpc("treadle_processed", args=asked)
        return dataclasses.replace(segment, processed=found[0])

    async def end(self, handles: "Sequence[_SubmittedSegment]") -> None:
        await self._llm.abort([handle.queue.request_id for handle in handles], internal=True)

    async def load(self, transfer: bytes) -> str:
        """Load weights; returns the workers' checksum: of the parameters where they can be read back, else as sent."""
        in_place, self._in_place = self._in_place, False
        try:
            if self._asleep:
                await self._llm.wake_up(["weights"])
            await self._pause()
            found = await (self._write(transfer) if in_place else self._load(transfer))
            if self._asleep:
                await self._llm.wake_up(["kv_cache"])
            await self._llm.resume_generation()
            self._asleep = False
        except Exception as error:
            await self._check_half_loaded()
            raise _failure(error) from error
        except asyncio.CancelledError:
            self._half_loaded = True  # how much was loaded is unknown
            raise
        checksums = {checksum for checksum, _ in found}
        if len(checksums) > 1:
            raise EngineFailure(f"vLLM's workers hold different weights: {', '.join(sorted(checksums))}")
        self._in_place = all(ready for _, ready in found)
        return str(checksums.pop())

    async def _check_half_loaded(self) -> None:
        """vLLM's loader cannot resume an update that failed midway: then this process has to be restarted."""
        try:
            self._half_loaded = any(await self._llm.collective_rpc("treadle_is_torn"))
        except Exception:  # noqa: BLE001 - whatever keeps it from answering
            self._half_loaded = True

    async def _pause(self) -> None:
        """What `pause_generation` does, but for the 20 ms it waits in the end: nothing of ours is being sampled."""
        await self._llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)

    async def _load(self, transfer: bytes) -> Sequence[tuple[str, bool]]:
        """Through vLLM's loader. What each worker holds then, and whether the next update may be written in place."""
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"transfer": transfer}))
        await self._llm.finish_weight_update()
        found: Sequence[tuple[str, bool]] = await self._llm.collective_rpc("treadle_settle")
        return found

    async def _write(self, transfer: bytes) -> Sequence[tuple[str, bool]]:
        found: Sequence[tuple[str, bool]] = await self._llm.collective_rpc("treadle_write", args=(transfer,))
        return found

    async def sleep(self, level: int) -> None:
        self._asleep = True  # it goes to sleep even if this call is cancelled
        await self._llm.sleep(level)

    async def wake(self) -> None:
        await self._llm.wake_up()
        await self._llm.resume_generation()
        self._asleep = False

    async def check(self) -> None:
        if self._half_loaded:
            raise EngineFailure("an update of the weights broke off in the middle")
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            raise _failure(error) from error

    async def serve_openai(self, served_as: str, host: str, port: int, api_key: str) -> str:
        from treadle.engine.vllm.openai_server import start_openai_server  # imports FastAPI

        if self._openai_url is None:
            self._openai_url = await start_openai_server(self._llm, served_as, host, port, api_key)
        return self._openai_url

    def close(self, timeout_s: float) -> None:
        self._llm.shutdown(timeout=timeout_s)


def check_version(version: str) -> None:
    """Refuse a vLLM that this module was not written for."""
    first, last = (".".join(map(str, edge)) for edge in SUPPORTED)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not SUPPORTED[0] <= numbers <= SUPPORTED[1]:
        problem = f"vLLM {version} is installed; treadle works with {first} to {last}"
        raise ConfigError([Mistake("rollout.name", problem, "vllm", fix=f"install vllm>={first},<={last}.*")])


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _read(output: Any) -> Segment:
    ids, logprobs = list(output.token_ids), output.logprobs
    values = list(logprobs.logprobs) if logprobs is not None else []
    assert len(values) == len(ids), f"vLLM reports {len(values)} logprobs for {len(ids)} tokens"
    return Segment(ids, values, _STOPS[output.finish_reason])


def _queued(stats: Any) -> float:
    """Seconds between vLLM's queue and its running batch; 0 where its statistics are off."""
    return max(0.0, stats.scheduled_ts - stats.queued_ts) if stats is not None and stats.scheduled_ts else 0.0


def _failure(error: Exception) -> EngineFailure:
    if isinstance(error, EngineFailure):
        return error
    cause = error.__cause__ or error
    return EngineFailure(f"vLLM: {type(cause).__name__}: {cause}")
