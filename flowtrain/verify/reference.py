"""The plain single-process Hugging Face loop that a decoupled run is compared with.

One uncut model, one sample at a time, everything that the processor returns passed in, gradients accumulated over the
step's rows and divided once by its trained tokens. No packs, no pool, no cut, no Ray, and no code of the runtime but
`flowtrain.data.sources`, which reads the rows:

    rows of the step ─▶ processor ─▶ model(**inputs).logits ─▶ Σ token cross entropy ─▶ backward        (each row)
    p.grad / trained tokens ─▶ norms in float64 ─▶ StepRecord.gradients
    clip by one global norm ─▶ torch.optim.AdamW ─▶ StepRecord.parameters                               (each step)

The loss is computed in the model's dtype: the one inside transformers' `forward` goes through float32.
A parameter that no row reached keeps `grad` None, so the optimizer passes it over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoProcessor

from flowtrain.config.schema import Config, TrainConfig
from flowtrain.data.sources import RawRow
from flowtrain.errors import ConfigError
from flowtrain.types import Module
from flowtrain.verify.labels import IGNORED, example
from flowtrain.verify.model import build_model, decays, modules_of
from flowtrain.verify.record import StepRecord

DTYPES = {"float64": torch.float64, "float32": torch.float32}
CLIP_EPS = 1e-6


def load_processor(config: Config) -> Any:
    """The model folder's processor with the config's pixel bounds."""
    bounds = {"max_pixels": config.data.max_pixels, "min_pixels": config.data.min_pixels}
    given = {name: value for name, value in bounds.items() if value is not None}
    return AutoProcessor.from_pretrained(
        config.model.path, trust_remote_code=config.model.trust_remote_code, local_files_only=True, **given
    )


def learning_rate(train: TrainConfig, module: Module, step: int, num_steps: int) -> float:
    """Peak · (ramp from 0 over the warm-up, then the schedule's share), for update `step` from 1."""
    peak = train.module_lr.get(module.value, train.lr)
    warmup = train.warmup_steps
    if warmup is None:
        warmup = math.ceil(num_steps * (0.03 if train.warmup_ratio is None else train.warmup_ratio))
    if step <= warmup:
        return peak * (step / warmup)
    done = min((step - 1 - warmup) / max(num_steps - warmup, 1), 1.0)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[train.schedule]
    floor = 1.0 if train.schedule == "constant" else train.min_lr_ratio
    return peak * (floor + (1 - floor) * share)


class Reference:
    """Trains the same rows as a run, step by step.

    Args:
        config: the run's config; `debug.faults` is not read here.
        weights_dir: whole-model safetensors to start from.
        num_steps: steps in all, for the learning-rate curve.

    Example:
        >>> reference = Reference(config, weights_dir, num_steps=5)      # doctest: +SKIP
        >>> reference.step(1, rows).loss                                 # doctest: +SKIP
    """

    def __init__(self, config: Config, weights_dir: Path, num_steps: int) -> None:
        if config.model.dtype not in DTYPES:
            raise ConfigError(f"model.dtype: {config.model.dtype} cannot be verified; use float64 or float32")
        self.config = config
        self.num_steps = num_steps
        self.processor = load_processor(config)
        self.dtype = DTYPES[config.model.dtype]
        self.model = build_model(config.model.path, weights_dir, self.dtype, config.model.trust_remote_code)
        self.modules: Mapping[str, Module] = modules_of(self.model)
        self.parameters: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        frozen = set(config.train.freeze)
        self.trained = tuple(name for name, module in self.modules.items() if module.value not in frozen)
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name in set(self.trained))
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.AdamW:
        """One group for each module with decay and one without."""
        train = self.config.train
        decayed = decays(self.model)
        groups: dict[tuple[Module, bool], list[torch.nn.Parameter]] = {}
        for name in self.trained:
            groups.setdefault((self.modules[name], decayed[name]), []).append(self.parameters[name])
        return torch.optim.AdamW(
            [
                {"params": group, "weight_decay": train.weight_decay if decay else 0.0, "module": module}
                for (module, decay), group in groups.items()
            ],
            lr=train.lr,
            betas=train.betas,
            eps=train.eps,
        )

    def loss_of(self, row: RawRow) -> tuple[torch.Tensor, int]:
        """Sum of the token losses of one row, and the number of its trained tokens."""
        inputs, labels = example(self.processor, row)
        given = {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        logits_TV = self.model(**given, use_cache=False).logits[0]
        assert logits_TV.dtype == self.dtype, f"logits are {logits_TV.dtype}"
        targets = labels[1:]
        loss = cross_entropy(logits_TV[:-1], targets, ignore_index=IGNORED, reduction="sum")
        return loss, int((targets != IGNORED).sum())

    def step(self, step: int, rows: Sequence[RawRow]) -> StepRecord:
        """One update over these rows, in the order of the source, each as often as it is given."""
        rows = sorted(rows, key=lambda row: row.index)
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, trained_tokens = 0.0, 0
        for row in rows:
            loss, tokens = self.loss_of(row)
            if loss.requires_grad:
                loss.backward()
            loss_sum += loss.item()
            trained_tokens += tokens
        gradients = {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}
        for gradient in gradients.values():
            gradient /= max(trained_tokens, 1)
        norms = self._norms(gradients)
        grad_norm = math.sqrt(math.fsum(norm**2 for norm in norms.values()))
        kept = {name: gradient.clone() for name, gradient in gradients.items()}
        rates = self._update(step, gradients, grad_norm) if trained_tokens else {}
        return StepRecord(
            step=step,
            ids=tuple(row.id for row in rows),
            trained_tokens=trained_tokens,
            loss=loss_sum / max(trained_tokens, 1),
            norms=norms,
            grad_norm=grad_norm,
            rates=rates,
            gradients=kept,
            parameters=self.snapshot(),
            num_rows=len(rows),
        )

    def adopt(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Go on from these parameters: those of a run that agreed so far.

        Some families compute norms and rotations in float32 inside, whatever the dtype. A difference of 1e-16 then now
        and then flips the last bit of a float32 number, and what follows grows from step to step: with the same
        parameters before each step, every step is compared for itself. What is carried over is bounded by the limit on
        parameters.
        """
        with torch.no_grad():
            for name, value in parameters.items():
                self.parameters[name].copy_(value)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy of every parameter as it is now."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def _norms(self, gradients: Mapping[str, torch.Tensor]) -> dict[Module, float]:
        squares: dict[Module, float] = {}
        for name, gradient in gradients.items():
            module = self.modules[name]
            squares[module] = squares.get(module, 0.0) + float(gradient.double().square().sum())
        return {module: math.sqrt(value) for module, value in squares.items()}

    def _update(self, step: int, gradients: Mapping[str, torch.Tensor], grad_norm: float) -> dict[Module, float]:
        """Clip by the one norm over all modules, then AdamW; returns the rates used."""
        clip_norm = self.config.train.clip_norm
        if clip_norm is not None:
            factor = min(clip_norm / (grad_norm + CLIP_EPS), 1.0)
            for gradient in gradients.values():
                gradient *= factor
        rates: dict[Module, float] = {}
        for group in self.optimizer.param_groups:
            module = group["module"]
            group["lr"] = rates[module] = learning_rate(self.config.train, module, step, self.num_steps)
        self.optimizer.step()
        return rates
