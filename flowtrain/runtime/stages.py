"""Makes a stage of a role and calls it by name: the same code in this process and inside a Ray actor.

| method | role | what it does |
|---|---|---|
| `prepare` | consumer 0 | whole-model weights, made once from the seed where the model folder has none |
| `reserve` | all with a segment | starts to make their segment of the pool, beside what follows |
| `look` | any, one a node | what is at the paths that every node needs |
| `load_modules` | all others | the imports of the role: seconds, so everyone's at once |
| `open_store` | rank 0 of a side | rendezvous of the side's collectives, on a free port |
| `configure` | all | builds the stage, once its segment is made |
| `attach`, `detach` | consumer | opens the segments it reads; lets go of those of producers that have left |
| `regroup` | all of a side that stay | leaves the collectives of the side for those of another number of ranks |
| `clock`, `flush_trace` | all | its monotonic clock; what its trace still holds, to the file |
| `devices` | one of a node | the newest figures of the node's GPUs |
| `sample_text` | reader | one row as the model reads it, for the start-up table |
| `restore` | all | parameters and optimizer from a checkpoint |
| `save` | all of a side | what each is the first to hold of its parameters and optimizer |
| `hand_over` | rank 0 of a side | the same, for ranks that join |
| `read`, `encode`, `backward`, `train`, `reduce`, `update` | by role | the stage's own methods |
| `export` | all of a side | its tensors into the export folder, written by the first |
| `finish_export` | consumer 0 | the parts joined into one Hugging Face folder |
"""

from __future__ import annotations

import importlib
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain.config.loading import config_from_json
from flowtrain.config.schema import Config
from flowtrain.plan import Layout
from flowtrain.pool import numa
from flowtrain.pool.arrays import Arrays
from flowtrain.pool.pages import HugePages
from flowtrain.pool.private import make_segment
from flowtrain.pool.segment import OwnSegment, SegmentHandle
from flowtrain.runtime.executor import StageReport, StageSpec
from flowtrain.runtime.failure import telling_peers
from flowtrain.runtime.nodes import LOOPBACK, Sight, look
from flowtrain.telemetry.nvml import DeviceSampler, NodeDevices
from flowtrain.telemetry.spans import Spans, no_span
from flowtrain.telemetry.trace import Trace
from flowtrain.types import Role

if TYPE_CHECKING:
    from flowtrain.models.half import Half
    from flowtrain.parallel.groups import Groups
    from flowtrain.parallel.holding import Holding

SPANNED = frozenset({"restore", "encode", "backward", "train", "reduce", "update", "save", "export", "read"})
"""Methods whose name is kept in the span file, so that an abort can be told from outside."""


