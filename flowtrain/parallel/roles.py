"""How a half's parameters are cut over tensor-parallel ranks, by what each module is and not by its family. No torch.

| role | known by | column (outputs cut) | row (inputs cut, outputs summed) |
|---|---|---|---|
| attention | a head size, `q_proj k_proj v_proj` | each by its own heads | `o_proj`, `out_proj`, `projection_layer` |
| attention, fused | a head size, `qkv` laid out [q; k; v] | each third by heads | `proj` |
| gated MLP | `gate_proj up_proj`, or `gate_up_proj` laid out [gate; up] | rows; each half | `down_proj` |
| MLP | `fc1 fc2`, `linear_fc1 linear_fc2`, `linear_1 linear_2`, or two linears in sequence | rows | the second |
| vocabulary | input embedding and head, tied or not | rows | |
| all else | norms, patch embedding, routers and experts, single linears | whole on every rank | |

What is whole has one of two kinds of gradient:

| gradient | of | because |
|---|---|---|
| the same on every rank | an encoder's norms, patch embedding; a projector | each computes the same |
| a share on every rank | q and k norms; a backbone's norms, row biases, experts | it sees its heads or tokens |

In a backbone the tokens of a pack are cut over the ranks outside attention and MLPs (sequence parallel); an encoder's
patches are not, since what it does between its blocks (windows, grids, tiles) needs them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flowtrain.errors import PlanError
from flowtrain.parallel.cuts import Cut, check_heads, cut_heads, cut_runs

Shape = tuple[int, ...]

SEPARATE = ("q_proj", "k_proj", "v_proj")
FUSED = "qkv"
ATTENTION_OUTPUTS = ("o_proj", "out_proj", "projection_layer", "proj")
HEAD_NORMS = ("q_norm", "k_norm")
MLPS: tuple[tuple[tuple[str, ...], str, int], ...] = (
    (("gate_proj", "up_proj"), "down_proj", 1),
    (("gate_up_proj",), "down_proj", 2),
    (("fc1",), "fc2", 1),
    (("linear_fc1",), "linear_fc2", 1),
    (("linear_1",), "linear_2", 1),
    (("0",), "2", 1),
)
"""Column linears, the row linear, and how many parts a column's rows are laid out in."""

OTHER_MIXERS = ("conv1d", "A_log", "dt_bias")
"""Parameters of layers that mix tokens otherwise than by attention: they need a pack's tokens together."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What a plan is made from, read off a half that may lie on the meta device.

    Attributes:
        shapes: whole shape of every own parameter by its whole-model name, a tied one once.
        head_dims: path of every module with a head size → that size.
        stream: path of the module whose tokens are cut over the ranks (the language model); None for an encoder.
        vocabulary: names of the input embedding's weight and the head's weight; one name where they are tied.
        head_bias: name of the head's bias, where it has one.
    """

    shapes: Mapping[str, Shape]
    head_dims: Mapping[str, int]
    stream: str | None = None
    vocabulary: tuple[str, ...] = ()
    head_bias: str | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """A module computed in pieces: what enters is whole on every rank, and what leaves is the sum over the ranks.

    Attributes:
        path: of the module.
        columns, row: paths of its linears.
        entries: paths of the modules at whose input the region begins: itself, or its column linears.
        heads: (heads, key-value heads) of one rank, for attention.
    """

    path: str
    columns: tuple[str, ...]
    row: str
    entries: tuple[str, ...]
    heads: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How a half is cut; see the page above.

    Attributes:
        cuts: of every parameter that is cut.
        partial: parameters that are whole on every rank, with a share of their gradient on each.
    """

    degree: int
    stream: str | None
    regions: tuple[Region, ...] = ()
    vocabulary: tuple[str, ...] = ()
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()

    def counts(self, name: str, rank: int) -> bool:
        """Whether this rank's part of a parameter, or of its gradient, stands for all ranks that hold the same."""
        cut = self.cuts.get(name)
        return rank == 0 if cut is None else cut.owners[rank] == rank


def plan_tensor(tree: Tree, degree: int, what: str = "layout") -> TensorPlan:
    """The plan of one half for `degree` ranks.

    Raises:
        PlanError: heads that do not divide, or a layer whose role is not known; `what` begins the sentence.
    """
    cuts: dict[str, Cut] = {}
    regions: list[Region] = []
    partial: set[str] = set()
    _check_mixers(tree, what)
    for path in _modules(tree):
        region = _attention(tree, path, degree, what, cuts, partial) or _mlp(tree, path, degree, cuts)
        if region is not None:
            regions.append(region)
    for name in (*tree.vocabulary, *((tree.head_bias,) if tree.head_bias else ())):
        cuts[name] = cut_runs(tree.shapes[name][0], degree, 0)
    if tree.stream is not None:
        partial |= {name for name in tree.shapes if _inside(name, tree.stream)} - cuts.keys()
    for name, cut in cuts.items():
        cut.assert_invariants(tree.shapes[name][cut.dim])
    return TensorPlan(degree, tree.stream, tuple(regions), tree.vocabulary, cuts, frozenset(partial))


