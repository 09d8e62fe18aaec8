"""`model.compile`: the backbone's layers by torch.compile, each what lies between attention and collectives.

    norm, q k v, rotation │ attention over packs │ o, + , norm, MLP, +
         compiled         │  as it is: borders   │     compiled         with any number of tokens

Only `forward` of a layer is compiled, so hooks on it (FSDP's gathering, gradient checkpointing) stay outside, and the
layers of one kind share what is compiled. Collectives and kernels for packs are marked where they are defined.
"""

from __future__ import annotations

from typing import Any

import torch

from flowtrain.errors import PlanError
from flowtrain.models.sections import decoder_layers


def compile_layers(model: Any, device: torch.device, backend: str = "inductor") -> None:
    """Compile each layer of the language model on its first forwards, in place; `backend`: torch's maker of kernels.

    Raises:
        PlanError: torch cannot compile on this machine.
    """
    from torch._inductor import config

    config.compile_threads = 1  # else a pool of processes, beside those of the run
    try:
        torch.compile(torch.neg, dynamic=True, backend=backend)(torch.ones(2, device=device))
    except Exception as error:
        why = str(error).strip().splitlines()[0]
        raise PlanError(f"model.compile: torch.compile does not work here ({why}): set model.compile: false") from error
    for _, layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
