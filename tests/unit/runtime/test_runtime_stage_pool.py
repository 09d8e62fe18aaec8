"""A process's part of the pool: where it can be reached."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from flowtrain.config.loading import load_config
from flowtrain.plan import RankPlan
from flowtrain.pool.address import offset_of
from flowtrain.pool.block import BlockError
from flowtrain.pool.client import PoolClient
from flowtrain.pool.private import make_segment
from flowtrain.pool.transport import make_transports
from flowtrain.pool.transport.nixl_agent import why_missing
from flowtrain.runtime.executor import StageSpec
from flowtrain.runtime.stage_pool import make_pool
from flowtrain.types import EmbeddingRef, Phase, Role, TensorSpec, UnitId


def listening() -> set[tuple[str, int]]:
    """Addresses and ports of this process at which others can connect."""
    return {tuple(at.laddr) for at in psutil.Process().net_connections("inet") if at.status == "LISTEN"}


@pytest.mark.parametrize("checksum", ["true", "false"])
def test_stray_writes_are_found_where_the_config_asks_for_it(
    checksum: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = load_config(digits / "digits.yaml", [f"pool.checksum={checksum}"]).config
    segment = make_segment(0, 1 << 16, "auto", shared=False)
    spec = StageSpec(RankPlan(Role.PRODUCER, 0, "cpu", 1), 1, "", "", str(tmp_path))
    pool = make_pool(config, spec, segment, local=True, endpoint=None)
    reader = PoolClient(None, make_transports(["local"]))
    try:
        handle = pool.handle()
        assert handle is not None
        reader.attach({0: handle})
        specs = (TensorSpec(0, (4,), "float32"),)
        address = pool.put(0, 0, specs, 16, [torch.ones(4)])
        ref = EmbeddingRef(0, UnitId(Phase.TRAIN, 1, 0, 0, 0), address, 16, specs, (), 0)
        reader.get(ref)
        segment.memory[offset_of(address)] ^= 1
        if checksum == "true":
            with pytest.raises(BlockError, match="checksum is"):
                reader.get(ref)
        else:
            reader.get(ref)
    finally:
        reader.close()
        pool.close()


@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
@pytest.mark.parametrize("named", [None, "all"])
def test_without_a_cluster_nixl_listens_on_loopback_only(
    named: str | None, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("UCX_NET_DEVICES", str(named))
    if named is None:
        monkeypatch.delenv("UCX_NET_DEVICES")
    config = load_config(digits / "digits.yaml", ["pool.transport=nixl"]).config
    spec = StageSpec(RankPlan(Role.PRODUCER, 0, "cpu", 1), 1, "", "", str(tmp_path))
    segment = make_segment(0, 1 << 16, "auto", shared=True)
    before = listening()
    pool = make_pool(config, spec, segment, local=False, endpoint=None)
    try:
        handle = pool.handle()
        assert handle is not None
        assert "nixl" in handle.endpoints
        addresses = {address for address, _ in listening() - before}
        assert "127.0.0.1" in addresses
        if named is None:
            assert addresses == {"127.0.0.1"}
        elif len(psutil.net_if_addrs()) > 1:
            assert len(addresses) > 1, "what the user has named counts"
    finally:
        pool.close()
