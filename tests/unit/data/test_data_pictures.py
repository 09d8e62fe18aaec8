"""Pictures: every mode becomes the same RGB, and every way of being broken has its reason."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from data_rows import png
from PIL import Image

from flowtrain.data.errors import BadImage
from flowtrain.data.pictures import load_picture, picture_size
from flowtrain.data.sources.base import ImageRef

LIMIT = 10**6


def ref(data: bytes) -> ImageRef:
    return ImageRef(data, "image 1 of rows.jsonl:3")


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixel(data: bytes) -> tuple[int, ...]:
    picture = load_picture(ref(data), LIMIT)
    assert picture.mode == "RGB"
    assert picture_size(ref(data), LIMIT) == (picture.height, picture.width)
    return tuple(np.asarray(picture)[0, 0].tolist())


@pytest.mark.parametrize(
    ("mode", "colour", "kind", "expected"),
    [
        ("RGB", (10, 20, 30), "PNG", (10, 20, 30)),
        ("L", 77, "PNG", (77, 77, 77)),
        ("1", 1, "PNG", (255, 255, 255)),
        ("RGBA", (10, 20, 30, 255), "PNG", (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), "PNG", (255, 255, 255)),
        ("LA", (77, 0), "PNG", (255, 255, 255)),
        ("CMYK", (0, 0, 0, 255), "TIFF", (0, 0, 0)),
        ("I;16", 257 * 100, "PNG", (100, 100, 100)),
    ],
)
def test_modes(mode: str, colour: object, kind: str, expected: tuple[int, ...]) -> None:
    assert pixel(png(5, 7, mode, colour, kind)) == expected


def test_a_transparent_palette_entry_is_laid_over_white() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 0, 0])
    assert pixel(saved(image)) == (200, 0, 0)
    assert pixel(saved(image, transparency=1)) == (255, 255, 255)


def test_the_first_frame_of_several() -> None:
    frames = [Image.new("RGB", (6, 4), (value, 0, 0)) for value in (250, 120, 0)]
    assert pixel(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))[0] == 250


def test_exif_orientation_turns_size_and_pixels() -> None:
    image = Image.new("RGB", (8, 4))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(image, "PNG", exif=exif)
    assert picture_size(ref(data), LIMIT) == (8, 4)
    upright = load_picture(ref(data), LIMIT)
    assert upright.size == (4, 8)
    assert upright.getpixel((3, 0)) == (255, 255, 255)


def noise(side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP"])
def test_a_cut_off_file_has_a_size_and_no_pixels(kind: str) -> None:
    data = saved(noise(64), kind)
    cut = data[: len(data) * 6 // 10]
    with pytest.raises(BadImage, match=r"image 1 of rows\.jsonl:3") as caught:
        load_picture(ref(cut), LIMIT)
    assert caught.value.reason == "image-undecodable"


def test_a_broken_checksum() -> None:
    data = bytearray(saved(noise(64)))
    place = data.index(b"IDAT") + 100
    data[place] ^= 0xFF
    with pytest.raises(BadImage) as caught:
        load_picture(ref(bytes(data)), LIMIT)
    assert caught.value.reason == "image-undecodable"


@pytest.mark.parametrize("data", [b"<html>404</html>", b"\0", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_image(data: bytes) -> None:
    with pytest.raises(BadImage) as caught:
        picture_size(ref(data), LIMIT)
    assert caught.value.reason == "image-undecodable"


@pytest.mark.parametrize(("side", "limit"), [(20_000, 89_478_485), (1001, 10**6)])
def test_too_many_pixels_are_refused_at_the_header(side: int, limit: int) -> None:
    """400 million pixels of one colour are half a megabyte on disk; refusing them must not decode them."""
    data = png(side, side, "1", 0)
    for read in (picture_size, load_picture):
        with pytest.raises(BadImage, match=str(limit)) as caught:
            read(ref(data), limit)
        assert caught.value.reason == "image-too-large"
    assert Image.MAX_IMAGE_PIXELS == 89_478_485


def test_the_limit_may_be_raised_above_pillows_own() -> None:
    data = png(20_000, 20_000, "1", 0)
    assert picture_size(ref(data), 400_000_000) == (20_000, 20_000)


def test_values_that_are_not_files(tmp_path: Path) -> None:
    for value, reason in (
        (tmp_path / "gone.png", "image-missing"),
        (tmp_path, "image-missing"),
        ("data:image/png,abc", "image-undecodable"),
        ("data:image/png;base64,@@", "image-undecodable"),
    ):
        with pytest.raises(BadImage) as caught:
            picture_size(ImageRef(value, "it"), LIMIT)
        assert caught.value.reason == reason
