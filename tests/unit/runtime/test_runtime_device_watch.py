"""Who is asked for devices, and what becomes of the answers."""

from __future__ import annotations

from flowtrain.plan import Layout, ModulePlan, Plan, RankPlan
from flowtrain.runtime.device_watch import DeviceWatch
from flowtrain.telemetry import metrics as m
from flowtrain.telemetry.nvml import LOST, DeviceSample, NodeDevices
from flowtrain.types import Role


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(device: str = "cuda:0") -> Plan:
    producers = tuple(RankPlan(Role.PRODUCER, rank, device, 1, node=rank) for rank in (0, 1))
    consumers = (RankPlan(Role.CONSUMER, 0, device, 1),)
    layouts = Layout(dp_replicate=2), Layout()
    return Plan(
        "disaggregated",
        ModulePlan(Role.PRODUCER, layouts[0], producers),
        ModulePlan(Role.CONSUMER, layouts[1], consumers),
        1,
        4,
        1024,
    )


def test_one_rank_a_node_is_asked_every_so_often_and_never_twice_at_once() -> None:
    clock = Clock()
    watch = DeviceWatch(plan(), 5.0, clock)
    asked = watch.due()
    assert asked == {(Role.CONSUMER, 0): ("devices", 5.0), (Role.PRODUCER, 1): ("devices", 5.0)}
    assert watch.due() == {}
    watch.answered(Role.CONSUMER, 0, NodeDevices("ok", {0: DeviceSample()}))
    clock.now = 5.0
    assert list(watch.due()) == [(Role.CONSUMER, 0)], "the other has not answered yet"
    watch.answered(Role.PRODUCER, 1, NodeDevices("no driver", final=True))
    clock.now = 10.0
    watch.answered(Role.CONSUMER, 0, NodeDevices("ok", {0: DeviceSample()}))
    assert list(watch.due()) == [(Role.CONSUMER, 0)], "a node that has none is left alone"
    assert DeviceWatch(plan(), 0.0, clock).due() == {}


def test_figures_have_their_device_and_missing_ones_their_reason() -> None:
    watch = DeviceWatch(plan(), 5.0, Clock())
    assert watch.measured() == {}
    watch.answered(Role.CONSUMER, 0, NodeDevices("ok", {0: DeviceSample(power_watts=70.0), 1: DeviceSample(LOST)}))
    watch.answered(Role.PRODUCER, 1, NodeDevices("no driver", final=True))
    measured = watch.measured()
    assert measured[m.DEVICE_STATE] == {"n0g0": "ok", "n0g1": LOST, "n1": "no driver"}
    assert measured[m.DEVICE_POWER] == {"n0g0": 70.0, "n0g1": None, "n1": None}
    assert m.METRICS.find("device/power/n0g0(W)") == (m.DEVICE_POWER, "n0g0")
    assert m.METRICS.find("device/throttled/n0g0") == (m.DEVICE_THROTTLED, "n0g0")


def test_a_state_is_told_once_and_only_of_nodes_whose_gpus_are_used() -> None:
    watch = DeviceWatch(plan(), 5.0, Clock())
    well, lost = NodeDevices("ok", {0: DeviceSample()}), NodeDevices("ok", {0: DeviceSample(LOST)})
    assert watch.answered(Role.CONSUMER, 0, well) == []
    assert watch.answered(Role.CONSUMER, 0, lost) == [f"devices: n0g0 {LOST}"]
    assert watch.answered(Role.CONSUMER, 0, lost) == []
    assert watch.answered(Role.CONSUMER, 0, well) == ["devices: n0g0 has all figures again"]
    quiet = DeviceWatch(plan("cpu"), 5.0, Clock())
    assert quiet.answered(Role.CONSUMER, 0, NodeDevices("no driver", final=True)) == []