class StageSlot:
    """One process's place for one stage. `local`: all stages share this process and its memory; `address`: its node's,
    for those on other nodes; `endpoint`: how other processes of the cluster call this one.

    `segment` is its own segment of the pool, None without one. A process can serve several runs: the first call of one
    closes the stage of the one before.
    """

    def __init__(self, role: Role, local: bool, address: str = LOOPBACK, endpoint: bytes | None = None) -> None:
        self.role = role
        self.local = local
        self.address = address
        self.endpoint = endpoint
        self.segment: OwnSegment | None = None
        self._reserved: Future[OwnSegment] | None = None
        self.stage: Any = None
        self.spans: Spans | None = None
        self._spec: StageSpec | None = None
        self._store: Any = None
        self._joined = False
        self._holding: Holding | None = None
        self._sampler: DeviceSampler | None = None

    def call(self, method: str, args: Sequence[Any], payloads: Sequence[Any]) -> tuple[Any, Any]:
        """The method's answer, and for `read` the payload block beside it."""
        target = getattr(self, f"_{method}", None) or getattr(self.stage, method)
        if self.spans is None or method not in SPANNED:
            value = target(*args, *payloads)
        else:
            groups = self._holding.groups if self._holding is not None else None
            with self.spans.order(method), telling_peers(groups, self.role, method):
                value = target(*args, *payloads)
        return value if method == "read" else (value, None)

    def close(self) -> None:
        """Give back the stage, its segment and its process group; idempotent."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None and reserved.exception() is None:
            reserved.result().close()
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        self._end_stage()

    def _end_stage(self) -> None:
        if self.stage is not None:
            self.stage.close()
            self.stage = self.segment = None
        if self.spans is not None:
            self.spans.close()
            self.spans = None
        self._leave()
        self._store = None

    # --- what the table lists -----------------------------------------------------------------------------------------

    def _prepare(self, config_json: str) -> str:
        from flowtrain.models.loading import ensure_weights

        return str(ensure_weights(config_from_json(config_json)))

    def _reserve(self, owner: int, num_bytes: int, huge_pages: HugePages) -> None:
        """Its pages take a second for some GiB; `configure` waits for them, and raises what went wrong."""
        self.close()
        thread = ThreadPoolExecutor(1, thread_name_prefix="reserve")
        self._reserved = thread.submit(self._make_segment, owner, num_bytes, huge_pages)
        thread.shutdown(wait=False)

    def _make_segment(self, owner: int, num_bytes: int, huge_pages: HugePages) -> OwnSegment:
        near = None
        if len(numa.nodes()) > 1:
            from flowtrain.allocator.gpus import local_gpus

            gpus, _ = local_gpus()
            near = gpus[0].numa_node if gpus else None
        return make_segment(owner, num_bytes, huge_pages, near, shared=not self.local)

    def _look(self, paths: Sequence[str]) -> tuple[str, tuple[Sight, ...]]:
        return self.address, look(paths)

    def _load_modules(self) -> None:
        reading = ("flowtrain.data.reader", "transformers.models.auto.processing_auto")
        for module in reading if self.role is Role.READER else ("flowtrain.runtime.stage_build",):
            importlib.import_module(module)

    def _open_store(self, world_size: int, timeout_seconds: float, spread: bool) -> tuple[str, int]:
        """`spread`: the side's ranks are on several nodes."""
        from torch.distributed import TCPStore

        host = self.address if spread else LOOPBACK
        # A store that opens its own socket listens on every interface of the machine.
        with socket.create_server((host, 0), backlog=world_size) as server:
            port = server.getsockname()[1]
            self._store = TCPStore(
                host,
                port,
                world_size,
                is_master=True,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
                master_listen_fd=server.detach(),
            )
        return host, port

    def _configure(self, spec: StageSpec) -> StageReport:
        store, self._store = self._store, None
        self._end_stage()
        self._spec = spec
        config = config_from_json(spec.config_json)
        rank_plan = spec.rank_plan
        name = f"{rank_plan.role}-{rank_plan.rank}"
        trace = Trace(Path(spec.run_dir), name) if config.run.trace else None
        self.spans = Spans(Path(spec.run_dir) / "spans" / name, trace)
        with self.spans("configure"):
            return self._build(spec, config, store)

    def _build(self, spec: StageSpec, config: Config, store: Any) -> StageReport:
        rank_plan = spec.rank_plan
        if rank_plan.role is Role.READER:
            from flowtrain.data.reader import ReaderStage

            self.stage = ReaderStage(config)
            return StageReport()
        from flowtrain.runtime.join import check_device
        from flowtrain.runtime.stage_build import build_consumer, build_producer

        check_device(rank_plan)
        groups = self._join(spec, config, store)
        build = build_producer if rank_plan.role is Role.PRODUCER else build_consumer
        built = build(spec, config, groups, lambda: self._pool(config, spec), self._span)
        self.stage, self._holding = built.stage, built.holding
        return built.report

    def _span(self, name: str) -> AbstractContextManager[None]:
        return no_span(name) if self.spans is None else self.spans(name)

    def _clock(self) -> int:
        return time.monotonic_ns()

    def _flush_trace(self) -> None:
        if self.spans is not None and self.spans.trace is not None:
            self.spans.trace.flush()

    def _devices(self, seconds: float) -> NodeDevices:
        if self._sampler is None:
            self._sampler = DeviceSampler(seconds)
        return self._sampler.latest()

    def _sample_text(self) -> str | None:
        text: str | None = self.stage.first_sample()
        return text

    def _attach(self, handles: Mapping[int, SegmentHandle], copies: SegmentHandle | None = None) -> None:
        self.stage.pool.attach(handles, copies)

    def _save(self, folder: str) -> None:
        """What this rank is the first to hold of its side's state; one that does not train has parameters only."""
        from flowtrain.update.storage import SavedState, save_parameters, write_state

        assert self._holding is not None, "a stage is saved once it is built"
        side = Path(folder) / str(self.role)
        if self.stage.updater is not None:
            self.stage.updater.save(side)
            return
        save_parameters(side, self._half.parameters_by_name(), self._holding, 0)
        if self._holding.groups.rank == 0:
            write_state(side, SavedState(0, self.stage.config.train.freeze, ()))

    _hand_over = _save

    @property
    def _half(self) -> Half:
        half: Half = self.stage.encoder if self.role is Role.PRODUCER else self.stage.backbone
        return half

    def _detach(self, owners: Sequence[int]) -> None:
        self.stage.pool.detach(owners)

    def _regroup(self, world_size: int, store_address: tuple[str, int] | None) -> None:
        """The stage keeps what it holds; `store_address` None: it is alone now."""
        from flowtrain.parallel.holding import Holding

        assert self._spec is not None, "a stage joins others once it is built"
        store, self._store = self._store, None
        self._leave()
        self._spec = replace(self._spec, layout=Layout(dp_replicate=world_size), store=store_address)
        groups = self._join(self._spec, self.stage.config, store)
        self._holding = Holding(groups)
        if self.stage.updater is not None:
            self.stage.updater.regroup(groups)

    def _restore(self, folder: str, version: int) -> None:
        """Continue from a checkpoint, of which this side may have written nothing."""
        from flowtrain.update.storage import load_parameters

        folders = [side for role in Role if (side := Path(folder) / str(role)).is_dir()]
        if self.role is Role.PRODUCER:
            self.stage.version = version
        if self.stage.updater is not None:
            self.stage.updater.load(folders)
        else:
            assert self._holding is not None
            load_parameters(folders, self._half.parameters_by_name(), self._holding)

    def _export(self, folder: str) -> None:
        from flowtrain.models.export import write_part

        assert self._holding is not None, "a stage is exported once it is built"
        tensors = self._holding.gathered(self._half.tensors_by_name())
        if self._holding.leads_stage:
            write_part(tensors, Path(folder), f"{self.role}-{self._holding.stage}")

    def _finish_export(self, aside: str, final: str) -> None:
        """Join both sides' parts and put the folder in its place, whole."""
        from flowtrain.models.export import finish_export

        config = self.stage.config
        finish_export(config.model.path, Path(aside), [Role.PRODUCER, Role.CONSUMER], config.model.trust_remote_code)
        shutil.rmtree(final, ignore_errors=True)
        Path(aside).rename(final)

    def _leave(self) -> None:
        if self._joined:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._joined = False

    # --- building -----------------------------------------------------------------------------------------------------

    def _join(self, spec: StageSpec, config: Config, store: Any) -> Groups:
        from flowtrain.runtime.join import join_side

        groups = join_side(spec, config.run.timeout_seconds, store, self.address)
        self._joined = spec.store is not None
        return groups

    def _pool(self, config: Config, spec: StageSpec, arrays: Arrays | None = None) -> Any:
        """`arrays`: as in `PoolClient`."""
        from flowtrain.runtime.stage_pool import make_pool

        if self._reserved is not None:
            self.segment, self._reserved = self._reserved.result(), None
        return make_pool(config, spec, self.segment, local=self.local, endpoint=self.endpoint, arrays=arrays)
