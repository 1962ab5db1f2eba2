"""vLLM's own OpenAI server on the same engine, for agents that speak HTTP.

Owns its socket, the API key check and the wait until it answers. What comes in here is sampled like everything else,
but belongs to no session: no versions are recorded, and an update ends it. Runs in the server process.
"""

import asyncio
import socket
from hmac import compare_digest
from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser

from treadle.errors import EngineFailure

_ANSWER_S = 60.0


class RequireKey:
    """ASGI middleware: only `/health` is answered without the key. vLLM's own check leaves some paths open."""

    key = ""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope.get("path") == "/health" or self._knows_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            body = b'{"error": {"message": "an API key is needed", "code": 401}}'
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _knows_key(self, scope: Any) -> bool:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        return bool(self.key) and compare_digest(given, b"Bearer " + self.key.encode())


async def start_openai_server(llm: Any, served_as: str, host: str, port: int, api_key: str) -> str:
    """Serve OpenAI's API, with an API key; returns the base URL once it answers. Port 0 takes a free one."""
    if not api_key:
        raise EngineFailure("vLLM's OpenAI server needs a key: without one, anything that reaches it could sample")
    if llm.tokenizer is None:
        fix = "set rollout.engine_kwargs.vllm.skip_tokenizer_init=false"
        raise EngineFailure(f"vLLM was started without a tokenizer, which its OpenAI server needs: {fix}")
    build_and_serve, make_parser = _find_app()
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    words = ["--model", llm.model_config.model, "--served-model-name", served_as, "--host", host, "--port", str(port)]
    RequireKey.key = api_key
    words += ["--middleware", f"{RequireKey.__module__}.{RequireKey.__name__}"]
    options = make_parser(FlexibleArgumentParser()).parse_args([*words, "--disable-uvicorn-access-log"])
    serving = asyncio.ensure_future(build_and_serve(llm, f"http://{host}:{port}", listener, options))
    answering = asyncio.ensure_future(_wait_for_answer(host, port))
    await asyncio.wait({serving, answering}, return_when=asyncio.FIRST_COMPLETED)
    if not answering.done():
        answering.cancel()
        raise EngineFailure(f"vLLM's OpenAI server ended at once: {serving.exception()}")
    answering.result()
    return f"http://{host}:{port}/v1"


def _find_app() -> tuple[Any, Any]:
    """vLLM's functions that build and serve its app, and read its options: they moved after 0.24."""
    try:
        from vllm.entrypoints.launchers.api_server.entry import build_and_serve
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.api_server import build_and_serve
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return build_and_serve, make_arg_parser


async def _wait_for_answer(host: str, port: int) -> None:
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            status = await reader.readline()
            writer.close()
    except TimeoutError:
        raise EngineFailure(f"vLLM's OpenAI server did not answer within {_ANSWER_S:g} s") from None
    if b" 200 " not in status:
        raise EngineFailure(f"vLLM's OpenAI server is not well: {status.decode(errors='replace').strip()}")
