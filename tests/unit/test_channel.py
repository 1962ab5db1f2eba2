"""Questions between processes: what becomes of them when the other end goes."""

import asyncio
import socket

import pytest

from treadle.process.channel import Channel, ChannelClosed
from treadle.process.rpc import RpcPeer


async def answer(question: str) -> str:
    return question.upper()


def test_questions_are_answered_in_both_directions() -> None:
    async def main() -> tuple[str, str]:
        ours, theirs = socket.socketpair()
        ends = [RpcPeer(await Channel.open(end), answer, ValueError) for end in (ours, theirs)]
        serving = [asyncio.ensure_future(peer.serve()) for peer in ends]
        answers = await ends[0].request("a"), await ends[1].request("b")
        ends[0]._channel.close()
        ends[1]._channel.close()
        await asyncio.gather(*serving)
        return answers

    assert asyncio.run(main()) == ("A", "B")


def test_what_is_told_is_heard_and_a_failure_of_it_is_nobodys() -> None:
    heard: list[str] = []

    async def hear(word: str) -> None:
        heard.append(word)
        if word == "bad":
            raise ValueError("nobody waits for this")

    async def main() -> str:
        ours, theirs = socket.socketpair()
        ends = [
            RpcPeer(await Channel.open(end), answering, ValueError)
            for end, answering in ((ours, answer), (theirs, hear))
        ]
        serving = [asyncio.ensure_future(peer.serve()) for peer in ends]
        for word in ("good", "bad"):
            ends[0].notify(word)
        await ends[0].request("more")
        told = await ends[1].request("a")
        for end in ends:
            end._channel.close()
        await asyncio.gather(*serving)
        return told

    assert asyncio.run(main()) == "A"
    assert heard == ["good", "bad", "more"]


@pytest.mark.parametrize("asked", [True, False])
def test_a_question_fails_when_the_other_end_goes_and_so_does_every_later_one(asked: bool) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel = await Channel.open(ours)
        peer = RpcPeer(channel, answer, ValueError)
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            serving = group.create_task(peer.serve())
            if asked:
                group.create_task(_expect_refusal(peer))
            await asyncio.sleep(0.01)
            theirs.close()
            await serving
            await _expect_refusal(peer)
        channel.close()

    asyncio.run(main())


async def _expect_refusal(peer: RpcPeer) -> None:
    with pytest.raises(ChannelClosed):
        await peer.request("is anyone there?")
