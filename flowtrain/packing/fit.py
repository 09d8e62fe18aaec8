"""Coefficients of the cost model from measured times: robust, non-negative, forgetting (pure, numpy only).

    packs    (Σℓ, Σ pairs, Σ trained, Σ patches, 1) ─┐
    encodes  (Σ patches, Σ pairs, calls) ────────────┼──▶ one line each ──▶ CostModel in seconds, with what it is worth
    backwards of the encoder, the same ──────────────┘

One line: seconds ≈ Σ coefficient · feature, found in these steps.

1. Rows are weighted by age (`HALF_LIFE` calls) and by 1 / predicted seconds, since relative errors are what counts.
2. The FLOPs model, scaled to the data, is the prior, right within a factor of two: it decides where the data cannot,
   such as between tokens and a pack's fixed part while all packs are alike.
3. Non-negative least squares; then again with the weights of residuals (Huber, then Tukey), so that a call that was
   interrupted, or the first of its kind, has no say.

Invariants: coefficients are finite and never negative; the same calls give the same line; a line that is worse than
the scaled FLOPs model, or bad in itself, is not used (`Line.trusted`). Times reach composition by the decision log
alone (contract C1).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from flowtrain.packing.cost import CostModel
from flowtrain.types import SampleMeta

HALF_LIFE = 256
MOST_KEPT = 1024
"""Calls kept of one kind: four half-lives."""

FEWEST = 24
"""Calls without which nothing is fitted."""

WARM_UP = 4
"""First calls of each process and kind that are left out: memory and kernels are still being set up."""

LEAST_NOISE = 0.01
"""Relative noise of a call's time that is assumed at least: times are never exact."""

WORST_ERROR = 0.25
WORSE = 1.05
"""How much larger than the scaled FLOPs model's error a line's may be: where both are alike either will do."""

WORST_R2 = 0.2
SPREAD = 0.15
"""Relative spread of the calls, as the FLOPs model sees them, from which a line must explain `WORST_R2` of the times,
as well as that model: equal packs leave nothing to explain, and the noise of single calls averages out over many."""

CLEARLY = 0.5
"""A line whose error is at most this share of the scaled FLOPs model's needs no other proof: calls that are mostly
their fixed part take nearly equal times, of which a line explains little."""

_ROUNDS = 8

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """A fitted line and what it is worth on the calls it was fitted to.

    Attributes:
        coefficients: seconds for one of each feature.
        scaled: the FLOPs model's coefficients times the one factor that suits the data best.
        num_calls: calls used.
        error: mean relative error of the line; `scaled_error`: of the scaled FLOPs model.
        r2: share of the variance of the times that the line explains.
        spread: relative deviation of the times that the scaled model predicts.
    """

    coefficients: tuple[float, ...]
    scaled: tuple[float, ...]
    num_calls: int
    error: float
    scaled_error: float
    r2: float
    spread: float

    @property
    def trusted(self) -> bool:
        explains = self.r2 >= WORST_R2 and self.error <= WORSE * self.scaled_error
        clearly = self.error <= CLEARLY * self.scaled_error
        return self.error <= WORST_ERROR and (explains or clearly or self.spread < SPREAD)

    @property
    def usable(self) -> tuple[float, ...]:
        """The line, or the scaled model where the line cannot be trusted."""
        return self.coefficients if self.trusted else self.scaled


