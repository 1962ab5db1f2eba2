"""Native engine: a Hugging Face decoder in this process, with continuous batching over a paged KV cache.

Owns the Engine protocol in front of the engine thread (`engine_thread`), which runs the scheduler. Knows nothing of
text beyond a decode function it may be given.

What holds: the same session making the same requests gets the same tokens and logprobs, alone and in any batch. On CPU
in float32 bit for bit, as long as what was swapped out was not dropped for lack of memory. In bfloat16 and on CUDA up
to rounding: a token changes only where its draw falls within rounding of a border between two tokens.
Memory is bounded: pages for the sequences that run, and host memory as swap space. Requests beyond them wait, and
sequences that outgrow them are preempted: they wait as well, and go on later with the same tokens.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.engine.in_flight import PauseGate
from treadle.engine.native.cuda_memory import free_bytes
from treadle.engine.native.engine_thread import EngineThread, OnResult, settle
from treadle.engine.native.input_batch import MAX_STOPS
from treadle.engine.native.kv_cache import PagedKVCache
from treadle.engine.native.model_runner import ModelRunner, find_row_step
from treadle.engine.native.parity import require_engine
from treadle.engine.native.prefix_cache import CacheCounters, SwapSpace
from treadle.engine.native.scheduler import HalfLoadedWeights, Scheduler
from treadle.engine.native.sequence import SequenceOutput, SequenceResult, SequenceState, TokenUpdate
from treadle.engine.protocol import ConfirmedWeights, Decode, WeightUpdate, batches_of, shapes_of
from treadle.engine.requests import LoadDecode, StopStringFinder, load_stop_decode, trim_at_stop, validate_request
from treadle.errors import MisuseError, TreadleError
from treadle.model.causal_lm import output_weight, prepare_module
from treadle.model.checksum import checksum as checksum_of
from treadle.model.load import load_causal_model
from treadle.types import Completion, OnTokens, Request, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Checksum = Callable[[Mapping[str, Tensor]], str]

_SWAP_FRACTION = 0.125
"""The fraction of a machine's memory for swapped-out keys and values."""


