"""`flowtrain plan CONFIG --profile FILE`: the plan for this machine by what was measured on it.

Layouts are those that launch runs; each open setup is predicted from the profile, and the fastest is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from flowtrain.config.schema import Config


def plan_measured(config: Config, profile_file: Path, json_file: Path | None, out: Path | None) -> None:
    """Print the plan and its predicted rate; write the result and the plan file."""
    import json

    from flowtrain.allocator import decide, describe_plan, local_inventory, make_plan, plan_to_dict
    from flowtrain.allocator.planfile import document_text
    from flowtrain.allocator.predict import Setup, predict
    from flowtrain.allocator.profile import check_profile, other_machine, read_profile
    from flowtrain.cli.rundir import writing
    from flowtrain.plan import layout_text
    from flowtrain.shapes import check_family, read_shape
    from flowtrain.telemetry.files import write_atomic

    shape = read_shape(config.model.path)
    check_family(shape.family)
    profile = read_profile(profile_file)
    check_profile(profile, config, profile_file)
    inventory = local_inventory()
    if (different := other_machine(profile, inventory)) is not None:
        typer.echo(f"warning: {profile_file} was measured on {different}: measure with `flowtrain profile`", err=True)
    decided = decide(config, shape, inventory, profile=profile)
    plan = make_plan(decided.config, shape, inventory)
    producers, consumers = plan.producers, plan.consumers
    setup = Setup(
        plan.placement == "colocated",
        len(producers.ranks),
        producers.ranks[0].threads,
        len(consumers.ranks),
        consumers.ranks[0].threads,
        inventory.cpus,
        producers.ranks[0].device == "cpu",
    )
    found = predict(profile, setup)
    typer.echo(describe_plan(plan))
    typer.echo(f"{found.samples_per_second:.4g} samples/s predicted, {found.step_seconds:.3g} s a step")
    for note in decided.notes:
        typer.echo(note)
    made = profile.made
    typer.echo(f"note: by {profile_file}, measured on {made.date} on {made.device} with {made.cores} cores")
    sides = {
        f"{side.role}s": {"layout": layout_text(side.layout), "threads": side.ranks[0].threads}
        for side in (producers, consumers)
    }
    expected = {"samples_per_second": found.samples_per_second, "step_seconds": found.step_seconds}
    content: dict[str, Any] = {"placement": plan.placement, **sides, "expected": expected}
    result = {**content, "compared": list(decided.notes), "plan": plan_to_dict(plan)}
    texts = ((json_file, json.dumps(result, indent=2) + "\n"), (out, document_text(content)))
    for file, text in texts:
        if file is not None:
            with writing(file):
                write_atomic(file, text)
