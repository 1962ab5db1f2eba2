"""Service of the Tinker API: sessions, models, samplers, and what each verb does with them.

    session      a client; ends when it sends no heartbeat for `SESSION_IDLE_S`, and its models with it
    model        an adapter that trains: `SESSION:train:N`
    sampler      an adapter, or the base, to sample from: `SESSION:sample:N`; those saved without a name live in memory

Owns ids, quotas and the records above; computing is the shared model's, results are the futures'. Knows no HTTP.
Waits: verbs that compute return the id of a future at once.
Invariant: a session reaches its own models and samplers alone; checkpoints are shared by all that have the key.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbits, token_hex
from typing import Any

from treadle.tinker.adapters import AdapterWeights
from treadle.tinker.checkpoints import SAMPLER, TRAINING, CheckpointRecord, CheckpointStore, StoredCheckpoint
from treadle.tinker.futures import MAX_QUEUED, CompletionQueue, FutureStore, OrderedRequests, Result
from treadle.tinker.protobuf import ForwardBackwardRequest, write_forward_backward, write_sample
from treadle.tinker.refusals import ApiError, RequestFailed
from treadle.tinker.requests import Body, read_adam, read_notes, read_sample, read_shape, whole_number
from treadle.tinker.requests import field as read_field
from treadle.tinker.shared_model import SharedModel
from treadle.tinker.trained_model import TrainedModel

SESSION_IDLE_S = 900.0
SWEEP_S = 5.0
MAX_SAMPLERS = 32
"""Samplers that keep their weights in memory. Of more, those used longest ago are dropped, or read again by name."""
CLONE_BLOCK = 1_000_000_000
"""Each client of a sampling session numbers its requests from its own multiple of this."""


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Quotas of a server."""

    max_models: int = 8
    max_sessions: int = 32


@dataclass(eq=False, slots=True)
class ClientSession:
    """One client of the server."""

    id: str
    name: str | None
    notes: Mapping[str, str] | None
    seen: float = field(default_factory=time.monotonic)
    num_samplers: int = 0


@dataclass(eq=False, slots=True)
class ServedModel:
    """A model that trains, and the order of its requests."""

    id: str
    session: str
    queue: OrderedRequests
    created_at: float = field(default_factory=time.time)
    notes: Mapping[str, str] | None = None
    trained: TrainedModel | None = None
    """None until it is made."""


@dataclass(eq=False, slots=True)
class Sampler:
    """Something to sample from. `path` names the checkpoint, where there is one."""

    id: str
    session: str
    path: str | None
    weights: AdapterWeights | None
    is_dropped: bool = False
    num_clients: int = 1
    queues: dict[int, CompletionQueue] = field(default_factory=dict)

    def queue(self, clone: int) -> CompletionQueue:
        return self.queues.setdefault(clone, CompletionQueue())


