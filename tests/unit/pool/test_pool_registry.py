"""The registry: who lives, who is dead, whose process id was used again, and that only the dead are swept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flowtrain.errors import PlanError
from flowtrain.pool.client import PoolClient
from flowtrain.pool.host import host_identity, machine_name
from flowtrain.pool.private import PrivateSegment
from flowtrain.pool.registry import Entry, Life, listed, register, registry_folder, run_name, start_of, sweep

HOLD = (
    "import os, sys\n"
    "from pathlib import Path\n"
    "from flowtrain.pool.host import host_identity, machine_name\n"
    "from flowtrain.pool.registry import Entry, register, start_of\n"
    "pid = os.getpid()\n"
    "entry = Entry('a', '/runs/a', 'producer 0', 0, pid, start_of(pid), machine_name(), host_identity(), 4096, 3, 1)\n"
    "register(entry, Path(sys.argv[1]))\n"
    "print('there', flush=True)\n"
    "sys.stdin.read()\n"
)


def entry(run: str = "mine", **changes: object) -> Entry:
    pid = os.getpid()
    started = start_of(pid)
    assert started is not None
    known = Entry(run, "/runs/mine", "producer 0", 0, pid, started, machine_name(), host_identity(), 4096, 3, 1)
    return replace(known, **changes)  # type: ignore[arg-type]


def test_a_killed_owners_entry_is_swept_and_a_live_ones_never(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        mine = register(entry(), tmp_path)
        assert [(one.entry.run, one.entry.life) for one in listed(tmp_path)] == [
            ("a", Life.ALIVE),
            ("mine", Life.ALIVE),
        ], "two runs side by side"
        assert sweep(tmp_path) == []
        other.send_signal(signal.SIGKILL)
        other.wait(20)
        assert [one.entry.life for one in listed(tmp_path)] == [Life.DEAD, Life.ALIVE]
        assert [one.entry.run for one in sweep(tmp_path)] == ["a"]
        assert [one.entry.run for one in listed(tmp_path)] == ["mine"]
        mine.close()
        mine.close()
    assert list(tmp_path.iterdir()) == []


def test_what_the_dead_have_left_is_swept_at_the_next_start(tmp_path: Path) -> None:
    left = register(entry("old", started=1), tmp_path)
    assert left.path.exists(), "a process id that was used again does not make an old entry alive"
    new = register(entry("new"), tmp_path)
    assert [one.entry.run for one in listed(tmp_path)] == ["new"]
    new.close()


def test_other_containers_and_machines_are_left_alone_and_an_earlier_boot_is_dead(tmp_path: Path) -> None:
    boot = host_identity().partition("/")[0]
    register(entry("container", host=f"{boot}/pid:[1]"), tmp_path)
    register(entry("machine", machine="node-7", host="its-boot/pid:[1]"), tmp_path)
    register(entry("reboot", host="earlier-boot/pid:[1]"), tmp_path)
    assert {one.entry.run: one.entry.life for one in listed(tmp_path)} == {
        "container": Life.ELSEWHERE,
        "machine": Life.ELSEWHERE,
        "reboot": Life.DEAD,
    }
    assert [one.entry.run for one in sweep(tmp_path)] == ["reboot"]
    assert [one.entry.run for one in listed(tmp_path)] == ["container", "machine"]


def test_machines_that_share_a_folder_never_write_into_each_others_files(tmp_path: Path) -> None:
    for machine in ("node-1", "node-2"):
        register(entry(machine=machine, host=f"{machine}/pid:[1]"), tmp_path)
    assert [one.entry.machine for one in listed(tmp_path)] == ["node-1", "node-2"]


def test_used_bytes_are_seen_from_outside(tmp_path: Path) -> None:
    pool = PoolClient(PrivateSegment(0, 4096), {}, registration=register(entry(), tmp_path))
    assert listed(tmp_path)[0].used_bytes == 0
    address = pool.put(0, 0, (), 100, ())
    assert listed(tmp_path)[0].used_bytes == 192
    pool.free([address])
    assert listed(tmp_path)[0].used_bytes == 0
    pool.close()
    assert listed(tmp_path) == []


def test_a_file_that_is_no_entry_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_bytes(b"\0" * 8 + b'{"run": "x"')
    (tmp_path / "short.json").write_bytes(b"abc")
    for number, wrong in enumerate(({"run": 7}, {"pid": "1"}, {"host": None}, {"bytes": 1.5})):
        odd = json.dumps({**asdict(entry()), **wrong}).encode()
        (tmp_path / f"odd-{number}.json").write_bytes(b"\0" * 8 + odd)
    (tmp_path / "other.json").write_text(json.dumps({"run": 1, "more": 2}))
    assert listed(tmp_path) == []
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 7


def test_what_an_owner_left_that_died_while_it_wrote_is_swept(tmp_path: Path) -> None:
    old, new = tmp_path / "mine-0-1-host.writing", tmp_path / "mine-1-2-host.writing"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    assert sweep(tmp_path) == []
    assert [*tmp_path.iterdir()] == [new]


def test_an_entry_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"gone/mine-0-.*json of a pool segment cannot be written \(No such file"):
        register(entry(), tmp_path / "gone")


def test_the_folder_is_the_users_own(tmp_path: Path) -> None:
    folder = registry_folder({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert folder == tmp_path / "flowtrain"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert registry_folder({"XDG_RUNTIME_DIR": str(tmp_path)}).stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PlanError, match="set XDG_RUNTIME_DIR"):
        registry_folder({"XDG_RUNTIME_DIR": str(tmp_path)})
    gone = registry_folder({"XDG_RUNTIME_DIR": str(tmp_path / "gone")})
    assert gone.name == f"flowtrain-{os.getuid()}", "without a runtime folder: the temporary one"


def test_a_process_that_is_gone_has_no_start() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(20)
    assert start_of(done.pid) is None
    assert run_name(Path("/x/a b+c"), 7) == "a_b_c-7"
