"""NIXL where it is missing, and what is made when. Transfers are tested between processes (contract, integration)."""

from __future__ import annotations

import threading

import pytest

from flowtrain.errors import PlanError
from flowtrain.pool.segment import Segment
from flowtrain.pool.transport import make_transports, nixl_agent


def test_without_the_extra_the_refusal_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("no_such_package_cu13",))
    with pytest.raises(PlanError, match=r"none of the packages no_such_package_cu13.*pip install 'flowtrain\[nixl\]'"):
        make_transports(["nixl"])
    assert make_transports(["shm"])


def test_a_library_that_does_not_load_is_told_from_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("xml",))  # a package without what is looked for in it
    assert "cannot be loaded" in (nixl_agent.why_missing() or "")


@pytest.mark.skipif(nixl_agent.why_missing() is not None, reason=str(nixl_agent.why_missing()))
def test_an_agent_is_made_only_when_someone_is_to_be_reached() -> None:
    segment = Segment.create(3, 1 << 16, "test-lazy")
    (transport,) = make_transports(["nixl"], segment).values()
    threads = threading.active_count()
    assert make_transports(["nixl"])["nixl"].endpoint is None, "nothing to serve"
    endpoint = transport.endpoint
    assert endpoint is not None
    assert endpoint == transport.endpoint, "one agent, however often it is asked for"
    assert threading.active_count() == threads
    transport.close()
    transport.close()
    segment.close()


@pytest.mark.skipif(nixl_agent.why_missing() is not None, reason=str(nixl_agent.why_missing()))
def test_an_endpoint_of_something_else_is_refused() -> None:
    segment = Segment.create(3, 1 << 16, "test-foreign")
    (transport,) = make_transports(["nixl"], segment).values()
    with pytest.raises(PlanError, match="install the same version of nixl on all nodes"):
        transport.attach(Segment.create(4, 1 << 16, "test-other").handle({"nixl": b"\0" * 64}))
    transport.close()
    segment.close()
