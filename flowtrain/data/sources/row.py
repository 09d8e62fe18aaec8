"""From a stored row to the one form: which shapes of conversations and images are understood.

| stored | understood as |
|---|---|
| `messages: [{role, content}]`, `conversations: [{from, value}]` | messages; roles human, gpt, bot, model too |
| content a string with `<image>` in it | text and image parts, split at each `<image>` |
| content a list of parts (`text`, `image`, `image_url`) | the same parts; an image inside a part is taken from there |
| `system: text` | a first message of that role |
| `images: […]` or `image: …` | the row's images, in order of their places |
| an image: bytes, `{bytes, path}`, a path relative to the file, a URL, `data:image/…` | a reference, read when needed |

Two user turns in a row, or a first turn of the assistant, are handed to the chat template as they are. Everything else
is a bad row with its reason: nothing is dropped or guessed. Relative paths of a file at a URL are addresses beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowtrain import mirror
from flowtrain.data.errors import BadRow
from flowtrain.data.sources.base import ImageRef, RawRow

IMAGE_TAG = "<image>"
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
}
COLUMNS = ("id", "messages", "conversations", "system", "images", "image")


def parse_row(stored: object, index: int, where: str, folder: Path) -> RawRow:
    """BadRow names what is wrong; `folder` is where relative image paths start."""
    if not isinstance(stored, Mapping):
        raise BadRow("bad-messages", f"{where} is {_kind(stored)}, not an object with `messages`")
    row_id = _id(stored.get("id"), index)
    try:
        messages, inline = _messages(stored, where)
        images = _images(stored, inline, where, folder)
        num_places = sum(part["type"] == "image" for message in messages for part in message["content"])
        if num_places != len(images):
            raise BadRow(
                "image-count",
                f"{where} has {len(images)} images and {num_places} places for them ({IMAGE_TAG} or image parts)",
            )
    except BadRow as error:
        error.row_id = row_id
        raise
    return RawRow(index, row_id, messages, images, where)


def _id(value: object, index: int) -> str:
    if isinstance(value, str) and value.strip():
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return f"row-{index}"


def _messages(stored: Mapping[str, Any], where: str) -> tuple[tuple[dict[str, Any], ...], list[Any]]:
    key = next((key for key in ("messages", "conversations") if stored.get(key) is not None), None)
    if key is None:
        raise BadRow("bad-messages", f"{where} has neither `messages` nor `conversations`")
    turns = stored[key]
    if not isinstance(turns, list) or not turns:
        raise BadRow("bad-messages", f"`{key}` of {where} is {_kind(turns)}, not a list of turns")
    inline: list[Any] = []
    messages = [_message(turn, f"{key}[{number}] of {where}", inline) for number, turn in enumerate(turns)]
    system = stored.get("system")
    if system is not None and system != "":
        messages.insert(0, {"role": "system", "content": _parts(system, f"`system` of {where}", inline)})
    return tuple(messages), inline


def _message(turn: object, where: str, inline: list[Any]) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise BadRow("bad-messages", f"{where} is {_kind(turn)}, not an object with a role and a content")
    told = turn.get("role", turn.get("from"))
    role = ROLES.get(told) if isinstance(told, str) else None
    if role is None:
        raise BadRow("bad-messages", f"{where} has the role {told!r}; known are {', '.join(sorted(ROLES))}")
    content = turn.get("content", turn.get("value"))
    return {"role": role, "content": _parts(content, where, inline)}


def _parts(content: object, where: str, inline: list[Any]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return _split(_text(content, where))
    if isinstance(content, list):
        return [_part(part, where, inline) for part in content]
    raise BadRow("bad-messages", f"the content of {where} is {_kind(content)}, not text or a list of parts")


def _split(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(IMAGE_TAG)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]


def _part(part: object, where: str, inline: list[Any]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": _text(part, where)}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", "image", "image_url"):
        raise BadRow("bad-messages", f"{where} has a part of type {kind!r}; known are text, image and image_url")
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise BadRow("bad-messages", f"a text part of {where} is {_kind(text)}, not text")
        return {"type": "text", "text": _text(text, where)}
    value = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    if value is not None:
        inline.append(value.get("url") if kind == "image_url" and isinstance(value, Mapping) else value)
    return {"type": "image"}


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("bad-messages", f"{where} has half a character (a lone surrogate) at {error.start}") from error
    return text


def _images(stored: Mapping[str, Any], inline: Sequence[Any], where: str, folder: Path) -> tuple[ImageRef, ...]:
    column = stored.get("images")
    if column is None:
        column = stored.get("image")
    values = [] if column is None or column == "" else column if isinstance(column, list) else [column]
    if values and inline:
        raise BadRow("image-count", f"{where} has images in its parts and {len(values)} more beside the messages")
    return tuple(
        _image(value, f"image {number} of {where}", folder) for number, value in enumerate(values or inline, start=1)
    )


def _image(value: object, label: str, folder: Path) -> ImageRef:
    if isinstance(value, Mapping):
        data = value.get("bytes")
        if isinstance(data, bytes) and data:
            name = value.get("path")
            return ImageRef(data, f"{label} ({name})" if name else label)
        value = value.get("path") if data is None or isinstance(data, bytes) else data
    if isinstance(value, bytes) and value:
        return ImageRef(value, label)
    if not isinstance(value, str) or not value:
        raise BadRow("image-missing", f"{label} is {_kind(value)}, not bytes, a path or a data URI")
    if value.startswith("data:"):
        return ImageRef(value, label)
    if "\0" in value:
        raise BadRow("image-missing", f"{label} has a path with a zero character")
    url = value if mirror.is_url(value) else mirror.shown(folder / value)
    try:
        path = mirror.local_path(url) if mirror.is_url(url) else Path(url)
    except mirror.FetchError as error:
        raise BadRow("image-missing", f"{label}: {error}") from error
    return ImageRef(path, f"{label} ({mirror.shown(path)})")


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    name = names.get(type(value), f"of type {type(value).__name__}")
    return f"an empty {name.removeprefix('a ').removeprefix('an ')}" if value in ("", [], {}) else name
