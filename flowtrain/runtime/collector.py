"""How often the driver's garbage collector looks for cycles.

Rows and steps come and go by the hundred thousand objects, hold no cycle and go with their last reference. By Python's
usual setting the collector would look at every new object several times, and at all of the process again and again:
a third of the time that composition takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MOST_NEW_OBJECTS = 500_000
"""Objects more than were freed since the last look before the next: more than a step of 2,048 packs adds, and some
100 MB at most of what waits to be found."""


@contextmanager
def rare_collection() -> Iterator[None]:
    """The collector looks every `MOST_NEW_OBJECTS`; as before at the end."""
    before = gc.get_threshold()
    gc.set_threshold(MOST_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
