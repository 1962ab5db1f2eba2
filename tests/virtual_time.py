"""The virtual clock of the simulation, for tests: see `treadle.trainer.simulation.clock`."""

from treadle.trainer.simulation.clock import HORIZON_S, Deadlock, HorizonPassed, VirtualTimeLoop, run

__all__ = ["HORIZON_S", "Deadlock", "HorizonPassed", "VirtualTimeLoop", "run"]
