"""NIXL between plain processes: every byte of random operations, over TCP between network namespaces, and deaths.

FLOWTRAIN_POOL_OPERATIONS sets the number of random operations of each reader (default 1000).
"""

from __future__ import annotations

import multiprocessing
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from busy import allowed
from nixl_peers import OWNER, READER, client, pattern

from flowtrain.pool.transport.nixl_agent import why_missing

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))

PEERS = Path(__file__).parent / "nixl_peers.py"
NUM_OPERATIONS = int(os.environ.get("FLOWTRAIN_POOL_OPERATIONS", "1000"))
LIMIT = 120.0 + NUM_OPERATIONS / 20

TCP = {"UCX_TLS": "tcp"}
"""As between machines without RDMA; UCX would use shared memory between processes of one machine."""


def start(
    ends: Sequence[Any], role: str, *arguments: str, environment: dict[str, str], prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """A peer that talks over these ends of pipes."""
    descriptors = [end.fileno() for end in ends]
    return subprocess.Popen(
        [*prefix, sys.executable, str(PEERS), role, ",".join(map(str, descriptors)), *arguments],
        pass_fds=descriptors,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens inside, these are gone at the end."""
    try:
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate(timeout=20)


@contextmanager
def pair(*role: str) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """An owner and its reader, which talk to each other."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        owner = start([mine], "owner", str(OWNER), environment=TCP)
        reader = start([theirs], *role, environment=TCP)
    with ended(owner, reader):
        yield owner, reader


def run_randomly(seed: int, environment: dict[str, str], prefixes: Sequence[Sequence[str]] = ((), ())) -> int:
    """Two owners, two readers, all of whom meet; returns the bytes that were read and written."""
    pipes = {(owner, reader): socket.socketpair() for owner in range(2) for reader in range(2)}
    processes = []
    for owner in range(2):
        ends = [pipes[owner, reader][0] for reader in range(2)]
        processes.append(start(ends, "owner", str(OWNER + owner), environment=environment, prefix=prefixes[0]))
    for reader in range(2):
        ends = [pipes[owner, reader][1] for owner in range(2)]
        arguments = (str(2 * seed + reader), str(NUM_OPERATIONS))
        processes.append(start(ends, "random", *arguments, environment=environment, prefix=prefixes[1]))
    for end in (end for both in pipes.values() for end in both):
        end.close()
    with ended(*processes):
        ends = [process.communicate(timeout=LIMIT) for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(errors for _, errors in ends)
    told = [out for out, _ in ends]
    return sum(int(number) for text in told for number in re.findall(r"operations, (\d+) bytes", text))


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    assert process.stderr is not None
    assert select.select([process.stdout], [], [], LIMIT)[0], "nothing was said in time"
    line = process.stdout.readline()
    assert line, f"it ended: {process.stderr.read()}"
    return line


def finished(process: subprocess.Popen[str]) -> str:
    """What a process printed, once it has ended well."""
    out, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    return out


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[list[str]]]:
    """Two nodes with addresses of their own: the prefixes of commands that run there."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the `ip` command")
    names = [f"flowtrain-{os.getpid()}-{number}" for number in range(2)]

    def ip(*arguments: str, check: bool = True) -> None:
        subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=20)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        ip("link", "add", "ft-pool0", "netns", names[0], "type", "veth", "peer", "name", "ft-pool1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"ft-pool{number}")
            ip("-n", name, "link", "set", f"ft-pool{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        # The loopback of each is left out: UCX offers it to others too, and one that tries it reaches itself.
        yield [
            ["ip", "netns", "exec", name, "env", f"UCX_NET_DEVICES=ft-pool{number}"]
            for number, name in enumerate(names)
        ]
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


@pytest.mark.timeout(LIMIT + 60)
def test_random_operations_on_one_machine() -> None:
    assert run_randomly(1, {}) > NUM_OPERATIONS


@pytest.mark.timeout(LIMIT + 60)
def test_random_operations_between_two_nodes_over_tcp(namespaces: list[list[str]]) -> None:
    num_bytes = run_randomly(2, TCP, namespaces)
    counters = [f"/sys/class/net/ft-pool0/statistics/{way}_bytes" for way in ("tx", "rx")]
    seen = subprocess.run([*namespaces[0], "cat", *counters], capture_output=True, check=True, timeout=20).stdout
    assert sum(map(int, seen.split())) >= num_bytes > 0, "the bytes went another way than the network"


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_killed_owner_is_named_at_once(operation: str) -> None:
    with pair("repeat", operation, "60") as (owner, reader):
        assert line_of(reader) == "moving\n"
        owner.send_signal(signal.SIGKILL)
        seconds, _, sentence = line_of(reader).partition(" ")
        assert float(seconds) < allowed(10)
        assert f"process {owner.pid}, which holds the segment of pool owner 3 on machine 0, is gone" in sentence


@pytest.mark.parametrize("operation", ["read"])
def test_a_stopped_owner_is_named_after_the_timeout(operation: str) -> None:
    with pair("repeat", operation, "2") as (owner, reader):
        assert line_of(reader) == "moving\n"
        owner.send_signal(signal.SIGSTOP)
        seconds, _, sentence = line_of(reader).partition(" ")
        assert 2 <= float(seconds) < allowed(5)
        assert f"no answer to a {operation.upper()} within 2 s" in sentence
        owner.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("operation", ["write"])
def test_an_owner_outlives_its_reader(operation: str) -> None:
    """A reader dies in the middle of its transfers; the owner goes on, and its other blocks are as they were."""
    mine, theirs = multiprocessing.Pipe()
    to_reader, from_reader = multiprocessing.Pipe()
    owner = start([theirs], "owner", str(OWNER), environment=TCP)
    reader = start([from_reader], "repeat", operation, "60", environment=TCP)
    with ended(owner, reader):
        handle = mine.recv()
        to_reader.send(handle)
        mine.send(to_reader.recv())
        to_reader.send(mine.recv())
        assert line_of(reader) == "moving\n"
        mine.send(("put", [(1, 1 << 20)]))
        (other,) = mine.recv()
        reader.send_signal(signal.SIGKILL)
        reader.wait(timeout=20)
        pool = client(READER)
        pool.attach({OWNER: handle})
        assert torch.equal(pool.get(other)[0], pattern(1, 1 << 20, 0))
        pool.put_gradients([other], [[pattern(1, 1 << 20, 1)]])
        pool.flush()
        mine.send(("check", [other]))
        assert mine.recv() == []
        pool.close()
        mine.send(None)
        assert owner.wait(timeout=20) == 0
