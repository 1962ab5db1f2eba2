"""Tinker server: `treadle serve --tinker`, the routes that the `tinker` client package calls, over HTTP.

Owns routes, the key, and how results and errors look on the wire. What a verb does is the service's.
Invariant: without the key nothing but the health route answers; a refusal has a status and a reason that names the
field; a verb of Tinker that is not served says so.

Waits: `retrieve_future` and `retrieve_futures` answer when there is something, and after `POLL_S` with nothing.
"""

import json
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from dataclasses import field as field_of
from datetime import UTC, datetime
from hmac import compare_digest
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from treadle.config import Config
from treadle.errors import ConfigError, Mistake
from treadle.gateway.http_server import HttpConnection, HttpRequest, HttpResponse, HttpServer
from treadle.model.tokenizer import find_model_path
from treadle.tinker.checkpoints import TRAINING, CheckpointStore, StoredCheckpoint
from treadle.tinker.protobuf import read_forward_backward
from treadle.tinker.refusals import ApiError, RequestFailed
from treadle.tinker.requests import Body, field, whole_number
from treadle.tinker.service import ServiceLimits, TinkerService
from treadle.tinker.shared_model import SharedModel

POLL_S = 25.0
PREFIX = "/api/v1/"
BODIES_AT_ONCE = 4
"""Largest bodies that may be on the way together."""
HEALTH = PREFIX + "healthz"
PROTOBUF = "application/x-protobuf"
MAX_FILES = 65_536

CLIENT_CONFIG: Mapping[str, Any] = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
    "parallel_fwdbwd_chunks": True,
}
"""Flags of the client: no tokens beside the key, plain bodies, one poll for all samples of a sampling session."""

NOT_SERVED: Mapping[str, str] = {
    "save_weights_external": "checkpoints are PEFT adapters on the server's disk already: treadle export merges one",
    "create_custom_loss": "losses are not run on the server: forward_backward_custom computes them in the client",
    "copy_weights": "there are no projects: every checkpoint is open to all that have the key",
    "auth/token": "this server knows one key, and no other tokens",
    "forward": "it is a forward_backward with forward_only",
}
"""Routes of Tinker that are refused, with the reason."""

