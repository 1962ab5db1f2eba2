"""A client of chat completions over a raw socket, and the same conversation on verifiers' interception server.

    /path/of/a/venv/with/verifiers/bin/python bench/raw_client.py [--turns 8] [--rounds 40]

Imports nothing of treadle, so that it runs where verifiers is installed. Prints JSON: seconds of CPU of a request to
verifiers' server, the client's own taken off. Its engine is an instant answer without tokens: rendering and sampling,
which ours does, are not in it.
"""

import argparse
import asyncio
import json
import resource
from typing import Any

ANSWER = "Well, that is that."


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class RawClient:
    """A connection that sends what it is given; it parses no more of an answer than it must."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self.reader, self.writer, self.key = reader, writer, key

    @classmethod
    async def connect(cls, port: int, key: str) -> "RawClient":
        return cls(*await asyncio.open_connection("127.0.0.1", port), key)

    async def talk(self, turns: int, first: str = "Task one", then: str = "Go on.", **options: Any) -> list[Any]:
        """A conversation of so many requests, each with all messages so far."""
        history: list[Any] = [{"role": "user", "content": first}]
        for _ in range(turns):
            history += [await self.ask(history, **options), {"role": "user", "content": then}]
        return history

    def close(self) -> None:
        self.writer.close()

    async def ask(self, history: list[Any], **options: Any) -> dict[str, Any]:
        body = json.dumps({"model": "policy", "messages": history, **options}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n"
        head += "content-type: application/json\r\n"
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return json.loads(await self._body())["choices"][0]["message"]  # type: ignore[no-any-return]

    async def _body(self) -> bytes:
        length = 0
        while (line := await self.reader.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return await self.reader.readexactly(length)


async def client_alone(turns: int, rounds: int, **talk: Any) -> float:
    """CPU of a request of the client, against a server that sends a fixed answer."""
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": ANSWER}}]}).encode()
    answer = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    class Fixed(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport: Any = transport

            self.left = 0

        def data_received(self, data: bytes) -> None:
            """A request is answered when all of it has come: large ones come in several pieces."""
            if not self.left:
                head, _, rest = data.partition(b"\r\n\r\n")
                self.left = int(head.rpartition(b"content-length: ")[2]) - len(rest)
            else:
                self.left -= len(data)
            if not self.left:
                self.transport.write(answer)

    server = await asyncio.get_running_loop().create_server(Fixed, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    began = cpu_s()
    for _ in range(rounds):
        client = await RawClient.connect(port, "k" * 32)
        await client.talk(turns, **talk)
        client.close()
    spent = cpu_s() - began
    server.close()
    return spent / rounds / turns


async def over_verifiers(turns: int, rounds: int) -> float:
    """CPU of a request to verifiers' interception server, the client's included."""
    from verifiers.v1.clients import Client, ModelContext
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.interception.server import InterceptionServer
    from verifiers.v1.session import RolloutSession
    from verifiers.v1.state import State
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, Response

    class Instant(Client):
        async def get_response(self, *_: Any, **__: Any) -> Response:
            message = {"role": "assistant", "content": ANSWER}
            raw = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
            raw["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
            said = AssistantMessage(content=ANSWER)
            return Response(id="1", created=0, model="policy", message=said, finish_reason="stop", raw=raw)

    spent = 0.0
    async with InterceptionServer() as server:
        config = TrainClientConfig(base_url="http://127.0.0.1:9/v1")
        server.clients[config.model_dump_json()] = Instant()
        for _ in range(rounds):
            task = TraceTask(type="Task", data=TaskData(prompt="Task one"))
            trace: Any = Trace(task=task, agent=AgentInfo.model_construct(config=None), state=State())
            session = RolloutSession(ctx=ModelContext(model="policy", client=config), trace=trace)
            async with server.acquire(session) as (_, key, _state):
                client = await RawClient.connect(server.port, key)
                began = cpu_s()
                await client.talk(turns)
                client.close()
                spent += cpu_s() - began
            assert len(trace.calls) == turns, trace.calls
    return spent / rounds / turns


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--turns", type=int, default=8)
    options.add_argument("--rounds", type=int, default=40)
    given = options.parse_args()
    client = asyncio.run(client_alone(given.turns, given.rounds))
    whole = asyncio.run(over_verifiers(given.turns, given.rounds))
    print(json.dumps({"client_s": client, "request_s": whole - client}))
