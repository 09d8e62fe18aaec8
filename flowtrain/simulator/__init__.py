"""A run on devices that need not be here, played event by event (pure: no torch, no Ray, no clock of the machine).

    rows ─▶ Composer ─▶ Flow, Directory, Exchange ──orders──▶ Devices ──answers, in simulated time──▶ Flow …
            the decision code of a run, as it is              seconds from a Timing, disturbed by Disturbances

`Simulation` plays it, `Outcome` is what came of it.
"""

from flowtrain.simulator.disturbances import Disturbances
from flowtrain.simulator.outcome import Outcome
from flowtrain.simulator.shared_cores import Cores
from flowtrain.simulator.simulation import Simulation
from flowtrain.simulator.system import Control, System

__all__ = ["Control", "Cores", "Disturbances", "Outcome", "Simulation", "System"]
