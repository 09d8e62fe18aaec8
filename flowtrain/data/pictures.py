"""Pictures as they are stored: the size from the header, and the pixels as upright RGB.

| stored | becomes |
|---|---|
| grey, palette, CMYK, 1 bit | RGB, by Pillow's conversion |
| transparency (RGBA, LA, a transparent palette entry) | laid over white, as transformers' processors do |
| 16-bit grey (I;16, I) | scaled to 8 bits |
| several frames (GIF, WebP, APNG) | the first frame |
| an EXIF orientation | turned upright; the size told is the upright one |

Cut-off files are errors: Pillow's leave to fill them with grey stays off. An image with more pixels than
`max_image_pixels` is refused at its header, before anything is decoded; Pillow's own guard stands at the same figure
while one of our pictures is open.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, ImageOps, UnidentifiedImageError

from flowtrain.data.errors import BadImage
from flowtrain.data.sources.base import ImageRef

_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
"""EXIF orientations whose upright picture has width and height exchanged."""

_PNG_ORIENTATION_MARKS = (b"eXIf", b"exif", b"Orientation", b"XML:com.adobe.xmp")
"""Without any of these a PNG says nothing of its orientation: neither as EXIF, nor in a text chunk, nor as XMP."""

_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
)
"""What Pillow's format plug-ins raise on damaged files, beside its own errors."""


def picture_size(ref: ImageRef, max_image_pixels: int) -> tuple[int, int]:
    """(height, width) of the upright picture, from the header alone; BadImage when there is none to read."""
    with _opened(ref, max_image_pixels) as (image, stored):
        width, height = image.size
        turned = _may_be_turned(image, stored) and image.getexif().get(_ORIENTATION) in _TURNED
        return (width, height) if turned else (height, width)


def load_picture(ref: ImageRef, max_image_pixels: int) -> Image.Image:
    """The upright first frame as RGB; BadImage when it cannot be decoded whole."""
    with _opened(ref, max_image_pixels) as (image, _):
        image.load()
        upright = ImageOps.exif_transpose(image)
        return to_rgb(upright)


def _may_be_turned(image: Image.Image, stored: bytes) -> bool:
    """Whether it can hold an orientation: asking Pillow for that of a PNG decodes all of it, since it may come last."""
    return image.format != "PNG" or any(mark in stored for mark in _PNG_ORIENTATION_MARKS)


def to_rgb(image: Image.Image) -> Image.Image:
    """See the module's table."""
    if image.mode.startswith("I"):
        return image.convert("I").point(lambda value: value / 257).convert("L").convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    return image.convert("RGB")


@contextmanager
def _opened(ref: ImageRef, max_image_pixels: int) -> Iterator[tuple[Image.Image, bytes]]:
    """The picture with its header read, and its bytes; what Pillow raises inside becomes a BadImage that names it."""
    data = ref.read()
    default = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max_image_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
                if width * height > max_image_pixels:
                    raise BadImage("image-too-large", _too_large(ref, f"{width}×{height} pixels", max_image_pixels))
                yield image, data
    except UnidentifiedImageError as error:
        raise BadImage("image-undecodable", f"{ref.label} is not an image of a known format") from error
    except Image.DecompressionBombError as error:
        told = re.search(r"\d+ pixels", str(error))
        size = told.group() if told else "too many pixels"
        raise BadImage("image-too-large", _too_large(ref, size, max_image_pixels)) from error
    except BadImage:
        raise
    except _UNREADABLE as error:
        raise BadImage("image-undecodable", f"{ref.label} is damaged: {error}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = default


def _too_large(ref: ImageRef, size: str, limit: int) -> str:
    return f"{ref.label} has {size}, the limit data.max_image_pixels is {limit}"
