"""Addresses by arithmetic, block sizes, and headers that tell what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pool.address import MAX_OWNERS, MAX_SEGMENT_BYTES, make_address, offset_of, owner_of
from flowtrain.pool.block import (
    ALIGNMENT,
    HEADER_BYTES,
    BlockError,
    BlockState,
    Header,
    block_bytes,
    check_block,
    checksum_of,
    read_header,
    write_header,
)


@given(owner=st.integers(0, MAX_OWNERS - 1), offset=st.integers(0, MAX_SEGMENT_BYTES - 1))
def test_an_address_comes_apart_into_what_made_it(owner: int, offset: int) -> None:
    address = make_address(owner, offset)
    assert 0 <= address < 2**63
    assert (owner_of(address), offset_of(address)) == (owner, offset)


@given(
    owners=st.lists(st.integers(0, 9), min_size=2, max_size=2, unique=True),
    offset=st.integers(0, MAX_SEGMENT_BYTES - 1),
)
def test_owners_share_no_address_and_segments_are_contiguous(owners: list[int], offset: int) -> None:
    first, second = owners
    assert make_address(first, offset) != make_address(second, offset)
    assert make_address(first, offset) - make_address(first, 0) == offset


@pytest.mark.parametrize(("owner", "offset"), [(-1, 0), (MAX_OWNERS, 0), (0, -1), (0, MAX_SEGMENT_BYTES)])
def test_an_address_outside_the_space_is_refused(owner: int, offset: int) -> None:
    with pytest.raises(AssertionError, match="outside"):
        make_address(owner, offset)


@given(payload=st.integers(0, 10**9))
def test_a_block_is_its_header_and_whole_lines(payload: int) -> None:
    total = block_bytes(payload)
    assert total % ALIGNMENT == 0
    assert payload + HEADER_BYTES <= total < payload + HEADER_BYTES + ALIGNMENT


HEADERS = st.builds(
    Header,
    state=st.sampled_from(BlockState),
    owner=st.integers(0, MAX_OWNERS - 1),
    version=st.integers(0, 2**40),
    position=st.integers(0, 2**62),
    address=st.integers(0, 2**63 - 1),
    payload_bytes=st.integers(0, 128),
    checksum=st.none() | st.integers(0, 2**32 - 1),
)


@given(header=HEADERS)
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    memory = memoryview(bytearray(HEADER_BYTES))
    write_header(memory, header)
    assert read_header(memory, "here") == header


@given(header=HEADERS, other=HEADERS)
def test_every_difference_is_told_by_name(header: Header, other: Header) -> None:
    memory = memoryview(bytearray(HEADER_BYTES))
    write_header(memory, header._replace(checksum=None))
    differ = [n for n in Header._fields if n != "checksum" and getattr(header, n) != getattr(other, n)]
    if not differ:
        check_block(memory, other, "here")
        return
    with pytest.raises(BlockError) as caught:
        check_block(memory, other, "block 0x40 of position 7")
    text = str(caught.value)
    assert text.startswith(f"block 0x40 of position 7, in state {header.state.name}: ")
    assert all(f"{name} is {getattr(header, name)!s}, expected {getattr(other, name)!s}" in text for name in differ)


def test_memory_without_a_header_is_named() -> None:
    with pytest.raises(BlockError, match="block 0x40: no block starts here"):
        read_header(memoryview(bytearray(HEADER_BYTES)), "block 0x40")


def test_a_checksum_finds_a_stray_write() -> None:
    memory = memoryview(bytearray(HEADER_BYTES + 64))
    memory[HEADER_BYTES:] = bytes(range(64))
    header = Header(BlockState.FEATURES, 0, 0, 0, make_address(0, 64), 64, checksum_of(memory[HEADER_BYTES:]))
    write_header(memory, header)
    check_block(memory, header, "here")
    memory[HEADER_BYTES + 5] ^= 1
    with pytest.raises(BlockError, match=r"checksum is [0-9a-f]{8}, expected"):
        check_block(memory, header, "here")
