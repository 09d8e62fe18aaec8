"""The config file as typed, frozen models: every key, its default, its bounds and what it is for (contract C14).

`flowtrain config --show` prints these with their resolved values; the reference page of the docs is made from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from flowtrain.config.debug import DebugConfig
from flowtrain.config.modes import MODES, ExchangeName, ModeName, Placement
from flowtrain.config.section import Decay, Fraction, NonNegative, Positive, Section
from flowtrain.config.units import ByteSize, ReadPath
from flowtrain.plan import Layout, layout_of
from flowtrain.types import Cut, Module, Role

ModuleName = Literal["encoder", "projector", "backbone"]


class RunConfig(Section):
    dir: Path = Field(Path("runs/default"), description="Folder of everything the run writes.")
    seed: NonNegative = Field(0, description="Seed of the row order and of random weights.")
    trace: bool = Field(False, description="Record what every process does, for Perfetto and `flowtrain report`.")
    trace_samples: bool = Field(True, description="Write RUN_DIR/samples.jsonl: the rows of every pack trained.")
    timeout_seconds: float = Field(600.0, gt=0, description="Longest wait for one answer of a process.")
    stop_deadline_seconds: float = Field(
        25.0, gt=0, description="Time for the last step and checkpoint after a signal."
    )


class ModelConfig(Section):
    path: ReadPath = Field(description="Hugging Face model folder (config, processor, chat template), or its URL.")
    init: Literal["auto", "random", "pretrained"] = Field(
        "auto", description="`random`: from the seed; `pretrained`: the folder's safetensors; `auto`: those if there."
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="Compute dtype; parameters stay fp32."
    )
    attention: Literal["auto", "sdpa", "flash"] = Field(
        "auto", description="Kernel for packs; `auto`: flash on GPU if there."
    )
    compile: bool = Field(False, description="Compile the backbone's layers with torch.compile, in the first packs.")
    trust_remote_code: bool = Field(False, description="Run Python code from the model folder.")


class DataConfig(Section):
    train: ReadPath = Field(description="Training rows: .parquet, .jsonl or .json file, a folder of them, or a URL.")
    eval: ReadPath | None = Field(None, description="Held-out rows.")
    on_bad_sample: Literal["skip", "error"] = Field("skip", description="A row that cannot be used: count it, or stop.")
    max_bad_share: Fraction = Field(0.5, description="Stop when more than this share of the first 100 rows is bad.")
    max_seq_len: Positive | None = Field(None, description="Longest row in tokens, images included; default: the pack.")
    max_pixels: Positive | None = Field(None, description="Pixel cap per image, applied by the processor.")
    min_pixels: Positive | None = Field(None, description="Pixel floor per image, applied by the processor.")
    max_image_pixels: Positive = Field(89_478_485, description="A stored image with more pixels is a bad row.")
    shuffle: bool = Field(
        True, description="Training rows in the seed's order, another one each epoch; false: the file's."
    )
    readers: Positive = Field(1, description="Processes that read and tokenise rows.")

    @model_validator(mode="after")
    def _pixels(self) -> DataConfig:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"`min_pixels` is {self.min_pixels}, above `max_pixels`, {self.max_pixels}")
        return self


class StepSize(Section):
    samples: Positive | None = Field(None, description="Rows of one step.")
    packs: Positive | None = Field(None, description="Packs a consumer rank of one step; the number of rows floats.")

    @model_validator(mode="after")
    def _one_of(self) -> StepSize:
        if (self.samples is None) == (self.packs is None):
            raise ValueError("give exactly one of `samples` and `packs`")
        return self


class TrainConfig(Section):
    step: StepSize = Field(StepSize(samples=32), description="Size of one optimizer update.")
    max_steps: Positive | None = Field(None, description="Updates to make; or give `epochs`.")
    epochs: Positive | None = Field(None, description="Passes over the rows; or give `max_steps`.")
    lr: float = Field(2e-5, gt=0, description="Peak learning rate.")
    module_lr: dict[ModuleName, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Peak learning rate of a module, where it differs from `lr`."
    )
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Shape after the warm-up.")
    warmup_steps: NonNegative | None = Field(None, description="Steps from 0 to the peak; or give `warmup_ratio`.")
    warmup_ratio: Fraction | None = Field(
        None, description="The same as a share of all steps; 0.03 when neither is given."
    )
    min_lr_ratio: Fraction = Field(0.0, description="Where cosine and linear end, as a share of the peak.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW decay; biases, norms and embeddings are left out.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="AdamW.")
    eps: float = Field(1e-8, gt=0, description="AdamW.")
    freeze: tuple[ModuleName, ...] = Field((), description="Modules that do not train.")
    clip_norm: float | None = Field(1.0, gt=0, description="Bound on the gradient norm over all modules; null: none.")
    max_lag: NonNegative = Field(0, description="Encoder versions an embedding may be behind: only 0, exact.")
    eval_every: Positive | None = Field(None, description="Steps between evaluation losses; null: only at the end.")
    gradient_checkpointing: bool | None = Field(None, description="Recompute layers of both sides; null: as planned.")
    max_nonfinite_steps: NonNegative = Field(3, description="Steps in a row that may be left out as non-finite.")

    @model_validator(mode="after")
    def _length(self) -> TrainConfig:
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError("give only one of `max_steps` and `epochs`")
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("give only one of `warmup_steps` and `warmup_ratio`")
        if len(set(self.freeze)) == len(Module):
            raise ValueError("`freeze` names every module: nothing would train")
        if self.max_lag:
            raise ValueError("`max_lag` above 0 is not supported yet: only exact training (lag 0) is")
        return self


class SideConfig(Section):
    num: Positive | None = Field(None, description="Data-parallel processes; short for `layout: rN`.")
    layout: str | None = Field(None, description="Degrees of parallelism, such as r2f4; excludes `num`.")
    threads: Positive | None = Field(None, description="CPU threads of each process; default: cores divided evenly.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: cuda where there is one.")
    gradient_checkpointing: bool | None = Field(None, description="Recompute layers; null: as `train` says.")
    node: NonNegative | None = Field(None, description="Node of the whole side; null: the driver's, 0, first.")

    @model_validator(mode="after")
    def _one_of(self) -> SideConfig:
        if self.num is not None and self.layout is not None:
            raise ValueError("give only one of `num` and `layout`")
        if self.layout is not None:
            try:
                layout_of(self.layout)
            except ValueError as error:
                raise ValueError(f"`layout`: {error}") from None
        return self

    @property
    def copies(self) -> Layout:
        """The layout as far as the config says it; what is open is one process."""
        return Layout(dp_replicate=self.num or 1) if self.layout is None else layout_of(self.layout)


class ProducersConfig(SideConfig):
    backward: Literal["keep", "recompute"] = Field("keep", description="Keep the encoder's graph, or run it again.")
    max_unit_patches: Positive = Field(
        4096, description="Most patches of one encoder call (a larger sample goes alone)."
    )


class ConsumersConfig(SideConfig):
    pass


class PoolConfig(Section):
    bytes: ByteSize = Field(
        256 * 2**20, description="Host bytes per node, divided among the owners on it; `64MiB` is understood."
    )
    transport: Literal["auto", "shm", "local", "nixl", "ray"] = Field(
        "auto", description="`auto`: by pair; `local` in one process, `shm` on one node, `nixl` or `ray` between nodes."
    )
    exchange: ExchangeName | None = Field(
        None,
        description="What both sides wait for: `pool` only room, `barrier_pipeline` encodes one slot ahead, "
        "`barrier_step` one side at a time; null: the mode's.",
    )
    prefill: NonNegative = Field(
        0, description="Packs per consumer that are ready before the first one runs; with a frozen encoder only."
    )
    huge_pages: Literal["auto", "off", "explicit"] = Field(
        "auto", description="`auto`: transparent where allowed; `explicit`: of those reserved by vm.nr_hugepages."
    )
    checksum: bool = Field(
        False, description="Write and check a CRC of every block, to find stray writes: slower, for debugging."
    )


class PackingConfig(Section):
    policy: Literal["dynamic", "arrival", "ffd", "raw_size", "paper", "karmarkar_karp", "wlb"] | None = Field(
        None,
        description="How packs are built; all but `dynamic` are there to compare with; null: the mode's.",
    )
    max_tokens: Positive = Field(1024, description="Most tokens of a pack, images included.")
    max_images: Positive | None = Field(None, description="Most images of a pack; a row with more is counted.")
    max_patches: Positive | None = Field(None, description="Most patches of a pack; a row with more is counted.")
    max_trained_tokens: Positive | None = Field(None, description="Most trained tokens of a pack: bounds its logits.")
    lookahead: Positive = Field(
        3, description="Steps of rows among which a step is chosen; 1: a step is exactly the next rows."
    )
    max_wait_steps: Positive = Field(
        4,
        description="Most steps that a row waits; 2 more where a step would lose over 1 %; dearer than a full pack: "
        "twice as many. Never below `packing.lookahead`.",
    )
    cost: Literal["model", "fitted"] = Field(
        "model", description="`model`: FLOPs of the shape; `fitted`: from measured times, logged so that runs repeat."
    )
    attention_efficiency: float = Field(
        1.0, gt=0, le=4, description="Speed of attention over that of matrix products, in the costs of `model`."
    )
    on_long_row: Literal["skip", "error", "own_pack"] = Field(
        "skip", description="A row longer than a pack: count it, stop, or give it a pack alone."
    )

    def longest_row(self, max_seq_len: int | None) -> int:
        """Tokens of the longest row that can be trained; `max_seq_len` is that of `data`."""
        longest = max_seq_len or self.max_tokens
        return longest if self.on_long_row == "own_pack" else min(longest, self.max_tokens)


class AllocationConfig(Section):
    policy: Literal["uniform", "stage_balanced", "flops_proportional", "flow_matching"] | None = Field(
        None, description="Who decides the processes left open; null: the mode's."
    )
    placement: Literal["colocated", "disaggregated", "auto"] | None = Field(
        None, description="Overrides the mode's; `auto`: the allocator takes the faster one."
    )
    profile: Literal["off", "auto"] | Path = Field(
        "off",
        description="File of measured times of the modules, to choose what is open by; `auto`: RUN_DIR-profile.yaml, "
        "measured first where it is missing; `off`: by a model.",
    )
    replan: Literal["off", "propose", "auto"] = Field(
        "off",
        description="When the data drift: keep the plan, say what would be better, or change the producers' number.",
    )
    max_producers: Positive | None = Field(None, description="Most under `replan: auto`; null: twice the plan's.")
    drift_percent: float = Field(
        25.0, gt=0, description="Change of one side's load against the other's beyond which a plan is looked for."
    )
    drift_window: Positive = Field(6, description="Steps whose medians tell drift from noise.")


class CheckpointConfig(Section):
    every: Positive | None = Field(
        None, description="Steps between checkpoints; null: only at a signal and at the end."
    )
    keep: Positive = Field(2, description="Complete checkpoints kept.")
    at_end: bool = Field(True, description="Write one at a signal and at the end.")
    export: bool = Field(True, description="Write RUN_DIR/export, a Hugging Face folder, at the end.")


class TelemetryConfig(Section):
    progress: Literal["auto", "rich", "plain", "off"] = Field("auto", description="`auto`: rich on a terminal.")
    sinks: tuple[Literal["prometheus", "tensorboard", "wandb", "ray"], ...] = Field(
        (), description="Where metrics go beside metrics.jsonl; `ray`: the metrics agent of `cluster.address`."
    )
    device_seconds: float = Field(5.0, ge=0, description="Interval at which GPUs are asked by NVML; 0: never.")
    prometheus_host: str = Field("127.0.0.1", description="Address of this machine that the prometheus sink is on.")
    prometheus_port: int = Field(9400, ge=0, le=65535, description="Port of the prometheus sink; 0: a free one.")
    wandb_project: str = Field("flowtrain", description="Project of the wandb sink.")
    wandb_mode: Literal["online", "offline"] = Field("online", description="`offline`: kept in RUN_DIR/wandb.")


class ClusterConfig(Section):
    address: str | None = Field(
        None,
        description="Ray cluster: `http://HEAD:8265` runs there as a job, `HOST:PORT` or `auto` joins the one that "
        "this machine is in; null: a local node of our own.",
    )
    oversubscribe: bool | None = Field(
        None, description="Allow more processes than cores; null: allowed with one warning on a local CPU run."
    )
    start_timeout_seconds: float = Field(120.0, gt=0, description="Longest wait for all processes to start.")
    temp_dir: Path | None = Field(None, description="Ray's folder for logs and sockets; null: Ray's default.")


class Config(Section):
    """One run. `mode` is a row of `flowtrain.config.modes`; each of its values can be overridden."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    producers: ProducersConfig = ProducersConfig()
    consumers: ConsumersConfig = ConsumersConfig()
    pool: PoolConfig = PoolConfig()
    packing: PackingConfig = PackingConfig()
    allocation: AllocationConfig = AllocationConfig()
    mode: ModeName = Field("flow", description="A row of the table of modes.")
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    cluster: ClusterConfig = ClusterConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def placement(self) -> Placement:
        """The mode's as long as `auto` is not decided, which happens before anything starts."""
        chosen = self.allocation.placement
        return MODES[self.mode].placement if chosen is None or chosen == "auto" else chosen

    @property
    def exchange(self) -> ExchangeName:
        """What the two sides wait for."""
        return self.pool.exchange or MODES[self.mode].exchange

    @property
    def policy(self) -> str:
        """Who decides the number of processes left open (contract C8)."""
        return self.allocation.policy or MODES[self.mode].allocation

    @property
    def packing_policy(self) -> str:
        """How packs are built."""
        return self.packing.policy or MODES[self.mode].composition

    @property
    def frozen(self) -> frozenset[Module]:
        return frozenset(Module(name) for name in self.train.freeze)

    def recompute(self, role: Role) -> bool | None:
        """Whether a side's layers run again in the backward; None where neither key says it."""
        own = (self.producers if role is Role.PRODUCER else self.consumers).gradient_checkpointing
        return self.train.gradient_checkpointing if own is None else own

    @property
    def parameter_dtype(self) -> Literal["float32", "float64"]:
        """Parameters, gradients and optimizer state are fp32 whatever the compute dtype, float64 only for proofs."""
        return "float64" if self.model.dtype == "float64" else "float32"

    @property
    def cut(self) -> Cut:
        """Where the model is cut (C4)."""
        return Cut.of(self.frozen)

    @property
    def producer_modules(self) -> frozenset[Module]:
        """The modules that live on the producer side of the cut; the others live on the consumer side."""
        if self.cut is Cut.BEFORE_PROJECTOR:
            return frozenset({Module.ENCODER})
        return frozenset({Module.ENCODER, Module.PROJECTOR})

    @property
    def trainable_encoder(self) -> bool:
        """Whether anything trains on the producer side, so that gradients come back through the pool."""
        return not self.producer_modules <= self.frozen

    @property
    def max_row_tokens(self) -> int:
        """A row longer than this cannot be trained: it is counted, or stops the run."""
        return self.packing.longest_row(self.data.max_seq_len)

    @model_validator(mode="after")
    def _agree(self) -> Config:
        if self.placement == "colocated":
            layouts = [side.copies for side in (self.producers, self.consumers)]
            if layouts[0] != layouts[1] or layouts[0] != Layout(dp_replicate=layouts[0].world_size):
                raise ValueError(
                    "`producers.num` and `consumers.num` must be equal, and no layout cut, when encoder and backbone "
                    "share a process (colocated)"
                )
            if self.pool.transport in ("nixl", "ray"):
                raise ValueError(
                    f"`pool.transport` {self.pool.transport} is for several processes: colocated, features stay in one"
                )
        elif self.pool.transport == "local":
            raise ValueError("`pool.transport` local is for one process (colocated): use auto or shm")
        if self.pool.prefill and self.trainable_encoder:
            raise ValueError(
                "`pool.prefill` is for a frozen encoder: features of the next step wait for this one's update"
            )
        if self.packing.on_long_row == "own_pack" and self.data.max_seq_len is None:
            raise ValueError("`packing.on_long_row` own_pack needs `data.max_seq_len`, the longest row memory holds")
        for name, side in (("producers", self.producers), ("consumers", self.consumers)):
            if side.node and self.cluster.address is None:
                raise ValueError(f"`{name}.node` is {side.node} and the run has one node: give `cluster.address`")
        if "ray" in self.telemetry.sinks and self.cluster.address is None:
            raise ValueError(
                "`telemetry.sinks` ray is for a running cluster: give `cluster.address`, or use prometheus"
            )
        if self.train.eval_every is not None and self.data.eval is None:
            raise ValueError("`train.eval_every` asks for evaluation losses: give `data.eval`, or leave it out")
        return self
