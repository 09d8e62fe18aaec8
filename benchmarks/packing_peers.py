"""Other projects' own packing functions on the same rows: verl's partitions, TRL's best-fit-decreasing packs.

    installed package, or a folder with it ──source file──▶ only the functions asked for ──▶ packs ──▶ the same figures

Only these functions are run, out of the packages' own files, so that nothing else of the packages has to work here.
What is absent is left out with a note. Rows are taken in order of arrival: for verl as many as its packs hold (97 % of
the tokens or somewhat less; else it adds packs until none is over the cap, as its training loop does); two steps of
rows for TRL, whose packs go to ranks in turn.
"""

from __future__ import annotations

import ast
import copy
import heapq
import importlib.util
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types

from benchmarks.packing_runs import COST, OVERHEAD, Run
from flowtrain.packing.measure import imbalances
from flowtrain.types import SampleMeta

Packs = list[list[SampleMeta]]
Pack = Callable[[Sequence[SampleMeta], Run], Packs]

FILLS = (0.97, 0.94, 0.91, 0.88, 0.85)
"""Shares of a step's tokens that verl is given, the first that needs no packs beyond those asked for."""


def source_of(package: str, file: str, folder: Path | None) -> Path | None:
    """A source file of a package, which is looked for and not imported."""
    if folder is not None:
        path = folder / package / file
        return path if path.exists() else None
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return next((Path(place) / file for place in places or () if (Path(place) / file).exists()), None)


def functions(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """These functions and classes of a file, run by themselves."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    assert len(wanted) == len(names), f"{path} has no longer all of {names}"
    space: dict[str, Any] = {
        "copy": copy,
        "heapq": heapq,
        "chain": chain,
        "np": np,
        "pyarrow": pa,
        "pa": pa,
        "pc": pc,
        "defaultdict": defaultdict,
        "deque": deque,
        "Literal": Literal,
    }
    exec(compile(ast.Module(wanted, []), str(path), "exec"), space)
    return {name: space[name] for name in names}


def prefix(rows: Sequence[SampleMeta], tokens: float) -> list[SampleMeta]:
    """The first rows that have so many tokens together."""
    found = []
    for row in rows:
        tokens -= row.tokens
        if tokens < 0:
            break
        found.append(row)
    return found


def verl(folder: Path | None) -> Pack | None:
    path = source_of("verl", "utils/seqlen_balancing.py", folder)
    if path is None:
        return None
    partition = functions(path, ["karmarkar_karp", "get_seqlen_balanced_partitions"])["get_seqlen_balanced_partitions"]

    def pack(rows: Sequence[SampleMeta], run: Run) -> Packs:
        for fill in FILLS:
            taken = prefix(rows, fill * run.ranks * run.packs * run.cap)
            if (found := parts_of(taken, run, run.packs)) is not None:
                return found
        taken = prefix(rows, FILLS[0] * run.ranks * run.packs * run.cap)
        num_packs = run.packs + 1
        while (found := parts_of(taken, run, num_packs)) is None:
            num_packs += 1
        return found

    def parts_of(taken: Sequence[SampleMeta], run: Run, num_packs: int) -> Packs | None:
        costs = [COST.sample_cost(row) for row in taken]
        shares = partition(costs, run.ranks, equal_size=False)
        found: Packs = []
        for share in shares:
            parts = partition([costs[number] for number in share], num_packs, equal_size=False)
            # Dearest first on every rank, as verl's balanced order has it: packs that run together are alike.
            packs = [[taken[share[place]] for place in part] for part in parts]
            found += sorted(packs, key=COST.pack_cost, reverse=True)
        if any(sum(row.tokens for row in pack) > run.cap for pack in found):
            return None
        return [found[rank * num_packs + slot] for slot in range(num_packs) for rank in range(run.ranks)]

    return pack


def trl(folder: Path | None) -> Pack | None:
    path = source_of("trl", "data_utils.py", folder)
    if path is None:
        return None
    found = functions(path, ["_SegmentTree", "_pack_bfd", "_check_if_columns_can_be_packed"])["_pack_bfd"]

    def pack(rows: Sequence[SampleMeta], run: Run) -> Packs:
        taken = prefix(rows, 2 * run.ranks * run.packs * run.cap)
        # Every token of a row is the row's number: the packed rows tell themselves what is in them.
        lists = pa.array([np.full(row.tokens, number, np.int32) for number, row in enumerate(taken)])
        packed = found(pa.table({"ids": lists}), run.cap)["ids"].combine_chunks()
        packs = [[taken[number] for number in dict.fromkeys(ids.values.to_numpy())] for ids in packed]
        return packs[: len(packs) // run.ranks * run.ranks]

    return pack


PEERS: dict[str, Callable[[Path | None], Pack | None]] = {"verl": verl, "trl bfd": trl}


def peer_figures(name: str, pack: Pack, run: Run, rows: Sequence[SampleMeta], num_steps: int) -> dict[str, Any]:
    """The columns of the table that a peer has."""
    found, seconds, fill, widths, useful, spent = [], [], [], [], 0, 0
    start = 0
    for _ in range(num_steps):
        begin = time.thread_time()
        packs = pack(rows[start:], run)
        seconds.append(time.thread_time() - begin)
        start += sum(map(len, packs))
        costs = [COST.pack_cost(pack) for pack in packs]
        slots = [costs[place : place + run.ranks] for place in range(0, len(costs), run.ranks)]
        # TRL makes two steps of packs at once: each is a step of its own.
        for first in range(0, len(slots), run.packs if name == "trl bfd" else len(slots)):
            step = slots[first : first + run.packs] if name == "trl bfd" else slots
            found.append(imbalances(step))
            useful += sum(map(sum, step))
            spent += sum((max(slot) + OVERHEAD) * run.ranks for slot in step)
            widths.append(len(step))
        fill.append(sum(row.tokens for pack in packs for row in pack) / (len(packs) * run.cap))
    return {
        "trace": run.trace,
        "cap": run.cap,
        "order": run.order,
        "rows": "-",
        "ranks": run.ranks,
        "packs": run.packs,
        "policy": name,
        "step": fmean(figure[0] for figure in found),
        "lock_step": fmean(figure[1] for figure in found),
        "lock_step_bound": "-",
        "microbatch": fmean(figure[2] for figure in found),
        "microbatch_worst": max(figure[2] for figure in found),
        "microbatch_bound": "-",
        "U": useful / spent,
        "fill": fmean(fill),
        "packs_a_rank": fmean(widths),
        "producers": "-",
        "wait": "-",
        "cpu_ms": 1000 * median(seconds),
    }
