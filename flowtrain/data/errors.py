"""Why a row or an image cannot be used: one stable word for the counts, one sentence for the person who repairs it.

| reason | what is wrong |
|---|---|
| `bad-messages` | not a conversation that can be read: broken JSON, no messages, an unknown role or content |
| `image-count` | the number of images differs from the number of places for them |
| `image-missing` | no such file, nothing at a URL, an empty value |
| `image-undecodable` | not an image, or one that is cut off or damaged |
| `image-too-large` | more stored pixels than `data.max_image_pixels` |
| `image-shape` | a shape the model's processor refuses, or another one than the header told when the row was read |
| `template` | the chat template refuses the row, or does not show which tokens are the answer |
| `no-trained-token` | nothing in it would be trained: no assistant turn, or an empty one |
| `too-long` | more tokens than a row may have |
"""

from __future__ import annotations

from flowtrain.errors import DataError

REASONS = (
    "bad-messages",
    "image-count",
    "image-missing",
    "image-undecodable",
    "image-too-large",
    "image-shape",
    "template",
    "no-trained-token",
    "too-long",
)

ADVICE = {
    "bad-messages": 'write each row as {"messages": [{"role": …, "content": …}, …]}',
    "image-count": "give each image one <image> in the text, and each <image> one entry in `images`",
    "image-missing": "paths start at the data file's folder: put the files there, or store bytes in the rows",
    "image-undecodable": "fetch or convert these files again",
    "image-too-large": "shrink these images, or raise data.max_image_pixels",
    "image-shape": "crop or pad these images to a shape that the model's processor takes",
    "template": "see that the rows' turns suit the model's chat template, or mark its answers with {% generation %}",
    "no-trained-token": "give these rows an answer of the assistant",
    "too-long": "raise packing.max_tokens or data.max_seq_len, or lower data.max_pixels",
}
"""What to change, for each reason."""


class BadRow(DataError):
    """A row that cannot be used. `reason` is one of `REASONS`; `row_id` is the row's own id where it could be read."""

    def __init__(self, reason: str, detail: str, row_id: str | None = None) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{detail} ({reason})")
        self.reason = reason
        self.detail = detail
        self.row_id = row_id

    def __reduce__(self) -> tuple[type[BadRow], tuple[str, str, str | None]]:
        return type(self), (self.reason, self.detail, self.row_id)


class BadImage(BadRow):
    """An image of a row cannot be used, found when its bytes are needed."""
