"""Egress lists: the proxy leads to the hosts of the list, counts what it refuses, and is the box's only way out."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import pytest

from tests.boxes import in_box, why_not
from treadle.config import SandboxConfig, loads
from treadle.config.sandbox import parse_egress, split_authority
from treadle.errors import ConfigError
from treadle.rollout.tools import Toolbox
from treadle.sandbox.egress import MAX_CONNECTIONS, MAX_HEAD_BYTES, MAX_NAMES, OTHERS, EgressProxy, ProxyDeadlines
from treadle.sandbox.providers import check_provider
from treadle.types import Task, ToolCall

GENEROUS_S = 30.0
METADATA = "169.254.169.254"


@asynccontextmanager
async def outside():
    """A host of the network: answers with the request that it got. Gives its port, and the requests."""
    seen = []

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")), 0
        )
        body = await reader.readexactly(length)
        seen.append(head.decode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\nbody:%b" % (5 + length, body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


@asynccontextmanager
async def opened(*entries, **settings):
    proxy = EgressProxy(entries, **settings)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()


async def say(proxy, data):
    """All that the proxy answers to these bytes."""
    async with asyncio.timeout(GENEROUS_S):
        reader, writer = await asyncio.open_unix_connection(proxy.path)
        writer.write(data)
        try:
            return (await reader.read()).decode()
        finally:
            writer.close()


def connect(target):
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()


def test_a_host_of_the_list_is_reached_by_connect_and_by_plain_http():
    async def run():
        async with outside() as (port, seen), opened(f"outside.test:{port}=127.0.0.1") as proxy:
            tunnel = await say(proxy, connect(f"Outside.Test.:{port}") + b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
            assert tunnel.startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK"), tunnel
            posted = f"POST http://outside.test:{port}/b?c=1 HTTP/1.1\r\nHost: other\r\nProxy-Authorization: secret\r\n"
            answer = await say(proxy, f"{posted}X-Kept: yes\r\nContent-Length: 3\r\n\r\nabc".encode())
            assert answer.endswith("body:abc"), answer
            assert seen[0].startswith("GET /a ")
            assert seen[1].split("\r\n")[:-2] == [
                "POST /b?c=1 HTTP/1.1",
                f"Host: outside.test:{port}",
                "X-Kept: yes",
                "Content-Length: 3",
                "Connection: close",
            ]
            assert not proxy.refused

    asyncio.run(run())


@pytest.mark.parametrize(
    "target, counted",
    [
        ("outside.test:{other}", "outside.test:{other}"),
        ("127.0.0.1:{port}", "127.0.0.1:{port}"),
        ("[::ffff:127.0.0.1]:{port}", "[::ffff:7f00:1]:{port}"),
        ("2130706433:{port}", "no host"),
        ("0x7f.1:{port}", "no host"),
        (METADATA + ":80", METADATA + ":80"),
        ("[fd00:ec2::254]:80", "[fd00:ec2::254]:80"),
        ("outside.test.evil.test:{port}", "outside.test.evil.test:{port}"),
        ("evil.test:{port}", "evil.test:{port}"),
        ("user@outside.test:{port}", "no host"),
        ("outside.test:99999", "no host"),
        ("outside.test%00.evil.test:{port}", "no host"),
    ],
)
def test_everything_else_is_refused_by_name_and_counted(target, counted):
    async def run():
        async with outside() as (port, seen), opened(f"outside.test:{port}=127.0.0.1") as proxy:
            names = {"port": port, "other": port + 1 if port < 65535 else 1}
            asked, name = target.format(**names), counted.format(**names)
            for request in (connect(asked), f"GET http://{asked}/ HTTP/1.1\r\n\r\n".encode()):
                answer = await say(proxy, request)
                assert answer.startswith(("HTTP/1.1 403 ", "HTTP/1.1 400 ")), answer
                if name != "no host":
                    assert f"{name} is not in sandbox.egress (outside.test:{port}=127.0.0.1)" in answer
            assert proxy.refused == {name: 2} and not seen

    asyncio.run(run())


@pytest.mark.parametrize(
    "address", ["127.0.0.1", METADATA, "10.0.0.5", "::1", "::ffff:10.0.0.5", "fe80::1%eth0", "64:ff9b::a9fe:a9fe"]
)
def test_a_name_of_the_list_that_leads_inside_is_refused(address):
    asked = []

    async def resolve(host, port):
        asked.append((host, port))
        return ["93.184.216.34", address]  # a public address first: every one is looked at

    async def run():
        async with outside() as (port, seen), opened(f"rebound.test:{port}", resolve=resolve) as proxy:
            answer = await say(proxy, connect(f"rebound.test:{port}"))
            assert answer.startswith("HTTP/1.1 403 ") and f"leads to {address}" in answer, answer
            assert proxy.refused == {f"rebound.test:{port}": 1} and asked == [("rebound.test", port)] and not seen

    asyncio.run(run())


def test_the_address_that_was_looked_at_is_the_one_that_is_used():
    answers = iter([["93.184.216.34"], ["127.0.0.1"]])  # DNS that changes its mind after the first look

    async def resolve(host, port):
        return next(answers)

    async def run():
        async with opened("public.test:443", resolve=resolve) as proxy:
            (allowed,) = parse_egress("public.test:443")
            assert await proxy.find_addresses(allowed) == ["93.184.216.34"]
        async with opened("public.test:443=192.0.2.9", resolve=resolve) as proxy:
            (allowed,) = parse_egress("public.test:443=192.0.2.9")
            assert await proxy.find_addresses(allowed) == ["192.0.2.9"]

    asyncio.run(run())


def test_hostile_heads_are_answered_and_end():
    async def run():
        async with opened("outside.test:80=127.0.0.1", deadlines=ProxyDeadlines(head_s=0.3)) as proxy:
            huge = await say(proxy, b"GET http://outside.test/ HTTP/1.1\r\nA: " + b"a" * (2 * MAX_HEAD_BYTES))
            assert huge.startswith("HTTP/1.1 431 "), huge[:80]
            slow = await say(proxy, b"CONNECT outside.test:80 HT")
            assert slow.startswith("HTTP/1.1 408 "), slow
            for broken in (
                b"\r\n\r\n",
                b"GET / HTTP/1.1\r\n\r\n",
                b"GET http://outside.test/ HTTP/1.1\r\nno header\r\n\r\n",
                b"GET http://outside.test/ HTTP/1.1\r\nA: b\nHost: c\r\n\r\n",
                b"\xff\x00 a HTTP/1.1\r\n\r\n",
                b"CONNECT outside.test HTTP/1.1\r\n\r\n",
            ):
                assert (await say(proxy, broken)).startswith("HTTP/1.1 400 "), broken
            assert proxy.refused == {"no host": 8}

    asyncio.run(run())


def test_refused_names_and_open_connections_are_bounded():
    async def run():
        async with opened("outside.test:80=127.0.0.1") as proxy:
            for number in range(MAX_NAMES + 5):
                await say(proxy, connect(f"h{number}.test:80"))
            assert len(proxy.refused) == MAX_NAMES + 1 and proxy.refused[OTHERS] == 5
            held = [await asyncio.open_unix_connection(proxy.path) for _ in range(MAX_CONNECTIONS)]
            assert (await say(proxy, b"")).startswith("HTTP/1.1 503 ")
            for _, writer in held:
                writer.close()

    asyncio.run(run())


def test_a_host_that_is_down_is_a_gateway_error_and_no_refusal():
    async def run():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
            port = taken.getsockname()[1]
            async with opened(f"down.test:{port}=127.0.0.1") as proxy:
                assert (await say(proxy, connect(f"down.test:{port}"))).startswith("HTTP/1.1 502 ")
                assert not proxy.refused

    asyncio.run(run())


@pytest.mark.parametrize(
    "entry, words",
    [
        ("", "no entry"),
        ("http://a.test", "no entry"),
        ("a.test:0", "0 is no port"),
        ("127.1:80", "no entry"),
        ("*.a.test", "no entry"),
        ("localhost:80", "write localhost:80=127.0.0.1"),
        ("a.test=b.test", "no entry"),
        ("192.0.2.1:80=192.0.2.2", "is an address already"),
    ],
)
def test_a_malformed_entry_is_named_with_what_to_write(entry, words):
    with pytest.raises(ConfigError) as caught:
        loads(f"model: {{path: unused}}\nrollout: {{sandbox: {{egress: ['{entry}']}}}}\n", "test.yaml")
    assert "rollout.sandbox.egress" in str(caught.value) and words in str(caught.value)


def test_entries_without_a_port_are_of_both_usual_ones():
    assert [str(one) for one in parse_egress("PyPI.org.")] == ["pypi.org:80", "pypi.org:443"]
    assert split_authority("[2001:DB8:0::1]:8443") == ("2001:db8::1", 8443)


def test_a_provider_without_a_way_out_is_refused_by_name():
    with pytest.raises(ConfigError) as caught:
        check_provider("rollout.sandbox", SandboxConfig(provider="landlock", egress=("a.test:80",)))
    assert "no way to a proxy" in str(caught.value) and "remove rollout.sandbox.egress" in str(caught.value)
    with pytest.raises(ConfigError, match="reaches_out"):
        check_provider("rollout.sandbox", SandboxConfig(provider="tests.unit.test_egress:DeafBox", egress=("a.test",)))


class DeafBox:
    """A provider by import path that says nothing of a way out."""


FETCH = """
import json, socket, sys, urllib.error, urllib.request
found = {}
for url in sys.argv[1:]:
    try:
        found[url] = urllib.request.urlopen(url, timeout=20).read().decode()
    except urllib.error.HTTPError as error:
        found[url] = error.code
    except OSError as error:
        found[url] = str(error)
