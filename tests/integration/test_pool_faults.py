"""What is left of the pool when a process dies or stops at the worst moment, and whether every byte arrives.

| state of the block | killed owner | killed reader |
|---|---|---|
| reserved | attaching anew is a sentence | – |
| written | readers go on, attaching anew is a sentence | nothing to the owner |
| leased | the same | the lease expires, another reads |
| gradient pending | the same | the block is lost and freed, its place is used again |
| gradient written | the same | the owner reads the gradient |

`FLOWTRAIN_STOP_SECONDS` and `FLOWTRAIN_OPERATIONS` make the long versions: 30 and 100000.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import until
from pool_processes import MAX_BYTES, SECONDS, Remote, context, ends, traffic

from flowtrain.errors import LostProcessError
from flowtrain.pool.block import BlockError
from flowtrain.pool.directory import Directory
from flowtrain.pool.lease import Lease
from flowtrain.types import EmbeddingRef, Role

STOP_SECONDS = float(os.environ.get("FLOWTRAIN_STOP_SECONDS", "1"))
NUM_OPERATIONS = int(os.environ.get("FLOWTRAIN_OPERATIONS", "3000"))
SEGMENT_BYTES = 1 << 20
BYTES = 70_000
HOLDER = (Role.CONSUMER, 0)
OTHER = (Role.CONSUMER, 1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No file in /dev/shm, no mapping and no descriptor of a segment in this process."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before
    assert "flowtrain-pool" not in Path("/proc/self/maps").read_text()


def bring_to(state: Lease, owner: Remote, reader: Remote, directory: Directory, position: int) -> EmbeddingRef:
    """A block in this state, in the processes and in the directory alike."""
    make = "reserve" if state is Lease.RESERVED else "put"
    ref: EmbeddingRef = owner.do(make, position, BYTES)
    assert directory.reserve(0, ref.unit, [BYTES])
    if state is Lease.RESERVED:
        return ref
    directory.written([ref])
    if state is Lease.WRITTEN:
        return ref
    directory.lease([ref], HOLDER, gradient=state is not Lease.LEASED)
    if state is Lease.LEASED:
        assert reader.do("hold", ref)
    elif state is Lease.PENDING:
        reader.do("half_gradient", ref)
    else:
        reader.do("gradient", ref)
        directory.gradient_written([ref], HOLDER)
    return ref


OWNER_STATES = [Lease.RESERVED, Lease.WRITTEN, Lease.LEASED, Lease.PENDING, Lease.GRADIENT]


@pytest.mark.parametrize("state", OWNER_STATES, ids=lambda state: state.name.lower())
def test_an_owner_killed_in_each_state(state: Lease) -> None:
    with ends(3) as (owner, reader, late):
        handle = owner.do("own", 0, SEGMENT_BYTES)
        reader.do("attach", handle)
        directory = Directory({0: SEGMENT_BYTES})
        other: EmbeddingRef = bring_to(Lease.WRITTEN, owner, reader, directory, position=1)
        ref = bring_to(state, owner, reader, directory, position=2)
        owner.kill()
        assert reader.do("hold", other), "those attached go on reading what is there"
        if state is Lease.LEASED:
            assert reader.do("still", ref)
        with pytest.raises(
            LostProcessError, match=f"process {handle.pid}, which holds the segment of pool owner 0, is"
        ):
            late.do("attach", handle)
        directory.assert_invariants()


@pytest.mark.parametrize("state", OWNER_STATES[1:], ids=lambda state: state.name.lower())
def test_a_reader_killed_in_each_state(state: Lease) -> None:
    with ends(3) as (owner, reader, second):
        handle = owner.do("own", 0, SEGMENT_BYTES)
        for remote in (reader, second):
            remote.do("attach", handle)
        directory = Directory({0: SEGMENT_BYTES})
        ref = bring_to(state, owner, reader, directory, position=1)
        reader.kill()
        expired = directory.expire(HOLDER)
        assert expired.readable == ((ref.address,) if state is Lease.LEASED else ())
        assert expired.lost == ((ref.address,) if state is Lease.PENDING else ())
        directory.assert_invariants()
        if state in (Lease.WRITTEN, Lease.LEASED):
            directory.lease([ref], OTHER)
            assert second.do("hold", ref), "another reader takes over, nothing is lost"
            second.do("gradient", ref)
            assert owner.do("has_gradient", ref)
        elif state is Lease.GRADIENT:
            assert owner.do("has_gradient", ref), "what was written before the death is there"
        else:
            with pytest.raises(BlockError, match="in state FEATURES: state is 1, expected 2"):
                owner.do("has_gradient", ref)
        directory.release(ref.unit)
        for address in directory.frees(0):
            owner.do("free", address)
        assert directory.used_bytes() == 0
        again = owner.do("put", 3, MAX_BYTES)
        assert second.do("hold", again), "the place is used again"


def test_a_reader_that_stops_loses_nothing_and_holds_up_nobody() -> None:
    """SIGSTOP in the middle of a lease: the owner goes on until the segment is full, then the reader where it was."""
    with ends(3) as (owner, reader, second):
        handle = owner.do("own", 0, SEGMENT_BYTES)
        for remote in (reader, second):
            remote.do("attach", handle)
        directory = Directory({0: SEGMENT_BYTES})
        ref = bring_to(Lease.LEASED, owner, reader, directory, position=1)
        os.kill(reader.process.pid, signal.SIGSTOP)
        reader.send("still", ref)
        stopped = time.monotonic()
        position = 2
        while directory.room(0, [BYTES]):
            other = bring_to(Lease.WRITTEN, owner, reader, directory, position)
            directory.lease([other], OTHER)
            assert second.do("hold", other)
            position += 1
        assert directory.used_bytes() <= directory.capacity()
        assert position > SEGMENT_BYTES // BYTES - 1, "the rest of the segment was used meanwhile"
        until(lambda: time.monotonic() - stopped >= STOP_SECONDS, "the stop to be over")
        assert not reader.connection.poll(0)
        os.kill(reader.process.pid, signal.SIGCONT)
        assert reader.answer(), "every byte of the leased block is as it was"


def test_descriptors_do_not_grow_with_blocks() -> None:
    with ends(2) as (owner, reader):
        reader.do("attach", owner.do("own", 0, SEGMENT_BYTES))
        counts = []
        for _ in range(2):
            for position in range(60):
                ref = owner.do("put", position + 1, BYTES)
                reader.do("gradient", ref)
                assert owner.do("has_gradient", ref)
                owner.do("free", ref.address)
            counts.append((owner.do("descriptors"), reader.do("descriptors")))
        assert counts[0] == counts[1]


FULL = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from pool_processes import End, pattern
owner, reader = End(), End()
reader.attach(owner.own(0, 8 << 20))
def go(first):
    for position in range(first, first + 200):
        ref = owner.put(position, 70000)
        assert reader.hold(ref)
        reader.views.clear()
        reader.gradient(ref)
        assert owner.has_gradient(ref)
        owner.free(ref.address)
go(1)
try:
    with open("/dev/shm/other", "wb") as file:
        while True:
            file.write(bytes(1 << 16))
except OSError as error:
    assert error.errno == 28, error
assert os.statvfs("/dev/shm").f_bavail == 0
go(1000)
owner.close(); reader.close()
print("all bytes right")
"""


def test_dev_shm_filled_by_another_program_in_mid_run() -> None:
    """In a mount namespace of its own, with a /dev/shm of 4 MiB: the pool does not live there and goes on."""
    mount = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", FULL, str(Path(__file__).parent)]
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("only root may make a mount namespace")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "all bytes right\n", ran.stderr


@pytest.mark.timeout(1200)
def test_four_processes_at_random_with_every_byte_checked() -> None:
    inboxes = [context.SimpleQueue() for _ in range(4)]
    handles, result = context.SimpleQueue(), context.SimpleQueue()
    processes = [
        context.Process(target=traffic, args=(me, inboxes, handles, NUM_OPERATIONS, 7, result)) for me in range(4)
    ]
    for process in processes:
        process.start()
    try:
        told = [handles.get() for _ in processes]
        for inbox in inboxes:
            for handle in told:
                inbox.put(handle)
        for process in processes:
            process.join(SECONDS + NUM_OPERATIONS / 100)
            assert process.exitcode == 0
        sums = sorted(result.get() for _ in processes)
        assert all(operations >= NUM_OPERATIONS for _, operations, _ in sums)
        assert all(num_bytes > NUM_OPERATIONS * 1000 for _, _, num_bytes in sums)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(SECONDS)
            process.close()
