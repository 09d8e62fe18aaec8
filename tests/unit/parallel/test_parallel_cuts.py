"""Cuts tile what they cut, whatever the sizes; plans go by role; what does not divide is refused with the numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.errors import PlanError
from flowtrain.parallel.cuts import Cut, check_heads, cut_heads, cut_runs, take
from flowtrain.parallel.roles import Tree, plan_tensor

DEGREES = st.sampled_from((1, 2, 3, 4, 8))


@given(degree=DEGREES, runs=st.integers(1, 5), parts=st.integers(1, 3), unit=st.integers(1, 4), more=st.integers(0, 7))
def test_runs_tile_the_dim_and_differ_by_one_unit(degree: int, runs: int, parts: int, unit: int, more: int) -> None:
    units = degree * runs + more % degree
    cut = cut_runs(units * parts * unit, degree, 0, parts, unit)
    cut.assert_invariants(units * parts * unit)
    lengths = [sum(stop - start for start, stop in ranges) for ranges in cut.ranges]
    assert max(lengths) - min(lengths) in (0, parts * unit)
    assert cut.sharing == 1
    assert _joined(cut, units * parts * unit)


@given(degree=DEGREES, heads=st.sampled_from((1, 2, 3, 4, 6, 8)), head_dim=st.integers(1, 4))
def test_query_heads_find_their_key_heads_on_their_rank(degree: int, heads: int, head_dim: int) -> None:
    """Of 24 query heads each rank has a run; the key heads that these attend with are those that it holds."""
    if degree % heads and heads % degree:
        with pytest.raises(PlanError, match=f"{heads} key-value heads do not divide by {degree}"):
            check_heads("here", 24, heads, degree)
        return
    check_heads("here", 24, heads, degree)
    queries, keys = cut_heads(24, head_dim, degree, 0), cut_heads(heads, head_dim, degree, 0)
    keys.assert_invariants(heads * head_dim)
    assert keys.sharing == max(1, degree // heads)
    for rank in range(degree):
        ((start, stop),), ((first, last),) = queries.ranges[rank], keys.ranges[rank]
        wanted = [head // (24 // heads) for head in range(start // head_dim, stop // head_dim)]
        held = list(range(first // head_dim, last // head_dim))
        # As attention groups them: equal runs of neighbouring queries for each key head.
        assert wanted == [key for key in held for _ in range(len(wanted) // len(held))]
        assert rank in keys.sharers(rank)
        assert keys.owners[rank] == min(keys.sharers(rank))
    assert _joined(keys, heads * head_dim)


def test_parts_stay_in_order_on_each_rank() -> None:
    """Rows laid out [q; k; v], two heads each of two rows: a rank holds its head of each, still as [q; k; v]."""
    cut = cut_runs(12, 2, 0, parts=3, unit=2)
    whole = torch.arange(12)
    assert torch.cat(take(whole, cut, 1)).tolist() == [2, 3, 6, 7, 10, 11]


def _joined(cut: Cut, size: int) -> bool:
    """Whether the parts of the owners, put back where they came from, are the whole."""
    whole = torch.arange(3 * size).view(size, 3)
    back = torch.full_like(whole, -1)
    for rank in range(cut.degree):
        part = torch.cat(take(whole, cut, rank))
        for there, here in cut.pieces(rank):
            back[there] = part[here]
    return torch.equal(back, whole)


def attention(
    path: str, heads: int = 4, kv_heads: int = 2, dim: int = 8, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    sizes = {"q_proj": (heads * dim, 32), "k_proj": (kv_heads * dim, 32), "v_proj": (kv_heads * dim, 32)}
    shapes = {f"{path}.{name}.weight": size for name, size in sizes.items()}
    shapes |= {f"{path}.{name}.bias": size[:1] for name, size in sizes.items() if bias}
    return shapes | {f"{path}.o_proj.weight": (32, heads * dim)}


def test_a_plan_goes_by_role() -> None:
    layer = "model.text.layers.0"
    shapes = {
        "model.text.embed_tokens.weight": (101, 32),
        **attention(f"{layer}.self_attn", bias=True),
        f"{layer}.self_attn.q_norm.weight": (8,),
        f"{layer}.mlp.gate_up_proj.weight": (48, 32),
        f"{layer}.mlp.down_proj.weight": (32, 24),
        f"{layer}.norm.weight": (32,),
        "model.projector.linear_1.weight": (32, 24),
        "model.projector.linear_2.weight": (32, 32),
        "lm_head.weight": (101, 32),
    }
    tree = Tree(shapes, {f"{layer}.self_attn": 8}, "model.text", ("model.text.embed_tokens.weight", "lm_head.weight"))
    plan = plan_tensor(tree, 4)
    assert plan.partial == {f"{layer}.self_attn.q_norm.weight", f"{layer}.norm.weight"}
    assert shapes.keys() - plan.cuts.keys() - plan.partial == {
        "model.projector.linear_1.weight",
        "model.projector.linear_2.weight",
    }
    assert plan.cuts[f"{layer}.self_attn.k_proj.bias"].ranges == (((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),))
    assert plan.cuts[f"{layer}.mlp.gate_up_proj.weight"].ranges[1] == ((6, 12), (30, 36))
    assert plan.cuts[f"{layer}.mlp.down_proj.weight"].dim == 1
    assert plan.cuts["lm_head.weight"].ranges == plan.cuts["model.text.embed_tokens.weight"].ranges
    assert [region.entries for region in plan.regions] == [(f"{layer}.self_attn",), (f"{layer}.mlp",)]
    assert plan.regions[0].heads == (1, 1)
    counted = [
        [plan.counts(name, rank) for rank in range(4)]
        for name in (f"{layer}.self_attn.k_proj.weight", f"{layer}.norm.weight")
    ]
    assert counted == [[True, False, True, False], [True, False, False, False]]


def test_a_region_begins_at_its_linears_where_something_lies_before_them() -> None:
    shapes = {"merger.norm.weight": (24,), "merger.linear_fc1.weight": (96, 96), "merger.linear_fc2.weight": (32, 96)}
    (region,) = plan_tensor(Tree(shapes, {}), 2).regions
    assert region.entries == ("merger.linear_fc1",)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (attention("m.attn"), "m.attn: 4 attention heads and 2 key-value heads do not divide by 3 ranks"),
        (attention("m.attn") | {"m.attn.q_norm.weight": (32,)}, "q_norm.weight of shape"),
        (attention("m.attn") | {"m.attn.o_proj.weight": (32, 16)}, "4 heads of 8 and an output of 16"),
        ({"m.mixer.conv1d.weight": (8, 1, 4)}, "m.mixer.conv1d.weight mixes tokens otherwise"),
    ],
)
def test_what_cannot_be_cut_is_refused(shapes: dict[str, tuple[int, ...]], says: str) -> None:
    degree = 3 if "divide" in says else 2
    with pytest.raises(PlanError, match=says):
        plan_tensor(Tree(shapes, {"m.attn": 8}, stream="m"), degree, "consumers.layout")
