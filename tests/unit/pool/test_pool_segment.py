"""Segments between processes: what is left when the owner is killed, and what cannot be attached."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgpack
import psutil
import pytest

from flowtrain.errors import LostProcessError, PlanError
from flowtrain.pool.pages import HugePages, huge_page_bytes, huge_pages_free, reserve_pages
from flowtrain.pool.private import make_segment
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
        assert os.stat(f"/proc/{handle.pid}/fd/{handle.fd}").st_blocks * 512 == BYTES, "all pages, from the start"
        process.kill()
        process.join(SECONDS)
        assert process.exitcode == -signal.SIGKILL
        assert bytes(segment.memory[8192:8197]) == b"hello"
        segment.memory[0:4] = b"more"
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


def huge_pages_reserved() -> int:
    return int(Path("/proc/sys/vm/nr_hugepages").read_text())


@pytest.mark.parametrize("huge_pages", ["auto", "off"])
@pytest.mark.parametrize("shared", [True, False])
def test_all_pages_are_reserved_and_mapped_at_the_start(huge_pages: HugePages, shared: bool) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    segment = make_segment(0, 16 * BYTES, huge_pages, shared=shared)
    grown = process.memory_info().rss - before
    assert grown > 0.95 * 16 * BYTES, f"{grown} bytes became resident"
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for offset in range(0, segment.bytes, 4096):
        segment.memory[offset] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults < 100, "writing meets no new page"
    segment.close()


def test_explicit_huge_pages_come_or_are_refused_with_both_numbers() -> None:
    page, free = huge_page_bytes(), huge_pages_free()
    if not page:
        pytest.skip("this kernel has no explicit huge pages")
    need = free + 1
    told = f"asks for {need} huge pages.*has {free} of {page} bytes free: raise vm.nr_hugepages by 1"
    with pytest.raises(PlanError, match=told):
        Segment.create(0, need * page, "flowtrain-test", "explicit")
    if os.geteuid() or huge_pages_reserved() != free:
        pytest.skip("root may reserve huge pages for a moment, and others use them")
    Path("/proc/sys/vm/nr_hugepages").write_text(str(free + 2))
    try:
        if huge_pages_free() < free + 2:
            pytest.skip("the machine has no two huge pages left")
        segment = make_segment(0, page + 4096, "explicit", shared=False)
        assert huge_pages_free() == free, "all pages are taken at the start"
        other = Segment.attach(segment.handle())
        segment.memory[page + 4095] = 7
        assert other.memory[page + 4095] == 7
        assert other.bytes == page + 4096
        other.close()
        segment.close()
    finally:
        Path("/proc/sys/vm/nr_hugepages").write_text(str(free))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 1 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], timeout=20, check=True)


@pytest.mark.parametrize("huge_pages", ["auto", "off"])
def test_memory_that_is_not_there_is_found_at_the_start(small_disk: Path, huge_pages: HugePages) -> None:
    with (small_disk / "file").open("w+b") as file:
        file.truncate(BYTES)
        mapping = mmap.mmap(file.fileno(), BYTES)
        with pytest.raises(PlanError, match=rf"the segment needs {BYTES} bytes .* lower pool\.bytes"):
            reserve_pages(mapping, file.fileno(), BYTES, huge_pages, "the segment")
        mapping.close()


def test_a_limit_of_address_space_is_a_sentence() -> None:
    """`ulimit -v`, in a process of its own."""
    code = (
        "import resource\n"
        "from flowtrain.pool.segment import Segment\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "Segment.create(0, 1 << 31, 'x')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "PlanError: the segment of 2147483648 bytes of pool owner 0 cannot be mapped" in ran.stderr
    assert "(ulimit -v)" in ran.stderr
