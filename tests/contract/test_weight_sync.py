"""What every way for weights to another process promises.

To add a transport, add it to `TRANSPORTS`. The receiver is a process of its own that knows nothing but the pickled map.
"""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.policies import make_policy, save_tiny_model
from treadle.engine.protocol import ConfirmedWeights, WeightUpdate
from treadle.errors import DeadlineError, EngineFailure, RunError
from treadle.model.checksum import checksum
from treadle.policy.policy import SinglePolicy
from treadle.weights import PolicySender, Transport, WeightSync
from treadle.weights.collective import BroadcastRank, CollectiveTransport, own_address
from treadle.weights.disk import DiskTransport
from treadle.weights.shared_memory import SharedMemoryTransport
from treadle.weights.transfer import CastTensors

BUCKET = 2048
"""Small, so that even a tiny model takes several."""

READER = """
import pickle, sys, time
import torch
torch.set_num_threads(1)
from treadle.model.checksum import RunningChecksum
print("up", flush=True)
for line in sys.stdin:
    parcel = pickle.loads(bytes.fromhex(line))
    running = RunningChecksum()
    try:
        for number, (name, tensor) in enumerate(parcel.items()):
            running.add(name, tensor)
            if number == 0:
                print("first", flush=True)
            if "stuck" in sys.argv:
                time.sleep(60)
    except Exception as error:
        print("failed", type(error).__name__, str(error).replace("\\n", " "), flush=True)
    else:
        print("whole", running.word(), flush=True)
"""

Make = Callable[[Path, int, float], Transport]

TRANSPORTS: dict[str, Make] = {
    "local": lambda folder, readers, wait: SharedMemoryTransport(timeout_s=wait, bucket_bytes=BUCKET),
    "collective": lambda folder, readers, wait: CollectiveTransport(
        host="127.0.0.1", receivers=readers, timeout_s=wait, bucket_bytes=BUCKET
    ),
    "disk": lambda folder, readers, wait: DiskTransport(folder, bucket_bytes=BUCKET),
}


