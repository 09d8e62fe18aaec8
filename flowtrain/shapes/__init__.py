"""Module shapes, read from the `config.json` of a Hugging Face model folder and nothing else (no torch, contract C14).

    config.json ──read_shape──▶ ModelShape ─┬─ features(cut) ──▶ what crosses the cut, for pool and plan
                                            ├─ parameters(module)
                                            └─ text, encoders ──▶ `flowtrain.flops`, allocator

| file | holds |
|---|---|
| `text.py` | the backbone: attention, windows, experts |
| `encoder.py` | an encoder, vision or audio, and its projector |
| `model.py` | the whole model, and which families can be cut |
| `read.py`, `keys.py` | reading config.json |
| `families.py` | which parts a family has, and where |
| `backbones.py`, `towers.py`, `projectors.py` | the kinds of parts |
| `payload.py` | places of a sample's tensors in its block of the pool |
"""

from flowtrain.shapes.encoder import EncoderShape, Modality, ProjectorShape
from flowtrain.shapes.model import CUT_FAMILIES, ModelShape, check_family
from flowtrain.shapes.payload import ALIGNMENT, DTYPE_BYTES, feature_specs, payload_bytes
from flowtrain.shapes.read import read_shape
from flowtrain.shapes.text import Mixer, MoeShape, RecurrentShape, TextShape

__all__ = [
    "ALIGNMENT",
    "CUT_FAMILIES",
    "DTYPE_BYTES",
    "EncoderShape",
    "Mixer",
    "Modality",
    "ModelShape",
    "MoeShape",
    "ProjectorShape",
    "RecurrentShape",
    "TextShape",
    "check_family",
    "feature_specs",
    "payload_bytes",
    "read_shape",
]
