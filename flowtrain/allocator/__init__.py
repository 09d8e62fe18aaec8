"""Who runs where: what the machine has, the plan made from it, and the pool's room under that plan (no torch, no Ray).

Config, ModelShape, Inventory ──decide──▶ Config ──make_plan──▶ Plan ─┬─ plan_warnings, describe_plan, forecast
                                                                   └─ check_pool
"""

from flowtrain.allocator.decide import decide
from flowtrain.allocator.describe import describe_plan, plan_to_dict, run_plan_to_dict
from flowtrain.allocator.forecast import Forecast, forecast
from flowtrain.allocator.inventory import Inventory, local_inventory
from flowtrain.allocator.make import make_plan, plan_warnings
from flowtrain.allocator.place import NodeRoom
from flowtrain.allocator.room import check_pool, pack_room
from flowtrain.allocator.stats import known_stats

__all__ = [
    "Forecast",
    "Inventory",
    "NodeRoom",
    "check_pool",
    "decide",
    "describe_plan",
    "forecast",
    "known_stats",
    "local_inventory",
    "make_plan",
    "pack_room",
    "plan_to_dict",
    "plan_warnings",
    "run_plan_to_dict",
]
