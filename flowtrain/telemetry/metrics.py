"""The table of metrics (contracts C11 and C12): what metrics.jsonl, the progress line, the docs and every sink follow.

A value that is not known is None and stays null in the file: never a false 0 (T08). Tokens are counted apart: text,
vision and trained (T04); there is no padding. No metric needs a collective (T06). `docs/observables.md` has this table
by `python scripts/metrics_reference.py`.
"""

from __future__ import annotations

from flowtrain.telemetry.registry import Kind, Reduce, Registry

METRICS = Registry()
_add = METRICS.add
COUNTER, GAUGE, FACT = Kind.COUNTER, Kind.GAUGE, Kind.FACT
SUM, MEAN, TIME_MEAN, MAX, IMBALANCE, LAST = (
    Reduce.SUM,
    Reduce.MEAN,
    Reduce.TIME_MEAN,
    Reduce.MAX,
    Reduce.IMBALANCE,
    Reduce.LAST,
)

# --- the step and its rows --------------------------------------------------------------------------------------------

STEP = _add("step", FACT, "", "update, from 1")
EPOCH = _add("epoch", FACT, "", "epoch of its last row, from 0")
ROWS = _add("rows", COUNTER, "rows", "rows trained", steps=SUM)
ROWS_SKIPPED = _add("rows/skipped", COUNTER, "rows", "rows read and not trained", steps=SUM)
ROWS_SKIPPED_OF = _add("rows/skipped/REASON", COUNTER, "rows", "the same by reason, where there were some", steps=SUM)
TEXT_TOKENS = _add("tokens/text", COUNTER, "tokens", "text tokens of the rows trained; there is no padding", steps=SUM)
VISION_TOKENS = _add("tokens/vision", COUNTER, "tokens", "image placeholders of the rows trained", steps=SUM)
TRAINED_TOKENS = _add("tokens/trained", COUNTER, "tokens", "tokens with a label, of the rows trained", steps=SUM)

# --- loss and update --------------------------------------------------------------------------------------------------

LOSS = _add(
    "loss_metrics/global_avg_loss",
    GAUGE,
    "",
    "mean over the trained tokens of the step",
    steps=LAST,
    console="loss {:.4f}",
)
LOSS_HEX = _add("loss_hex", FACT, "", "the same exactly, as a hexadecimal float")
EVAL_LOSS = _add(
    "validation_metrics/loss",
    GAUGE,
    "",
    "evaluation loss after this step, where one was due",
    steps=LAST,
    console="eval {:.4f}",
    optional=True,
)
GRAD_NORM = _add("grad_norm", GAUGE, "", "of the mean loss over all modules, before clipping", steps=LAST)
GRAD_NORM_OF = _add(
    "grad_norm/MODULE", GAUGE, "", "of one module; null where no sample of the step reached it", steps=LAST
)
LR = _add("lr", GAUGE, "", "largest learning rate", steps=LAST)
LR_OF = _add("lr/MODULE", GAUGE, "", "rate of each module that trains", steps=LAST)
APPLIED = _add(
    "update_applied", FACT, "", "false when the update was left out: a non-finite gradient, or no trained token"
)

NONFINITE = _add(
    "update/nonfinite", COUNTER, "", "1 where the loss or the gradient norm is not finite, else 0", steps=SUM
)
LAST_STEP = _add("last_step", GAUGE, "", "updates that the run is to make in all", steps=LAST, optional=True)

# --- speed ------------------------------------------------------------------------------------------------------------

