"""Payloads as plain bytes: the pool without torch."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain.pool.arrays import ByteArrays
from flowtrain.pool.client import PoolClient, Put
from flowtrain.pool.private import PrivateSegment
from flowtrain.pool.transport import make_transports
from flowtrain.types import EmbeddingRef, Phase, TensorSpec, UnitId

UNIT = UnitId(Phase.TRAIN, 1, 0, 0, 0)
SPECS = (TensorSpec(0, (2, 32), "bfloat16"),)


def test_bytes_go_there_and_gradients_come_back() -> None:
    owner = PoolClient(PrivateSegment(2, 4096), {}, checksum=True, arrays=ByteArrays())
    reader = PoolClient(None, make_transports(["local"]), checksum=True, arrays=ByteArrays())
    handle = owner.handle()
    assert handle is not None
    reader.attach({2: handle})
    sent = np.arange(128, dtype=np.uint8)
    (address,) = owner.put_all(0, [Put(7, SPECS, 128, [sent])])
    ref = EmbeddingRef(7, UNIT, address, 128, SPECS, (), 0)
    ((found,),) = reader.get_all([ref])
    assert (found == sent).all()
    reader.put_gradients([ref], [[np.broadcast_to(np.uint8(9), (128,))]])
    reader.flush()
    reader.release([ref])
    ((gradient,),) = owner.gradients([ref])
    assert (gradient == 9).all()
    owner.free([address])
    del found, gradient
    reader.close()
    owner.close()


def test_other_sizes_are_refused() -> None:
    owner = PoolClient(PrivateSegment(2, 4096), {}, arrays=ByteArrays())
    with pytest.raises(AssertionError, match=r"bytes of position 7 are \(64,\), expected \(128,\)"):
        owner.put_all(0, [Put(7, SPECS, 128, [np.zeros(64, np.uint8)])])
    owner.close()
