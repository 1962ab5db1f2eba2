"""The bytes between client and server of a vLLM replica."""

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.engine.vllm.protocol import (
    FrameKind,
    ReplicaSocket,
    ReplicaSocketClosed,
    SampleRequest,
    SampleResult,
    merge_spans,
)
from treadle.types import StopReason

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=50).map(tuple)


@given(ids=IDS, stops=IDS, stream=st.integers(0, 2**64 - 1), temperature=st.floats(0, 10), top_k=st.integers(-1, 100))
def test_an_order_arrives_as_it_left(ids, stops, stream, temperature, top_k) -> None:
    order = SampleRequest(ids, 7, temperature, 0.9, top_k, stops, stream, 12)
    assert SampleRequest.unpack(order.pack()) == order


@given(
    parts=st.lists(st.tuples(st.integers(0, 5), st.floats(-100, 0)), max_size=40),
    stop=st.sampled_from([StopReason.STOP, StopReason.LENGTH, StopReason.ABORT]),
)
def test_an_answer_arrives_with_its_logprobs_to_the_last_bit(parts, stop) -> None:
    ids, logprobs = tuple(at for at, _ in parts), tuple(value for _, value in parts)
    answer = SampleResult(ids, logprobs, ((3, len(ids)),) if ids else (), stop, queue_s=0.1 * len(ids))
    again = SampleResult.unpack(answer.pack())
    assert again == answer and again.versions() == (3,) * len(ids)


def test_spans_of_one_version_become_one() -> None:
    assert merge_spans([(0, 0), (0, 3), (0, 2), (1, 0), (2, 4), (2, 0)]) == ((0, 5), (2, 4))
    assert SampleResult((1, 2, 3), (0.0,) * 3, ((0, 1), (4, 2)), StopReason.STOP).versions() == (0, 4, 4)


def test_frames_keep_their_order_and_the_end_is_noticed() -> None:
    async def main() -> None:
        ours, theirs = [ReplicaSocket(*await asyncio.open_connection(sock=end)) for end in socket.socketpair()]
        ours.send(FrameKind.REQUEST, 1, b"abc")
        ours.send_object(FrameKind.RESULT, 2, {"x": 1})
        assert await theirs.receive() == (FrameKind.REQUEST, 1, b"abc")
        assert (await theirs.receive())[:2] == (FrameKind.RESULT, 2)
        ours.close()
        with pytest.raises(ReplicaSocketClosed):
            await theirs.receive()
        with pytest.raises(ReplicaSocketClosed):
            ours.send(FrameKind.REQUEST, 3)
        theirs.close()

    asyncio.run(main())
