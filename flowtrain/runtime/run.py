"""One training run from a resolved config: plan it, start it, train it, export it, end it.

    read shapes, rows ▶ plan ▶ log decisions ▶ start stages ▶ Controller.train ▶ export ▶ summary ▶ close

Everything that can be refused is refused before a process starts (R01, R03).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from flowtrain.allocator import (
    decide,
    forecast,
    known_stats,
    local_inventory,
    make_plan,
    plan_to_dict,
    plan_warnings,
    run_plan_to_dict,
)
from flowtrain.allocator.limits import limit_warnings, process_limits, raise_open_files
from flowtrain.allocator.profile import given_profile
from flowtrain.allocator.spare import with_producers
from flowtrain.config.loading import dump_resolved
from flowtrain.config.schema import Config
from flowtrain.data.stream import BLOCK_ROWS, SampleStream
from flowtrain.errors import Interrupted, Terminated
from flowtrain.packing import Composer, CompositionSpec, compose_eval
from flowtrain.plan import Plan
from flowtrain.pool.directory import Directory
from flowtrain.runtime.checkpoints import CheckpointWriter, newest_complete, read_state
from flowtrain.runtime.collector import rare_collection
from flowtrain.runtime.controller import Controller
from flowtrain.runtime.controller_trace import ControllerTrace
from flowtrain.runtime.decisions import Costs, ReplayLog
from flowtrain.runtime.device_watch import DeviceWatch
from flowtrain.runtime.exchange import exchange_of
from flowtrain.runtime.executor import Executor
from flowtrain.runtime.flow import Flow
from flowtrain.runtime.inputs import (
    Inputs,
    Schedule,
    check_resume,
    composition,
    composition_entry,
    costs_of,
    open_rows,
    schedule_of,
)
from flowtrain.runtime.ledger import Ledger
from flowtrain.runtime.local import LocalExecutor
from flowtrain.runtime.nodes import who_runs_where
from flowtrain.runtime.owners import producer_owners
from flowtrain.runtime.peers import Peers
from flowtrain.runtime.replan import make_replan
from flowtrain.runtime.rows import BadShare, EvalRows, Payloads, RowFeed
from flowtrain.runtime.signals import StopRequest
from flowtrain.runtime.stage_pool import transport_warnings
from flowtrain.runtime.start import Checkpoint, all_ranks, start_stages
from flowtrain.shapes import ModelShape, read_shape
from flowtrain.telemetry.files import write_atomic
from flowtrain.telemetry.run_files import RunFiles
from flowtrain.telemetry.sinks import OPENERS, Opener, open_sinks
from flowtrain.telemetry.tables import placement_table
from flowtrain.types import Role
from flowtrain.update.schedule import resume_notes

if TYPE_CHECKING:
    from flowtrain.runtime.cluster import Cluster
    from flowtrain.runtime.nodes import Node


def execute(
    config: Config,
    run_dir: Path,
    resume: Path | None,
    stop: StopRequest,
    dump: bool = False,
    executor: Executor | None = None,
    replay: Path | None = None,
    shape: ModelShape | None = None,
    plan: Plan | None = None,
) -> None:
    """Run to the end; raises what ended it.

    `resume`: a complete checkpoint folder. `dump`: write gradients and parameters of every step (verify). `executor`:
    one that the caller has started and will close; it must have a process for each rank of the plan. `replay`: the
    decision log of a run to repeat. `shape`, `plan`: where they are not those of the config: on emulated devices.
    """
    state = read_state(resume) if resume else None
    shape = shape or read_shape(config.model.path)
    inventory, stats = local_inventory(), known_stats(config.data.train)
    log = ReplayLog.read(replay) if replay else None
    with ExitStack() as stack:
        cluster = _joined(config, stop, stack) if executor is None else None
        rooms = [node.room for node in cluster.nodes] if cluster else None
        if rooms is not None:  # what is open could not be decided before
            config = decide(config, shape, inventory, stats, nodes=rooms).config
        given = plan is not None
        plan = plan or make_plan(config, shape, inventory, rooms, stats)
        if state and config.allocation.replan == "auto":
            plan = with_producers(plan, state["producers"])
        expected = None if given else forecast(config, shape, plan, inventory, stats, given_profile(config), rooms)
        limits = process_limits()
        raise_open_files(plan, limits)
        held_out = open_rows(config.data.eval) if config.data.eval is not None else None
        inputs = Inputs(
            config, run_dir, shape, plan, open_rows(config.data.train), held_out, resume, state, log, expected
        )
        schedule = schedule_of(inputs)
        total = schedule.total_steps
        check_resume(inputs, total)
        if log is not None:
            log.check(inputs.first_step + 1, total, composition_entry(inputs, composition(inputs)))
        files = stack.enter_context(RunFiles(run_dir, inputs.first_step if state else None))
        sinks = stack.enter_context(open_sinks(config, run_dir, _sink_openers(config)))
        ledger = Ledger(config, shape, plan, files, state, total, sinks.sinks)
        trace = stack.enter_context(ControllerTrace(run_dir if config.run.trace else None))
        try:
            for note in resume_notes(config.train, state, total) if state else ():
                ledger.line(note)
            if not given:  # of this machine, which has no such devices
                warnings = plan_warnings(config, plan, inventory) + transport_warnings(config, plan)
                for warning in (*warnings, *limit_warnings(plan, limits)):
                    ledger.line(f"warning: {warning}")
            if log is not None and log.plan_differs(inputs.first_step + 1, plan_to_dict(plan)):
                ledger.line(
                    "note: processes or threads differ from those of the log: losses may differ in the last bits"
                )
            ledger.starting()
            _train(
                inputs,
                schedule,
                ledger,
                files,
                stop,
                executor or make_executor(config, plan, cluster, stop, stack),
                trace,
                dump,
                cluster.nodes if cluster else (),
            )
            sinks.in_order = True
            if stop.requested:
                raise stop.error()
        except (Interrupted, Terminated) as error:
            ledger.close(error)
            raise type(error)(f"{error}; {_way_on(run_dir)}") from error
        except BaseException as error:
            ledger.close(error)
            raise
        ledger.close(None)


def _sink_openers(config: Config) -> Mapping[str, Opener]:
    if "ray" not in config.telemetry.sinks:
        return OPENERS
    from flowtrain.runtime.ray_metrics import RayMetricsSink

    return {**OPENERS, "ray": RayMetricsSink}


def _way_on(run_dir: Path) -> str:
    """What of an ended run is there to go on with."""
    newest = newest_complete(run_dir).folder
    if newest is None:
        return "no checkpoint was written"
    return f"{newest.name} is saved, go on with --resume {run_dir}"


def _train(
    inputs: Inputs,
    schedule: Schedule,
    ledger: Ledger,
    files: RunFiles,
    stop: StopRequest,
    executor: Executor,
    trace: ControllerTrace,
    dump: bool,
    nodes: Sequence[Node],
) -> None:
    """`nodes`: of a cluster that was joined, by which the plan was made."""
    config, plan = inputs.config, inputs.plan
    spec = composition(inputs)
    costs = costs_of(inputs)
    at = inputs.first_step + 1
    expected = inputs.expected
    told = {} if expected is None else {"expected": expected.to_dict()}  # no replay looks at it
    files.decision(at, "plan", plan=plan_to_dict(plan), **told)
    if nodes:  # only now those of the plan are known
        write_atomic(inputs.run_dir / "config.yaml", dump_resolved(config))
        rows = who_runs_where([*all_ranks(plan), *plan.spare], nodes)
        write_atomic(
            inputs.run_dir / "plan.yaml", yaml.safe_dump(run_plan_to_dict(config, plan, expected), sort_keys=False)
        )
        write_atomic(inputs.run_dir / "placement.json", json.dumps([asdict(row) for row in rows], indent=2) + "\n")
        if config.telemetry.progress != "off":
            ledger.line(placement_table(rows))
    files.decision(at, "composition", **composition_entry(inputs, spec))
    if (choice := costs.to_log(at)) is not None:
        files.decision(at, "cost", **choice.to_dict())
    checkpoint = Checkpoint(inputs.resume, inputs.first_step) if inputs.resume else None
    reports, sample_text = start_stages(config, plan, executor, inputs.run_dir, checkpoint, stop)
    ledger.started(reports, sample_text)
    trace.align(executor, all_ranks(plan))
    controller = _controller(inputs, spec, costs, schedule, executor, ledger, stop, trace, dump)
    controller.train()
    if trace.recording:
        staying = {key for key in reports if key[0] is not Role.PRODUCER}
        staying |= {(Role.PRODUCER, rank) for rank in range(controller.replan.num_producers)}
        controller.ask(dict.fromkeys(staying, ("flush_trace",)))
    if not stop.requested and config.checkpoint.export:
        folder = inputs.run_dir / "export"
        aside = folder.with_suffix(".tmp")
        # Parts of an export that was cut short may be of another layout, whose ranks wrote other tensors.
        shutil.rmtree(aside, ignore_errors=True)
        ranks = [rank for side in (plan.producers, plan.consumers) for rank in side.ranks]
        controller.ask({(rank.role, rank.rank): ("export", str(aside)) for rank in ranks})
        controller.ask({(Role.CONSUMER, 0): ("finish_export", str(aside), str(folder))})
        ledger.line(f"exported to {folder}")


def _controller(
    inputs: Inputs,
    spec: CompositionSpec,
    costs: Costs,
    schedule: Schedule,
    executor: Executor,
    ledger: Ledger,
    stop: StopRequest,
    trace: ControllerTrace,
    dump: bool,
) -> Controller:
    config, plan = inputs.config, inputs.plan
    num_rows = len(inputs.train)
    payloads = Payloads()
    composer = Composer(spec, costs.of(inputs.first_step + 1).cost)
    if inputs.state is not None:
        composer.load_state_dict(inputs.state["composition"])
    at = composer.state_dict()
    block_rows = min(BLOCK_ROWS, max(spec.step_samples or BLOCK_ROWS, 1))
    stream = SampleStream(
        num_rows, block_rows, plan.readers, start=at["cursor"], carried=at["carried"], end=spec.horizon
    )
    feed = RowFeed(stream, composer, payloads, BadShare(config.data.max_bad_share, num_rows))
    eval_rows = None
    if inputs.eval is not None:
        eval_rows = EvalRows(len(inputs.eval), BLOCK_ROWS, plan.readers, payloads, composer.too_big)
    producers = plan.producers.leading
    owners = producer_owners(plan)
    journal = ledger.files.pool_event if config.debug.pool_journal else None
    colocated = plan.placement == "colocated"
    flow = Flow(
        Directory({owner: rank.segment_bytes for owner, rank in zip(owners, producers, strict=True)}, journal),
        num_producers=len(producers),
        owners=owners,
        shards=plan.producers.layout.dp_shard,
        packs_held=plan.consumers.layout.packs_held,
        num_consumers=plan.consumers.layout.dp_degree,
        trainable_encoder=config.trainable_encoder,
        exchange=exchange_of(config.exchange, colocated=colocated, prefill=config.pool.prefill),
        reduced_roles=inputs.reduced_roles,
        payload_bytes=inputs.sample_bytes,
        colocated=colocated,
        version=inputs.first_step,
    )
    return Controller(
        config,
        executor,
        flow,
        feed,
        costs,
        eval_rows,
        lambda index: compose_eval(composer.spec, composer.cost, eval_rows.samples if eval_rows else (), index),
        ledger,
        CheckpointWriter(inputs.run_dir, config.checkpoint.keep),
        schedule,
        stop,
        make_replan(
            config,
            plan,
            inputs.shape,
            inputs.run_dir,
            composer,
            inputs.reduced_roles,
            inputs.replay,
            None if inputs.expected is None else inputs.expected.ratios,
        ),
        Peers({Role.PRODUCER: plan.producers.layout, Role.CONSUMER: plan.consumers.layout}),
        inputs.data_order,
        trace,
        DeviceWatch(plan, config.telemetry.device_seconds),
        frozenset(role for role in Role if inputs.resume is not None and (inputs.resume / str(role)).is_dir()),
        inputs.run_dir / "verify" if dump else None,
    )


def _joined(config: Config, stop: StopRequest, stack: ExitStack) -> Cluster | None:
    """The running cluster that the config names, joined before the plan is made: it says what its nodes have."""
    if config.cluster.address is None or config.placement == "colocated":
        return None
    from flowtrain.runtime.cluster import Cluster

    cluster = stack.enter_context(Cluster(config.cluster))
    with stop.held():
        cluster.join()
    return cluster


def make_executor(config: Config, plan: Plan, cluster: Cluster | None, stop: StopRequest, stack: ExitStack) -> Executor:
    """Stages in this process (one colocated rank), or in Ray actors, in the cluster joined or on a node of our own."""
    if plan.in_driver:
        local = LocalExecutor()
        stack.callback(local.close)
        return local
    from flowtrain.runtime.cluster import Cluster
    from flowtrain.runtime.ray_executor import RayExecutor
    from flowtrain.runtime.reservation import Reservation

    stack.enter_context(rare_collection())
    if cluster is None:
        cluster = stack.enter_context(Cluster(config.cluster))
    colocated = plan.placement == "colocated"
    processes = [rank for rank in all_ranks(plan) if not (colocated and rank.role is Role.CONSUMER)]
    named = [*processes, *plan.spare]
    with stop.held():
        cluster.start(named)
    room = None
    if config.cluster.address is not None:
        room = Reservation(cluster.nodes, named, cluster.cpus_of, config.cluster.start_timeout_seconds)
    executor = RayExecutor(cluster, config.cluster.start_timeout_seconds, colocated, room)
    stack.callback(executor.close)
    return executor