for address in (("127.0.0.1", int(sys.argv[1].split(":")[2].strip("/"))), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 5)
        found["direct"] = "reached"
    except OSError:
        pass
print(json.dumps(found))
"""


def test_a_box_reaches_the_list_and_nothing_else():
    async def work(box):
        async with outside() as (port, seen):
            box._proxy._allowed |= {(one.host, one.port): one for one in parse_egress(f"outside.test:{port}=127.0.0.1")}
            urls = [f"http://outside.test:{port}/", f"http://evil.test:{port}/", f"http://{METADATA}/latest/meta-data/"]
            done = await box.exec(["python3", "-c", FETCH, *urls], timeout_s=GENEROUS_S)
            assert json.loads(done.stdout) == {urls[0]: "body:", urls[1]: 403, urls[2]: 403}, done.text
            assert box.egress_refused == {f"evil.test:{port}": 1, f"{METADATA}:80": 1} and len(seen) == 1

    in_box("bubblewrap", work, egress=("a.test:80",), memory_mb=512)


def test_the_way_out_is_back_after_a_command_ended_it():
    async def work(box):
        killed = "for p in /proc/[0-9]*; do grep -q bridge $p/cmdline 2> /dev/null && kill -9 ${p#/proc/}; done; true"
        answered = (
            "exec 3<>/dev/tcp/127.0.0.1/3128 && printf 'GET http://b.test/ HTTP/1.1\\r\\n\\r\\n' >&3 && head -1 <&3"
        )
        for _ in range(2):
            await box.exec(["bash", "-c", killed.replace("grep -q bridge", "grep -q '[b]ridge-0'")])
            done = await box.exec(["bash", "-c", answered], timeout_s=GENEROUS_S)
            assert b" 403 b.test:80 is not in sandbox.egress" in done.stdout, done.text
        assert box.egress_refused == {"b.test:80": 2}

    in_box("bubblewrap", work, egress=("a.test:80",))


def test_a_tool_result_has_what_its_call_was_refused():
    if why_not("bubblewrap") is not None:
        pytest.skip("bubblewrap cannot run here")
    text = "model: {path: unused}\nrollout: {multi_turn: {tools: [bash]}, sandbox: {egress: [a.test]}}\n"
    rollout = loads(text, "test.yaml").rollout
    fetch = "import urllib.request as r; r.urlopen('http://b.test:81/')"

    async def run():
        task = Task(uid="a", messages=({"role": "user", "content": "go"},))
        toolbox = await Toolbox.create(rollout.multi_turn, rollout.sandbox)
        async with toolbox, toolbox.open(task) as tools:
            refused = await tools.call(ToolCall("bash", {"command": f'python3 -c "{fetch}"'}))
            assert "403" in refused.text and refused.extra == {"egress_refused": {"b.test:81": 1}}, refused
            assert not (await tools.call(ToolCall("bash", {"command": "true"}))).extra

    asyncio.run(run())
