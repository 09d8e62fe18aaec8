"""Small pictures and rows for tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def png(width: int = 32, height: int = 32, mode: str = "RGB", colour: Any = 100, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), colour).save(file, kind)
    return file.getvalue()


def conversation(
    answer: Any = "A cat.", images: Any = ("a.png",), prompt: str = "<image>What is it?"
) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": list(images)}
