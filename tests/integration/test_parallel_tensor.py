"""Every family in tensor-parallel pieces equals itself whole: features, loss and each gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gloo_ranks import Ranks
from parallel_cells import make_case, run_backbone, run_encoder
from tiny_families import make_family

from flowtrain.verify.compare import FLOAT32_INSIDE

LIMIT = 1e-10
LIMIT_FLOAT32_INSIDE = 1e-6  # of each gradient, where sums over tokens are added up in float32
CELLS = [
    ("qwen3_vl", 2),
    ("qwen3_vl", 4),
    ("qwen2_5_vl", 2),
    ("qwen2_vl", 2),
    ("qwen3_vl_moe", 2),
    ("gemma3", 2),
    ("glm4v", 2),
    ("glm4v_moe", 2),
    ("internvl", 2),
    ("idefics3", 2),
    ("smolvlm", 2),
    ("llava", 2),
    ("llava_next", 2),
    ("llava_onevision", 2),
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of numpy, inside the processor of GLM-4V
@pytest.mark.parametrize(("family", "degree"), CELLS)
def test_a_backbone_in_pieces_equals_itself_whole(
    family: str, degree: int, ranks: Ranks, case_of: Callable[[str], Path]
) -> None:
    limit = LIMIT_FLOAT32_INSIDE if family in FLOAT32_INSIDE else LIMIT
    for errors in ranks.call(run_backbone, case_of(family), world_size=degree):
        assert {name: error for name, error in errors.items() if not error <= limit} == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("family", sorted({family for family, _ in CELLS}))
def test_an_encoder_in_pieces_equals_itself_whole(family: str, ranks: Ranks, case_of: Callable[[str], Path]) -> None:
    limit = LIMIT_FLOAT32_INSIDE if family in FLOAT32_INSIDE else LIMIT
    for errors in ranks.call(run_encoder, case_of(family), world_size=2):
        assert {name: error for name, error in errors.items() if not error <= limit} == {}
