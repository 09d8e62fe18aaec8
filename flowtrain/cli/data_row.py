"""One row on the terminal, as the model sees it: `flowtrain data show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowtrain.data.errors import BadImage, BadRow
from flowtrain.data.pictures import load_picture
from flowtrain.data.sample import SampleBuilder
from flowtrain.data.show import half_blocks, masked_text, token_runs
from flowtrain.data.sources.base import ImageRef
from flowtrain.errors import DataError
from flowtrain.types import SkippedRow


def find_row(builder: SampleBuilder, wanted: str) -> int:
    """Row number of a number or an id; an id that looks like a number is found when there is no such row number."""
    num_rows = len(builder.source)
    if wanted.isdecimal() and int(wanted) < num_rows:
        return int(wanted)
    for number in range(num_rows):
        try:
            row_id = builder.source.row(number).id
        except BadRow as error:
            row_id = error.row_id or ""
        if row_id == wanted:
            return number
    raise DataError(f"{builder.source.path} has no row {wanted}: it has {num_rows} rows, numbered from 0")


def show_row(builder: SampleBuilder, number: int, console: Console) -> dict[str, Any]:
    """Print one row: text with the trained tokens marked, pictures, token counts; returns the same as plain data."""
    built = builder.build(number, number, 0, 0)
    if isinstance(built, SkippedRow):
        console.print(Text(f"row {number} ({built.id}) cannot be used, {built.reason}: {built.detail}"), soft_wrap=True)
        return {"row": number, "id": built.id, "skipped": built.reason, "detail": built.detail}
    sample, tokens = built
    console.rule(Text(f"row {number} · {sample.id}"))
    if console.is_terminal:
        text = Text()
        for run in token_runs(builder.measure, tokens):
            shown = f"{run.text}×{run.num_image_tokens}" if run.num_image_tokens else run.text
            text.append(shown, style="bold green" if run.trained else "cyan" if run.num_image_tokens else "dim")
        console.print(text)
    else:
        console.print(Text(masked_text(builder.measure, tokens)), soft_wrap=True)
    if sample.images:
        table = Table()
        table.add_column("image", overflow="fold")
        for heading in ("width × height", "patches", "tokens"):
            table.add_column(heading, justify="right", no_wrap=True)
        refs = builder.source.row(number).images
        for place, (ref, image) in enumerate(zip(refs, sample.images, strict=True), 1):
            name = _image_name(ref, place, builder.source.path)
            table.add_row(Text(name), f"{image.width} × {image.height}", str(image.patches), str(image.tokens))
        console.print(table)
        if console.is_terminal:
            _print_pictures(builder, number, console)
    console.print(
        f"{sample.tokens} tokens: {sample.text_tokens} text, {sample.vision_tokens} image; "
        f"{sample.trained_tokens} trained"
    )
    return {
        "row": number,
        "id": sample.id,
        "text": masked_text(builder.measure, tokens),
        "tokens": {"text": sample.text_tokens, "vision": sample.vision_tokens, "trained": sample.trained_tokens},
        "images": [
            {"height": image.height, "width": image.width, "patches": image.patches, "tokens": image.tokens}
            for image in sample.images
        ],
        "input_ids": tokens.input_ids.tolist(),
        "labels": tokens.labels.tolist(),
    }


def _image_name(ref: ImageRef, place: int, data_file: Path) -> str:
    """Its number in the row and, where it is a file, its path as the row gives it."""
    if not isinstance(ref.value, Path):
        return str(place)
    folder = data_file if data_file.is_dir() else data_file.parent
    return f"{place}  {ref.value.relative_to(folder) if ref.value.is_relative_to(folder) else ref.value}"


def _print_pictures(builder: SampleBuilder, number: int, console: Console) -> None:
    """Each picture in half blocks, side by side as far as the terminal is wide."""
    thumbnails = []
    for ref in builder.source.row(number).images:
        try:
            picture = load_picture(ref, builder.config.max_image_pixels)
        except BadImage as error:
            thumbnails.append(Text(str(error), style="red"))
            continue
        art = Text()
        for line in half_blocks(picture, max_columns=24, max_rows=12):
            for upper, lower in line:
                art.append("▀", style=f"{upper} on {lower}")
            art.append("\n")
        thumbnails.append(art)
    console.print(Columns(thumbnails))
