"""Every family in tensor-parallel pieces equals itself whole: features, loss and each gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gloo_ranks import Ranks
from parallel_cells import make_case, run_backbone, run_cut_twice, run_encoder
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


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """File of a family's case, made once."""
    made: dict[str, Path] = {}

    def case(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = make_case(make_family(family, folder / "model"), folder)
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


@pytest.mark.parametrize("layout", ["f2t2", "f2c2", "t2c2"])
def test_a_backbone_cut_over_two_axes(layout: str, ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    assert_equal("qwen3_vl", ranks.call(run_cut_twice, case_of("qwen3_vl"), layout, world_size=4))
