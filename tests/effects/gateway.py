"""What keys of `rollout.gateway` change: where it listens, what agents are given, and which of their turns train."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx

from tests.effects.cases import Case, config_cases, configured
from tests.gateways import agent
from treadle.gateway.server import GatewayServer

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    FREE_PORT: int = probe.getsockname()[1]
LONG = {"model": "policy", "messages": [{"role": "user", "content": " " * 1_500_000}]}
USER = {"role": "user", "content": "Hi."}


def served(directory: Path, **keys: Any) -> Any:
    """Where the gateway listens, the address it gives out, its answer to a long request, and what trains."""
    gateway = configured("model: {path: unused}\n", keys).rollout.gateway

    async def main() -> Any:
        server = await GatewayServer.start(gateway)
        async with agent(train=gateway.train) as it:
            opened = server.open(it.conversation)
            port, url = server._http.port, server.url  # type: ignore[union-attr]
            key = {"x-api-key": opened.key}
            async with httpx.AsyncClient(base_url=f"http://{gateway.host}:{port}", headers=key) as client:
                status = (await client.post("/v1/chat/completions", json=LONG)).status_code
            await it.chat(USER)
            await it.chat(USER)
            rows = await it.rows()
        await server.close()
        return gateway.host, port == FREE_PORT, url.replace(str(port), "PORT"), status, len(rows)

    return asyncio.run(main())


EFFECTS: dict[str, Case] = config_cases(
    "rollout.gateway",
    served,
    ("host", "127.0.0.1", "127.0.0.2"),
    ("port", 0, FREE_PORT),
    ("url", "http://{host}:{port}", "http://host.docker.internal:{port}"),
    ("max_body_mb", 1, 2),
    ("train", "main", "all"),
)
