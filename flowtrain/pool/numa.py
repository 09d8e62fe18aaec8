"""Which NUMA nodes this machine has, and pages that lie on a chosen one: the node of the GPU that copies from them.

Memory of another socket is read at a fraction of the speed. Without a wish, pages lie on the node of the thread that
first touches them. Linux; elsewhere and on machines of one node there is nothing to choose.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_MASK_BITS = 1024
_libc = ctypes.CDLL(None, use_errno=True)


def nodes(root: Path = Path("/sys")) -> tuple[int, ...]:
    """Numbers of those that are online; (0,) where the machine does not tell."""
    with suppress(OSError):
        return tuple(numbers((root / "devices/system/node/online").read_text())) or (0,)
    return (0,)


def nodes_of_cores(cores: set[int], root: Path = Path("/sys")) -> tuple[int, ...]:
    """Nodes that have one of these cores."""
    found = []
    for node in nodes(root):
        with suppress(OSError):
            if cores & set(numbers((root / f"devices/system/node/node{node}/cpulist").read_text())):
                found.append(node)
    return tuple(found)


def numbers(text: str) -> Iterator[int]:
    """Of a list as the kernel writes it.

    >>> list(numbers("0-2,5"))
    [0, 1, 2, 5]
    """
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            yield from range(int(first), int(last or first) + 1)


def prefer(mapping: mmap.mmap, node: int) -> str | None:
    """Let pages of a mapping that are not there yet lie on a node as far as it has room; why not, where they may not.

    A shared file keeps the wish for whoever maps it.
    """
    call = _MBIND.get(platform.machine())
    if call is None:
        return f"not known how on {platform.machine()}"
    if not 0 <= node < _MASK_BITS:
        return f"there is no node {node}"
    mask = (1 << node).to_bytes(_MASK_BITS // 8, "little")
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    length = -(-len(mapping) // mmap.PAGESIZE) * mmap.PAGESIZE
    arguments = (ctypes.c_void_p(start), ctypes.c_ulong(length), _PREFERRED, mask, ctypes.c_ulong(_MASK_BITS + 1), 0)
    if _libc.syscall(ctypes.c_long(call), *arguments):
        return os.strerror(ctypes.get_errno())
    return None


def refusal(node: int) -> str | None:
    """Why this process may not choose where its pages lie; None when it may."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        return prefer(page, node)
