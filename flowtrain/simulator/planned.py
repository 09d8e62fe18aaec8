"""A plan on devices becomes what is simulated: system, rules of composition, costs, seconds (pure).

    Question, chosen modules ─┬─▶ System            ranks, lock-step groups, segments of the pool
    Axes, Rest ───────────────┼─▶ CompositionSpec   step, packs, units
                              └─▶ CostModel, DeviceTiming

A segment of the pool that is not given has the bytes that launch would ask for: a slot of full packs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from flowtrain.allocator.problem import Question
from flowtrain.allocator.room import packs_together, room_of
from flowtrain.allocator.solve import Choice
from flowtrain.allocator.throughput import Job
from flowtrain.config.schema import PackingConfig, StepSize
from flowtrain.data.order import Order
from flowtrain.errors import PlanError
from flowtrain.packing import Composer, CompositionSpec, CostModel
from flowtrain.packing.trace import composed_steps
from flowtrain.plan import Layout
from flowtrain.pool.block import block_bytes
from flowtrain.runtime.exchange import EXCHANGES
from flowtrain.shapes import EncoderShape, ModelShape, payload_bytes
from flowtrain.simulator.device_timing import DeviceTiming
from flowtrain.simulator.system import Control, System
from flowtrain.types import Cut, ImageMeta, Row, SampleMeta, SkippedRow, Step


@dataclass(frozen=True, slots=True)
class Options:
    """What a plan leaves open: axes of the mode, rules of packs, the pool, checkpoints, the controller.

    Attributes:
        prefill: `pool.prefill` of a config.
        packing: of a config, or its defaults; a pack has the tokens that the plan says.
        step: of a config, where it is given in packs; None: the samples that the plan is for.
        max_seq_len, max_unit_patches: `data.max_seq_len` and `producers.max_unit_patches` of a config; None: those of
            a pack, and those of the plan's encode units.
    """

    exchange: str = "pool"
    prefill: int = 0
    composition: str = "dynamic"
    packing: PackingConfig = field(default_factory=PackingConfig)
    step: StepSize | None = None
    max_seq_len: int | None = None
    max_unit_patches: int | None = None
    segment_bytes: int | None = None
    save_every: int | None = None
    save_seconds: float = 0.0
    control: Control = field(default_factory=Control)


@dataclass(frozen=True, slots=True)
class Planned:
    """All that a simulation takes. `longest_row`: in tokens; `peak_flops`: of a mean device of the plan."""

    system: System
    spec: CompositionSpec
    cost: CostModel
    timing: DeviceTiming
    longest_row: int
    peak_flops: float
    notes: tuple[str, ...] = ()

    def judged(self, rows: Sequence[SampleMeta | SkippedRow]) -> list[SampleMeta | SkippedRow]:
        """The rows of a file as a run finds them: those longer than a row may be, or over a cap of a pack, are skipped.

        Raises:
            PlanError: none is left.
        """
        found = without_long(rows, self.longest_row)
        usable = [row for row in found if isinstance(row, SampleMeta)]
        too_big = {row.position: row for row in Composer(self.spec, self.cost).too_big(usable)}
        found = [too_big.get(row.position, row) for row in found]
        if len(too_big) == len(usable):
            counts = ", ".join(f"{count} {reason}" for reason, count in skipped_reasons(found).most_common())
            raise PlanError(
                f"no row fits a pack of {self.spec.max_tokens} tokens ({counts}): plan larger packs, or raise what "
                f"packing.max_* says of them"
            )
        return found

    def steps(self, rows: Sequence[SampleMeta | SkippedRow], order: Order) -> Iterator[Step]:
        """Composed from these rows, which are `judged`, as a run reads them, epoch after epoch."""
        return composed_steps(replace(self.spec, num_rows=len(rows)), self.cost, order.rows(rows))


def without_long(rows: Iterable[SampleMeta | SkippedRow], longest_row: int) -> list[SampleMeta | SkippedRow]:
    """Rows as readers hand them on: those of more tokens are skipped."""
    return [
        SkippedRow(row.position, row.row, row.id, "too-long", f"it has {row.tokens} tokens")
        if isinstance(row, SampleMeta) and row.tokens > longest_row
        else row
        for row in rows
    ]


def skipped_reasons(rows: Sequence[SampleMeta | SkippedRow]) -> Counter[str]:
    """How many rows are skipped for what."""
    return Counter(row.reason for row in rows if isinstance(row, SkippedRow))


def planned(question: Question, job: Job, choices: Sequence[Choice], options: Options) -> Planned:
    """The simulation of these modules on the question's cluster.

    Raises:
        PlanError: the pool is too small, nothing trains, or the plan has more than one encoder.
    """
    shape, frozen, cluster = question.shape, question.frozen, question.cluster
    cut = Cut.of(frozen)
    timing = DeviceTiming.of_choices(choices, cluster, job, shape, cut)
    backbone = timing.backbone.choice
    encoder = timing.encoder.choice if timing.encoder is not None else None
    candidate = backbone.candidate
    consumers = candidate.layout
    colocated = encoder is None or encoder.group == backbone.group
    # Colocated, each backbone replica encodes the images of its own packs.
    producers = Layout(consumers.dp_degree) if colocated or encoder is None else encoder.candidate.layout
    roles = frozenset(choice.load.role for choice in choices if choice.load.trains)
    if not roles:
        raise PlanError("train.freeze leaves nothing to train: a simulation is one of training; unfreeze a module")
    trainable = encoder is not None and encoder.load.gradient_returns

    features = shape.features(cut)

    @cache
    def size(tokens: int, patches: int) -> int:
        return payload_bytes(features, job.dtype, tokens, patches)

    most = candidate.pack_tokens
    packing = options.packing.model_copy(update={"max_tokens": most})
    longest = packing.longest_row(options.max_seq_len)
    pack_room = room_of(packing, longest, shape, cut, job.dtype)
    step = options.step or StepSize(samples=job.step_samples)
    slots = (step.packs or backbone.packs + 2) if EXCHANGES[options.exchange].whole_steps else 0
    packs = packs_together(consumers, slots)
    wanted = pack_room.segment_bytes(packs)
    segment = options.segment_bytes or wanted
    if segment < wanted:
        raise PlanError(
            f"a segment of the pool has {segment} bytes and {packs} packs with one full row of "
            f"{max(most, longest)} tokens each need {wanted}: give more pool bytes, or fewer tokens a pack"
        )
    room = min(producers.dp_degree, max(pool.node.devices for pool in cluster)) * segment
    notes = [f"pool: {segment / 2**30:.3g} GiB for each producer, {room / 2**30:.3g} GiB a node of producers"]
    if options.save_every is not None:
        notes.append(f"a checkpoint every {options.save_every} steps stops the ranks for {options.save_seconds:g} s")
    devices = _devices(choices)
    system = System.of(
        producers=producers,
        consumers=consumers,
        colocated=colocated,
        exchange=options.exchange,
        prefill=options.prefill,
        num_devices=sum(count for count, _ in devices),
        segment_bytes=segment,
        payload_bytes=lambda sample: size(sample.vision_tokens, sample.patches),
        trainable_encoder=trainable,
        reduced_roles=roles,
        control=options.control,
        save_every=options.save_every,
        save_seconds=options.save_seconds,
    )
    spec = CompositionSpec.of(
        packing,
        options.composition,
        step,
        consumers=consumers,
        producers=producers,
        colocated=colocated,
        trainable_encoder=trainable,
        max_unit_patches=options.max_unit_patches or job.unit_patches[0],
        max_pack_vision_bytes=pack_room.cap,
        block_bytes=lambda tokens, patches: block_bytes(size(tokens, patches)),
        num_rows=1,
        horizon=None,
    )
    cost = CostModel.from_shape(shape, frozen, cut, packing.attention_efficiency)
    peak = sum(count * cluster[pool].node.peak(job.dtype) for count, pool in devices) / system.num_devices
    return Planned(system, spec, cost, timing, longest, peak, tuple(notes))


def _devices(choices: Sequence[Choice]) -> list[tuple[int, int]]:
    """Devices and node type of each group of modules; modules of a group share theirs."""
    groups = {choice.group: (choice.candidate.devices, choice.pool) for choice in choices}
    return list(groups.values())


def with_patches(rows: Sequence[SampleMeta], shape: ModelShape) -> list[SampleMeta]:
    """Rows of a trace, whose images are known in tokens, with the patches that this model has for them."""
    vision, per_token = shape.vision, shape.projector.patches_per_token
    return [
        with_images_of(row, [_image(image, per_token * image.tokens, vision) for image in row.images]) for row in rows
    ]


def _image(image: ImageMeta, patches: int, vision: EncoderShape) -> ImageMeta:
    return image._replace(patches=patches, patch_pairs=vision.attended_pairs(patches))


def with_images_of(row: SampleMeta, images: Sequence[ImageMeta]) -> SampleMeta:
    """The row with other images."""
    counts = row.text_tokens, sum(image.tokens for image in images), row.trained_tokens
    return SampleMeta.of(row.position, row.row, row.id, *counts, tuple(images), row.block, row.place)


def with_images(rows: Sequence[Row], factor: float) -> list[Row]:
    """`factor` times as many images: each row's are repeated, or left out, so that the tokens so far come nearest."""
    found: list[Row] = []
    wanted = taken = 0.0
    for row in rows:
        if isinstance(row, SkippedRow):
            found.append(row)
            continue
        images: list[ImageMeta] = []
        for image in row.images:
            wanted += factor * image.tokens
            times = max(0, round((wanted - taken) / image.tokens)) if image.tokens else 0
            taken += times * image.tokens
            images += times * [image]
        found.append(with_images_of(row, images))
    return found
