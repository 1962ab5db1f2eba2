"""Placement plan (resource pools): GPUs, batch sizes and staleness, computed before anything starts.

Owns: which role runs on which node and GPU, how many engines there are, how batches divide, how stale samples get.
Never starts, measures or changes anything. A stand-alone rollout is planned from `rollout` alone.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from treadle.config.placement import FreeGPUs, Machine, Placement, RewardPlacement, place_rewards, reward_gpu_requests
from treadle.config.root import Config, SFTRunConfig, TrainConfig
from treadle.config.rules import check_rules
from treadle.config.transport import TransportKind, choose_transport
from treadle.errors import ConfigError, Mistake


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one training step divides. Micro batches are packed by tokens, so their number has an upper bound only."""

    tasks: int
    samples: int
    trajectories: int
    mini_batches: int
    epochs: int
    optimizer_steps: int
    ranks: int
    trajectories_per_rank: int
    """In one optimizer step, at most: rows are dealt by tokens, and need not divide."""
    tokens_per_micro_batch: int
    max_micro_batches: int
    """Per rank and optimizer step; reached when every trajectory is as long as it may be."""


@dataclass(frozen=True, slots=True)
class StalenessRange:
    """Policy versions between the weights that sampled a token and the weights it trains."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that follows from a config and the machines it runs on."""

    mode: str
    placements: tuple[Placement, ...]
    shares_devices: bool
    replicas: int
    gpus_per_replica: int
    places: int
    """Sessions that may be open at once."""
    batches: BatchPlan | None
    staleness: StalenessRange | None
    weights: TransportKind | None
    """How new weights reach the engines; None where nothing trains."""
    unused_gpus: int
    validation: Placement | None = None
    """An engine of its own, for validation that goes on beside training; None: it shares the others."""
    rewards: RewardPlacement | None = None
    """GPUs of reward models; None where they use none."""

    def nodes(self, role: str) -> tuple[Placement, ...]:
        return tuple(placement for placement in self.placements if placement.role == role)

    def replica_gpus(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each engine, numbered as on its machine; none for an engine on a CPU."""
        size = self.gpus_per_replica
        if not size:
            return ((),) * self.replicas
        hosts = [placement.gpus for placement in self.placements if "rollout" in placement.role]
        return tuple(gpus[at : at + size] for gpus in hosts for at in range(0, len(gpus), size))[: self.replicas]

    def trainer_gpus(self) -> tuple[int, ...]:
        """The GPUs of the trainer's nodes, node by node."""
        return tuple(gpu for placement in self.placements if "trainer" in placement.role for gpu in placement.gpus)

    def held(self) -> tuple[Placement, ...]:
        """Every node of every role that has something to itself."""
        rewards = self.rewards
        return self.placements if rewards is None or rewards.shared_with else (*self.placements, rewards.placement)


def make_plan(config: Config, machines: Sequence[Machine]) -> Plan:
    """The plan for a config on these machines; refuses, with the numbers that clash, what does not fit."""
    if mistakes := check_rules(config):
        raise ConfigError(mistakes)
    if isinstance(config, SFTRunConfig):
        config = config.without_sampling()
    room = FreeGPUs(machines)
    placements = _place(config, room)
    training = config if isinstance(config, TrainConfig) else None
    replicas = _replicas(config)
    rewards = place_rewards(config, placements, room)
    validation = _place_validation(training, placements, room) if training else None
    return Plan(
        mode=training.trainer.mode if training else "rollout",
        placements=placements,
        shares_devices=training is not None and config.rollout.nnodes == 0,
        replicas=replicas,
        gpus_per_replica=_replica_gpus(config),
        places=config.rollout.num_places(replicas),
        batches=_batches(training) if training else None,
        staleness=_staleness(training) if training else None,
        weights=choose_transport(training) if training else None,
        unused_gpus=room.unused_gpus,
        validation=validation,
        rewards=rewards,
    )


def place_trainer(config: TrainConfig, machine: Machine) -> tuple[int, ...]:
    """The GPUs of one of the trainer's nodes on a machine where nothing samples: for training again from a journal."""
    room = FreeGPUs([machine])
    want = replace(next(_role_requests(config)), nodes=1)
    placement = room.take(want.role, 0, want.gpus)
    if placement is None:
        raise ConfigError([replace(_too_few(config, want, room.machines), missing="GPU", count=want.gpus)])
    return placement.gpus


def validates_beside(config: TrainConfig) -> bool:
    """Whether there is validation between steps that goes on beside them."""
    return config.trainer.mode != "sync" and config.trainer.test_freq > 0 and bool(config.data.val_files)


@dataclass(frozen=True, slots=True)
class _RoleRequest:
    role: str
    nodes: int
    gpus: int
    key: str


def _role_requests(config: Config) -> Iterator[_RoleRequest]:
    rollout = config.rollout
    if isinstance(config, TrainConfig):
        trainer = config.trainer
        samples = rollout.nnodes == 0 and not isinstance(config, SFTRunConfig)
        role = "trainer + rollout" if samples else "trainer"
        yield _RoleRequest(role, trainer.nnodes, trainer.n_gpus_per_node, "trainer.n_gpus_per_node")
        if rollout.nnodes:
            yield _RoleRequest("rollout", rollout.nnodes, rollout.n_gpus_per_node, "rollout.n_gpus_per_node")
    else:
        yield _RoleRequest("rollout", rollout.nnodes or 1, rollout.n_gpus_per_node, "rollout.n_gpus_per_node")


def asked_machines(config: Config) -> list[Machine]:
    """Machines as large as a config needs, whether or not there are such machines."""
    asked = [want.gpus for want in _role_requests(config) for _ in range(want.nodes)]
    rewards = list(reward_gpu_requests(config))
    if rewards:
        asked.append(
            max(sum(request.num_gpus for request in rewards), *(1 + (request.fixed or 0) for request in rewards))
        )
    return [Machine(f"node{at}", gpus) for at, gpus in enumerate(asked)]


def _place(config: Config, room: FreeGPUs) -> tuple[Placement, ...]:
    """Assign a machine to each node, the largest nodes first."""
    placed: dict[str, list[Placement]] = {want.role: [] for want in _role_requests(config)}
    mistakes: list[Mistake] = []
    for want in sorted(_role_requests(config), key=lambda want: -want.gpus):
        for node in range(want.nodes):
            placement = room.take(want.role, node, want.gpus)
            if placement is None:
                lacking = max(1, (want.nodes - node) * want.gpus - room.unused_gpus)
                mistakes.append(replace(_too_few(config, want, room.machines), missing="GPU", count=lacking))
                break
            placed[want.role].append(placement)
    if mistakes:
        raise ConfigError(mistakes)
    return tuple(placement for nodes in placed.values() for placement in nodes)


def _place_validation(config: TrainConfig, placements: Sequence[Placement], room: FreeGPUs) -> Placement | None:
    """Free GPUs for validation; on a CPU, beside the last engines. None: it shares the engines of the rollout."""
    if not validates_beside(config) or any(request.share > 0.5 for request in reward_gpu_requests(config)):
        return None  # it has reward models of its own, on the same GPUs
    if not _engine_gpus(config):
        return replace(placements[-1], role="validation", node=0)
    return room.take("validation", 0, _replica_gpus(config))


def _too_few(config: Config, want: _RoleRequest, machines: Sequence[Machine]) -> Mistake:
    sizes = Counter(machine.num_gpus for machine in machines)
    have = " and ".join(f"{_machines(count)} with {_gpus(size)}" for size, count in sizes.items()) or "no machine"
    wanted = f"{want.nodes} × {_gpus(want.gpus)} = {want.nodes * want.gpus}" if want.nodes > 1 else _gpus(want.gpus)
    others = [
        f", besides {item.nodes * item.gpus} for {item.role}"
        for item in _role_requests(config)
        if item.role != want.role
    ]
    there = "there is" if len(machines) < 2 else "there are"
    problem = f"{wanted} wanted for {want.role}{''.join(others)}; {there} {have}"
    fix = "ask for fewer, or set it to 0 to run on the CPU" if any(sizes) else "no GPU is visible: 0 runs on the CPU"
    return Mistake(want.key, problem, want.gpus, config.origin(want.key), fix)


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _engine_gpus(config: Config) -> int:
    """GPUs the engines are spread over."""
    rollout = config.rollout
    if not rollout.uses_gpus():
        return 0
    if isinstance(config, TrainConfig) and rollout.nnodes == 0:
        return config.trainer.nnodes * config.trainer.n_gpus_per_node
    return max(1, rollout.nnodes) * rollout.n_gpus_per_node


def _replica_gpus(config: Config) -> int:
    return config.rollout.tensor_model_parallel_size if _engine_gpus(config) else 0


def _replicas(config: Config) -> int:
    rollout = config.rollout
    if isinstance(config, TrainConfig) and choose_transport(config) == "own":
        return 1  # the engine is in the policy's process
    if gpus := _engine_gpus(config):
        return gpus // rollout.tensor_model_parallel_size
    shares = isinstance(config, TrainConfig) and rollout.nnodes == 0
    nodes = config.trainer.nnodes if shares and isinstance(config, TrainConfig) else max(1, rollout.nnodes)
    return nodes * rollout.replicas_per_node


def _batches(config: TrainConfig) -> BatchPlan:
    actor, trainer, rollout, tasks = config.actor, config.trainer, config.rollout, config.data.train_batch_size
    ranks = trainer.num_ranks()
    mini_batches = tasks // actor.ppo_mini_batch_size
    samples, longest = rollout.n, rollout.trajectory_length()
    if isinstance(config, SFTRunConfig):
        samples, longest = 1, config.longest_row()
    per_rank = ceil(actor.ppo_mini_batch_size * samples / ranks)
    per_micro_batch = actor.ppo_max_token_len_per_gpu // longest
    return BatchPlan(
        tasks=tasks,
        samples=samples,
        trajectories=tasks * samples,
        mini_batches=mini_batches,
        epochs=actor.ppo_epochs,
        optimizer_steps=mini_batches * actor.ppo_epochs,
        ranks=ranks,
        trajectories_per_rank=per_rank,
        tokens_per_micro_batch=actor.ppo_max_token_len_per_gpu,
        max_micro_batches=ceil(per_rank / per_micro_batch),
    )


def _staleness(config: TrainConfig) -> StalenessRange:
    return StalenessRange(1 if config.trainer.mode == "one_step_off" else 0, staleness_bound(config))


def staleness_bound(config: TrainConfig) -> int:
    """How many policy versions a token may be behind the weights it trains."""
    return {"sync": 0, "one_step_off": 1, "fully_async": config.trainer.max_staleness}[config.trainer.mode]