Answer = HttpResponse | bytes
Route = Callable[[Body], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class TinkerSettings:
    """How a server is started."""

    key: str
    directory: Path
    """Where checkpoints are."""
    name: str | None = None
    """The name that clients ask for; the model's path where it is None."""
    limits: ServiceLimits = field_of(default_factory=ServiceLimits)


class TinkerServer:
    """The HTTP side: an `HttpHandler`."""

    def __init__(self, service: TinkerService, key: str, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._service = service
        self._key = key.encode()
        self._num_bytes = 0
        """Of bodies that are on the way, or being answered."""
        self._posts: dict[str, Route] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": _future(service.create_model),
            "get_info": self._get_info,
            "optim_step": _future(service.optim_step),
            "save_weights": _future(service.save_weights),
            "load_weights": _future(service.load_weights),
            "save_weights_for_sampler": _future(service.save_for_sampler),
            "create_sampling_session": self._create_sampler,
            "join_sampling_session": self._join_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve_future,
            "retrieve_futures": self._retrieve_futures,
            "cancel_future": self._cancel_future,
            "weights_info": self._weights_info,
            "telemetry": self._telemetry,
        }

    def check(self, request: HttpRequest) -> object:
        """Refuse a request without the key before its body is read."""
        if request.target.split("?", 1)[0] == HEALTH:
            return None
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not compare_digest(given.encode("utf-8", "replace"), self._key):
            return _refusal(ApiError(401, "this is not the server's key: use the one that treadle serve printed"))
        return self

    def take_bytes(self, owner: object, count: int) -> HttpResponse | None:
        """Bodies on the way are bounded together: many half-sent ones would be all memory."""
        self._num_bytes += count
        most = BODIES_AT_ONCE * self.max_body_bytes
        if self._num_bytes <= most:
            return None
        return _refusal(ApiError(429, f"requests of {most} bytes are on the way already: send fewer at once"))

    def refuse_body(self, most: int) -> HttpResponse:
        fix = "send smaller batches, or start treadle serve --tinker with a larger rollout.gateway.max_body_mb"
        return _refusal(ApiError(413, f"the body is larger than {most} bytes: {fix}"))

    def release(self, owner: object, num_bytes: int) -> None:
        self._num_bytes -= num_bytes

    async def handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        try:
            answer = await self._answer(request)
        except ApiError as error:
            answer = _refusal(error)
        except RequestFailed as failure:
            answer = _refusal(ApiError(400 if failure.by_user else 503, failure.reason))
        if isinstance(answer, HttpResponse):
            await connection.respond(answer)
            return
        await connection.start_stream(PROTOBUF)
        await connection.send(answer, is_last=True)

    async def _answer(self, request: HttpRequest) -> Answer:
        target, _, query = request.target.partition("?")
        path = unquote(target).removeprefix(PREFIX)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "compressed bodies are not read: client/config says so")
        if request.method in ("GET", "HEAD", "DELETE", "PUT"):
            return await self._rest(request.method, path, {key: values[-1] for key, values in parse_qs(query).items()})
        if path == "forward_backward":
            return _future_response(self._service.forward_backward(read_forward_backward(request.body)))
        if path.startswith("sessions/") and path.endswith("/finish"):
            self._service.end_session(path.split("/")[1])
            return HttpResponse(200, {})
        route = self._posts.get(path)
        if route is None:
            reason = NOT_SERVED.get(path, f"treadle serves these: forward_backward, {', '.join(self._posts)}")
            raise ApiError(400 if path in NOT_SERVED else 404, f"{path} is not served: {reason}")
        return await route(_read_json(request.body))

    # --- the client's own questions

    async def _client_config(self, body: Body) -> Answer:
        most = self.max_body_bytes // 2  # the client's estimate of a body is a rough one
        return HttpResponse(200, {**CLIENT_CONFIG, "fwdbwd_max_chunk_bytes_count": min(5_000_000, most)})

    async def _dynamic_config(self, body: Body) -> Answer:
        return HttpResponse(200, {"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def _telemetry(self, body: Body) -> Answer:
        """Read by nothing: what a client reports of itself stays with it."""
        return HttpResponse(200, {"status": "accepted"})

    async def _create_session(self, body: Body) -> Answer:
        session = self._service.create_session(body)
        return HttpResponse(200, {"type": "create_session", "session_id": session.id})

    async def _heartbeat(self, body: Body) -> Answer:
        self._service.find_session(field(body, "session_id", str))
        return HttpResponse(200, {"type": "session_heartbeat"})

    async def _get_info(self, body: Body) -> Answer:
        service = self._service
        model = service.find_model(field(body, "model_id", str))
        shape = model.trained.shape if model.trained is not None else None
        data = {
            "arch": type(service.shared.base.module).__name__,
            "model_name": service.base_model,
            "tokenizer_id": service.tokenizer,
        }
        rank = shape.rank if shape is not None else None
        found = {"type": "get_info", "model_id": model.id, "model_name": service.base_model, "model_data": data}
        return HttpResponse(200, {**found, "is_lora": True, "lora_rank": rank})

    # --- sampling and futures

    async def _create_sampler(self, body: Body) -> Answer:
        sampler = self._service.create_sampler(body)
        return HttpResponse(200, {"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def _join_sampler(self, body: Body) -> Answer:
        sampler = self._service.find_sampler(field(body, "sampling_session_id", str))
        sampler.num_clients += 1
        return HttpResponse(200, {"type": "join_sampling_session", "client_counter": sampler.num_clients - 1})

    async def _sample(self, body: Body) -> Answer:
        request_id, count = self._service.sample(body)
        ids = [f"{request_id}:{at}" for at in range(count)]
        return HttpResponse(200, {"request_id": request_id, "sample_sequence_ids": ids})

    async def _retrieve_future(self, body: Body) -> Answer:
        request_id = field(body, "request_id", str)
        entry = await self._service.futures.wait(request_id, POLL_S)
        if entry is None:
            return HttpResponse(408, {"type": "try_again", "request_id": request_id, "queue_state": "active"})
        if entry.failure is not None:
            return HttpResponse(200, {"error": entry.failure.reason, "category": entry.failure.category})
        assert entry.result is not None, "done, and not failed"
        return entry.result if isinstance(entry.result, bytes) else HttpResponse(200, entry.result)

    async def _retrieve_futures(self, body: Body) -> Answer:
        target = field(body, "target", dict)
        sampler = self._service.find_sampler(field(target, "sampling_session_id", str))
        for request_id in field(body, "retrieved_request_ids", list, []):
            self._service.futures.forget(str(request_id))
        given = field(body, "timeout", float, optional=True)
        timeout_s = POLL_S if given is None else min(max(0.0, given), POLL_S)
        queue = sampler.queue(whole_number(target, "cloned_sampler_id", 0, 2**63 - 1, 0))
        events, cursor = await queue.poll(whole_number(body, "prev_cursor", 0, 2**63 - 1, 0), timeout_s)
        completions = [
            {"state": "failed", "request_id": event.request_id}
            if event.failed
            else {
                "state": "finished",
                "request_id": event.request_id,
                "response_payload_uncompressed_size": event.num_bytes,
            }
            for event in events
        ]
        return HttpResponse(200, {"completions": completions, "cursor": cursor})

    async def _cancel_future(self, body: Body) -> Answer:
        self._service.futures.cancel(field(body, "request_id", str))
        return HttpResponse(200, {})

    # --- what a client may look up

    async def _weights_info(self, body: Body) -> Answer:
        record = self._service.checkpoints.find(field(body, "tinker_path", str)).record
        shape = record.shape
        found = {"base_model": record.base_model, "is_lora": True, "lora_rank": shape.rank}
        trains = {"train_attn": shape.train_attn, "train_mlp": shape.train_mlp, "train_unembed": shape.train_unembed}
        return HttpResponse(200, {**found, **trains})

    async def _rest(self, method: str, path: str, query: Mapping[str, str]) -> Answer:
        parts, service = path.split("/"), self._service
        if method == "GET" and path == "healthz":
            return HttpResponse(200, {"status": "ok"})
        if method == "GET" and path == "get_server_capabilities":
            longest = service.shared.longest
            model = {"model_name": service.base_model, "max_context_length": longest}
            return HttpResponse(200, {"supported_models": [{**model, "trainable": True, "sampleable": True}]})
        if method == "GET" and parts[0] == "samplers" and len(parts) == 2:
            return HttpResponse(200, service.describe_sampler(parts[1]))
        if method == "GET" and parts[0] == "sessions":
            return self._sessions(parts[1:])
        if parts[0] in ("training_runs", "checkpoints"):
            return self._checkpoints(method, parts, query)
        raise ApiError(404, f"{method} {path} is not served")

    def _sessions(self, parts: list[str]) -> Answer:
        service = self._service
        if not parts:
            return HttpResponse(200, {"sessions": list(service.sessions)})
        session = service.find_session(parts[0])
        models = [model.id for model in service.models.values() if model.session == session.id]
        samplers = [sampler.id for sampler in service.samplers.values() if sampler.session == session.id]
        found = {"training_run_ids": models, "sampler_ids": samplers, "display_name": session.name}
        return HttpResponse(200, {**found, "user_metadata": session.notes})

    def _checkpoints(self, method: str, parts: list[str], query: Mapping[str, str]) -> Answer:
        store = self._service.checkpoints
        if method == "DELETE" and len(parts) == 5 and parts[2] == "checkpoints":
            store.delete(store.find(f"tinker://{parts[1]}/{parts[3]}/{parts[4]}"))
            return HttpResponse(200, {})
        if method != "GET":
            raise ApiError(400, f"{method} {'/'.join(parts)} is not served: checkpoints are listed and deleted")
        if parts == ["checkpoints"]:
            return HttpResponse(200, _page([_describe(found) for found in store.all()], "checkpoints", query))
        if parts == ["training_runs"]:
            runs = [
                self._describe_run(store, model) for model in dict.fromkeys((*self._service.models, *store.models()))
            ]
            return HttpResponse(200, _page(runs, "training_runs", query))
        if len(parts) == 2:
            return HttpResponse(200, self._describe_run(store, parts[1]))
        if len(parts) == 3 and parts[2] == "checkpoints":
            return HttpResponse(200, {"checkpoints": [_describe(found) for found in store.all(parts[1])]})
        if len(parts) == 6 and parts[5] == "archive":
            found = store.find(f"tinker://{parts[1]}/{parts[3]}/{parts[4]}")
            raise ApiError(
                400, f"archives are not made: the checkpoint is the directory {found.directory} of the server"
            )
        raise ApiError(404, f"{'/'.join(parts)} is not served")

    def _describe_run(self, store: CheckpointStore, model_id: str) -> dict[str, Any]:
        saved, model = list(store.all(model_id)), self._service.models.get(model_id)
        if model is None and not saved:
            raise ApiError(404, f"model {model_id} is not loaded, and has no checkpoints")
        shape = model.trained.shape if model is not None and model.trained is not None else None
        shape = saved[-1].record.shape if shape is None and saved else shape
        last = {kind: [item for item in saved if (item.kind == TRAINING) is kind] for kind in (True, False)}
        return {
            "training_run_id": model_id,
            "base_model": self._service.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": shape.rank if shape is not None else None,
            "last_request_time": _moment(time.time() if model is not None else saved[-1].record.created_at),
            "last_checkpoint": _describe(last[True][-1]) if last[True] else None,
            "last_sampler_checkpoint": _describe(last[False][-1]) if last[False] else None,
            "user_metadata": model.notes if model is not None else None,
        }


def _future(verb: Callable[[Body], str]) -> Route:
    async def route(body: Body) -> Answer:
        return _future_response(verb(body))

    return route


def _future_response(request_id: str) -> HttpResponse:
    return HttpResponse(200, {"request_id": request_id, "model_id": request_id.rpartition(":")[0]})


def _refusal(error: ApiError) -> HttpResponse:
    return HttpResponse(error.status, {"detail": error.reason})


def _read_json(body: bytes) -> Body:
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(422, f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(422, "the body must be a JSON object")
    return found


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _describe(found: StoredCheckpoint) -> dict[str, Any]:
    record = found.record
    return {
        "checkpoint_id": f"{found.kind}/{found.name}",
        "checkpoint_type": "training" if found.kind == TRAINING else "sampler",
        "time": _moment(record.created_at),
        "tinker_path": found.path,
        "size_bytes": sum(file.stat().st_size for file in found.directory.iterdir() if file.is_file()),
        "public": False,
        "user_metadata": record.notes,
        "expires_at": None if record.expires_at is None else _moment(record.expires_at),
    }


def _page(items: list[dict[str, Any]], name: str, query: Mapping[str, str]) -> dict[str, Any]:
    def number(key: str, default: int) -> int:
        value = query.get(key, "")
        return int(value) if value.isdigit() and len(value) < 10 else default

    offset, limit = number("offset", 0), number("limit", 100)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}


async def serve_tinker(config: Config, settings: TinkerSettings, on_ready: Callable[[str, str], None]) -> None:
    """Load the model, call `on_ready` with address and model name, and serve until cancelled."""
    gateway = config.rollout.gateway
    async with AsyncExitStack() as started:
        shared = await SharedModel.create(config)
        started.push_async_callback(shared.close)
        directory = find_model_path(config.model.path)
        aliases = (config.model.path,) if directory is None else (config.model.path, str(directory))
        tokenizer = config.model.path if directory is None else str(directory)
        name = settings.name or config.model.path
        service = TinkerService(shared, name, aliases, tokenizer, settings.directory)
        service.limits = settings.limits
        started.push_async_callback(service.close)
        server = TinkerServer(service, settings.key, gateway.max_body_mb * 1_000_000)
        _allow_connections()
        try:
            http = await HttpServer.start(server, gateway.host, gateway.port)
        except OSError as error:
            problem = f"cannot listen on {gateway.host}:{gateway.port}: {error.strerror or error}"
            fix = "give another --port; 0 takes a free one"
            raise ConfigError(
                [Mistake("rollout.gateway.port", problem, gateway.port, gateway.origin("port"), fix)]
            ) from error
        started.push_async_callback(http.close)
        on_ready(gateway.url.format(host=gateway.host, port=http.port).rstrip("/"), name)
        await service.sweep()


def _allow_connections() -> None:
    """Raise the limit on open files: a client keeps hundreds of connections while it samples."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