def _modules(tree: Tree) -> Iterator[str]:
    """Paths of all modules that may be cut, in the half's order: in a backbone those of its stream only."""
    paths: dict[str, None] = {}
    for name in tree.shapes:
        components = name.split(".")
        for length in range(1, len(components) - 1):
            paths[".".join(components[:length])] = None
    yield from (path for path in paths if tree.stream is None or _inside(path, tree.stream))


def _attention(tree: Tree, path: str, degree: int, what: str, cuts: dict[str, Cut], partial: set[str]) -> Region | None:
    head_dim = tree.head_dims.get(path)
    linears = _linears(tree, path)
    columns = (FUSED,) if FUSED in linears else SEPARATE if set(SEPARATE) <= linears.keys() else ()
    row = next((name for name in ATTENTION_OUTPUTS if name in linears), None)
    if head_dim is None or not columns or row is None:
        return None
    parts = len(SEPARATE) if columns == (FUSED,) else 1
    heads = [linears[name][0] // head_dim // parts for name in columns]
    num_heads, num_kv_heads = heads[0], heads[-1]
    check_heads(f"{what}, {path}", num_heads, num_kv_heads, degree)
    if linears[row][1] != num_heads * head_dim:
        raise PlanError(
            f"{what}: {path} has {num_heads} heads of {head_dim} and an output of {linears[row][1]}; "
            "this kind of attention cannot be cut: use tensor-parallel degree 1"
        )
    for name, number in zip(columns, heads, strict=True):
        if parts > 1:
            cut = cut_runs(linears[name][0], degree, 0, parts, head_dim)
        else:
            cut = cut_heads(number, head_dim, degree, 0)
        _cut_column(tree, f"{path}.{name}", cut, cuts)
    cuts[f"{path}.{row}.weight"] = cut_heads(num_heads, head_dim, degree, 1)
    for name in _parameters(tree, path):
        child = name[len(path) + 1 :].split(".")[0]
        if child in (*columns, row):
            continue
        if child not in HEAD_NORMS or tree.shapes[name] != (head_dim,):
            raise PlanError(
                f"{what}: {name} of shape {list(tree.shapes[name])} spans heads of {head_dim} that would lie on "
                f"{degree} ranks; this kind of attention cannot be cut: use tensor-parallel degree 1"
            )
        partial.add(name)
    names = tuple(f"{path}.{name}" for name in columns)
    return Region(path, names, f"{path}.{row}", (path,), (num_heads // degree, max(1, num_kv_heads // degree)))


def _mlp(tree: Tree, path: str, degree: int, cuts: dict[str, Cut]) -> Region | None:
    linears = _linears(tree, path)
    for columns, row, parts in MLPS:
        if not {*columns, row} <= linears.keys() or linears[row][1] * parts != linears[columns[0]][0]:
            continue
        if linears[row][1] < degree:
            return None
        for name in columns:
            _cut_column(tree, f"{path}.{name}", cut_runs(linears[name][0], degree, 0, parts), cuts)
        cuts[f"{path}.{row}.weight"] = cut_runs(linears[row][1], degree, 1)
        names = tuple(f"{path}.{name}" for name in columns)
        children = {name[len(path) + 1 :].split(".")[0] for name in _parameters(tree, path)}
        return Region(path, names, f"{path}.{row}", (path,) if children == {*columns, row} else names)
    return None


def _cut_column(tree: Tree, linear: str, cut: Cut, cuts: dict[str, Cut]) -> None:
    cuts[f"{linear}.weight"] = cut
    if f"{linear}.bias" in tree.shapes:
        cuts[f"{linear}.bias"] = cut


def _check_mixers(tree: Tree, what: str) -> None:
    for name in tree.shapes:
        if tree.stream is not None and not set(OTHER_MIXERS).isdisjoint(name.split(".")):
            raise PlanError(
                f"{what}: the layer of {name} mixes tokens otherwise than by attention and cannot be shared by "
                "ranks: use copies, such as r2"
            )


def _linears(tree: Tree, path: str) -> dict[str, Shape]:
    """Direct children of `path` with a weight of two dims → its shape."""
    found = {}
    for name in _parameters(tree, path):
        child, _, rest = name[len(path) + 1 :].partition(".")
        if rest == "weight" and len(tree.shapes[name]) == 2:
            found[child] = tree.shapes[name]
    return found


def _parameters(tree: Tree, path: str) -> Iterator[str]:
    return (name for name in tree.shapes if _inside(name, path))


def _inside(name: str, path: str) -> bool:
    return name.startswith(f"{path}.")
