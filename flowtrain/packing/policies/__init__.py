"""How a step is taken out of a window of rows: one file a policy, and the dict that names them."""

from flowtrain.packing.policies.arrival import Arrival
from flowtrain.packing.policies.dynamic import Dynamic
from flowtrain.packing.policies.ffd import FirstFitDecreasing
from flowtrain.packing.policies.karmarkar_karp import KarmarkarKarp
from flowtrain.packing.policies.paper import Paper
from flowtrain.packing.policies.protocol import Draw, Due, Policy, Slots
from flowtrain.packing.policies.raw_size import RawSize
from flowtrain.packing.policies.wlb import WlbQueues

POLICIES: dict[str, Policy] = {
    "arrival": Arrival(),
    "ffd": FirstFitDecreasing(),
    "raw_size": RawSize(),
    "paper": Paper(),
    "karmarkar_karp": KarmarkarKarp(),
    "wlb": WlbQueues(),
    "dynamic": Dynamic(),
}
"""Name in `packing.policy` → policy."""

__all__ = ["POLICIES", "Draw", "Due", "Policy", "Slots"]
