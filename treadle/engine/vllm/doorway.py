"""vLLM's own OpenAI server, on the same engine: a door for agents that speak HTTP.

Owns its socket and the wait until it answers. What comes in here is sampled like everything else, but belongs to no
session: no versions are recorded, and an update ends it. Runs in the server process.
"""

import asyncio
import socket
from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser

from treadle.errors import EngineFailure

_ANSWER_S = 60.0


async def open_doorway(llm: Any, served_as: str, host: str, port: int) -> str:
    """Serve OpenAI's API; the base URL once it answers. Port 0 takes a free one."""
    if llm.tokenizer is None:
        fix = "set rollout.engine_kwargs.vllm.skip_tokenizer_init=false"
        raise EngineFailure(f"vLLM was started without a tokenizer, which its OpenAI server needs: {fix}")
    build_and_serve, make_parser = _find_app()
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    words = ["--model", llm.model_config.model, "--served-model-name", served_as, "--host", host, "--port", str(port)]
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
