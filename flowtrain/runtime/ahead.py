"""How many steps are composed before they run (pure, contract C10)."""

from __future__ import annotations

from flowtrain.runtime.flow import Flow

COMPOSE_AHEAD = 3
"""Steps composed before the current one is done, so that readers and composition are never waited for."""

RUN_AHEAD = 64
"""The same with a frozen encoder whose producers have nothing to do: they run ahead as far as the pool has room."""


def may_compose(flow: Flow, composed: int) -> bool:
    """Whether the step behind `composed`, the last one so far, is to be composed now."""
    idle = not flow.trainable_encoder and not flow.units_waiting
    return composed - flow.version < (RUN_AHEAD if idle else COMPOSE_AHEAD)
