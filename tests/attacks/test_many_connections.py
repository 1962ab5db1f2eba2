"""Ten thousand connections that each hold half a request change nothing for the sessions of others."""

import asyncio
import resource
import sys

import httpx
import pytest

from tests.gateways import agent
from tests.rollouts import rollout, say
from treadle.config.rollout import GatewayConfig
from treadle.gateway.server import GatewayServer

COUNT = 10_000
FILES = 20_000

CLIENT = """
import resource, socket, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
port, count = map(int, sys.argv[1:])
held = []
for _ in range(count):
    try:
        held.append(socket.create_connection(("127.0.0.1", port), 30))
        held[-1].sendall(b"POST /v1/messages HTTP/1.1\\r\\nhost: x\\r\\ncontent-len")
    except ConnectionError:
        pass
print(len(held), flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < FILES, reason=f"needs a limit of {FILES:,} open files"
)


def test_ten_thousand_half_sent_requests_cost_others_nothing() -> None:
    async def main() -> None:
        gateway = await GatewayServer.start(GatewayConfig())
        port = gateway.url.rpartition(":")[2]
        async with agent(say("Hi."), config=rollout(response_length=10**7, max_model_len=10**7)) as it:
            opened = gateway.open(it.conversation)
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CLIENT, port, str(COUNT), stdin=-1, stdout=-1
            )
            assert client.stdin is not None and client.stdout is not None
            said = asyncio.ensure_future(client.stdout.readline())
            asked = 0
            headers = {"x-api-key": opened.key}
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as old:
                while not said.done():
                    await ask(old, asked)
                    asked += 1
                    await asyncio.sleep(0.25)
                assert int(await said) > COUNT // 2, "they did connect"
                await ask(old, asked)
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as new:
                await ask(new, asked + 1)
            assert asked > 0 and gateway.num_connections <= gateway.max_connections
            client.stdin.close()
            await asyncio.wait_for(client.wait(), 60)
            await it.conversation.close()
        await gateway.close()

    asyncio.run(main())


async def ask(client: httpx.AsyncClient, number: int) -> None:
    """A turn on a connection that is there, or that is opened now."""
    body = {"model": "policy", "messages": [{"role": "user", "content": str(number)}], "max_tokens": 4}
    (await client.post("/v1/chat/completions", json=body)).raise_for_status()
