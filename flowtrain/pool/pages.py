"""Pages of a segment: reserved at start, as large as allowed, near the owner's cores, mapped before they are needed.

| step | what for |
|---|---|
| ask for huge pages on the mapping | fewer page-table entries, so faster copies |
| prefer a NUMA node, where one is wished | pages lie beside the GPU that copies from them; else the owner's thread |
| populate it, from the owner's thread | the first `put` meets no fault |
| `fallocate` the rest | what was not populated is reserved all the same: writing into it is never a bus error |

A machine without the memory says so here (`PlanError`), before training.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Literal

from flowtrain.errors import PlanError
from flowtrain.pool.numa import prefer

HugePages = Literal["auto", "off", "explicit"]
"""`auto`: transparent ones where the machine allows them; `explicit`: out of its reserved huge pages; `off`: none."""

_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_SHORT = (errno.ENOMEM, errno.ENOSPC, errno.EFAULT)


def reserve_pages(
    mapping: mmap.mmap, fd: int, num_bytes: int, huge_pages: HugePages, whose: str, near: int | None = None
) -> None:
    """Reserve and map all pages of a new segment; `fd` -1 for private memory, `near`: a NUMA node to prefer.

    Raises:
        PlanError: the machine has fewer.
    """
    if near is not None and (why := prefer(mapping, near)):
        warnings.warn(
            f"{whose} does not lie on NUMA node {near}, that of its GPU ({why}): copies are slower; let the container "
            f"use mbind (docker --cap-add SYS_NICE)",
            RuntimeWarning,
            stacklevel=3,
        )
    try:
        if huge_pages == "auto":
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        elif fd >= 0 and huge_pages == "off":
            os.posix_fallocate(fd, 0, num_bytes)  # faster than page by page
        populate(mapping)
        if fd >= 0:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in _SHORT:
            raise
        raise PlanError(
            f"{whose} needs {num_bytes} bytes of memory and the machine has no more than {available_bytes()} left "
            f"({error.strerror}): lower pool.bytes, or give the machine or container more"
        ) from error


def populate(mapping: mmap.mmap) -> None:
    """Map all pages of a mapping for reading and writing, making those that are not there yet.

    Other threads go on meanwhile, which they could not during `mapping.madvise`.
    """
    start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapping)))
    if _libc.madvise(start, ctypes.c_size_t(len(mapping)), _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # a kernel before 5.14 maps pages when they are first touched
            raise OSError(number, os.strerror(number))


def huge_page_bytes() -> int:
    """Size of this machine's explicit huge pages; 0 where it has no support for them."""
    return _meminfo("Hugepagesize")


def huge_pages_free() -> int:
    return _meminfo("HugePages_Free")


def available_bytes() -> int:
    return _meminfo("MemAvailable")


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            number, *unit = value.split()
            return int(number) * (1024 if unit == ["kB"] else 1)
    return 0
