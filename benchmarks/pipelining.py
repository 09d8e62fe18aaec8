"""Our pipeline beside `torch.distributed.pipelining`: the same sections, packs and links, a core for each of two ranks.

    python -m benchmarks.pipelining --json FILE --check

Both run a step of eight packs of text through the example backbone (four layers, 2 M parameters, float32), 1F1B with a
section a rank and interleaved with two. All ways take turns in one run, and each time is that of the slower rank.

| way | packs |
|---|---|
| `ours` | each of its own length |
| `torch, equal` | all of one length, as its schedules need; only where packs have one length |
| `torch, padded` | filled up to the longest that a run may have, so that stages are prepared once |
| `torch, prepared` | filled up to the longest of the step; stages and schedule are made again each step |
| `torch, as they are` | each of its own length, in processes of their own: what becomes of them |

`outcome`: exit statuses of the two processes where they did not end well.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.record import Check, Result, main

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
PACKS = 8
LONGEST = 512
EQUAL = 320
"""Tokens of a pack: the mean of what uneven ones have."""
SHORTEST = 2 * EQUAL - LONGEST
STEPS = 8
WARM_UP = 1
LIMIT_SECONDS = 60.0
SLOWER = 1.25
"""Most that ours may take, as a share of torch's at one length: torch posts its receives ahead, ours when it needs
them."""
FASTER = 0.95
"""Most that ours may take, as a share of the better of torch's ways at uneven lengths."""
AGREEMENT = 1e-5


@dataclass(frozen=True)
class Rank:
    """One process's sections of the backbone, and what it runs them with."""

    backbone: Any
    groups: Any
    links: Any
    sections: int

    @property
    def rank(self) -> int:
        return int(self.groups.rank)

    def ours(self, packs: Sequence[Sequence[Any]]) -> None:
        """A step as a consumer runs it."""
        from flowtrain.consumer.pack_run import PackRun
        from flowtrain.messages import PackOrder
        from flowtrain.pipeline import schedule
        from flowtrain.types import Pack, Phase

        order = PackOrder(Phase.TRAIN, 1, Pack(0, 0, (), (), 0, 0), (), (), False, len(packs))
        runs = [PackRun(order, (), samples, {}, self.backbone, self.links) for samples in packs]
        for work in schedule(self.rank, RANKS, self.sections, len(packs)):
            (runs[work.slot].forward if work.forward else runs[work.slot].backward)(work.section)
        self.links.flush()

    def torch_schedule(self, tokens: int, packs: list[Sequence[Any]]) -> Any:
        """Stages and schedule for packs of `tokens`, which are read from `packs` at each forward."""
        import torch
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        ids = torch.zeros(tokens, dtype=torch.long)
        hidden = torch.zeros(self.backbone.carried_shape([self.backbone.stand_in(tokens)], 0), requires_grad=True)
        stages = []
        for runner in self.backbone.sections:
            section = runner.section
            given, made = (
                ids if section.is_first else hidden,
                torch.zeros((), requires_grad=True) if section.is_last else hidden,
            )
            stages.append(
                PipelineStage(
                    _stage_of(self.backbone, runner, packs),
                    section.number,
                    RANKS * self.sections,
                    torch.device("cpu"),
                    input_args=(given,),
                    output_args=(made,),
                    group=self.groups.over(("pp",)),
                )
            )
        ways: dict[str, Any] = {"loss_fn": lambda loss, target: loss, "scale_grads": False}
        if self.sections == 1:
            return Schedule1F1B(stages[0], PACKS, **ways)
        return ScheduleInterleaved1F1B(stages, PACKS, **ways)

    def torch_step(self, schedule: Any) -> None:
        import torch

        schedule.step(
            arg_mbs=[(torch.zeros(schedule.tokens, dtype=torch.long),)] * PACKS if self.rank == 0 else None,
            kwarg_mbs=[{"slot": slot} for slot in range(PACKS)],
            target_mbs=[torch.zeros(())] * PACKS if self.rank == RANKS - 1 else None,
            return_outputs=False,
        )

    def gradients(self) -> Any:
        """Of all parameters here, in one tensor; they are dropped."""
        import torch

        held = [p for p in self.backbone.parameters_by_name().values() if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in held])
        for parameter in held:
            parameter.grad = None
        return flat


