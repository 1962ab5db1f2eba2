"""The Tinker API over HTTP with the bundled model, without the client package: keys, order, quotas, refusals."""

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

import treadle
from tests.tinker_messages import floats, forward_backward, integers, read_outputs, read_sample
from treadle.api.research import PolicySample
from treadle.config import Config, loads
from treadle.gateway.http_server import HttpServer
from treadle.model.tokenizer import resolve_model_path
from treadle.tinker import futures, server, service
from treadle.tinker.adapters import AdapterShape, AdapterWeights
from treadle.tinker.checkpoints import CheckpointRecord, CheckpointStore
from treadle.tinker.refusals import RequestFailed
from treadle.tinker.server import TinkerServer
from treadle.tinker.service import ServiceLimits, TinkerService
from treadle.tinker.shared_model import SharedModel
from treadle.types import StopReason

MODEL = "treadle/tiny-calculator"
KEY = "tml-key"
IDS = [5, 6, 7, 8, 9]
ONES = {"target_tokens": torch.tensor(IDS[1:]), "weights": torch.ones(4)}
Json = dict[str, Any]


class Client:
    """A client of a served model, for one session."""

    def __init__(self, service: TinkerService, url: str, key: str = KEY) -> None:
        self.service = service
        self.http = httpx.AsyncClient(base_url=url, headers={"x-api-key": key}, timeout=60)
        self.session = ""

    async def post(self, path: str, body: Json | bytes, status: int = 200) -> Json:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.http.post(f"/api/v1/{path}", content=content)
        assert response.status_code == status, response.text
        found: Json = response.json()
        return found

    async def get(self, path: str, status: int = 200) -> Json:
        response = await self.http.get(f"/api/v1/{path}")
        assert response.status_code == status, response.text
        found: Json = response.json()
        return found

    async def result(self, future: Json) -> Any:
        """What a future ends with: protobuf as bytes, JSON as a dict."""
        response = await self.http.post("/api/v1/retrieve_future", json={"request_id": future["request_id"]})
        while response.status_code == 408:
            response = await self.http.post("/api/v1/retrieve_future", json={"request_id": future["request_id"]})
        assert response.status_code == 200, response.text
        return response.json() if response.headers["content-type"] == "application/json" else response.content

    async def open(self) -> None:
        self.session = (await self.post("create_session", {"tags": [], "sdk_version": "0"}))["session_id"]

    async def create(self, number: int = 0, **lora: Any) -> Json:
        body = {"session_id": self.session, "model_seq_id": number, "base_model": MODEL}
        found: Json = await self.result(await self.post("create_model", {**body, "lora_config": {"rank": 4, **lora}}))
        return found

    async def model(self, number: int = 0, **lora: Any) -> str:
        return str((await self.create(number, **lora))["model_id"])

    async def sampler(self, **changes: Any) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": MODEL, **changes}
        return str((await self.post("create_sampling_session", body))["sampling_session_id"])

    async def sample(self, sampler: str, number: int = 0, ids: list[int] = IDS, **changes: Any) -> Any:
        params = {"max_tokens": 6, **changes.pop("sampling_params", {})}
        body = {"sampling_session_id": sampler, "seq_id": number, "sampling_params": params, **changes}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": ids}]}
        found = await self.result(await self.post("asample", {**body, "prompt": prompt}))
        return read_sample(found) if isinstance(found, bytes) else found

    async def train(
        self, model: str, number: int, data: Any = None, loss_fn: str = "cross_entropy", **more: Any
    ) -> Any:
        body = forward_backward(model, number, data or [(IDS[:-1], ONES)], loss_fn, **more)
        found = await self.result(await self.post("forward_backward", body))
        return read_outputs(found) if isinstance(found, bytes) else found

    async def step(self, model: str, number: int, **adam: Any) -> Json:
        body = {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": 1e-2, **adam}}
        found: Json = await self.result(await self.post("optim_step", body))
        return found


def config(**changes: str) -> Config:
    lines = [f"model: {{path: {MODEL}}}", "rollout: {prompt_length: 128, response_length: 128}"]
    return loads("\n".join(lines), "a test", tuple(f"{key}={value}" for key, value in changes.items()))


def served(
    use: Callable[[Client], Coroutine[Any, Any, None]],
    tmp_path: Path,
    limits: ServiceLimits | None = None,
    mb: float = 1,
    model: str = MODEL,
) -> None:
    async def main() -> None:
        shared = await SharedModel.create(config(**{"model.path": model}))
        tinker = TinkerService(shared, MODEL, (), MODEL, tmp_path / "checkpoints")
        tinker.limits = limits or ServiceLimits()
        http = await HttpServer.start(TinkerServer(tinker, KEY, int(mb * 1_000_000)), "127.0.0.1", 0)
        client = Client(tinker, f"http://127.0.0.1:{http.port}")
        try:
            async with asyncio.timeout(300):
                await client.open()
                await use(client)
        finally:
            await client.http.aclose()
            await http.close()
            await tinker.close()
            await shared.close()

    asyncio.run(main())


def test_nothing_but_health_answers_without_the_key(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        stranger = Client(client.service, str(client.http.base_url), "tml-other")
        assert await stranger.get("healthz") == {"status": "ok"}
        for path in ("create_session", "forward_backward", "client/config", "nowhere"):
            found = await stranger.post(path, {}, 401)
            assert "not the server's key" in found["detail"]
        assert "detail" in await stranger.get("get_server_capabilities", 401)
        await stranger.http.aclose()

    served(use, tmp_path)


def test_samples_and_forwards_have_the_logprobs_of_the_policy(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        sampler = await client.sampler()
        done = await client.sample(sampler, num_samples=3, prompt_logprobs=True)
        model = await client.model()
        with treadle.Policy(MODEL, max_length=256) as policy:
            for number, sequence in enumerate(done.sequences, start=1):
                ids = tuple(integers(sequence.tokens))
                (expected,) = policy.logprobs([PolicySample("", tuple(IDS), ids, (), StopReason.STOP)])
                assert floats(sequence.logprobs) == pytest.approx(expected.tolist(), abs=1e-5)
                assert sequence.stop_reason == (0 if ids[-1] == 2 else 1)
                whole = [*IDS, *ids]
                data = [(whole[:-1], {"target_tokens": torch.tensor(whole[1:])})]
                outputs, _ = await client.train(model, number, data, forward_only=True)
                assert outputs[0]["logprobs"][len(IDS) - 1 :].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
            prompt = floats(done.prompt_logprobs)
            (expected,) = policy.logprobs([PolicySample("", tuple(IDS[:1]), tuple(IDS[1:]), (), StopReason.STOP)])
            assert prompt[0] != prompt[0] and prompt[1:] == pytest.approx(expected.tolist(), abs=1e-5)

    served(use, tmp_path)


def test_a_saved_adapter_samples_as_it_was_trained_and_opens_as_a_policy(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        model = await client.model()
        before, metrics = await client.train(model, 1)
        for number in range(2, 8, 2):
            assert (await client.step(model, number))["metrics"]["grad_norm"] > 0
            after, later = await client.train(model, number + 1)
        assert later["loss:sum"] < metrics["loss:sum"]
        base = {"model_id": model, "seq_id": 8}
        unnamed = await client.result(
            await client.post("save_weights_for_sampler", {**base, "sampling_session_seq_id": 5})
        )
        found = await client.sample(unnamed["sampling_session_id"], prompt_logprobs=True)
        assert floats(found.prompt_logprobs)[1:] == pytest.approx(after[0]["logprobs"].tolist(), abs=1e-5)
        named = await client.result(await client.post("save_weights_for_sampler", {**base, "seq_id": 9, "path": "a"}))
        assert named["path"] == f"tinker://{model}/sampler_weights/a"
        directory = client.service.checkpoints.find(named["path"]).directory
        with treadle.Policy({"path": MODEL, "adapter": str(directory)}, max_length=256) as policy:
            (expected,) = policy.logprobs([PolicySample("", tuple(IDS[:1]), tuple(IDS[1:]), (), StopReason.STOP)])
        assert after[0]["logprobs"].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        unchanged = await client.sample(await client.sampler(), prompt_logprobs=True)
        assert floats(unchanged.prompt_logprobs)[1:] == pytest.approx(before[0]["logprobs"].tolist(), abs=1e-5)

    served(use, tmp_path)


def test_requests_of_a_model_run_in_their_order_and_once(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        model = await client.model()
        step = {"model_id": model, "seq_id": 3, "adam_params": {}}
        later = await client.post("optim_step", step)
        second = await client.post("forward_backward", forward_backward(model, 2, [(IDS[:-1], ONES)]))
        assert not client.service.futures.get(later["request_id"]).done.is_set()  # type: ignore[union-attr]
        first = await client.post("forward_backward", forward_backward(model, 1, [(IDS[:-1], ONES)]))
        again = await client.post("forward_backward", forward_backward(model, 1, [(IDS[:-1], ONES)]))
        assert first == again
        assert isinstance(await client.result(first), bytes) and isinstance(await client.result(second), bytes)
        twice = (await client.result(later))["metrics"]["grad_norm"]
        other = await client.model(1, seed=0)
        assert client.service.models[model].trained.num_steps == 1  # type: ignore[union-attr]
        await client.train(other, 1)
        assert (await client.step(other, 2))["metrics"]["grad_norm"] != twice

    served(use, tmp_path)


def test_a_request_whose_predecessor_never_comes_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(client: Client) -> None:
        model = await client.model()
        future = await client.post("forward_backward", forward_backward(model, 2, [(IDS[:-1], ONES)]))
        client.service.models[model].queue.expire()
        assert not client.service.futures.get(future["request_id"]).done.is_set()  # type: ignore[union-attr]
        monkeypatch.setattr(futures, "GAP_TIMEOUT_S", -1.0)
        client.service.models[model].queue.expire()
        assert await client.result(future) == {"error": "request 1 of this model never arrived", "category": "server"}

    served(use, tmp_path)


def test_two_models_train_apart(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        first, second = await client.model(0, seed=1), await client.model(1, seed=1)
        ((start,), _) = await client.train(second, 1, forward_only=True)
        await client.train(first, 1)
        await client.step(first, 2)
        ((moved,), _), ((still,), _) = await client.train(first, 3), await client.train(second, 2, forward_only=True)
        assert torch.equal(still["logprobs"], start["logprobs"])
        assert not torch.equal(moved["logprobs"], start["logprobs"])

    served(use, tmp_path)


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        model = await client.model(seed=4)
        await client.train(model, 1)
        await client.step(model, 2)
        saved = await client.result(await client.post("save_weights", {"model_id": model, "seq_id": 3, "path": "one"}))
        await client.train(model, 4)
        await client.step(model, 5)
        ((expected,), _) = await client.train(model, 6, forward_only=True)
        body = {"session_id": client.session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
        loaded = await client.result(await client.post("load_weights", body))
        assert loaded["model_id"] == f"{client.session}:train:1"
        await client.train(loaded["model_id"], 1)
        await client.step(loaded["model_id"], 2)
        ((resumed,), _) = await client.train(loaded["model_id"], 3, forward_only=True)
        assert torch.equal(resumed["logprobs"], expected["logprobs"])
        info = await client.post("weights_info", {"tinker_path": saved["path"]})
        assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == (MODEL, 4, True)
        (run,) = (await client.get("training_runs"))["training_runs"][:1]
        assert run["last_checkpoint"]["tinker_path"] == saved["path"]
        response = await client.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/one")
        assert response.status_code == 200
        assert (await client.get(f"training_runs/{model}/checkpoints"))["checkpoints"] == []

    served(use, tmp_path)


def test_a_checkpoint_of_another_base_model_is_refused(tmp_path: Path) -> None:
    saved: dict[str, str] = {}

    async def save(client: Client) -> None:
        body = {"model_id": await client.model(), "path": "a"}
        for number, kind in enumerate(("save_weights", "save_weights_for_sampler"), start=1):
            saved[kind] = (await client.result(await client.post(kind, {**body, "seq_id": number})))["path"]

    async def load(client: Client) -> None:
        load = {"session_id": client.session, "model_seq_id": 1, "path": saved["save_weights"], "optimizer": False}
        new = await client.result(await client.post("load_weights", load))
        into = {"model_id": await client.model(2), "seq_id": 1, "path": saved["save_weights"], "optimizer": True}
        old = await client.result(await client.post("load_weights", into))
        body = {"session_id": client.session, "sampling_session_seq_id": 0}
        path = saved["save_weights_for_sampler"]
        sampler = await client.post("create_sampling_session", {**body, "model_path": path}, 404)
        for found in (new["error"], old["error"], sampler["detail"]):
            assert f"was trained on another base model: {MODEL} with weights of checksum" in found
            assert "Start treadle serve --tinker with the model that it was trained on" in found

    other = tmp_path / "other"
    shutil.copytree(resolve_model_path(MODEL), other)
    weights = load_file(other / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 0.01}, other / "model.safetensors", {"format": "pt"})
    served(save, tmp_path)
    served(load, tmp_path, model=str(other))


@pytest.mark.parametrize("name", ["../../x", "a/b", "", "..", ".hidden", "a" * 200, "x\n"])
def test_a_checkpoint_cannot_be_named_out_of_its_directory(name: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(RequestFailed, match=r"is no (name for|path of) a checkpoint"):
        store.find(f"tinker://x/weights/{name}")
    with pytest.raises(RequestFailed, match=r"is no (name for|path of) a checkpoint"):
        store.find(f"tinker://{name}/weights/x")
    with pytest.raises(RequestFailed, match="is no name for a checkpoint"):
        record = CheckpointRecord("base", "", AdapterShape(1), 0, 0.0)
        store.save(None, ("x", "weights", name), AdapterWeights(AdapterShape(1), {}), record)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


REFUSED: list[tuple[str, Json, str]] = [
    ("stable_reinforce", {}, "its formula is not published"),
    ("ppo", {}, "logprobs is missing"),
    ("gspo", {}, "needs clip_low_threshold and clip_high_threshold"),
    ("cross_entropy", {"beta": 1.0}, "cross_entropy has no 'beta'"),
    ("nonsense", {}, "it is unknown"),
]


def test_a_loss_that_cannot_be_is_a_failed_future(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        model = await client.model()
        for number, (loss_fn, options, reason) in enumerate(REFUSED, start=1):
            found = await client.train(model, number, loss_fn=loss_fn, **options)
            assert found["category"] == "user" and reason in found["error"]
        assert "no gradients" in (await client.step(model, len(REFUSED) + 1))["error"]

    served(use, tmp_path)


def test_what_does_not_fit_the_model_is_refused_by_its_place(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        model, sampler = await client.model(), await client.sampler()
        short = {"target_tokens": torch.tensor([1])}
        found = await client.train(model, 1, [(IDS[:-1], ONES), (IDS, short)])
        assert "data[1]: target_tokens [1] must be [5]" in found["error"]
        found = await client.train(model, 2, [([999_999], {"target_tokens": torch.tensor([1])})])
        assert "outside of the vocabulary" in found["error"]
        found = await client.sample(sampler, 0, [1] * 300)
        assert "do not fit the model's 256 tokens" in found["error"] and found["category"] == "user"
        found = await client.sample(sampler, 1, [-1])
        assert "outside of the vocabulary" in found["error"]
        body = {
            "sampling_session_id": sampler,
            "seq_id": 2,
            "sampling_params": {},
            "prompt": {"chunks": [{"type": "image"}]},
        }
        assert "text models" in (await client.post("asample", body, 400))["detail"]
        for path in ("save_weights_external", "create_custom_loss", "copy_weights"):
            assert "is not served" in (await client.post(path, {}, 400))["detail"]
        other = {
            "session_id": client.session,
            "model_seq_id": 7,
            "base_model": "other/model",
            "lora_config": {"rank": 4},
        }
        found = await client.result(await client.post("create_model", other))
        assert MODEL in found["error"] and found["category"] == "user"
        assert "no whole models" in (await client.post("create_model", {**other, "lora_config": None}, 400))["detail"]

    served(use, tmp_path)


def test_quotas_of_models_sessions_and_bodies(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        await client.model(0)
        assert "raise --max-models" in (await client.create(1))["error"]
        body = {"tags": [], "sdk_version": "0"}
        await client.post("create_session", body)
        assert "raise --max-sessions" in (await client.post("create_session", body, 403))["detail"]
        await client.post(f"sessions/{client.session}/finish", {})
        await client.post("session_heartbeat", {"session_id": client.session}, 410)
        assert not client.service.models
        await client.open()
        await client.model(0)
        response = await client.http.post("/api/v1/telemetry", content=b"x" * 200_000)
        assert response.status_code == 413
        assert "serve --tinker with a larger rollout.gateway.max_body_mb" in response.json()["detail"]

    served(use, tmp_path, ServiceLimits(max_models=1, max_sessions=2), mb=0.1)


def test_a_session_without_heartbeats_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SWEEP_S", 0.01)

    async def use(client: Client) -> None:
        await client.model()
        sweeping = asyncio.create_task(client.service.sweep())
        monkeypatch.setattr(service, "SESSION_IDLE_S", -1.0)
        while client.service.models:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        sweeping.cancel()
        await client.post("session_heartbeat", {"session_id": client.session}, 410)

    served(use, tmp_path)


def test_an_ended_session_computes_nothing_more(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        model = await client.model()
        tinker = client.service
        trained, others = tinker.models[model].trained, Client(tinker, str(client.http.base_url))
        assert trained is not None
        await others.open()
        async with tinker.shared._turns.take(None, alone=True, timeout_s=300):
            for number in range(1, 6):
                await client.post("forward_backward", forward_backward(model, number, [(IDS[:-1], ONES)]))
            await client.post(f"sessions/{client.session}/finish", {})
        await others.sample(await others.sampler())
        while tinker.futures.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not trained.has_gradients
        await others.http.aclose()

    served(use, tmp_path)


def test_samplers_beyond_the_limit_are_dropped_or_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_SAMPLERS", 1)

    async def use(client: Client) -> None:
        model = await client.model()
        await client.train(model, 1)
        await client.step(model, 2)
        saved = {}
        for number, extra in enumerate([{"path": "a"}, {"sampling_session_seq_id": 1}, {"sampling_session_seq_id": 2}]):
            body = {"model_id": model, "seq_id": 3 + number, **extra}
            saved[number] = await client.result(await client.post("save_weights_for_sampler", body))
        newest = await client.sample(saved[2]["sampling_session_id"], prompt_logprobs=True)
        body = {"sampling_session_id": saved[1]["sampling_session_id"], "seq_id": 0}
        assert "under a name" in (await client.post("asample", body, 404))["detail"]
        names = [await client.sampler(sampling_session_seq_id=at, model_path=saved[0]["path"]) for at in (3, 4)]
        for name in (*names, names[0]):
            found = await client.sample(name, names.index(name), prompt_logprobs=True)
            assert floats(found.prompt_logprobs)[1:] == floats(newest.prompt_logprobs)[1:]
        held = [sampler.id for sampler in client.service.samplers.values() if sampler.weights is not None]
        assert held == [names[1]]

    served(use, tmp_path)


def test_one_poll_reports_every_finished_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(client: Client) -> None:
        sampler = await client.sampler()
        for number in (0, 1):
            await client.sample(sampler, number)
        await client.sample(sampler, 1_000_000_000)
        target = {"sampling_session_id": sampler, "cloned_sampler_id": 0}
        found = await client.post("retrieve_futures", {"target": target, "prev_cursor": 0})
        assert [item["request_id"] for item in found["completions"]] == [f"{sampler}:0", f"{sampler}:1"]
        assert all(item["response_payload_uncompressed_size"] > 0 for item in found["completions"])
        body = {
            "target": target,
            "prev_cursor": found["cursor"],
            "timeout": 0,
            "retrieved_request_ids": [f"{sampler}:0"],
        }
        assert (await client.post("retrieve_futures", body))["completions"] == []
        await client.post("retrieve_future", {"request_id": f"{sampler}:0"}, 410)
        monkeypatch.setattr(server, "POLL_S", 0.01)
        model = await client.model()
        late = await client.post("forward_backward", forward_backward(model, 2, [(IDS[:-1], ONES)]))
        again = await client.post("retrieve_future", {"request_id": late["request_id"]}, 408)
        assert again["type"] == "try_again"

    served(use, tmp_path)


def test_the_same_seed_draws_the_same_tokens_and_no_seed_others(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        sampler = await client.sampler()
        params = {"max_tokens": 12, "temperature": 1.5}
        draws = [
            await client.sample(sampler, number, num_samples=2, sampling_params=params | extra)
            for number, extra in enumerate([{"seed": 1}, {"seed": 1}, {"seed": 2}, {}, {}])
        ]
        tokens = [tuple(tuple(integers(item.tokens)) for item in draw.sequences) for draw in draws]
        assert tokens[0] == tokens[1] and len(set(tokens)) == 4
        assert tokens[0][0] != tokens[0][1]

    served(use, tmp_path)


def test_stops_are_the_models_own_those_given_or_none(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        sampler = await client.sampler()
        params = {"max_tokens": 100, "seed": 3}
        own = (await client.sample(sampler, 0, sampling_params=params)).sequences[0]
        assert integers(own.tokens)[-1] == 2 and own.stop_reason == 0
        none = (await client.sample(sampler, 1, sampling_params=params | {"stop": []})).sequences[0]
        assert len(integers(none.tokens)) == 100 and none.stop_reason == 1
        first = integers(own.tokens)[0]
        given = (await client.sample(sampler, 2, sampling_params=params | {"stop": [first]})).sequences[0]
        assert integers(given.tokens) == [first] and given.stop_reason == 0

    served(use, tmp_path)


def test_scores_of_a_prompt_agree_with_each_other(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        sampler = await client.sampler()
        targets = {"data": [*IDS[1:]], "dtype": "int64", "shape": [4, 1]}
        wanted = {"prompt_logprobs": True, "topk_prompt_logprobs": 384, "target_prompt_logprobs": targets}
        found = await client.sample(sampler, 0, **wanted, prompt_alt_tokens_k=2, topk_sample_logprobs=3)
        logprobs = floats(found.prompt_logprobs)[1:]
        assert floats(found.target_prompt_logprobs.dense) == pytest.approx(logprobs, abs=1e-5)
        top = torch.tensor(floats(found.topk_prompt_logprobs.logprobs)).view(5, 384)
        ids = torch.tensor(integers(found.topk_prompt_logprobs.token_ids)).view(5, 384)
        assert bool((top[0] == -99999.0).all()) and top[1:].exp().sum(1).tolist() == pytest.approx([1.0] * 4, abs=1e-4)
        by_token = torch.zeros(5, 384).scatter(1, ids.long(), top)
        assert by_token[torch.arange(1, 5), torch.tensor(IDS[1:])].tolist() == pytest.approx(logprobs, abs=1e-5)
        drawn = torch.frombuffer(bytearray(found.prompt_alt_tokens.tokens.dense), dtype=torch.int64).view(4, 2)
        values = torch.tensor(floats(found.prompt_alt_tokens.logprobs.dense)).view(4, 2)
        torch.testing.assert_close(by_token[1:].gather(1, drawn), values, atol=1e-5, rtol=0)
        sequence = found.sequences[0]
        sampled = torch.tensor(floats(sequence.topk_sampled_logprobs.logprobs)).view(-1, 3)
        assert len(sampled) == len(integers(sequence.tokens))
        assert bool((sampled[:, 0] >= torch.tensor(floats(sequence.logprobs)) - 1e-5).all())
        last = await client.sample(sampler, 1, prompt_logprobs=True, prompt_logprobs_last_n=2)
        tail = floats(last.prompt_logprobs)
        assert all(value != value for value in tail[:3]) and tail[3:] == pytest.approx(logprobs[2:], abs=1e-5)

    served(use, tmp_path)
