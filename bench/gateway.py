"""What the gateway costs: CPU of a request over HTTP, beside the same turns of a session in process.

    python bench/gateway.py [--sessions 1000] [--turns 8] [--verifiers VENV/bin/python]

Engine and tools are instant. The client is a raw socket whose own CPU is measured apart, so that the figure is the
server's. Prints CPU per request over the in-process session (limit: 1 ms), requests a second, and the memory of an open
session beside its text (limit: 100 kB). With the Python of an environment that has verifiers, also the same
conversation on its interception server: before and after ours, because a shared machine is not the same all the time.
"""

import argparse
import asyncio
import gc
import json
import subprocess
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raw_client import ANSWER, RawClient, client_alone, cpu_s

from tests import rollouts
from tests.gateways import agent
from treadle.config.rollout import GatewayConfig
from treadle.gateway.server import GatewayServer
from treadle.rollout.parsers import parser
from treadle.rollout.protocol import Services
from treadle.rollout.session import Session
from treadle.types import SamplingParams

SCRIPT = rollouts.say(ANSWER)
LONG = rollouts.rollout(prompt_length=100_000, response_length=100_000)
ROUNDS = 40


LARGE = {
    "first": "word " * 3000,
    "then": "result " * 300,
    "tools": [
        {
            "type": "function",
            "function": {
                "name": f"tool{number}",
                "description": "words " * 350,
                "parameters": {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(8)}},
            },
        }
        for number in range(12)
    ],
}
"""A conversation of the size of Claude Code's: 12 tools of 28 kB, 15 kB to begin with, 2 kB after each turn."""


async def in_process(turns: int, first: str = "", then: str = "Go on.", tools: Sequence[Any] = ()) -> float:
    """CPU of one turn of a session without a gateway."""
    renderer = rollouts.renderer()
    services = Services(LONG, rollouts.engine(SCRIPT), renderer, parser("hermes"))
    sampling = SamplingParams(1000, stop_token_ids=renderer.stop_token_ids)
    began = cpu_s()
    for _ in range(ROUNDS):
        task = rollouts.task()
        messages = [{"role": "user", "content": first}] if first else task.messages
        session = Session(task, 0, services, None, tools, sampling, renderer.prompt(messages, tools))  # type: ignore[arg-type]
        for _ in range(turns):
            await session.generate()
            await session.observe(then)
    return (cpu_s() - began) / ROUNDS / turns


async def over_http(turns: int, rounds: int, **talk: Any) -> float:
    """CPU of one request, the client's included."""
    server = await GatewayServer.start(GatewayConfig())
    port = int(server.url.rpartition(":")[2])
    spent = 0.0
    for _ in range(rounds):
        async with agent(SCRIPT, config=LONG) as it:
            opened = server.open(it.conversation)
            client = await RawClient.connect(port, opened.key)
            began = cpu_s()
            await client.talk(turns, **talk)
            client.close()
            spent += cpu_s() - began
            server.close_session(opened)
    await server.close()
    return spent / rounds / turns


async def many(sessions: int, turns: int) -> tuple[float, float]:
    """Requests a second with all sessions at once, and bytes of an open one beside its text.

    All are connected before the first request and stay so after the last one: none waits for the end of another.
    """
    server = await GatewayServer.start(GatewayConfig())
    port = int(server.url.rpartition(":")[2])
    section = LONG

    async def connect(count: int) -> list[RawClient]:
        agents = [await agent(SCRIPT, config=section).__aenter__() for _ in range(count)]
        return [await RawClient.connect(port, server.open(it.conversation).key) for it in agents]

    few = await connect(sessions // 10)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    talks = await asyncio.gather(*(client.talk(turns) for client in few))
    text = sum(len(json.dumps(talk)) for talk in talks)
    del talks
    gc.collect()
    memory = (tracemalloc.get_traced_memory()[0] - before - text) / len(few)
    tracemalloc.stop()
    clients = await connect(sessions)
    began = time.perf_counter()
    await asyncio.gather(*(client.talk(turns) for client in clients))
    wall = time.perf_counter() - began
    held = server.num_connections
    assert held == sessions + len(few), f"{sessions + len(few)} connections were opened, and {held} are left"
    await server.close()
    return sessions * turns / wall, memory


def on_verifiers(python: str, turns: int) -> float:
    """CPU of one request to verifiers' interception server, in a process of its own."""
    script = Path(__file__).with_name("raw_client.py")
    command = [python, str(script), "--turns", str(turns), "--rounds", str(ROUNDS)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(printed.splitlines()[-1])["request_s"])


async def main(sessions: int, turns: int, verifiers: str | None) -> None:
    theirs = [on_verifiers(verifiers, turns)] if verifiers else []
    base = await in_process(turns)
    client = await client_alone(turns, ROUNDS)
    ours = await over_http(turns, ROUNDS) - client
    print(f"a turn in process         {base * 1e3:6.2f} ms CPU")
    print(f"a request over HTTP       {ours * 1e3:6.2f} ms CPU, the client's {client * 1e3:.2f} ms taken off")
    print(f"the gateway's share       {(ours - base) * 1e3:6.2f} ms CPU (limit 1)")
    large_base = await in_process(turns, **LARGE)
    large = await over_http(turns, ROUNDS, **LARGE) - await client_alone(turns, ROUNDS, **LARGE)
    print(f"requests of 45 to 60 kB   {(large - large_base) * 1e3:6.2f} ms CPU; in process {large_base * 1e3:.2f}")
    if verifiers:
        theirs.append(on_verifiers(verifiers, turns))
        both = " and ".join(f"{seconds * 1e3:.2f}" for seconds in theirs)
        print(f"on verifiers' server      {both} ms CPU before and after, without rendering or tokens")
        print(f"ratio to ours             {sum(theirs) / len(theirs) / ours:6.2f}")
    rate, memory = await many(sessions, turns)
    print(f"{sessions} sessions at once     {rate:6.0f} requests/s, client included")
    print(f"an open session           {memory / 1e3:6.1f} kB beside its text (limit 100)")


if __name__ == "__main__":
    parser_ = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser_.add_argument("--sessions", type=int, default=1000)
    parser_.add_argument("--turns", type=int, default=8)
    parser_.add_argument("--verifiers", help="Python of an environment with verifiers")
    asyncio.run(main(**vars(parser_.parse_args())))
