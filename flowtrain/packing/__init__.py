"""Composition: which rows form a step, which form a pack, in which order, and which images share an encoder call.

rows in order ──add──▶ Composer ──next──▶ Step      a function of rows, config and log alone (contracts C1, C10)
"""

from flowtrain.packing.compose import Composer, compose_eval
from flowtrain.packing.cost import CostModel
from flowtrain.packing.policies import POLICIES
from flowtrain.packing.spec import CompositionSpec, sync_of

__all__ = ["POLICIES", "Composer", "CompositionSpec", "CostModel", "compose_eval", "sync_of"]
