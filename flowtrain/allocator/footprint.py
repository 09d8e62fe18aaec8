"""Bytes of the fullest device of each candidate, in the form that the search asks for (`MemoryModel`)."""

from __future__ import annotations

import numpy as np

from flowtrain.allocator.load import CandidateTable, Floats, ModuleLoad
from flowtrain.allocator.throughput import Job


def device_bytes(load: ModuleLoad, c: CandidateTable, job: Job) -> Floats:
    """Weights, gradients, optimizer, gathered layers, activations and logits; the device's context is not in it."""
    width = job.bytes_per_number
    share = load.parameters / (c.tp * c.pp)
    trained = load.trained_parameters / (c.tp * c.pp * c.shard_degree)
    gathered = np.where(c.shard_degree > 1, 2 * share / np.maximum(1.0, load.layers / c.pp) * width, 0.0)
    rows = c.pack_tokens / (c.tp * c.cp)
    of_layer = width * (4 * load.hidden + 2 * (load.heads + load.kv_heads) * load.head_dim + 3 * load.mlp_width)
    kept = np.array([1.0, 0.6, 0.0])[c.recompute] * of_layer + width * load.hidden
    in_flight = np.minimum(c.pp, np.maximum(1, c.pp)) if load.needs_backward else 1
    activations = rows * (kept * load.layers / c.pp * in_flight if load.needs_backward else 0.0) + rows * of_layer
    logits = 6.0 * load.vocab * rows
    total: Floats = share / c.shard_degree * width + 16 * trained + gathered + activations + logits
    return total
