"""Placement on machines: free GPUs counted and given out; GPUs of reward models.

Reward models get GPUs of their own where some are free, and share those of the engines or the trainer where none are.
All of them are on one machine, with the scorer that asks them. Which role wants what is the plan's business.
Invariant: what is asked of one GPU, as fractions of its memory, is never more than the whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.config.root import Config
from treadle.errors import ConfigError, Mistake


@dataclass(frozen=True, slots=True)
class Machine:
    """One computer that is there to be used."""

    name: str
    num_gpus: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """One node of a role: where it is, and which GPUs it has; none means CPU."""

    role: str
    node: int
    machine: str
    gpus: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.role} node {self.node}: {self.place()}"

    def place(self) -> str:
        """The machine and its devices, in words."""
        return f"{self.machine}, {f'GPU {_ranges(self.gpus)}' if self.gpus else 'CPU'}"


class FreeGPUs:
    """Free GPUs of the machines."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = machines
        self._free = [list(range(machine.num_gpus)) for machine in machines]
        self._load = [0] * len(machines)

    def take(self, role: str, node: int, num_gpus: int) -> Placement | None:
        """Place a node of a role; None where no machine has the GPUs. Two share one only where there is no other."""
        room = [at for at, gpus in enumerate(self._free) if len(gpus) >= num_gpus]
        if not room:
            return None
        at = min(room, key=lambda at: (self._load[at], len(self._free[at])))
        self._load[at] += 1
        gpus, self._free[at] = tuple(self._free[at][:num_gpus]), self._free[at][num_gpus:]
        return Placement(role, node, self.machines[at].name, gpus)

    @property
    def unused_gpus(self) -> int:
        return sum(len(gpus) for gpus in self._free)


def _ranges(numbers: Sequence[int]) -> str:
    return ", ".join(_format_ranges(numbers))


def _format_ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Runs of numbers, each as its first and last."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield str(numbers[start]) if at == start + 1 else f"{numbers[start]}–{numbers[at - 1]}"
            start = at


REWARD = "reward"
"""The role of reward models in a plan."""


@dataclass(frozen=True, slots=True)
class RewardPlacement:
    """Where reward models compute, of those that use GPUs."""

    placement: Placement
    shared_with: str | None
    """The role whose GPUs these are; None: their own."""
    gpus: Mapping[str, tuple[int, ...]]
    """Of each model, numbered as on the machine."""


@dataclass(frozen=True, slots=True)
class GPURequest:
    """GPU request of one reward model."""

    name: str
    key: str
    num_gpus: int
    share: float
    """Of the memory of each."""
    fixed: int | None = None
    """The GPU that the config names, if it does."""


def reward_gpu_requests(config: Config) -> Iterator[GPURequest]:
    """The GPU requests of a config's reward models."""
    reward = config.reward
    for name, classifier in reward.classifiers.items():
        if classifier.placement != "endpoint" and classifier.device.startswith("cuda"):
            _, _, number = classifier.device.partition(":")
            key, share = f"reward.classifiers.{name}.device", classifier.gpu_memory_utilization
            yield GPURequest(name, key, 1, share, int(number) if number else None)
    for name, judge in reward.judges.items():
        engine = judge.engine
        if engine.name in ("native", "vllm") and engine.n_gpus:
            yield GPURequest(name, f"reward.judges.{name}.engine.n_gpus", engine.n_gpus, engine.gpu_memory_utilization)


def place_rewards(config: Config, placements: Sequence[Placement], room: FreeGPUs) -> RewardPlacement | None:
    """The places of all reward models that use GPUs; refuses what does not fit."""
    wanted = list(reward_gpu_requests(config))
    if not wanted:
        return None
    fixed = [request for request in wanted if request.fixed is not None]
    if fixed and config.cluster.backend == "ray":
        raise ConfigError(
            [_refuse(config, request, "names a GPU, but Ray chooses it", "write cuda") for request in fixed]
        )
    largest = max((machine.num_gpus for machine in room.machines), default=0)
    if missing := [request for request in fixed if request.fixed is not None and request.fixed >= largest]:
        refused = [_refuse(config, request, "no machine has that GPU", "write cuda, or cpu") for request in missing]
        raise ConfigError([replace(mistake, missing="GPU") for mistake in refused])
    free = [request for request in wanted if request.fixed is None]
    own = room.take(REWARD, 0, sum(request.num_gpus for request in free)) if free else None
    if own is not None:
        gpus = {**_deal(free, own.gpus), **_named(fixed)}
        return RewardPlacement(own, None, gpus)
    return _share_gpus(config, free, fixed, placements)


def _share_gpus(
    config: Config, free: Sequence[GPURequest], fixed: Sequence[GPURequest], placements: Sequence[Placement]
) -> RewardPlacement:
    """GPUs that a role has already: an engine's before those of a trainer alone."""
    most = max((request.num_gpus for request in free), default=0)
    hosts = sorted((item for item in placements if len(item.gpus) >= most), key=lambda item: "rollout" not in item.role)
    if free and (not hosts or not hosts[0].gpus):
        largest = max(free, key=lambda request: request.num_gpus)
        problem = (
            f"{most} GPUs of one machine wanted for the reward model {largest.name!r}: none has them free, or to share"
        )
        refused = _refuse(config, largest, problem, "ask for fewer, or run it on the CPU")
        raise ConfigError([replace(refused, missing="GPU", count=most)])
    host = hosts[0]
    gpus = {**_deal(free, host.gpus), **_named(fixed)}
    if mistakes := list(_overfull(config, [*free, *fixed], gpus, host)):
        raise ConfigError(mistakes)
    used = tuple(sorted({gpu for held in gpus.values() for gpu in held}))
    return RewardPlacement(Placement(REWARD, 0, host.machine, used), host.role, gpus)


def _deal(wanted: Sequence[GPURequest], gpus: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """To each model the next ones, beginning again when there are no more."""
    dealt, at = {}, 0
    for request in wanted:
        dealt[request.name] = tuple(gpus[number % len(gpus)] for number in range(at, at + request.num_gpus))
        at += request.num_gpus
    return dealt


def _named(fixed: Sequence[GPURequest]) -> dict[str, tuple[int, ...]]:
    return {request.name: (request.fixed,) for request in fixed if request.fixed is not None}


def _overfull(
    config: Config, wanted: Sequence[GPURequest], gpus: Mapping[str, tuple[int, ...]], host: Placement
) -> Iterator[Mistake]:
    """Models that want more of a GPU than the engine and the models before them leave."""
    engines = config.rollout.gpu_memory_utilization if "rollout" in host.role and config.rollout.uses_gpus() else 0.0
    filled = dict.fromkeys(host.gpus, engines)
    for request in wanted:
        for gpu in gpus[request.name]:
            filled[gpu] = filled.get(gpu, 0.0) + request.share
            if filled[gpu] > 1:
                problem = (
                    f"{request.name!r} shares GPU {gpu} with {host.role}: {filled[gpu]:.2f} of its memory is asked for"
                )
                yield _refuse(config, request, problem, "lower gpu_memory_utilization, or add a GPU")
                break


def _refuse(config: Config, request: GPURequest, problem: str, fix: str) -> Mistake:
    value = request.num_gpus if request.fixed is None else f"cuda:{request.fixed}"
    return Mistake(request.key, problem, value, config.origin(request.key), fix)
