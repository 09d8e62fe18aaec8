"""`flowtrain evaluate`: answers to held-out rows by greedy generation, counted as right when they match exactly.

Straight transformers (`AutoModelForImageTextToText`, `AutoProcessor`), so that it works on any Hugging Face folder and
tells what another user of the export would see. The last assistant turn of a row is the expected answer; what comes
before it is the prompt. Rows of similar length are answered together, padded on the left; a row that cannot be read
counts as not answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowtrain.data.sources import RawRow, open_source
from flowtrain.errors import ConfigError, DataError
from flowtrain.verify.rows import num_images, pictures, text_of


@dataclass(frozen=True, slots=True)
class Answer:
    """`given` None: the row could not be answered, for `reason`."""

    id: str
    expected: str
    given: str | None
    reason: str = ""

    @property
    def right(self) -> bool:
        return self.given is not None and self.given.strip() == self.expected.strip()


@dataclass(frozen=True, slots=True)
class Score:
    """Answers in the order of the rows."""

    answers: tuple[Answer, ...]

    @property
    def num_right(self) -> int:
        return sum(answer.right for answer in self.answers)

    @property
    def unanswered(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if answer.given is None)

    @property
    def exact_match(self) -> float:
        """Share of all rows, the unanswered ones too."""
        return self.num_right / len(self.answers)

    def to_json(self) -> dict[str, Any]:
        """The form of `--json`."""
        return {
            "rows": len(self.answers),
            "right": self.num_right,
            "unanswered": len(self.unanswered),
            "exact_match": self.exact_match,
            "answers": [
                {"id": a.id, "expected": a.expected, "given": a.given, "right": a.right, "reason": a.reason}
                for a in self.answers
            ],
        }


@dataclass(frozen=True, slots=True)
class Question:
    """One row to answer; `number` is its place among the rows read."""

    number: int
    row: RawRow
    prompt: str
    expected: str
    num_images: int


class Answerer:
    """A model folder ready to answer.

    Raises:
        ConfigError: the folder is not a complete model with weights, processor and chat template.
    """

    def __init__(self, folder: Path, device: str = "auto", trust_remote_code: bool = False) -> None:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} has no config.json; give a Hugging Face model folder, such as RUN_DIR/export")
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        try:
            self.processor: Any = AutoProcessor.from_pretrained(folder, **options)
            self.model, loading = AutoModelForImageTextToText.from_pretrained(
                folder, dtype="auto", output_loading_info=True, **options
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"{folder} cannot be loaded by transformers: {' '.join(str(error).split())}") from error
        missing = sorted(loading["missing_keys"])
        if missing:
            raise ConfigError(f"{folder} lacks {len(missing)} weights, such as {missing[0]}; export it again")
        if not getattr(self.processor, "chat_template", None):
            raise ConfigError(f"{folder} has no chat template; add chat_template.jinja to it")
        self.model.to(self.device).eval()
        self.processor.tokenizer.padding_side = "left"
        self.options = self._generation_options()

    def _generation_options(self) -> dict[str, Any]:
        """Greedy, ending at any end token that the model or the tokenizer names."""
        tokenizer, stored = self.processor.tokenizer, self.model.generation_config
        ends = stored.eos_token_id if isinstance(stored.eos_token_id, list) else [stored.eos_token_id]
        ends = sorted({token for token in (*ends, tokenizer.eos_token_id) if token is not None})
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        for name in ("temperature", "top_p", "top_k"):
            setattr(stored, name, None)
        return {
            "do_sample": False,
            "num_beams": 1,
            "eos_token_id": ends or None,
            "pad_token_id": tokenizer.pad_token_id,
        }

    def question(self, number: int, row: RawRow) -> Question:
        """Raises: DataError when the row has no answer to compare with, or its images and places differ."""
        messages = list(row.messages)
        if not messages or messages[-1]["role"] != "assistant":
            raise DataError(f"row {row.id!r} does not end with an answer")
        asked, expected = messages[:-1], text_of(messages[-1])
        prompt = self.processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        return Question(number, row, prompt, expected, num_images(asked))

    @torch.inference_mode()
    def answer(self, questions: list[Question], images: list[list[Any]], max_new_tokens: int) -> list[str]:
        """One answer for each question. Raises: DataError when the processor refuses them."""
        try:
            given = self.processor(
                text=[question.prompt for question in questions],
                images=images if any(images) else None,
                padding=True,
                return_tensors="pt",
            )
        except ValueError as error:
            raise DataError(f"the processor refuses the row: {' '.join(str(error).split())}") from error
        given = {name: self._placed(value) for name, value in given.items()}
        ids = self.model.generate(**given, **self.options, max_new_tokens=max_new_tokens)
        new = ids[:, given["input_ids"].shape[1] :]
        return [self.processor.tokenizer.decode(row, skip_special_tokens=True) for row in new]

    def _placed(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.device, self.model.dtype) if value.is_floating_point() else value.to(self.device)


def evaluate(
    answerer: Answerer,
    data: Path,
    max_new_tokens: int = 128,
    limit: int | None = None,
    group_rows: int = 32,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """Answer the rows of `data` (the first `limit`).

    Args:
        group_rows: rows answered together.
        progress: gets rows done and rows in all.

    Raises:
        DataError: no rows.
    """
    source = open_source(data)
    total = len(source) if limit is None else min(limit, len(source))
    if not total:
        raise DataError(f"{data} has no rows: give a file that has some")
    answers: dict[int, Answer] = {}
    questions = []
    for number in range(total):
        row_id = f"row-{number}"
        try:
            row = source.row(number)
            row_id = row.id
            questions.append(answerer.question(number, row))
        except DataError as error:
            answers[number] = Answer(getattr(error, "row_id", None) or row_id, "", None, str(error))
    for group in groups(questions, group_rows):
        readable, images = [], []
        for question in group:
            try:
                images.append(pictures(question.row, question.num_images))
                readable.append(question)
            except DataError as error:
                answers[question.number] = Answer(question.row.id, question.expected, None, str(error))
        for question, given, reason in _answered(answerer, readable, images, max_new_tokens):
            answers[question.number] = Answer(question.row.id, question.expected, given, reason)
        progress(len(answers), total)
    return Score(tuple(answers[number] for number in range(total)))


def _answered(
    answerer: Answerer, questions: list[Question], images: list[list[Any]], max_new_tokens: int
) -> Iterator[tuple[Question, str | None, str]]:
    """Each question with its answer, or why there is none: a refused row does not take others along."""
    if not questions:
        return
    try:
        texts = answerer.answer(questions, images, max_new_tokens)
    except DataError as error:
        if len(questions) == 1:
            yield questions[0], None, str(error)
            return
        for question, pictures_of in zip(questions, images, strict=True):
            yield from _answered(answerer, [question], [pictures_of], max_new_tokens)
        return
    for question, text in zip(questions, texts, strict=True):
        yield question, text, ""


def groups(questions: list[Question], group_rows: int) -> Iterator[list[Question]]:
    """Questions of like length together, so that little is padded; those without an image apart from those with."""
    for with_images in (False, True):
        alike = [question for question in questions if bool(question.num_images) == with_images]
        alike.sort(key=lambda question: (question.num_images, len(question.prompt), question.number))
        for start in range(0, len(alike), group_rows):
            yield alike[start : start + group_rows]