def _stage_of(backbone: Any, runner: Any, packs: list[Sequence[Any]]) -> Any:
    from torch import nn

    class Stage(nn.Module):
        def forward(self, given: Any, slot: int) -> Any:
            if runner.section.is_last:
                return backbone.loss(packs[slot], False, runner, given)[0]
            return backbone.run(packs[slot], False, runner, None if runner.section.is_first else given)[0]

    return Stage()


def join(rank: int, run: str, sections: int) -> Rank:
    import torch
    import torch.distributed as dist

    from flowtrain.config.loading import load_config
    from flowtrain.models.backbone import BackboneHalf
    from flowtrain.models.loading import ensure_weights
    from flowtrain.parallel.groups import join_groups
    from flowtrain.parallel.links import Links
    from flowtrain.parallel.spread import SideSpread
    from flowtrain.pipeline import cut_sections
    from flowtrain.plan import Layout

    torch.set_num_threads(1)
    store = dist.FileStore(f"{run}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT_SECONDS))
    example = ROOT / "examples" / "emoji"
    config = load_config(example / "emoji.yaml", [f"run.dir={run}/rank-{rank}"]).config
    cpu = torch.device("cpu")
    groups = join_groups(Layout(pp=RANKS, vpp=sections), rank, cpu, LIMIT_SECONDS)
    spread = SideSpread(groups, LIMIT_SECONDS, cut_sections([1.0] * 4, 0.0, RANKS * sections))
    weights = ensure_weights(config)
    backbone = BackboneHalf.load(config.model.path, weights, config, cpu, "float32", spread)
    return Rank(backbone, groups, Links(groups, cpu), sections)


def make_packs(backbone: Any, lengths: Sequence[int], seed: int) -> list[list[Any]]:
    """A sample of text a pack, of which the later half is trained."""
    import torch

    from flowtrain.models.backbone import PackSample

    generator = torch.Generator().manual_seed(seed)
    packs = []
    for length in lengths:
        ids = torch.randint(64, 1000, (length,), generator=generator)
        labels = torch.where(torch.arange(length) < length // 2, -100, ids)
        packs.append([PackSample(ids, labels)])
    return packs


def filled(backbone: Any, packs: Sequence[list[Any]], tokens: int) -> list[list[Any]]:
    """The packs with a sample behind them that nothing is trained on, up to `tokens`."""
    lengths = [len(pack[0].input_ids) for pack in packs]
    return [
        [*pack, backbone.stand_in(tokens - length)] if length < tokens else pack
        for pack, length in zip(packs, lengths, strict=True)
    ]


def lengths_of(step: int, equal: bool, seed: int) -> list[int]:
    import random

    draw = random.Random(1000 * seed + step)
    return [EQUAL] * PACKS if equal else [draw.randint(SHORTEST, LONGEST) for _ in range(PACKS)]


def run_rank(rank: int, run: str, sections: int, seed: int) -> None:
    """All ways in turn; seconds of each, and how far gradients are from ours."""
    import torch
    import torch.distributed as dist

    own = join(rank, run, sections)
    seconds: dict[str, list[float]] = {}
    worst: dict[str, float] = {}
    shown: list[Sequence[Any]] = []
    ready = {tokens: _prepared(own, tokens, shown) for tokens in (EQUAL, LONGEST)}
    for step in range(WARM_UP + STEPS):
        for equal in (True, False):
            packs = make_packs(own.backbone, lengths_of(step, equal, seed), seed + step)
            most = max(len(pack[0].input_ids) for pack in packs)

            def by_torch(tokens: int, again: bool, packs: list[list[Any]] = packs) -> None:
                shown[:] = filled(own.backbone, packs, tokens)
                own.torch_step(_prepared(own, tokens, shown) if again else ready[tokens])

            ways: dict[str, Callable[[], None]] = {"ours": lambda packs=packs: own.ours(packs)}  # type: ignore[misc]
            if equal:
                ways["torch, equal"] = lambda: by_torch(EQUAL, False)
            else:
                ways["torch, padded"] = lambda: by_torch(LONGEST, False)
                ways["torch, prepared"] = lambda most=most: by_torch(most, True)  # type: ignore[misc]
            expected = None
            for way, work in ways.items():
                dist.barrier()
                begun = time.perf_counter()
                work()
                taken = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                found, key = own.gradients(), f"{'equal' if equal else 'uneven'}/{way}"
                expected = found if expected is None else expected
                error = float((found - expected).norm() / expected.norm())
                worst[key] = max(worst.get(key, 0.0), error)
                if step >= WARM_UP:
                    seconds.setdefault(key, []).append(float(taken))
    Path(run, f"rank-{rank}.json").write_text(json.dumps({"seconds": seconds, "worst": worst}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _prepared(own: Rank, tokens: int, packs: list[Sequence[Any]]) -> Any:
    schedule = own.torch_schedule(tokens, packs)
    schedule.tokens = tokens
    return schedule


def run_as_they_are(rank: int, run: str, sections: int, seed: int) -> None:
    """Uneven packs in torch's schedule, prepared for the first of them, as it would prepare itself."""
    own = join(rank, run, sections)
    packs = make_packs(own.backbone, lengths_of(0, False, seed), seed)
    schedule = _prepared(own, len(packs[0][0].input_ids), [*packs])
    own.torch_step(schedule)


def spawn(target: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Exit statuses of the ranks; None for one that had to be killed."""
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    statuses: list[int | None] = []
    for process in processes:
        process.join(2 * LIMIT_SECONDS)
        statuses.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
            process.join()
    return statuses


def measure(seed: int) -> Result:
    rows: list[Mapping[str, Any]] = []
    checks: list[Check] = []
    for sections, schedule in ((1, "1F1B"), (2, "interleaved")):
        with tempfile.TemporaryDirectory() as run:
            statuses = spawn(run_rank, run, sections, seed)
            assert statuses == [0] * RANKS, f"{schedule}: exit statuses {statuses}"
            told = [json.loads(Path(run, f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
        medians = {way: 1e3 * statistics.median(of_way) for way, of_way in told[0]["seconds"].items()}
        for way, median in medians.items():
            lengths, name = way.split("/")
            rows.append(
                {
                    "schedule": schedule,
                    "lengths": lengths,
                    "way": name,
                    "step_ms": median,
                    "ours_1": median / medians[f"{lengths}/ours"],
                    "outcome": "ends",
                }
            )
        with tempfile.TemporaryDirectory() as run:
            outcome = spawn(run_as_they_are, run, sections, seed)
        row = {"schedule": schedule, "lengths": "uneven", "way": "torch, as they are"}
        rows.append({**row, "step_ms": 0.0, "ours_1": 0.0, "outcome": f"exit {outcome}"})
        share = medians["equal/ours"] / medians["equal/torch, equal"]
        checks.append(Check(f"{schedule}: ours, share of torch's time, equal lengths", share, "<=", SLOWER))
        best = min(medians["uneven/torch, padded"], medians["uneven/torch, prepared"])
        share = medians["uneven/ours"] / best
        checks.append(Check(f"{schedule}: ours, share of torch's time, uneven lengths", share, "<=", FASTER))
        worst = max(error for rank in told for error in rank["worst"].values())
        checks.append(Check(f"{schedule}: largest difference of gradients", worst, "<=", AGREEMENT))
    settings = {"packs": PACKS, "equal_tokens": EQUAL, "uneven_tokens": [SHORTEST, LONGEST], "steps": STEPS}
    return Result(settings, rows, checks)


if __name__ == "__main__":
    main("pipelining", lambda options: measure(options.seed))