class LineFit:
    """Calls of one kind; `prior`: the FLOPs model's coefficient of each feature, the last one the fixed part."""

    def __init__(self, prior: Sequence[float]) -> None:
        assert any(prior[:-1]), "a line needs a feature that the model expects to cost something"
        self.prior = np.asarray(prior, np.float64)
        # What costs nothing by the model is no part of the work; only the fixed part is never in it and always there.
        self._active = np.flatnonzero(self.prior > 0).tolist()
        if len(prior) - 1 not in self._active:
            self._active.append(len(prior) - 1)
        self.calls: deque[tuple[float, ...]] = deque(maxlen=MOST_KEPT)

    def add(self, features: Sequence[float], seconds: float) -> None:
        assert len(features) == len(self.prior), f"{len(features)} features for {len(self.prior)} coefficients"
        if seconds > 0 and math.isfinite(seconds) and any(features[:-1]):
            self.calls.append((*map(float, features), float(seconds)))

    def solve(self) -> Line | None:
        """None while there are too few calls."""
        if len(self.calls) < FEWEST:
            return None
        table = np.asarray(self.calls, np.float64)
        x, y = table[:, self._active], table[:, -1]
        prior = self.prior[self._active]
        age = 0.5 ** (np.arange(len(y))[::-1] / HALF_LIFE)
        guess = x @ prior
        factor = _weighted_median(y / guess, age * guess)
        scaled = factor * prior
        unit = np.maximum(factor * guess, 0.25 * np.median(y))
        rows, target = x / unit[:, None], y / unit
        weights, noise, found = age, WORST_ERROR, scaled
        for number in range(_ROUNDS):
            found = _non_negative(rows, target, weights, scaled, noise)
            residuals = target - rows @ found
            noise = max(1.4826 * float(np.median(np.abs(residuals))), LEAST_NOISE)
            weights = age * _resistance(residuals / noise, tukey=number >= _ROUNDS // 2)
        fitted = x @ found
        # Fitted as the line is, by the same weights: the middle and the mean differ where noise has one sign.
        fair = guess * float(np.sum(weights * guess * y / unit**2) / np.sum(weights * (guess / unit) ** 2))
        left = float(np.average((y - fitted) ** 2, weights=weights))
        whole = _deviation(y, weights) ** 2
        return Line(
            coefficients=self._all(found),
            scaled=self._all(scaled),
            num_calls=len(y),
            error=float(np.average(abs(fitted - y) / y, weights=weights)),
            scaled_error=float(np.average(abs(fair - y) / y, weights=weights)),
            r2=1.0 - left / whole if whole > 0 else 1.0,
            spread=_deviation(guess, weights) / float(np.average(guess, weights=weights)),
        )

    def _all(self, active: Floats) -> tuple[float, ...]:
        whole = np.zeros(len(self.prior))
        whole[self._active] = active
        return tuple(float(value) for value in whole)


def _non_negative(rows: Floats, target: Floats, weights: Floats, prior: Floats, noise: float) -> Floats:
    """argmin over c ≥ 0 of Σ w (row · c - target)² + pull towards `prior`: the best of the minima over all supports.

    A term's prior is as uncertain as the term is large in these rows, and a row as its noise: Bayes' weights.
    """
    size = np.average(rows**2, axis=0, weights=weights)
    pull = noise**2 * np.where(size > 0, size, 1.0)
    weighted = rows * weights[:, None]
    gram = weighted.T @ rows + np.diag(pull)
    right = weighted.T @ target + pull * prior
    best, lowest = np.zeros(len(prior)), 0.0
    for count in range(len(prior), 0, -1):
        for support in map(list, combinations(range(len(prior)), count)):
            part = np.linalg.solve(gram[np.ix_(support, support)], right[support])
            value = -float(right[support] @ part)
            if (part >= 0).all() and value < lowest:
                lowest, best = value, np.zeros(len(prior))
                best[support] = part
    return best


def _resistance(deviations: Floats, tukey: bool) -> Floats:
    """Weights that leave a row its say while its residual is ordinary, and take it away where it is not."""
    far = np.abs(deviations)
    if tukey:
        return np.where(far < 4.685, (1 - np.minimum(far / 4.685, 1) ** 2) ** 2, 0.0)
    return 1.345 / np.maximum(far, 1.345)


def _deviation(values: Floats, weights: Floats) -> float:
    mean = np.average(values, weights=weights)
    return math.sqrt(float(np.average((values - mean) ** 2, weights=weights)))


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


# --- both sides -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fitted:
    """A cost model in seconds, with the lines behind it; a line is None where its side has made too few calls."""

    cost: CostModel
    packs: Line
    encodes: Line | None
    backwards: Line | None

    @property
    def trusted(self) -> bool:
        """Whether composition may use it: the backbone's line decides the packs."""
        return self.packs.trusted


class CostFit:
    """Takes the times of calls and gives a cost model; `base`: the FLOPs model."""

    def __init__(self, base: CostModel) -> None:
        self.base = base
        real = base.coefficients()
        consumer = [real[name] for name in ("token", "token_pair", "trained_token", "projected_patch", "pack")]
        producer = [real[name] for name in ("patch", "patch_pair", "unit")]
        self._lines = {"pack": LineFit(consumer)}
        if any(producer[:-1]):
            self._lines |= {"encode": LineFit(producer), "backward": LineFit(producer)}
        self._seen: Counter[tuple[str, int]] = Counter()

    def trained(self, rank: int, samples: Sequence[SampleMeta], seconds: float) -> None:
        """A consumer rank has trained a pack of these samples."""
        self._add("pack", rank, pack_features(self.base, samples), seconds)

    def encoded(self, producer: int, samples: Sequence[SampleMeta], seconds: float) -> None:
        """A producer has encoded these samples in one call."""
        self._add("encode", producer, self._unit_features([samples]), seconds)

    def returned(self, producer: int, units: Sequence[Sequence[SampleMeta]], seconds: float) -> None:
        """A producer has run the backwards of these units."""
        self._add("backward", producer, self._unit_features(units), seconds)

    def solve(self) -> Fitted | None:
        """None while the consumers have made too few calls; `Fitted.trusted` tells whether it is worth using."""
        lines = {kind: fit.solve() for kind, fit in self._lines.items()}
        packs = lines["pack"]
        if packs is None:
            return None
        token, token_pair, trained_token, projected_patch, pack = packs.usable
        sides = [line for kind in ("encode", "backward") if (line := lines.get(kind)) is not None]
        if sides:
            patch, patch_pair, unit = (sum(values) for values in zip(*(line.usable for line in sides), strict=True))
        else:
            # No image yet: the encoder is taken to be as fast as the backbone.
            factor = packs.scaled[0] / self._lines["pack"].prior[0]
            real = self.base.coefficients()
            patch, patch_pair, unit = (float(factor * real[name]) for name in ("patch", "patch_pair", "unit"))
        cost = CostModel.from_coefficients(
            token=token,
            token_pair=token_pair,
            trained_token=trained_token,
            projected_patch=projected_patch,
            patch=patch,
            patch_pair=patch_pair,
            pack=pack,
            unit=unit,
            full_layers=self.base.full_layers,
            windowed_layers=self.base.windowed_layers,
            window_tokens=self.base.window_tokens,
        )
        return Fitted(cost, packs, lines.get("encode"), lines.get("backward"))

    def state(self) -> dict[str, Any]:
        """The calls kept, JSON-ready; the warm-up of processes is not part of it."""
        return {kind: [list(call) for call in fit.calls] for kind, fit in self._lines.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; what it says of a side that this run does not have is left out."""
        for kind, fit in self._lines.items():
            fit.calls.extend(tuple(call) for call in state.get(kind, ()))

    def _add(self, kind: str, rank: int, features: Sequence[float], seconds: float) -> None:
        if kind not in self._lines or not any(features[:-1]):
            return
        self._seen[kind, rank] += 1
        if self._seen[kind, rank] > WARM_UP:
            self._lines[kind].add(features, seconds)

    def _unit_features(self, units: Sequence[Sequence[SampleMeta]]) -> tuple[int, int, int]:
        samples = [sample for unit in units for sample in unit]
        return sum(sample.patches for sample in samples), sum(sample.patch_pairs for sample in samples), len(units)


def pack_features(cost: CostModel, samples: Iterable[SampleMeta]) -> tuple[int, int, int, int, int]:
    """Σℓ, Σ pairs(ℓ), Σ trained tokens, Σ patches, and 1 for the pack."""
    sizes = [(s.tokens, cost.token_pairs(s.tokens), s.trained_tokens, s.patches) for s in samples]
    tokens, pairs, trained, patches = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0, 0, 0)
    return tokens, pairs, trained, patches, 1
