"""Any OpenAI-compatible endpoint as an engine, for evaluation and data generation.

Owns nothing but requests on their way. Refuses to train: the weights are someone else's.
Invariant: what comes back is a completion, an abort or an `EngineFailure` that names the address.

A completion has the server's text. It has the server's ids and logprobs where the server gives them (vLLM does with
`extra_body: {return_token_ids: true}`); otherwise ids made from the text and NaN for each logprob. Its versions are 0.
Tool calls that the server parsed are in `calls` and not in the text.
An aborted request has no tokens: they are in the server until the answer is whole.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Self

from treadle.config.rollout import OpenAIConfig, RolloutConfig
from treadle.engine.chat import read_completion, write_body
from treadle.engine.gate import Gate
from treadle.engine.interrupt import Flight, Flights, Interrupted
from treadle.engine.protocol import Encode, WeightUpdate
from treadle.errors import ConfigError, EngineFailure, Mistake, MisuseError
from treadle.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from treadle.engine.endpoint import Endpoint


class OpenAIEngine:
    """An endpoint, one of its models, and the requests in flight there."""

    def __init__(
        self,
        openai: OpenAIConfig,
        rollout: RolloutConfig,
        *,
        endpoint: "Endpoint",
        model: str,
        name: str,
        encode: Encode,
    ) -> None:
        self.name = name
        self.version = 0
        self.model = model
        self._openai = openai
        self._rollout = rollout
        self._endpoint = endpoint
        self._encode = encode
        self._gate = Gate()
        self._flights = Flights()

    @classmethod
    async def create(
        cls,
        openai: OpenAIConfig,
        rollout: RolloutConfig,
        *,
        encode: Encode,
        name: str = "openai",
        api_key: str | None = None,
    ) -> Self:
        """Reach the endpoint and settle the model, or raise. `api_key` is the value, whoever read it from where."""
        from treadle.engine.endpoint import Endpoint

        advice = {status: text.format(api_key_env=openai.api_key_env) for status, text in _ADVICE.items()}
        address, key = _address(openai), _key(openai, api_key)
        endpoint = Endpoint(address, api_key=key, advice=advice, connections=rollout.max_num_seqs)
        try:
            offered = await _models(endpoint, rollout.limits.launch_timeout_s, rollout.failures.request_retries)
            model = openai.model or next(iter(offered), None)
            if model is None:
                raise EngineFailure(f"{endpoint.address}/models names no model: {_ADVICE[404]}")
        except BaseException:
            await endpoint.close()
            raise
        return cls(openai, rollout, endpoint=endpoint, model=model, name=name, encode=encode)

    async def generate(self, request: Request) -> Completion:
        session = request.session
        if self._gate.shut and not await self._gate.admit(session):
            return self._aborted()
        body = write_body(request, self.model, self._openai.extra_body)
        flight = Flight(session, asyncio.get_running_loop().time())
        self._flights[flight] = None
        try:
            with flight:
                reply = await self._ask(body)
        except Interrupted:
            return self._aborted()
        finally:
            self._flights.land(flight)
        return self._read(reply, request)

    async def abort(self, session: str | None = None) -> None:
        self._gate.abort(session)
        self._flights.end("aborted", session)

    async def pause(self) -> None:
        self._gate.pause()
        self._flights.end("aborted")

    async def resume(self) -> None:
        self._gate.resume()

    async def health(self) -> None:
        await _models(self._endpoint, self._rollout.limits.request_timeout_s, retries=0)

    async def update_weights(self, update: WeightUpdate) -> str:
        raise MisuseError(
            f"the weights behind {self._endpoint.address} cannot be changed from here: "
            "rollout.name=openai evaluates and generates data; to train, use native or vllm"
        )

    async def close(self) -> None:
        if self._gate.close(f"engine {self.name} is closed"):
            self._flights.end("aborted")
            await self._flights.drain(self._rollout.limits.close_timeout_s)
            await self._endpoint.close()

    async def _ask(self, body: str) -> Any:
        timeout_s, retries = self._rollout.limits.request_timeout_s, self._rollout.failures.request_retries
        return await self._endpoint.call("POST", "chat/completions", body, timeout_s=timeout_s, retries=retries)

    def _read(self, reply: Any, request: Request) -> Completion:
        try:
            return read_completion(reply, request, replica=self.name, encode=self._encode)
        except EngineFailure as failure:
            raise type(failure)(f"{self._endpoint.address}/chat/completions: {failure}") from failure

    def _aborted(self) -> Completion:
        return Completion((), (), (), StopReason.ABORT, replica=self.name)


_MOVED = "the endpoint has moved: set rollout.openai.base_url to where it is now"
_ADVICE = {
    **dict.fromkeys((301, 302, 307, 308), _MOVED),
    400: "rollout.openai.extra_body replaces fields of the request; null leaves one out",
    401: "set the environment variable {api_key_env} to a key of this endpoint",
    403: "the key in {api_key_env} may not do this: check the key and the model",
    404: "check rollout.openai.base_url, which mostly ends in /v1, and rollout.openai.model",
    422: "rollout.openai.extra_body replaces fields of the request; null leaves one out",
}


def _address(openai: OpenAIConfig) -> str:
    if openai.base_url is None or not openai.base_url.startswith(("http://", "https://")):
        problem = (
            "rollout.name=openai needs the address of an endpoint"
            if openai.base_url is None
            else (f"must start with http:// or https://, got {openai.base_url!r}")
        )
        fix = "for example rollout.openai.base_url=http://localhost:8000/v1"
        raise ConfigError([Mistake("rollout.openai.base_url", problem, openai.base_url, fix=fix)])
    return openai.base_url


def _key(openai: OpenAIConfig, api_key: str | None) -> str | None:
    """The key as a header can carry it. A line break from a file is no part of it."""
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        problem = f"the key in the environment variable {openai.api_key_env} holds characters that no key has"
        raise ConfigError([Mistake("rollout.openai.api_key_env", problem, openai.api_key_env)])
    return key or None


async def _models(endpoint: "Endpoint", timeout_s: float, retries: int) -> list[str]:
    """The models on offer; none where the server keeps no list, since it does answer."""
    reply = await endpoint.call("GET", "models", timeout_s=timeout_s, retries=retries, may_lack=True)
    if reply is None:
        return []
    try:
        return [entry["id"] for entry in reply["data"]]
    except (KeyError, TypeError) as error:
        raise EngineFailure(f"{endpoint.address}/models answered with no list of models") from error
