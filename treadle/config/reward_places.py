"""GPUs of reward models: their own where some are free, those of the engines or the trainer where none are.

Owns the arithmetic that a plan prints and a runtime follows. All models are on one machine, with the scorer that asks
them. Invariant: what is asked of one GPU, as fractions of its memory, is never more than the whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.config.machines import Placement, Room
from treadle.config.root import Config
from treadle.errors import ConfigError, Mistake

REWARD = "reward"
"""The role of reward models in a plan."""


@dataclass(frozen=True, slots=True)
class RewardPlaces:
    """Where reward models compute, of those that use GPUs."""

    placement: Placement
    shared_with: str | None
    """The role whose GPUs these are; None: their own."""
    gpus: Mapping[str, tuple[int, ...]]
    """Of each model, numbered as on the machine."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What one model wants."""

    name: str
    key: str
    num_gpus: int
    share: float
    """Of the memory of each."""
    fixed: int | None = None
    """The GPU that the config names, if it does."""


def wishes(config: Config) -> Iterator[Wish]:
    """The GPUs that the reward models of a config want."""
    reward = config.reward
    for name, classifier in reward.classifiers.items():
        if classifier.placement != "endpoint" and classifier.device.startswith("cuda"):
            _, _, number = classifier.device.partition(":")
            key, share = f"reward.classifiers.{name}.device", classifier.gpu_memory_utilization
            yield Wish(name, key, 1, share, int(number) if number else None)
    for name, judge in reward.judges.items():
        engine = judge.engine
        if engine.name in ("native", "vllm") and engine.n_gpus:
            yield Wish(name, f"reward.judges.{name}.engine.n_gpus", engine.n_gpus, engine.gpu_memory_utilization)


def place_rewards(config: Config, placements: Sequence[Placement], room: Room) -> RewardPlaces | None:
    """The places of all reward models that use GPUs; refuses what does not fit."""
    wanted = list(wishes(config))
    if not wanted:
        return None
    fixed = [wish for wish in wanted if wish.fixed is not None]
    if fixed and config.cluster.backend == "ray":
        raise ConfigError([_refuse(config, wish, "names a GPU, but Ray chooses it", "write cuda") for wish in fixed])
    largest = max((machine.num_gpus for machine in room.machines), default=0)
    if missing := [wish for wish in fixed if wish.fixed is not None and wish.fixed >= largest]:
        refused = [_refuse(config, wish, "no machine has that GPU", "write cuda, or cpu") for wish in missing]
        raise ConfigError([replace(mistake, missing="GPU") for mistake in refused])
    free = [wish for wish in wanted if wish.fixed is None]
    own = room.take(REWARD, 0, sum(wish.num_gpus for wish in free)) if free else None
    if own is not None:
        gpus = {**_deal(free, own.gpus), **_named(fixed)}
        return RewardPlaces(own, None, gpus)
    return _share(config, free, fixed, placements)


def _share(
    config: Config, free: Sequence[Wish], fixed: Sequence[Wish], placements: Sequence[Placement]
) -> RewardPlaces:
    """GPUs that a role has already: an engine's before those of a trainer alone."""
    most = max((wish.num_gpus for wish in free), default=0)
    hosts = sorted((item for item in placements if len(item.gpus) >= most), key=lambda item: "rollout" not in item.role)
    if free and (not hosts or not hosts[0].gpus):
        largest = max(free, key=lambda wish: wish.num_gpus)
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
    return RewardPlaces(Placement(REWARD, 0, host.machine, used), host.role, gpus)


def _deal(wanted: Sequence[Wish], gpus: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """To each model the next ones, beginning again when there are no more."""
    dealt, at = {}, 0
    for wish in wanted:
        dealt[wish.name] = tuple(gpus[number % len(gpus)] for number in range(at, at + wish.num_gpus))
        at += wish.num_gpus
    return dealt


def _named(fixed: Sequence[Wish]) -> dict[str, tuple[int, ...]]:
    return {wish.name: (wish.fixed,) for wish in fixed if wish.fixed is not None}


def _overfull(
    config: Config, wanted: Sequence[Wish], gpus: Mapping[str, tuple[int, ...]], host: Placement
) -> Iterator[Mistake]:
    """Models that want more of a GPU than the engine and the models before them leave."""
    engines = config.rollout.gpu_memory_utilization if "rollout" in host.role and config.rollout.uses_gpus() else 0.0
    filled = dict.fromkeys(host.gpus, engines)
    for wish in wanted:
        for gpu in gpus[wish.name]:
            filled[gpu] = filled.get(gpu, 0.0) + wish.share
            if filled[gpu] > 1:
                problem = (
                    f"{wish.name!r} shares GPU {gpu} with {host.role}: {filled[gpu]:.2f} of its memory is asked for"
                )
                yield _refuse(config, wish, problem, "lower gpu_memory_utilization, or add a GPU")
                break


def _refuse(config: Config, wish: Wish, problem: str, fix: str) -> Mistake:
    value = wish.num_gpus if wish.fixed is None else f"cuda:{wish.fixed}"
    return Mistake(wish.key, problem, value, config.origin(wish.key), fix)
