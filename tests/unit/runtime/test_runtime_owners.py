"""Owner ids of a plan, and the transports that a process is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowtrain.config.schema import Config
from flowtrain.plan import Layout, ModulePlan, Plan, RankPlan
from flowtrain.pool.address import machine_of_owner, make_owner
from flowtrain.pool.transport import nixl_agent
from flowtrain.runtime.owners import owner_ids, producer_owners
from flowtrain.runtime.stage_pool import transport_names, transport_warnings
from flowtrain.types import Role


def plan(producers: list[int], consumers: list[int], copied: int) -> Plan:
    """Nodes of the ranks; consumers copy `copied` bytes."""
    sides = {
        role: ModulePlan(
            role,
            Layout(dp_replicate=len(nodes)),
            tuple(RankPlan(role, rank, "cpu", 1, size, node) for rank, node in enumerate(nodes)),
        )
        for role, nodes, size in ((Role.PRODUCER, producers, 4096), (Role.CONSUMER, consumers, copied))
    }
    return Plan("disaggregated", sides[Role.PRODUCER], sides[Role.CONSUMER], 1, 8, 1 << 20)


def test_on_one_node_an_owner_is_its_rank() -> None:
    assert producer_owners(plan([0, 0, 0], [0], 0)) == (0, 1, 2)


def test_owners_are_counted_on_their_node() -> None:
    owners = owner_ids(plan([0, 1, 1, 0], [1, 0], 4096))
    assert owners == {
        (Role.PRODUCER, 0): make_owner(0, 0),
        (Role.PRODUCER, 1): make_owner(1, 0),
        (Role.PRODUCER, 2): make_owner(1, 1),
        (Role.PRODUCER, 3): make_owner(0, 1),
        (Role.CONSUMER, 0): make_owner(1, 2),
        (Role.CONSUMER, 1): make_owner(0, 2),
    }
    assert len(set(owners.values())) == len(owners)
    assert [machine_of_owner(owner) for owner in producer_owners(plan([0, 1, 1], [0], 0))] == [0, 1, 1]


def config(emoji: Path, transport: str) -> Config:
    given: dict[str, Any] = {"model": {"path": emoji / "model"}, "data": {"train": emoji / "data/train.jsonl"}}
    return Config.model_validate({**given, "pool": {"transport": transport}})


def test_transports_of_a_process(emoji: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = config(emoji, "auto")
    assert transport_names(auto, local=True, spread=False) == ("local",)
    assert transport_names(auto, local=False, spread=False) == ("shm",)
    assert transport_names(config(emoji, "ray"), local=False, spread=False) == ("ray",)
    monkeypatch.setattr(nixl_agent, "PACKAGES", ())
    assert transport_names(auto, local=False, spread=True) == ("shm", "ray")
    (warning,) = transport_warnings(auto, plan([1], [0], 4096))
    assert "pip install 'flowtrain[nixl]'" in warning
    assert transport_warnings(auto, plan([0], [0], 0)) == []
    assert transport_warnings(config(emoji, "ray"), plan([1], [0], 4096)) == []
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("flowtrain",))
    monkeypatch.setattr(nixl_agent, "_bindings", lambda: None)
    assert transport_names(auto, local=False, spread=True) == ("shm", "nixl", "ray")
    assert transport_warnings(auto, plan([1], [0], 4096)) == []
