"""The prompt file: JSON Lines, one request a line.

    {"prompt": "Tom has 17 apples ...", "answer": "42", "arrival": 3, "id": "p007"}

Only `prompt` is needed. `answer` is what the generated text is compared with, `arrival` the step at which the request
comes in (0 is the first), `id` what the user calls it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptFileError

__all__ = ["PACKAGED_PROMPTS", "Request", "read_requests"]

PACKAGED_PROMPTS = Path(__file__).resolve().parent.parent / "assets" / "prompts.jsonl"


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        number: its place in the file, from 0; what traces call it.
        line: its line in the file, from 1.
        id: the user's name for it, or its number.
        prompt: the text.
        answer: the right answer, None where the file gives none.
        arrival: the step at which it comes in.
    """

    number: int
    line: int
    id: str
    prompt: str
    answer: str | None = None
    arrival: int = 0


def read_requests(path: str | os.PathLike[str], limit: int | None = None) -> list[Request]:
    """The requests of a prompt file, the first `limit` of them.

    Raises:
        PromptFileError: no such file, not JSON Lines, no prompt in it, or a value that no request can have; the message
            names the file and the line.
    """
    requests: list[Request] = []
    ids: dict[str, int] = {}
    for number, text in _lines(path):
        try:
            request = _request(text, len(requests), number)
        except PromptFileError as error:
            raise PromptFileError(f"{path}, line {number}: {error}") from None
        if request.id in ids:
            raise PromptFileError(f"{path}, line {number}: id {request.id!r} stands in line {ids[request.id]} already")
        ids[request.id] = number
        requests.append(request)
        if limit is not None and len(requests) == limit:
            break
    if not requests:
        raise PromptFileError(f'{path} holds no prompt; write one JSON object a line, {{"prompt": "..."}}')
    return requests


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """(number, text) of each line that is not blank."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield number, text
    except OSError as error:
        raise PromptFileError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path} is not text in UTF-8; write one JSON object a line") from error


def _request(text: str, number: int, line: int) -> Request:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"not JSON ({error}); write one JSON object a line") from None
    if not isinstance(data, dict):
        raise PromptFileError('not a JSON object; write {"prompt": "..."}')
    prompt = data.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise PromptFileError(f'"prompt" is {_shown(prompt)}, expected a text that is not empty')
    arrival = data.get("arrival", 0)
    if type(arrival) is not int or arrival < 0:
        raise PromptFileError(f'"arrival" is {_shown(arrival)}, expected a step: 0 or more')
    answer = data.get("answer")
    if type(answer) is int:
        answer = str(answer)
    if answer is not None and not isinstance(answer, str):
        raise PromptFileError(f'"answer" is {_shown(answer)}, expected a text')
    name = data.get("id", str(number))
    if not isinstance(name, (str, int)):
        raise PromptFileError(f'"id" is {_shown(name)}, expected a text')
    for key, value in (("prompt", prompt), ("answer", answer), ("id", str(name))):
        try:
            (value or "").encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptFileError(
                f'"{key}" is no text in UTF-8: character {error.start} is half of a surrogate pair, '
                f"{_shown(error.object[error.start])}"
            ) from None
    return Request(number, line, str(name), prompt, answer, arrival)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
