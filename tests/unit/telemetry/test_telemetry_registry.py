"""The table of metrics: what a name means, how values become one, and that records, docs and sinks follow it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.telemetry.metrics import METRICS
from flowtrain.telemetry.registry import Kind, Reduce, Registry, Tally
from flowtrain.telemetry.sinks.prometheus import UNIT_WORDS, prometheus_name

LOADS = st.dictionaries(st.integers(0, 9), st.floats(0.01, 100), min_size=1)


def tally(values: list[tuple[float, float]]) -> Tally:
    made = Tally()
    for value, weight in values:
        made.add(value, weight)
    return made


def test_how_values_become_one() -> None:
    values = tally([(2.0, 1.0), (8.0, 1.0), (5.0, 2.0)])
    found = {how: values.value(how) for how in Reduce}
    assert found == {
        Reduce.SUM: 20.0,
        Reduce.MEAN: 5.0,
        Reduce.TIME_MEAN: 5.0,
        Reduce.MAX: 8.0,
        Reduce.IMBALANCE: 1.6,
        Reduce.LAST: 5.0,
    }


def test_of_nothing_nothing_is_known() -> None:
    assert [Tally().value(how) for how in Reduce] == [None] * len(Reduce)
    assert tally([(0.0, 1.0)]).value(Reduce.IMBALANCE) is None
    assert tally([(-2.0, 1.0)]).value(Reduce.MAX) == -2.0


@given(LOADS)
def test_imbalance_is_between_one_and_the_number_of_ranks(loads: dict[int, float]) -> None:
    found = tally([(load, 1.0) for load in loads.values()]).value(Reduce.IMBALANCE)
    assert found is not None
    assert 1 - 1e-9 <= found <= len(loads) + 1e-9


def test_a_record_is_complete_and_in_the_order_of_the_table() -> None:
    registry = Registry()
    some = registry.add("time(s)", Kind.GAUGE, "s", "", ranks=Reduce.MEAN)
    split = registry.add("lr/MODULE", Kind.GAUGE, "", "")
    rare = registry.add("loss", Kind.GAUGE, "", "", optional=True)
    assert registry.record({split: {"encoder": 1.0}, some: {0: 1.0, 1: 3.0}}) == {"time(s)": 2.0, "lr/encoder": 1.0}
    assert list(registry.record({rare: None, split: {}, some: {}})) == ["time(s)", "loss"]
    with pytest.raises(AssertionError, match=r"without time\(s\)"):
        registry.record({split: {}})
    with pytest.raises(AssertionError, match="declared twice"):
        registry.add("loss", Kind.GAUGE, "", "")


def test_names_lead_to_their_metric() -> None:
    registry = Registry()
    whole = registry.add("pool/bytes_in", Kind.COUNTER, "B", "")
    split = registry.add("pool/bytes_in/TRANSPORT", Kind.COUNTER, "B", "")
    assert registry.find("pool/bytes_in") == (whole, None)
    assert registry.find("pool/bytes_in/shm") == (split, "shm")
    for unknown in ("pool/bytes_in/", "pool/bytes_out", "pool"):
        with pytest.raises(KeyError, match="declare it"):
            registry.find(unknown)


def test_the_table_can_be_shown_by_every_sink() -> None:
    shown = [metric for metric in METRICS if metric.kind is not Kind.FACT]
    names = [prometheus_name(metric) for metric in shown]
    assert len(set(names)) == len(names) > 40
    assert all(name.isidentifier() for name in names)
    assert {"flowtrain_mfu_percent", "flowtrain_flow_starvation_seconds", "flowtrain_lr_by_module"} <= set(names)
    assert {metric.unit for metric in METRICS} - UNIT_WORDS.keys() == {"", "rows", "tokens"}, "said by the names"
    for metric in METRICS:
        assert metric.meaning, metric.name
        assert metric.kind is not Kind.COUNTER or metric.steps is Reduce.SUM, metric.name
