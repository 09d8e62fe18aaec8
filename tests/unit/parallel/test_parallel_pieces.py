"""Pieces on disk: what one layout has written another reads, number by number."""

from __future__ import annotations

import tempfile
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.errors import ConfigError
from flowtrain.parallel.pieces import Box, Region
from flowtrain.update.storage import Piece, Pieces, write_pieces

SHAPE = (7, 5)


@st.composite
def partings(draw: st.DrawFn) -> list[Region]:
    """Boxes that together are all of a tensor of `SHAPE`, some of them empty."""
    edges = [[0, *sorted(draw(st.lists(st.integers(0, size), max_size=2))), size] for size in SHAPE]
    boxes = product(*(list(pairwise(of_dim)) for of_dim in edges))
    return [Region(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in boxes]


@settings(max_examples=30, deadline=None)
@given(partings(), partings())
def test_any_parting_reads_what_any_other_has_written(written: list[Region], read: list[Region]) -> None:
    whole = torch.arange(35.0).reshape(SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        for rank, region in enumerate(written):
            if region.is_empty:
                continue
            write_pieces(Path(folder), "parameters", rank, {"w": [Piece(whole[region.slices], region, SHAPE)]})
        pieces = Pieces([Path(folder)], "parameters")
        pieces.check("w", SHAPE, torch.float32)
        for region in read:
            target = torch.full(region.shape, -1.0)
            pieces.read_into("w", target, [Box(region, region.within(region))])
            assert torch.equal(target, whole[region.slices])


def test_a_missing_piece_is_told_with_the_numbers(tmp_path: Path) -> None:
    region = Region((0, 0), (3, 5))
    write_pieces(tmp_path, "parameters", 0, {"w": [Piece(torch.zeros(3, 5), region, SHAPE)]})
    with pytest.raises(ConfigError, match="15 of the 35 numbers of w are there"):
        Pieces([tmp_path], "parameters").check("w", SHAPE, torch.float32)