class TinkerService:
    """All of the API but its transport."""

    def __init__(self, shared: SharedModel, name: str, aliases: tuple[str, ...], tokenizer: str, root: Path) -> None:
        self.shared = shared
        self.base_model = name
        self._names = (name, *aliases)
        self.tokenizer = tokenizer
        self.checkpoints = CheckpointStore(root)
        self.futures = FutureStore()
        self.limits = ServiceLimits()
        self.sessions: dict[str, ClientSession] = {}
        self.models: dict[str, ServedModel] = {}
        self.samplers: OrderedDict[str, Sampler] = OrderedDict()

    # --- sessions

    def create_session(self, body: Body) -> ClientSession:
        if len(self.sessions) >= self.limits.max_sessions:
            raise ApiError(403, f"{self.limits.max_sessions} sessions are open: end one, or raise --max-sessions")
        name = read_field(body, "display_name", str, optional=True)
        session = ClientSession(token_hex(8), name, read_notes(body))
        self.sessions[session.id] = session
        return session

    def find_session(self, session_id: str) -> ClientSession:
        session = self.sessions.get(session_id)
        if session is None:
            raise ApiError(410, f"session {session_id} is not open: it ended, or the server restarted")
        session.seen = time.monotonic()
        return session

    def end_session(self, session_id: str) -> None:
        """Drop a session with its models, samplers and futures; what was saved stays."""
        self.sessions.pop(session_id, None)
        self.futures.forget_owner(session_id)
        for model in [model for model in self.models.values() if model.session == session_id]:
            model.queue.close()
            del self.models[model.id]
        for sampler in [sampler for sampler in self.samplers.values() if sampler.session == session_id]:
            del self.samplers[sampler.id]

    async def sweep(self) -> None:
        """End sessions without a heartbeat, and drop what is kept no longer, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            oldest = time.monotonic() - SESSION_IDLE_S
            for session in list(self.sessions.values()):
                if session.seen < oldest:
                    self.end_session(session.id)
            for model in self.models.values():
                model.queue.expire()
            self.futures.sweep()

    async def close(self) -> None:
        await self.futures.close()

    # --- models

    def check_base(self, name: str) -> None:
        if name not in self._names:
            raise RequestFailed(f"base_model {name!r} is not served here: this server has {self.base_model!r}")

    def _open_model(self, body: Body) -> tuple[str, ServedModel | None]:
        """The future's id of a request that makes a model, and that model; None where it was asked for before."""
        session = self.find_session(read_field(body, "session_id", str))
        model_id = f"{session.id}:train:{whole_number(body, 'model_seq_id', 0, 2**31)}"
        request_id = f"{model_id}:0"
        if self.futures.get(request_id) is not None:
            return request_id, None
        queue = OrderedRequests(self.futures, first=1)
        model = self.models[model_id] = ServedModel(model_id, session.id, queue, notes=read_notes(body))
        return request_id, model

    async def _make(self, model: ServedModel, base: str | None, make: Callable[[], Awaitable[Result]]) -> Result:
        """Make a model, within the quota; one that cannot be made is gone."""
        try:
            if len(self.models) > self.limits.max_models:
                raise RequestFailed(
                    f"{self.limits.max_models} models are loaded: end a session, or raise --max-models of treadle serve"
                )
            if base is not None:
                self.check_base(base)
            return await make()
        except BaseException:
            self.models.pop(model.id, None)
            raise

    def create_model(self, body: Body) -> str:
        """A new model; the id of its future."""
        base, shape = read_field(body, "base_model", str), read_shape(body)
        request_id, model = self._open_model(body)
        if model is not None:
            opened = model

            async def create() -> Result:
                opened.trained = await self.shared.create_model(
                    shape, randbits(32) if shape.seed is None else shape.seed
                )
                return {"type": "create_model", "model_id": opened.id}

            entry = self.futures.add(request_id, model.session)
            self.futures.start(entry, lambda: self._make(opened, base, create))
        return request_id

    def find_model(self, model_id: str) -> ServedModel:
        model = self.models.get(model_id)
        if model is None:
            raise ApiError(404, f"model {model_id} is not loaded: its session ended, or it was never made")
        self.find_session(model.session)
        return model

    def _trained(self, model: ServedModel) -> TrainedModel:
        if model.trained is None:
            raise RequestFailed(f"model {model.id} was never made")
        return model.trained

    def _enqueue(self, model: ServedModel, seq_id: int, work: Callable[[], Awaitable[Result]]) -> str:
        """Put a request of a model in its order; the id of its future."""
        request_id = f"{model.id}:{seq_id}"
        if self.futures.get(request_id) is None:
            entry = self.futures.add(request_id, model.session)
            try:
                model.queue.submit(seq_id, entry, work)
            except ApiError:
                entry.finish(failure=RequestFailed("refused"))
                self.futures.forget(request_id)
                raise
        return request_id

    def forward_backward(self, request: ForwardBackwardRequest) -> str:
        model = self.find_model(request.model_id)

        async def compute() -> Result:
            trained, shared = self._trained(model), self.shared
            found = await shared.train(
                trained,
                lambda: trained.forward(
                    request.data,
                    request.loss_fn,
                    request.loss_fn_config,
                    longest=shared.longest,
                    backward=not request.forward_only,
                    recompute=shared.recompute,
                ),
            )
            return write_forward_backward(found.outputs, found.metrics)

        return self._enqueue(model, request.seq_id, compute)

    def optim_step(self, body: Body) -> str:
        model, params = self.find_model(read_field(body, "model_id", str)), read_adam(body)

        async def step() -> Result:
            trained = self._trained(model)
            return {"metrics": dict(await self.shared.train(trained, lambda: trained.step(params)))}

        return self._enqueue(model, _seq_id(body), step)

    # --- checkpoints

    def _record(self, body: Body, trained: TrainedModel) -> CheckpointRecord:
        lifetime_s = read_field(body, "ttl_seconds", int, optional=True)
        now = time.time()
        expires = None if lifetime_s is None else now + lifetime_s
        checksum, notes = self.shared.base.checksum, read_notes(body)
        return CheckpointRecord(self.base_model, checksum, trained.shape, trained.num_steps, now, expires, notes)

    def _find_checkpoint(self, path: str) -> StoredCheckpoint:
        """The checkpoint of a path; a RequestFailed where its adapter was trained on another base than this one."""
        found = self.checkpoints.find(path)
        trained_on, mine = found.record.base_checksum, self.shared.base.checksum
        if trained_on != mine:
            raise RequestFailed(
                f"{path} was trained on another base model: {found.record.base_model} with weights of checksum "
                f"{trained_on or 'unknown'}, but this server has {self.base_model} with {mine}. Start treadle serve "
                "--tinker with the model that it was trained on"
            )
        return found

    def save_weights(self, body: Body) -> str:
        model = self.find_model(read_field(body, "model_id", str))
        seq_id, overwrite = _seq_id(body), read_field(body, "overwrite", bool, False)
        name = read_field(body, "path", str, f"{seq_id:06d}")

        async def save() -> Result:
            trained = self._trained(model)
            record, place = self._record(body, trained), (model.id, TRAINING, name)
            saved = await asyncio.to_thread(
                lambda: self.checkpoints.save(
                    self.shared.base, place, trained.weights, record, trained.optimizer_state(), overwrite=overwrite
                )
            )
            return {"type": "save_weights", "path": saved.path}

        return self._enqueue(model, seq_id, save)

    def save_for_sampler(self, body: Body) -> str:
        model = self.find_model(read_field(body, "model_id", str))
        name = read_field(body, "path", str, optional=True)
        if read_field(body, "kind", str, "snapshot") != "snapshot":
            raise ApiError(400, "kind 'inflight' is not supported: a sampler keeps the weights it was saved with")
        number = None if name is not None else whole_number(body, "sampling_session_seq_id", 0, 2**31)

        async def save() -> Result:
            trained = self._trained(model)
            if name is None:
                sampler = self._add_sampler(model.session, number, None, trained.weights)
                return {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}
            record, place = self._record(body, trained), (model.id, SAMPLER, name)
            weights = trained.weights
            saved = await asyncio.to_thread(self.checkpoints.save, self.shared.base, place, weights, record)
            return {"type": "save_weights_for_sampler", "path": saved.path}

        return self._enqueue(model, _seq_id(body), save)

    def load_weights(self, body: Body) -> str:
        """Load a checkpoint into a model; one without a model makes it."""
        if body.get("weights_access_token") is not None:
            raise ApiError(400, "weights_access_token: there are no other accounts on this server")
        path, restores = read_field(body, "path", str), read_field(body, "optimizer", bool)
        if body.get("model_id") is not None:
            model = self.find_model(read_field(body, "model_id", str))
            return self._enqueue(model, _seq_id(body), lambda: self._load(model, path, restores))
        base = read_field(body, "base_model", str, optional=True)
        request_id, opened = self._open_model(body)
        if opened is not None:

            async def create() -> Result:
                shape = self._find_checkpoint(path).record.shape
                opened.trained = await self.shared.create_model(shape, shape.seed or 0)
                return await self._load(opened, path, restores)

            entry = self.futures.add(request_id, opened.session)
            self.futures.start(entry, lambda: self._make(opened, base, create))
        return request_id

    async def _load(self, model: ServedModel, path: str, restores: bool) -> Result:
        trained, found = self._trained(model), self._find_checkpoint(path)
        weights = await asyncio.to_thread(self.checkpoints.load_weights, found, self.shared.base.device)
        moments = await asyncio.to_thread(self.checkpoints.load_optimizer, found) if restores else None
        await self.shared.train(trained, lambda: trained.load(weights, moments, found.record.num_steps))
        return {"type": "load_weights", "path": path, "model_id": model.id}

    # --- sampling

    def _add_sampler(
        self, session: str, number: int | None, path: str | None, weights: AdapterWeights | None
    ) -> Sampler:
        sampler = Sampler(f"{session}:sample:{number}", session, path, weights)
        self.samplers[sampler.id] = sampler
        self._drop_weights()
        return sampler

    def _drop_weights(self) -> None:
        """Keep the weights of the samplers that were used last; those of a checkpoint can be read again."""
        held = [item for item in self.samplers.values() if item.weights is not None]
        for item in held[: max(0, len(held) - MAX_SAMPLERS)]:
            item.weights, item.is_dropped = None, item.path is None

    async def _weights_of(self, sampler: Sampler) -> AdapterWeights | None:
        if sampler.weights is None and sampler.path is not None:
            found = self._find_checkpoint(sampler.path)
            sampler.weights = await asyncio.to_thread(self.checkpoints.load_weights, found, self.shared.base.device)
            self._drop_weights()
        return sampler.weights

    def create_sampler(self, body: Body) -> Sampler:
        """A sampler of the base model, or of a checkpoint."""
        session = self.find_session(read_field(body, "session_id", str))
        number = whole_number(body, "sampling_session_seq_id", 0, 2**31)
        known = self.samplers.get(f"{session.id}:sample:{number}")
        if known is not None:
            return known
        path, base = read_field(body, "model_path", str, optional=True), body.get("base_model")
        try:
            if path is None:
                self.check_base(read_field(body, "base_model", str))
                return self._add_sampler(session.id, number, None, None)
            if base is not None:
                self.check_base(str(base))
            self._find_checkpoint(path)
        except RequestFailed as failure:
            raise ApiError(404, failure.reason) from failure
        return self._add_sampler(session.id, number, path, None)

    def find_sampler(self, sampler_id: str) -> Sampler:
        sampler = self.samplers.get(sampler_id)
        if sampler is None:
            raise ApiError(404, f"sampling session {sampler_id} is not open: its session ended, or it was never made")
        self.samplers.move_to_end(sampler_id)
        self.find_session(sampler.session)
        return sampler

    def _sampler_of(self, body: Body) -> Sampler:
        sampler_id = read_field(body, "sampling_session_id", str, optional=True)
        if sampler_id is None:
            raise ApiError(400, "sampling_session_id is missing: make a sampling session first")
        sampler = self.find_sampler(sampler_id)
        if sampler.is_dropped:
            raise ApiError(
                404,
                f"sampling session {sampler.id} was dropped: {MAX_SAMPLERS} newer ones were saved. Save weights that "
                "you go on sampling from under a name (save_weights_for_sampler)",
            )
        return sampler

    def sample(self, body: Body) -> tuple[str, int]:
        """The id of a sampling request's future, and how many sequences it will have."""
        sampler = self._sampler_of(body)
        number = whole_number(body, "seq_id", 0, 2**63 - 1)
        request_id = f"{sampler.id}:{number}"
        spec = read_sample(body, request_id)
        if self.futures.get(request_id) is not None:
            return request_id, spec.num_samples
        if self.futures.num_running >= MAX_QUEUED:
            raise ApiError(429, f"{MAX_QUEUED} requests are not finished yet")
        entry = self.futures.add(request_id, sampler.session)
        entry.on_done = sampler.queue(number // CLONE_BLOCK).add

        async def draw() -> Result:
            return write_sample(await self.shared.sample(spec, await self._weights_of(sampler)))

        self.futures.start(entry, draw)
        return request_id, spec.num_samples

    def describe_sampler(self, sampler_id: str) -> dict[str, Any]:
        sampler = self.find_sampler(sampler_id)
        found: dict[str, Any] = {"sampler_id": sampler.id, "base_model": self.base_model}
        return found if sampler.path is None else {**found, "model_path": sampler.path}


def _seq_id(body: Body) -> int:
    return whole_number(body, "seq_id", 1, 2**31)
