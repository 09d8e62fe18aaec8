"""Which GPUs the processes of a run are shown where the user has chosen some; Ray counts what it is told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from busy import allowed

SHOWN = """
import json, os, ray
from flowtrain.config.schema import ClusterConfig
from flowtrain.plan import RankPlan
from flowtrain.runtime.cluster import Cluster
from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.types import Role

ranks = [
    RankPlan(Role.READER, 0, "cpu", 1),
    RankPlan(Role.PRODUCER, 0, "cuda:0", 1),
    RankPlan(Role.CONSUMER, 0, "cuda:0", 1),
]
with Cluster(ClusterConfig()) as cluster:
    cluster.start(ranks)
    executor = RayExecutor(cluster, 60.0)
    executor.start(ranks)
    look = lambda stage: os.environ.get("CUDA_VISIBLE_DEVICES")
    told = {role.value: ray.get(actor.__ray_call__.remote(look)) for (role, _), actor in executor._actors.items()}
    executor.close()
print(json.dumps(told))
"""


def test_each_process_on_a_gpu_is_shown_one_of_those_that_the_user_left() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "3,5"}
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], env=environment, capture_output=True, text=True, timeout=allowed(90), check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert {told["producer"], told["consumer"]} == {"3", "5"}
    assert told["reader"] == "3,5", "neither hidden nor widened, and not used"
