"""Every family in tensor-parallel pieces equals itself whole: features, loss and each gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gloo_ranks import Ranks
from layout_cells import FOUR_LAYERS
from parallel_cells import make_case, run_backbone, run_encoder, run_layout
from tiny_families import make_family

from flowtrain.verify.compare import FLOAT32_INSIDE

LIMIT = 1e-10
LIMIT_FLOAT32_INSIDE = 1e-6  # of each gradient, where sums over tokens are added up in float32
TENSOR = [("qwen3_vl", 4)] + [
    (family, 2)
    for family in (
        "gemma3", "glm4v", "glm4v_moe", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "qwen2_5_vl",
        "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
    )
]  # fmt: skip
CONTEXT = [("qwen3_vl", 4)] + [
    (family, 2) for family in ("gemma3", "glm4v", "idefics3", "internvl", "llava_onevision", "qwen2_5_vl", "qwen2_vl")
]


PIPELINES = [
    "gemma3", "glm4v", "glm4v_moe", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "qwen2_5_vl",
    "qwen2_vl", "qwen3_vl_moe", "smolvlm",
]  # fmt: skip


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """File of a family's case, made once."""
    made: dict[str, Path] = {}

    def case(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            kind, values = ("qwen3_vl", FOUR_LAYERS) if family == "deep" else (family, None)
            made[family] = make_case(make_family(kind, folder / "model", values), folder)
        return made[family]

    return case


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes with gloo between them."""
    started = Ranks(4)
    yield started
    started.close()


def assert_equal(family: str, of_ranks: list[dict[str, float]]) -> None:
    limit = LIMIT_FLOAT32_INSIDE if family in FLOAT32_INSIDE else LIMIT
    for errors in of_ranks:
        assert {name: error for name, error in errors.items() if not error <= limit} == {}


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of numpy, inside the processor of GLM-4V


@pytest.mark.parametrize(("family", "degree"), TENSOR)
def test_a_backbone_cut_by_heads(family: str, degree: int, ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    """With four ranks there are fewer key-value heads than ranks."""
    assert_equal(family, ranks.call(run_backbone, case_of(family), "tp", world_size=degree))


@pytest.mark.parametrize(("family", "degree"), CONTEXT)
def test_a_backbone_cut_by_tokens(family: str, degree: int, ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    assert_equal(family, ranks.call(run_backbone, case_of(family), "cp", world_size=degree))


@pytest.mark.parametrize("family", [family for family, degree in TENSOR if degree == 2])
def test_an_encoder_cut_by_heads(family: str, ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    assert_equal(family, ranks.call(run_encoder, case_of(family), world_size=2))


def test_norms_of_heads_in_an_encoder_cut_by_heads(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank norms its own heads, so it has a share of the norm's gradient, as of nothing else there."""
    case = make_case(make_family("glm4v", tmp_path / "model"), tmp_path, head_norms=True)
    of_ranks = ranks.call(run_encoder, case, world_size=2)
    assert any("q_norm" in name for name in of_ranks[0])
    assert_equal("glm4v", of_ranks)


@pytest.mark.parametrize("layout", ["f2t2", "f2c2", "t2c2", "t2p2", "f2p2", "p2c2"])
def test_a_backbone_cut_over_two_axes(layout: str, ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    assert_equal("qwen3_vl", ranks.call(run_layout, case_of("qwen3_vl"), layout, world_size=4))


@pytest.mark.parametrize("family", PIPELINES)
def test_a_backbone_in_two_stages(family: str, ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    """Two copies. Gemma 3's head is its embedding, of which each stage has one."""
    assert_equal(family, ranks.call(run_layout, case_of(family), "r2p2", world_size=4))


@pytest.mark.parametrize("layout", ["r2p2", "r2p2v2", "p4", "t2p2v2", "f2p2v2"])
def test_deep_stack_levels_reach_later_stages(layout: str, ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    """Four layers, of which the first two have levels of features added behind them."""
    assert_equal("qwen3_vl", ranks.call(run_layout, case_of("deep"), layout, world_size=4))


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_vl_moe", "r2f2e2"), ("qwen3_vl_moe", "f4e2"), ("glm4v_moe", "f2c2e4"), ("qwen3_vl_moe", "f2p2e2")],
)
def test_experts_on_several_ranks(family: str, layout: str, ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    assert_equal(family, ranks.call(run_layout, case_of(family), layout, world_size=4))


def test_a_frozen_backbone_hands_gradients_through(ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    assert_equal("qwen3_vl", ranks.call(run_layout, case_of("qwen3_vl"), "r2p2", ("backbone",), world_size=4))


def test_compiled_layers_in_pieces(ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    """Traced and run as traced, with torch's own kernels: what is made of a trace is torch's."""
    of_ranks = ranks.call(run_layout, case_of("qwen3_vl"), "f2t2", (), "cpu", True, world_size=4)
    assert_equal("qwen3_vl", of_ranks)
