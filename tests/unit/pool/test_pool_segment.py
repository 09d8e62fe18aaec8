"""Segments between processes: what is left when the owner is killed, and what cannot be attached."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgpack
import pytest

from flowtrain.errors import LostProcessError
from flowtrain.pool.segment import Segment, SegmentHandle

SECONDS = 60.0
BYTES = 1 << 22


def own_segment(connection: Connection) -> None:
    """Make a segment, write into its third page, tell its handle, and live until told otherwise."""
    segment = Segment.create(3, BYTES, "flowtrain-test")
    segment.memory[2 * 4096 : 2 * 4096 + 5] = b"hello"
    connection.send(segment.handle())
    connection.recv()


@contextmanager
def owner() -> Iterator[tuple[SegmentHandle, multiprocessing.context.SpawnProcess]]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=own_segment, args=(theirs,))
    process.start()
    theirs.close()
    try:
        assert mine.poll(SECONDS), "the owner did not start"
        yield mine.recv(), process
    finally:
        if process.is_alive():
            process.kill()
        process.join(SECONDS)
        process.close()
        mine.close()


def mappings_named(text: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if text in line]


def test_memory_outlives_a_killed_owner_and_then_goes() -> None:
    shared_before = set(os.listdir("/dev/shm"))
    with owner() as (handle, process):
        assert set(os.listdir("/dev/shm")) <= shared_before
        segment = Segment.attach(handle)
        assert bytes(segment.memory[8192:8197]) == b"hello"
        assert segment.page_bytes() == 4096
        assert os.stat(f"/proc/{handle.pid}/fd/{handle.fd}").st_blocks * 512 == 4096, "seen from outside"
        process.kill()
        process.join(SECONDS)
        assert process.exitcode == -signal.SIGKILL
        assert bytes(segment.memory[8192:8197]) == b"hello"
        segment.memory[0:4] = b"more"
        assert segment.page_bytes() == 8192
        with pytest.raises(
            LostProcessError, match=rf"process {handle.pid}, which holds the segment of pool owner 3, is"
        ):
            Segment.attach(handle)
        assert set(os.listdir("/dev/shm")) <= shared_before
        assert len(mappings_named("flowtrain-test")) == 1
        segment.close()
        assert mappings_named("flowtrain-test") == []


def test_a_descriptor_used_for_something_else_is_not_attached(tmp_path: Path) -> None:
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    segment = Segment.create(0, 4096, "flowtrain-test")
    handle = segment.handle()
    segment.close()
    os.dup2(other, handle.fd)
    try:
        with pytest.raises(LostProcessError, match="another file by now"):
            Segment.attach(handle)
    finally:
        os.close(other)
        os.close(handle.fd)


def test_a_descriptor_of_another_size_is_not_attached() -> None:
    segment = Segment.create(0, 4096, "flowtrain-test")
    with pytest.raises(LostProcessError, match="another file of 4096 bytes"):
        Segment.attach(segment.handle()._replace(bytes=8192))
    segment.close()


def test_attaching_leaks_no_descriptor() -> None:
    segment = Segment.create(0, 4096, "flowtrain-test")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        other = Segment.attach(segment.handle())
        other.close()
        other.close()
        with pytest.raises(LostProcessError):
            Segment.attach(segment.handle()._replace(inode=1))
        with pytest.raises(LostProcessError):
            Segment.attach(segment.handle()._replace(bytes=1))
    assert len(os.listdir("/proc/self/fd")) == before
    segment.close()


def test_the_size_is_sealed() -> None:
    segment = Segment.create(0, 8192, "flowtrain-test")
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.handle().fd, size)
    segment.close()


def test_a_handle_travels_by_pickle_and_msgpack() -> None:
    handle = SegmentHandle(owner=129, pid=2, fd=3, bytes=4, inode=2**40, host="a", endpoints={"nixl": b"\x00agent"})
    assert handle.machine == 2
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert SegmentHandle(*msgpack.unpackb(msgpack.packb(handle))) == handle