class NativeEngine:
    """An `Engine` on a Hugging Face decoder. Built by `create`."""

    def __init__(
        self,
        rollout: RolloutConfig,
        module: "PreTrainedModel",
        thread: EngineThread,
        *,
        name: str,
        version: int,
        decode: Decode | None,
        checksum: Checksum,
        load_decode: LoadDecode | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self._rollout = rollout
        self._module = module
        self._thread = thread
        self._decode = decode
        self._stop_decode = decode
        self._load_decode = load_decode
        self._checksum = checksum
        self._gate = PauseGate()
        self._vocab_size = output_weight(module).shape[0]

    @classmethod
    async def create(
        cls,
        rollout: RolloutConfig,
        model: "ModelConfig | PreTrainedModel",
        *,
        name: str = "native-0",
        device: torch.device | str = "cpu",
        decode: Decode | None = None,
        version: int = 0,
        checksum: Checksum = checksum_of,
        parity_check: bool = True,
        load_decode: LoadDecode | None = None,
    ) -> Self:
        """Load the model, or share one that is on `device` already, and start the engine's thread.

        With a shared module, `update_weights` without tensors only confirms what the module holds. `decode` makes
        the text of completions; without it the text is empty, and `load_decode` is called, in a thread, with the first
        request that has stop strings. `checksum` computes what an update confirms.
        `parity_check`: refuse a shared module of a kind that the engine computes otherwise; for a loaded one
        `model.parity_check` decides.
        """
        target, longest = torch.device(device), rollout.sequence_length()
        if isinstance(model, ModelConfig):
            dtype = choose_dtype(rollout, target)
            module = await asyncio.to_thread(
                partial(load_causal_model, model, dtype=dtype, device=target, longest=longest)
            )
            parity_check = model.parity_check
        else:
            module = prepare_module(model, longest)
        if parity_check:
            await asyncio.to_thread(require_engine, module.config, longest)
        thread = EngineThread(name)
        await thread.start(partial(_build, rollout, module, target, name, version))
        return cls(
            rollout,
            module,
            thread,
            name=name,
            version=version,
            decode=decode,
            checksum=checksum,
            load_decode=load_decode,
        )

    async def generate(self, request: Request) -> Completion:
        room = self._rollout.sequence_length()
        validate_request(request, self.name, room=room, vocab_size=self._vocab_size, max_stops=MAX_STOPS)
        if self._gate.shut and not await self._gate.admit(request.session):
            return Completion((), (), (), StopReason.ABORT, replica=self.name)
        finder = await self._stop_finder(request) if request.sampling.stop else None
        thread, answer = self._thread, asyncio.get_running_loop().create_future()
        thread.check()
        deliver = partial(settle, answer) if request.on_tokens is None else partial(_deliver, answer, request.on_tokens)
        sequence = SequenceState(request, deliver, room, finder=finder)
        thread.sequences.add(sequence)
        thread.post(lambda scheduler: scheduler.add(sequence))
        try:
            result: SequenceResult = await answer
        except asyncio.CancelledError:
            thread.post(lambda scheduler: scheduler.abort(lambda other: other is sequence))
            raise
        finally:
            thread.sequences.discard(sequence)
        if isinstance(result, Exception):
            raise result
        return self._with_text(result, request) if self._decode else result

    def _with_text(self, completion: Completion, request: Request) -> Completion:
        assert self._decode is not None
        ids = completion.ids
        visible = ids[:-1] if ids and ids[-1] in request.sampling.stop_token_ids else ids
        return replace(completion, text=trim_at_stop(self._decode(visible), request.sampling.stop))

    async def _stop_finder(self, request: Request) -> StopStringFinder:
        if self._stop_decode is None:
            self._stop_decode = await load_stop_decode(self._load_decode, request, self.name)
        return StopStringFinder(
            request.sampling.stop, self._stop_decode, request.ids[len(request.ids) - request.num_begun :]
        )

    async def abort(self, session: str | None = None) -> None:
        self._gate.abort(session)
        await self._abort_running(session)

    async def _abort_running(self, session: str | None = None) -> None:
        await self._thread.call(
            lambda scheduler: scheduler.abort(lambda sequence: session is None or sequence.request.session == session)
        )

    async def pause(self) -> None:
        self._gate.pause()
        await self._abort_running()

    async def resume(self) -> None:
        self._gate.resume()

    def forget(self, session: str) -> None:
        """Drop a finished session's cached tokens, soon. Without it, the least recently used are evicted anyway."""
        self._thread.post(lambda scheduler: scheduler.forget(session))

    async def sleep(self, level: int = 1) -> None:
        """Release the KV cache's memory while there are no requests, if `rollout.free_cache_engine` says so.

        The next request takes it again, so nothing has to wake the engine. Weights stay: they may be the policy's own,
        so all levels are the same here. With requests in flight nothing happens.
        """
        if self._rollout.free_cache_engine:
            await self._thread.call(lambda scheduler: scheduler.release())

    async def cache_counters(self) -> CacheCounters:
        """What the prefix cache had to do so far."""
        return await self._thread.call(lambda scheduler: scheduler.cache_counters)

    async def wake(self) -> None:
        """No-op: see `sleep`."""

    async def health(self) -> None:
        self._thread.check()
        self._thread.check_weights()

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        """Copy the tensors in place, between two steps, and confirm what the module then holds.

        Requests that run go on with keys and values of the old weights; pause first, to have none. With
        `rollout.overlap_weight_updates` they also go on while the tensors arrive, which takes room for all of them.
        Names and shapes are checked before anything is copied. Where tensors stop coming halfway, requests and
        `health` fail until an update arrives whole.
        """
        tensors, own = update.tensors, self._module.state_dict(keep_vars=True)
        for name, shape in shapes_of(tensors):
            self._check_weight(name, shape, own)
        if self._rollout.overlap_weight_updates and self._thread.sequences and self._can_stage(tensors):
            tensors = await asyncio.to_thread(self._stage, tensors)
        pause_s = await self._thread.call(
            lambda scheduler: scheduler.change_weights(update.version, partial(self._load, update.version, tensors))
        )
        self.version = update.version
        return ConfirmedWeights(await asyncio.to_thread(self._checksum, dict(self._module.named_parameters())), pause_s)

    def _can_stage(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether tensors have yet to arrive, and a GPU has room for them beside the module's."""
        if isinstance(tensors, dict):
            return False
        if self._module.device.type != "cuda":
            return True
        needed = sum(parameter.numel() * parameter.itemsize for parameter in self._module.parameters())
        free = free_bytes(self._module.device)
        if free < needed:
            self._warn_of_stop(f"{free:,} bytes of the GPU are free, and the weights have {needed:,}")
        return free >= needed

    def _warn_of_stop(self, reason: str) -> None:
        log.warning(
            "%s samples nothing while new weights arrive: %s; lower rollout.gpu_memory_utilization, or set "
            "rollout.overlap_weight_updates=false",
            *(self.name, reason),
        )

    def _stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copies of the tensors, where and as the module has them; the tensors as they are, unread, if they find no
        room."""
        own, staged = self._module.state_dict(keep_vars=True), dict[str, Tensor]()
        try:
            rooms = {name: _room_for(parameter) for name, parameter in self._module.named_parameters()}
        except torch.OutOfMemoryError as error:
            self._warn_of_stop(f"there is no room for them beside the old ones ({str(error).splitlines()[0]})")
            return tensors
        with torch.no_grad():
            for batch in batches_of(tensors):
                for name, tensor in batch:
                    self._check_weight(name, tensor.shape, own)
                    room = rooms.pop(name, None)
                    staged[name] = (_room_for(own[name]) if room is None else room).copy_(tensor)
        return staged

    def _load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        own, copied = self._module.state_dict(keep_vars=True), 0
        try:
            with torch.no_grad():
                for batch in batches_of(tensors):
                    for name, tensor in batch:
                        self._check_weight(name, tensor.shape, own)
                    torch._foreach_copy_([own[name] for name, _ in batch], [tensor for _, tensor in batch])
                    copied += len(batch)
            if self._module.device.type == "cuda":
                torch.cuda.synchronize(self._module.device)  # the pause lasts until the copies have been made
        except TreadleError as error:
            if not copied:
                raise
            raise HalfLoadedWeights(
                f"{self.name}: the weights of version {version} broke off after {copied} of {len(tensors)} tensors, so "
                f"nothing is sampled until an update arrives whole: {error}"
            ) from error

    def _check_weight(self, name: str, shape: Sequence[int], own: Mapping[str, Tensor]) -> None:
        if name not in own:
            raise MisuseError(f"{self.name}: the model has no weight {name!r}")
        if tuple(shape) != tuple(own[name].shape):
            shapes = f"{tuple(shape)} came, {tuple(own[name].shape)} is held"
            raise MisuseError(f"{self.name}: weight {name!r} has another shape: {shapes}")

    async def close(self) -> None:
        if self._gate.close(f"engine {self.name} is closed"):
            await self._thread.close()


def _deliver(answer: "asyncio.Future[SequenceOutput]", on_tokens: OnTokens, output: SequenceOutput) -> None:
    """Tokens to the request that asks for them, and the result to the call that waits for it."""
    if not isinstance(output, TokenUpdate):
        settle(answer, output)
    elif not answer.done():
        on_tokens(output.start, output.ids)


def _room_for(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, requires_grad=False)


def choose_dtype(rollout: RolloutConfig, device: torch.device) -> torch.dtype:
    """The dtype that `rollout.dtype` means on a device."""
    name = rollout.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _build(
    rollout: RolloutConfig,
    module: "PreTrainedModel",
    device: torch.device,
    name: str,
    version: int,
    on_result: OnResult,
) -> Scheduler:
    """The scheduler and its model runner, built in the thread that will use them."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    row_step = find_row_step(module, rollout.max_num_seqs, device)
    cache = PagedKVCache.create(rollout, module, device, row_step)
    host_bytes = int(_SWAP_FRACTION * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    swap_space = SwapSpace(host_bytes)
    runner = _build_runner(rollout, module, cache, row_step)
    return Scheduler(rollout, runner, swap_space, on_result, name=name, version=version)


def _build_runner(rollout: RolloutConfig, module: "PreTrainedModel", cache: PagedKVCache, row_step: int) -> ModelRunner:
    """With graphs and kernels of our own on a GPU; with plain torch elsewhere."""
    if cache.kv.device.type != "cuda":
        return ModelRunner(module, cache, row_step)
    from treadle.engine.native.cuda_graphs import (
        CudaGraphRunner,  # triton comes with it, which CPU machines do not have
    )

    return CudaGraphRunner(module, cache, row_step, eager=rollout.enforce_eager)
