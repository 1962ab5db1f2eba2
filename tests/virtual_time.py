"""The virtual clock of the simulation, for tests: see `treadle.simulate.clock`."""

from treadle.simulate.clock import HORIZON_S, Deadlock, HorizonPassed, VirtualTimeLoop, run

__all__ = ["HORIZON_S", "Deadlock", "HorizonPassed", "VirtualTimeLoop", "run"]
