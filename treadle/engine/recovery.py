"""Replicas that die: how often one is started again, and what is told of it."""

from dataclasses import dataclass

from treadle.terminal import warn


@dataclass(frozen=True, slots=True)
class Patience:
    """The numbers behind giving up."""

    attempts: int = 3
    """Starts that may fail in a row, or replicas that may die young in a row."""
    young_s: float = 60.0
    """A replica that lived longer did not die of its start."""
    first_wait_s: float = 1.0
    """Before the second attempt; doubled each time."""
    place_s: float = 30.0
    """How long a replica may look for another node before the run goes on without it."""


DEFAULT_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Recovery:
    """What became of a replica that died."""

    replica: str
    cause: str
    successor: str | None
    """None: there is none, for `reason`. The same name: it is a new process at the old post."""
    seconds: float
    """From its death to its successor's first request, or to this report."""
    reason: str = ""
    place: str = ""
    """Where the successor is, if it had to move."""

    def __str__(self) -> str:
        if self.successor == self.replica:
            return f"{self.replica} serves again after {self.seconds:.1f} s: {self.cause}"
        died = f"{self.replica} died: {self.cause}"
        if self.successor is None:
            return f"{died}; it could not be brought back: {self.reason}"
        moved = f" on {self.place}" if self.place else ""
        return f"{died}; {self.successor} took its place{moved} after {self.seconds:.1f} s"


def print_recovery(recovery: Recovery) -> None:
    """The default place for reports: standard error."""
    warn(f"note: {recovery}")