STEP_SECONDS = _add(
    "time_metrics/end_to_end(s)", COUNTER, "s", "from the end of the step before to the end of this one", steps=SUM
)
TELEMETRY_SECONDS = _add(
    "time_metrics/telemetry(s)",
    COUNTER,
    "s",
    "processor time of the controller in records, sinks and progress, of the step before",
    steps=SUM,
)
THROUGHPUT = _add(
    "throughput(tps)",
    GAUGE,
    "tokens/s",
    "text and vision tokens a second and device, producers' devices included",
    steps=TIME_MEAN,
    console="{:,.0f} tokens/s",
)
TFLOPS = _add("tflops", GAUGE, "TFLOP/s", "needed TFLOP/s per device", steps=TIME_MEAN)
FLOPS_OF = _add("flops/MODULE", COUNTER, "FLOP", "needed FLOPs of each module ([MFU](mfu.md))", steps=SUM)
MFU = _add("mfu(%)", GAUGE, "%", "all modules over all devices, below", steps=TIME_MEAN, console="MFU {:.1f}%")
MFU_ENCODER = _add("mfu/encoder(%)", GAUGE, "%", "producer side over the producers' devices", steps=TIME_MEAN)
MFU_BACKBONE = _add("mfu/backbone(%)", GAUGE, "%", "consumer side over the consumers' devices", steps=TIME_MEAN)
MFU_BACKBONE_PALM = _add(
    "mfu/backbone_palm(%)",
    GAUGE,
    "%",
    "the backbone by the PaLM paper's formula, for comparison with figures that use it",
    steps=TIME_MEAN,
)
MFU_LLM_ONLY = _add(
    "mfu/llm_only(%)", GAUGE, "%", "`mfu/backbone(%)` had no consumer waited for the encoder", steps=TIME_MEAN
)
MFU_GAP = _add(
    "mfu/gap_to_llm_only(%)",
    GAUGE,
    "%",
    "share of the step by which waiting for the encoder prolonged it",
    steps=TIME_MEAN,
)
PEAK_TFLOPS = _add("mfu/peak_tflops", GAUGE, "TFLOP/s", "peak of all devices together", steps=LAST)
PEAK_SOURCE = _add("mfu/peak_source", FACT, "", "whose figure the peak is; why it is not known, where it is not")
MEMORY = _add(
    "memory/max_active(GiB)",
    GAUGE,
    "GiB",
    "highest so far of any rank: accelerator memory, or resident memory on a CPU",
    steps=MAX,
)

# --- pool -------------------------------------------------------------------------------------------------------------

POOL_OCCUPANCY = _add(
    "pool/occupancy(%)",
    GAUGE,
    "%",
    "largest used share of the pool during the step",
    steps=MAX,
    console="pool {:.0f}%",
)
POOL_BYTES_IN = _add("pool/bytes_in", COUNTER, "B", "bytes of features put by producers", steps=SUM)
POOL_BYTES_OUT = _add("pool/bytes_out", COUNTER, "B", "bytes of features got by consumers", steps=SUM)
POOL_WRITTEN = _add(
    "pool/bytes_in/TRANSPORT",
    COUNTER,
    "B",
    "bytes written into the pool: features (`own`, the producer's own segment), gradients by the transport that "
    "carried them",
    steps=SUM,
)
POOL_READ = _add(
    "pool/bytes_out/TRANSPORT",
    COUNTER,
    "B",
    "bytes read out of the pool by each transport ([pool](pool.md#transports)), by all ranks that read",
    steps=SUM,
)
POOL_SECONDS = _add(
    "pool/seconds",
    GAUGE,
    "s",
    "time in calls of the pool (put, get, gradients, release, free), of the rank that spent most",
    ranks=MAX,
    steps=SUM,
)
POOL_PINNED = _add(
    "pool/pinned_bytes",
    GAUGE,
    "B",
    "bytes of segments that the ranks have page-locked for a GPU; 0 without one, or where the driver refused",
    ranks=SUM,
    steps=MAX,
)

# --- flow -------------------------------------------------------------------------------------------------------------

PRODUCTION_RATE = _add(
    "flow/production_rate",
    GAUGE,
    "tokens/s",
    "vision tokens per busy second of the producers (mean over ranks): the smaller of the two is the bottleneck",
    steps=MEAN,
)
CONSUMPTION_RATE = _add(
    "flow/consumption_rate", GAUGE, "tokens/s", "vision tokens per busy second of the consumers", steps=MEAN
)
STARVATION = _add(
    "flow/starvation(s)",
    GAUGE,
    "s",
    "waiting for features, mean over consumer ranks",
    ranks=MEAN,
    steps=SUM,
    console="starved {:.2f}s",
)
STALL = _add("flow/stall(s)", GAUGE, "s", "waiting for room or orders, mean over producer ranks", ranks=MEAN, steps=SUM)

