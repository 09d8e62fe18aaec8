"""A profile of real stages: every order is timed, work makes it longer, and rates follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_runs import make_config

from flowtrain.allocator.predict import Setup, predict
from flowtrain.allocator.profile import check_profile, dump_profile, read_profile
from flowtrain.errors import ConfigError
from flowtrain.runtime.profile_run import PACKS_ALONE, SIZES, measure
from flowtrain.runtime.ray_executor import RayExecutor
from flowtrain.runtime.signals import StopRequest
from flowtrain.types import Role


@pytest.mark.timeout(300)
@pytest.mark.parametrize("freeze", ["train.freeze=[]", "train.freeze=[encoder]"])
def test_real_stages_are_measured(actors: RayExecutor, tmp_path: Path, freeze: str) -> None:
    config = make_config("emoji", tmp_path / "run", freeze, "packing.max_tokens=512")
    told: list[str] = []
    # No time at all: one round of each setting.
    profile = measure(config, config.run.dir, 0.0, StopRequest(60), told.append, actors)
    assert len(told) == 4
    for role in (Role.PRODUCER, Role.CONSUMER):
        for colocated, together in ((True, False), (False, False), (False, True)):
            (stage,) = profile.measured(role, colocated, together)
            assert (stage.colocated, stage.together) == (colocated, together)
            trains = role is Role.CONSUMER or freeze == "train.freeze=[]"
            assert (stage.update_seconds > 0) == trains
            assert bool(stage.backward) == (role is Role.PRODUCER and trains)
            if not together:
                assert sum(point.num for point in stage.forward) <= len(SIZES) * PACKS_ALONE
            works = [point.work for point in stage.forward]
            assert works == sorted(works)
    assert profile.trainable_encoder == (freeze == "train.freeze=[]")
    assert profile.rows_per_step == pytest.approx(32, abs=1)
    alone = profile.measured(Role.CONSUMER)[0].forward
    assert alone[-1].seconds > alone[0].seconds, "three times the tokens take no longer"
    apart = predict(profile, Setup(False, 1, 1, 1, 1, cores=2))
    assert apart.step_seconds >= max(apart.producer_seconds, apart.consumer_seconds)
    assert predict(profile, Setup(True, 1, 2, 1, 2, cores=2)).samples_per_second > 0

    path = tmp_path / "profile.yaml"
    path.write_text(dump_profile(profile))
    check_profile(read_profile(path), config, path)
    with pytest.raises(ConfigError, match=r"measured with model\.dtype float32 \(here float64\)"):
        check_profile(profile, make_config("emoji", tmp_path, freeze, "model.dtype=float64"), path)
