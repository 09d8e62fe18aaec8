"""Addresses by arithmetic, block sizes, and headers that tell what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.pool.address import (
    LINE_BYTES,
    MAX_LOCAL_OWNERS,
    MAX_MACHINES,
    MAX_OWNERS,
    MAX_SEGMENT_BYTES,
    NUM_GENERATIONS,
    Region,
    generation_of,
    machine_of,
    machine_of_owner,
    make_address,
    make_owner,
    offset_of,
    owner_of,
    place_of,
    region_of,
)
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
from flowtrain.types import Address

OFFSETS = st.integers(0, MAX_SEGMENT_BYTES // LINE_BYTES - 1).map(lambda line: line * LINE_BYTES)
PARTS = st.tuples(
    st.integers(0, MAX_MACHINES - 1),
    st.integers(0, MAX_LOCAL_OWNERS - 1),
    OFFSETS,
    st.integers(0, NUM_GENERATIONS - 1),
    st.sampled_from(Region),
)


def address_of(parts: tuple[int, int, int, int, Region]) -> int:
    machine, local, offset, generation, region = parts
    return make_address(make_owner(machine, local), offset, generation, region)


@given(parts=PARTS)
def test_an_address_comes_apart_into_what_made_it(parts: tuple[int, int, int, int, Region]) -> None:
    machine, local, offset, generation, region = parts
    owner = make_owner(machine, local)
    address = make_address(owner, offset, generation, region)
    assert 0 <= address < 2**63
    assert (owner_of(address), machine_of(address), offset_of(address)) == (owner, machine, offset)
    assert (generation_of(address), region_of(address)) == (generation, region)
    assert machine_of_owner(owner) == machine
    assert f"byte {offset} of owner {owner} on machine {machine}" in place_of(address)
    assert ("device" in place_of(address)) == (region is Region.DEVICE)


@given(first=PARTS, second=PARTS)
def test_two_addresses_are_equal_exactly_when_all_their_parts_are(
    first: tuple[int, int, int, int, Region], second: tuple[int, int, int, int, Region]
) -> None:
    assert (address_of(first) == address_of(second)) == (first == second)


@given(parts=PARTS)
def test_a_segment_is_contiguous(parts: tuple[int, int, int, int, Region]) -> None:
    machine, local, offset, generation, region = parts
    assert address_of(parts) - address_of((machine, local, 0, generation, region)) == offset // LINE_BYTES


@pytest.mark.parametrize(
    ("owner", "offset", "generation"),
    [(-1, 0, 0), (MAX_OWNERS, 0, 0), (0, -64, 0), (0, MAX_SEGMENT_BYTES, 0), (0, 0, -1), (0, 0, NUM_GENERATIONS)],
)
def test_an_address_outside_the_space_is_refused(owner: int, offset: int, generation: int) -> None:
    with pytest.raises(AssertionError, match="outside"):
        make_address(owner, offset, generation)


def test_a_place_between_two_lines_has_no_address() -> None:
    with pytest.raises(AssertionError, match="offset 63 of owner 0 is not a multiple of 64"):
        make_address(0, 63)


@pytest.mark.parametrize(("machine", "local"), [(-1, 0), (MAX_MACHINES, 0), (0, -1), (0, MAX_LOCAL_OWNERS)])
def test_an_owner_outside_the_space_is_refused(machine: int, local: int) -> None:
    with pytest.raises(AssertionError, match="outside"):
        make_owner(machine, local)


@given(payload=st.integers(0, 10**9))
def test_a_block_is_its_header_and_whole_lines(payload: int) -> None:
    total = block_bytes(payload)
    assert total % ALIGNMENT == 0
    assert payload + HEADER_BYTES <= total < payload + HEADER_BYTES + ALIGNMENT


IDENTITY_BYTES = 48
"""Of a header; a checksum and bytes without meaning lie behind."""

HEADERS = st.builds(
    Header,
    state=st.sampled_from(BlockState),
    owner=st.integers(0, MAX_OWNERS - 1),
    version=st.integers(0, 2**40),
    position=st.integers(0, 2**62),
    address=st.integers(0, 2**63 - 1).map(Address),
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


@given(header=HEADERS, stray=st.binary(min_size=1, max_size=HEADER_BYTES), at=st.integers(0, HEADER_BYTES - 1))
def test_whatever_lies_over_a_header_is_a_block_error(header: Header, stray: bytes, at: int) -> None:
    memory = memoryview(bytearray(HEADER_BYTES + 128))
    write_header(memory, header._replace(checksum=None))
    identity = bytes(memory[:IDENTITY_BYTES])
    memory[at : at + len(stray)] = stray
    if memory[:IDENTITY_BYTES] == identity:
        return
    with pytest.raises(BlockError, match=r"^block 0x40"):
        check_block(memory, header, "block 0x40")


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