# --- packs ------------------------------------------------------------------------------------------------------------

PACK_FILL = _add("pack/fill(%)", GAUGE, "%", "tokens over the packs' capacity", steps=MEAN)
PACK_IMBALANCE = _add(
    "pack/imbalance",
    GAUGE,
    "",
    "largest over mean predicted time of the consumers; 1 is even",
    ranks=IMBALANCE,
    steps=MEAN,
)
PACK_IMBALANCE_MEASURED = _add(
    "pack/imbalance_measured", GAUGE, "", "the same of measured times", ranks=IMBALANCE, steps=MEAN
)
ENCODE_IMBALANCE = _add(
    "pack/imbalance_encoder",
    GAUGE,
    "",
    "the same of producers, predicted over the units that each encoded",
    ranks=IMBALANCE,
    steps=MEAN,
)
ENCODE_IMBALANCE_MEASURED = _add(
    "pack/imbalance_encoder_measured",
    GAUGE,
    "",
    "the same of producers, of measured times",
    ranks=IMBALANCE,
    steps=MEAN,
)
LOAD_OF = _add(
    "pack/load/RANK",
    GAUGE,
    "",
    "measured time of a rank (`producer-0`) over the mean of its side; of sides of 2 to 16 ranks",
    steps=MEAN,
)
COST_ERROR = _add(
    "pack/cost_error(%)",
    GAUGE,
    "%",
    "mean of |predicted - measured| / measured over the packs: a fitted cost model predicts seconds, the FLOPs model "
    "by the pace of the packs before; null for the first step",
    steps=MEAN,
)

# --- the plan, with `allocation.replan` other than `off` --------------------------------------------------------------

PLAN_PRODUCERS = _add("plan/producers", GAUGE, "", "producers at the step's end", steps=LAST, optional=True)
PLAN_DRIFT = _add(
    "plan/drift(%)",
    GAUGE,
    "%",
    "how far the load is from what the plan was made for; null while the window fills",
    steps=LAST,
    optional=True,
)
PLAN_PROPOSAL = _add(
    "plan/proposal", GAUGE, "", "number of producers proposed at this step, else null", steps=LAST, optional=True
)

# --- devices: the newest sample of each (`nvml`), NODE and number as in n0g1; n0 where the node has none to ask ------

DEVICE_STATE = _add(
    "device/state/DEVICE",
    FACT,
    "",
    "`ok`, or why figures of this device (n0g1: GPU 1 of node 0) or of the whole node (n0) are null",
    optional=True,
)
DEVICE_THROTTLE = _add("device/throttle/DEVICE", FACT, "", "what slows its clocks down: power or heat", optional=True)
DEVICE_UTILIZATION = _add(
    "device/utilization/DEVICE(%)", GAUGE, "%", "share of time in which a kernel ran", steps=MEAN, optional=True
)
DEVICE_MEMORY = _add(
    "device/memory_used/DEVICE(GiB)", GAUGE, "GiB", "memory in use, by all processes", steps=MAX, optional=True
)
DEVICE_POWER = _add("device/power/DEVICE(W)", GAUGE, "W", "electric power", steps=MEAN, optional=True)
DEVICE_TEMPERATURE = _add("device/temperature/DEVICE(C)", GAUGE, "C", "of the chip", steps=MAX, optional=True)
DEVICE_PCIE = _add("device/pcie/DEVICE(B/s)", GAUGE, "B/s", "bytes over PCIe, both ways", steps=MEAN, optional=True)
DEVICE_NVLINK = _add(
    "device/nvlink/DEVICE(B/s)", GAUGE, "B/s", "bytes over NVLink, both ways, all links", steps=MEAN, optional=True
)
DEVICE_THROTTLED = _add(
    "device/throttled/DEVICE", GAUGE, "", "1 while power or heat slows its clocks down", steps=MEAN, optional=True
)
