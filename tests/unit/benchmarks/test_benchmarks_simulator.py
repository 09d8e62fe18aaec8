"""What the judge of the simulator is calibrated by: lines and the speed of busy cores from orders of known seconds."""

from __future__ import annotations

import random

import pytest

from benchmarks.simulator_lines import Order, fit, with_interruptions
from flowtrain.packing import CostModel

BASE = CostModel.from_coefficients(token=6e9, token_pair=6e5, patch=2e9, patch_pair=1e6)
TOKEN, PAIR, PACK = 1e-4, 1e-8, 0.02
PATCH, UNIT = 5e-5, 0.004


def orders(together: float, noise: float) -> dict[str, list[Order]]:
    """Packs and encodes of given lines; every other one shares half of its time with the other side."""
    dice = random.Random(3)

    def order(kind: str, features: tuple[int, ...], seconds: float, number: int) -> Order:
        seconds *= 1.0 + noise * dice.uniform(-1.0, 1.0)
        shared = (number % 2) * 0.5 * seconds / (0.5 + 0.5 * together)
        return Order(kind, features, (seconds - together * shared, shared))

    packs = [(dice.randint(200, 1500), dice.randint(20_000, 400_000)) for _ in range(60)]
    units = [dice.randint(100, 900) for _ in range(60)]
    return {
        "pack": [
            order("pack", (tokens, pairs, 0, 0, 1), TOKEN * tokens + PAIR * pairs + PACK, number)
            for number, (tokens, pairs) in enumerate(packs)
        ],
        "encode": [order("encode", (patches, 0, 1), PATCH * patches + UNIT, n) for n, patches in enumerate(units)],
        "backward": [],
    }


@pytest.mark.parametrize("together", [1.0, 0.8, 0.55])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_lines_and_the_speed_of_busy_cores_are_found_again(together: float, noise: float) -> None:
    found, cores = fit({"one": BASE}, {"one": orders(together, noise)}, cores=2)
    lines = found["one"]
    assert set(lines) == {"pack", "encode"}
    assert cores.together == pytest.approx(together, abs=0.02 + 0.3 * noise)
    token, pair, _, _, pack = lines["pack"]
    predicted = 1000 * token + 100_000 * pair + pack
    assert predicted == pytest.approx(1000 * TOKEN + 100_000 * PAIR + PACK, rel=0.01 + 0.3 * noise)
    assert 500 * lines["encode"][0] + lines["encode"][2] == pytest.approx(500 * PATCH + UNIT, rel=0.01 + 0.3 * noise)


def test_the_seconds_of_runs_that_never_overlap_are_their_own() -> None:
    alone = {"pack": [Order("pack", (n, n * n, 0, 0, 1), (1e-3 * n, 0.0)) for n in range(10, 60)]}
    found, cores = fit({"one": BASE}, {"one": alone}, 2)
    token, pair, _, _, pack = found["one"]["pack"]
    assert cores.together == 1.0
    assert 40 * token + 1600 * pair + pack == pytest.approx(0.04, rel=0.02)


def test_orders_that_were_interrupted_count_in_the_time_of_a_step() -> None:
    """The fit leaves them out; what all orders took is what a run of them takes."""
    packs = [Order("pack", (n, n * n, 0, 0, 1), (1e-3 * n * (3 if n % 10 == 0 else 1), 0.0)) for n in range(10, 60)]
    found, cores = fit({"one": BASE}, {"one": {"pack": packs}}, 2)
    plain, whole = found["one"]["pack"], with_interruptions(found["one"]["pack"], packs, cores)
    told = sum(c * f for pack in packs for c, f in zip(whole, pack.features, strict=True))
    took = sum(pack.seconds[0] for pack in packs)
    assert told == pytest.approx(took)
    assert whole[0] / plain[0] == pytest.approx(1.17, abs=0.03)


def test_settings_have_lines_of_their_own_and_share_the_cores() -> None:
    """One that never overlaps takes the cores' speed from the other."""
    slower = {"pack": [Order("pack", (n, n * n, 0, 0, 1), (1e-3 * n, 0.0)) for n in range(10, 60)]}
    found, cores = fit({"one": BASE, "two": BASE}, {"one": orders(0.7, 0.0), "two": slower}, 2)
    assert cores.together == pytest.approx(0.7, abs=0.02)
    assert set(found["two"]) == {"pack"}
    token, pair, _, _, pack = found["two"]["pack"]
    assert 40 * token + 1600 * pair + pack == pytest.approx(0.04, rel=0.02)
