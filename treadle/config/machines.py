"""Machines to plan for, and what a plan gives of them.

Owns the count of what is still free. Knows no role: who wants what, and what happens where there is too little, is the
plan's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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


class Room:
    """What is left of the machines."""

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
    return ", ".join(_words(numbers))


def _words(numbers: Sequence[int]) -> Iterator[str]:
    """Runs of numbers, each as its first and last."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield str(numbers[start]) if at == start + 1 else f"{numbers[start]}–{numbers[at - 1]}"
            start = at
