"""The settings in which other trainers are measured: the best one of each counts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

LEAST_RATIO = 2.0
"""What the best mode should be by the best setting of the other trainers, in samples/s on rows of mixed sizes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`processes` share the cores, each with its threads; rows of a forward are padded to the longest of them.

    `order`: `sequential`, as FlowTrain takes them, or `group_by_length`, rows of like length in a forward.
    """

    trainer: str
    processes: int
    rows_per_forward: int
    order: str

    @property
    def name(self) -> str:
        how = "one process" if self.processes == 1 else f"DDP {self.processes}"
        grouped = ", by length" if self.order == "group_by_length" else ""
        return f"{self.trainer}, {how}, {self.rows_per_forward} rows{grouped}"


TRAINERS = ("trainer", "sft")


def settings(cores: int, step_rows: int, full: bool) -> list[Setting]:
    """One process with all threads, and a process for each core; `full` adds other numbers of rows in a forward."""
    rows = (1, 2, 4, 8, 16) if full else (4,)
    orders = ("sequential", "group_by_length")
    every = product(TRAINERS, sorted({1, cores}), rows, orders)
    return [
        Setting(trainer, processes, number, order)
        for trainer, processes, number, order in every
        if step_rows % (processes * number) == 0
        and not (trainer == "sft" and order == "group_by_length")
        and not (number == 1 and order == "group_by_length")
    ]
