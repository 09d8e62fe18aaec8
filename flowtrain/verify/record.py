"""What one step did, in the one form in which a run and the reference are compared, and how a run's files become it.

RUN_DIR/samples.jsonl ────────────────────────────────▶ ids            ┐
RUN_DIR/metrics.jsonl ─── loss (hexadecimal), norms ──▶ numbers        ├─▶ StepRecord
RUN_DIR/verify/step-N/{producer,consumer}-*.safetensors ▶ gradients,   │
                                                        parameters     ┘
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from flowtrain.errors import FlowTrainError
from flowtrain.types import Module

SIDES = ("producer", "consumer")


@dataclass(frozen=True)
class StepRecord:
    """One update. Tensors are named as in the whole model.

    Attributes:
        ids: rows trained, one entry for each time a row was trained.
        trained_tokens: tokens with a label among them.
        loss: mean over the trained tokens.
        norms: gradient norm of each module that a row reached, before clipping.
        grad_norm: the same over all modules.
        rates: learning rate of each module that trains.
        gradients: of the mean loss, before clipping; a parameter that no row reached is absent.
        parameters: after the update.
        repeated: tensors that both sides of a run hold.
    """

    step: int
    ids: tuple[str, ...]
    trained_tokens: int
    loss: float
    norms: Mapping[Module, float]
    grad_norm: float
    rates: Mapping[Module, float]
    gradients: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    num_rows: int | None = None
    repeated: tuple[str, ...] = field(default=())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; none when the file is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


class RecordedRun:
    """The steps of a run started with `--verify`, read one at a time: tensors of one step are in memory at once."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._metrics = {record["step"]: record for record in read_lines(run_dir / "metrics.jsonl")}
        self._packs: dict[int, list[dict[str, Any]]] = {}
        for pack in read_lines(run_dir / "samples.jsonl"):
            self._packs.setdefault(pack["step"], []).append(pack)

    @property
    def steps(self) -> list[int]:
        return sorted(self._metrics)

    def ids(self, step: int) -> tuple[str, ...]:
        """Rows of one step, pack by pack."""
        packs = sorted(self._packs.get(step, []), key=lambda pack: (pack["pack"], pack["rank"]))
        places = [(pack["pack"], pack["rank"]) for pack in packs]
        if len(set(places)) != len(places):
            raise FlowTrainError(f"{self.run_dir / 'samples.jsonl'}: step {step} names a pack of a rank twice")
        return tuple(row_id for pack in packs for row_id in pack["ids"])

    def folder(self, step: int) -> Path:
        return self.run_dir / "verify" / f"step-{step}"

    def read(self, step: int) -> StepRecord:
        metrics = self._metrics[step]
        gradients, repeated_gradients = self._tensors(step, "gradients")
        parameters, repeated_parameters = self._tensors(step, "parameters")
        return StepRecord(
            step=step,
            ids=self.ids(step),
            trained_tokens=metrics["tokens/trained"],
            loss=float.fromhex(metrics["loss_hex"]),
            norms=_by_module(metrics, "grad_norm"),
            grad_norm=float("nan") if metrics["grad_norm"] is None else metrics["grad_norm"],
            rates=_by_module(metrics, "lr"),
            gradients=gradients,
            parameters=parameters,
            num_rows=metrics["rows"],
            repeated=(*repeated_gradients, *repeated_parameters),
        )

    def _tensors(self, step: int, kind: str) -> tuple[dict[str, torch.Tensor], list[str]]:
        """All tensors of one kind, and the names that several files hold."""
        union: dict[str, torch.Tensor] = {}
        repeated: list[str] = []
        for side in SIDES:
            for path in sorted(self.folder(step).glob(f"{side}-{kind}-*.safetensors")):
                tensors = load_file(path)
                repeated += sorted(union.keys() & tensors.keys())
                union |= tensors
        return union, repeated


def _by_module(metrics: Mapping[str, Any], name: str) -> dict[Module, float]:
    values = {module: metrics.get(f"{name}/{module.value}") for module in Module}
    return {module: value for module, value in values.items() if value is not None}