class Reader:
    """An engine's receiving half, in a process of its own."""

    def __init__(self, name: str, *words: str) -> None:
        self.name = name
        command = [sys.executable, "-c", READER, *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "up"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def open(self, update: WeightUpdate) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(pickle.dumps(update.tensors).hex() + "\n")
        self.process.stdin.flush()

    def first(self) -> None:
        """Wait until it has the first tensor."""
        assert self._line() == "first"

    def result(self) -> str:
        for line in iter(self._line, ""):
            word, _, rest = line.partition(" ")
            if word == "whole":
                return rest
            if word == "failed":
                raise EngineFailure(rest)
        raise EngineFailure(f"{self.name} died")

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        self.open(update)
        return ConfirmedWeights(await asyncio.to_thread(self.result))

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.process.communicate(timeout=10)


class Both:
    """Two replicas behind one name; the first answer counts, and both must agree."""

    name = "both"

    def __init__(self, *readers: Reader) -> None:
        self.readers = readers

    async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
        words = await asyncio.gather(*(reader.update_weights(update) for reader in self.readers))
        assert len(set(words)) == 1
        return words[0]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> SinglePolicy:
    return make_policy(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def readers() -> Iterator[tuple[Reader, Reader]]:
    pair = Reader("replica-0"), Reader("replica-1")
    yield pair
    for reader in pair:
        reader.close()


@pytest.fixture(params=TRANSPORTS)
def make(request: pytest.FixtureRequest) -> Make:
    return TRANSPORTS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_bit_for_bit_at_every_receiver(
    make: Make, policy: SinglePolicy, readers: tuple[Reader, Reader], tmp_path: Path, dtype: torch.dtype
) -> None:
    transport = make(tmp_path, 2, 20.0)
    sender = PolicySender(policy, dtype=dtype, transport=transport)
    report = asyncio.run(WeightSync(sender, timeout_s=30).push_to(Both(*readers), 3))
    sent = {name: tensor.to(dtype) for name, tensor in policy.tensors().items()}
    assert report.checksum == checksum(sent) and report.version == 3
    assert report.num_bytes == sum(tensor.nbytes for tensor in sent.values())
    assert not list(tmp_path.iterdir()), "nothing is left when everybody has it"


def test_versions_follow_each_other(
    make: Make, policy: SinglePolicy, readers: tuple[Reader, Reader], tmp_path: Path
) -> None:
    sender = PolicySender(policy, transport=make(tmp_path, 1, 20.0))

    async def main() -> list[str]:
        words = []
        for version in (1, 2, 3):
            with torch.no_grad():
                next(iter(policy.tensors().values())).add_(0.5)
            words.append((await WeightSync(sender, timeout_s=30).push_to(readers[0], version)).checksum)
        return words

    assert len(set(asyncio.run(main()))) == 3


def test_a_receiver_killed_on_the_way_fails_alone_and_nothing_is_left(
    make: Make, policy: SinglePolicy, tmp_path: Path
) -> None:
    transport = make(tmp_path, 1, 5.0)
    stuck = Reader("replica-9", "stuck")
    sender = PolicySender(policy, transport=transport)

    async def main() -> float:
        update = await sender.publish(1)
        stuck.open(update)
        await asyncio.to_thread(stuck.first)
        stuck.kill()
        began = time.monotonic()
        await sender.retire(1)
        return time.monotonic() - began

    assert asyncio.run(main()) < 5.0, "its death was noticed, not waited for"
    assert not list(tmp_path.iterdir())
    after = Reader("replica-10")
    assert asyncio.run(WeightSync(sender, timeout_s=30).push_to(after, 2)).checksum == checksum(policy.tensors())
    after.close()


def test_a_receiver_that_hangs_does_not_keep_the_others_from_their_weights(
    make: Make, policy: SinglePolicy, readers: tuple[Reader, Reader], tmp_path: Path
) -> None:
    stuck = Reader("replica-9", "stuck")
    sender = PolicySender(policy, transport=make(tmp_path, 2, 4.0))

    async def main() -> str:
        update = await sender.publish(1)
        stuck.open(update)
        word = (await readers[0].update_weights(update)).checksum
        stuck.kill()
        await sender.retire(1)
        return word

    assert asyncio.run(main()) == checksum(policy.tensors())


def test_more_receivers_than_expected_and_latecomers_are_served(
    make: Make, policy: SinglePolicy, readers: tuple[Reader, Reader], tmp_path: Path
) -> None:
    sender = PolicySender(policy, transport=make(tmp_path, 1, 10.0))

    async def main() -> set[str]:
        update = await sender.publish(1)
        words = await asyncio.gather(*(reader.update_weights(update) for reader in readers))
        words.append(await readers[0].update_weights(update))
        await sender.retire(1)
        return {word.checksum for word in words}

    assert asyncio.run(main()) == {checksum(policy.tensors())}


def test_nobody_waits_for_ever(make: Make, policy: SinglePolicy, tmp_path: Path) -> None:
    stuck = Reader("replica-9", "stuck")
    sender = PolicySender(policy, transport=make(tmp_path, 1, 0.5))
    with pytest.raises(DeadlineError, match=r"replica-9 did not confirm the weights of version 1 within 1 s"):
        asyncio.run(_impatient(sender, stuck))


async def _impatient(sender: PolicySender, stuck: Reader) -> None:
    class Silent:
        name = stuck.name

        async def update_weights(self, update: WeightUpdate) -> ConfirmedWeights:
            stuck.open(update)
            await asyncio.sleep(30)
            return ConfirmedWeights("")

    try:
        await WeightSync(sender, timeout_s=1).push_to(Silent(), 1)
    finally:
        stuck.kill()


def test_a_parcel_that_was_taken_back_cannot_be_opened(make: Make, policy: SinglePolicy, tmp_path: Path) -> None:
    sender = PolicySender(policy, transport=make(tmp_path, 0, 0.5))

    async def main() -> WeightUpdate:
        update = await sender.publish(1)
        await sender.retire(1)
        return update

    update = asyncio.run(main())
    with pytest.raises((EngineFailure, RunError)):
        for _ in update.tensors.values():
            pass


def test_a_broadcast_reaches_other_machines(policy: SinglePolicy, readers: tuple[Reader, Reader]) -> None:
    """By the address of an interface, whatever the name of this machine leads to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no interface but the loopback")
        host = probe.getsockname()[0]
    assert not host.startswith("127.")
    transport = CollectiveTransport(host=host, receivers=1, timeout_s=10, bucket_bytes=BUCKET)
    report = asyncio.run(WeightSync(PolicySender(policy, transport=transport), timeout_s=20).push_to(readers[0], 1))
    assert report.checksum == checksum(policy.tensors())
    assert own_address(BroadcastRank(1, 1, 2), (host, 9)) == host == own_address(BroadcastRank(1, 0, 2), (host, 9))
    assert own_address(BroadcastRank(1, 1, 2), ("127.0.0.1", 9)) == "127.0.0.1"


def test_a_file_that_was_cut_off_is_named(policy: SinglePolicy, tmp_path: Path) -> None:
    transport = DiskTransport(tmp_path, bucket_bytes=BUCKET)
    transfer = transport.publish(1, CastTensors(dict(policy.tensors()), None))
    file = tmp_path / "weights-1" / "bucket-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(EngineFailure, match=rf"weights on disk, {file}"):
        list(transfer.items())


def test_what_a_killed_sender_left_on_disk_goes_with_the_next_one(policy: SinglePolicy, tmp_path: Path) -> None:
    DiskTransport(tmp_path).publish(1, CastTensors(dict(policy.tensors()), None))
    DiskTransport(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_ends_the_push_by_name(policy: SinglePolicy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sender = PolicySender(policy, transport=DiskTransport(tmp_path / "file"))
    with pytest.raises(RunError, match=rf"version 1 could not be written to {tmp_path}/file/weights-1"):
        asyncio.run(sender.publish(1))
