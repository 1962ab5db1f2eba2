"""Weight transport: which way new weights take from the policy to the engines (`trainer.weights.transport`).

Owns the choice behind `auto`, and the rule that refuses transports which cannot work.
Refuses to know how any of them works. Invariant: plan and runtime ask here, so what is printed is what happens.

    own         the engine is in the policy's process: nothing is sent
    shared      memory that two processes of one machine share: host memory, or a GPU's where both sides are on it
    store       Ray's object store: shared memory within a node, one transfer to each other node
    collective  one broadcast to all engines: NCCL between GPUs, gloo between CPUs
    disk        files in a directory that both sides see
"""

from pathlib import PurePath
from typing import Literal

from treadle.config.root import TrainConfig
from treadle.config.validate import Clashes

TransportKind = Literal["own", "shared", "store", "collective", "disk"]

_KEY = "trainer.weights"


def choose_transport(config: TrainConfig) -> TransportKind:
    """The way that weights take in a run of this config."""
    transport, on_ray = config.trainer.weights.transport, config.cluster.backend == "ray"
    if not on_ray and not engines_are_processes(config):
        return "own"
    if transport != "auto":
        return transport
    return "store" if on_ray else "shared"


def engines_are_processes(config: TrainConfig) -> bool:
    """Whether engines of a run without Ray are processes of their own."""
    return config.rollout.nnodes > 0 or config.rollout.name == "vllm"


def weights_directory(config: TrainConfig) -> str:
    """Where weights lie on their way, for `disk`."""
    return config.trainer.weights.directory or str(PurePath(config.logging.directory()) / "weights")


def uses_nccl(config: TrainConfig) -> bool:
    """Whether both ends of a collective are on GPUs. Without Ray, the weights of many ranks leave from the host."""
    trainer, rollout = config.trainer, config.rollout
    gathered_on_gpu = config.cluster.backend == "ray" or trainer.num_ranks() == 1
    return bool(trainer.n_gpus_per_node and rollout.n_gpus_per_node and gathered_on_gpu)


def describe_transport(config: TrainConfig) -> str:
    """That way, in words for a plan."""
    shares_gpu = config.rollout.nnodes == 0 and config.trainer.n_gpus_per_node
    words = {
        "own": "stay in the policy's process",
        "shared": "through memory of the GPU (CUDA IPC)" if shares_gpu else "through shared memory",
        "store": "through Ray's object store",
        "collective": f"one broadcast to all engines ({'NCCL' if uses_nccl(config) else 'gloo'})",
        "disk": f"through files in {weights_directory(config)}",
    }
    return words[choose_transport(config)]


def transport_can_work(config: TrainConfig) -> Clashes:
    """The rule: a way must lead from this policy to these engines, and what describes another way is a mistake."""
    weights, backend, way = config.trainer.weights, config.cluster.backend, choose_transport(config)
    transport = weights.transport
    if transport != "auto" and way == "own":
        problem = f"{transport}, but the engine is in the policy's own process: nothing travels"
        yield f"{_KEY}.transport", problem, "leave it auto, or give the engine a process of its own: rollout.nnodes=1"
    elif transport == "store" and backend != "ray":
        yield f"{_KEY}.transport", f"store is Ray's, but cluster.backend is {backend}", "shared, or cluster.backend=ray"
    elif transport == "shared" and backend == "ray":
        problem = "shared stays within one machine, but cluster.backend is ray"
        yield f"{_KEY}.transport", problem, "store: within a node it is shared memory too"
    elif transport == "collective" and config.trainer.n_gpus_per_node and config.rollout.nnodes == 0:
        problem = "collective, but NCCL joins no two processes on one GPU, and rollout.nnodes is 0"
        yield f"{_KEY}.transport", problem, "leave it auto, or set rollout.nnodes for engines on GPUs of their own"
    else:
        yield from _describes_its_way(config, way)


def _describes_its_way(config: TrainConfig, way: TransportKind) -> Clashes:
    weights = config.trainer.weights
    if weights.directory is not None and way != "disk":
        fix = f"set {_KEY}.transport=disk, or leave it null"
        yield f"{_KEY}.directory", f"is given, but weights take another way: {way}", fix
    if weights.bucket_mb is not None and way in ("own", "store"):
        yield f"{_KEY}.bucket_mb", f"is given, but weights do not travel in buckets: {way}", "leave it null"
