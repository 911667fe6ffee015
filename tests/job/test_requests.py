"""The prompt file: what is taken, and what is refused with which words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dbo_greenlet.errors import PromptFileError
from dbo_greenlet.job.requests import PACKAGED_PROMPTS, Request, read_requests


def written(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_keys_and_only_the_prompt(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '{"prompt": "Wie viel?", "answer": "4", "arrival": 3, "id": "a"}\n\n{"prompt": "é", "answer": 7, "more": 1}\n',
    )
    assert read_requests(path) == [Request(0, 1, "a", "Wie viel?", "4", 3), Request(1, 3, "1", "é", "7", 0)]
    assert len(read_requests(path, limit=1)) == 1


def test_the_packaged_prompts_have_answers_and_arrive_over_time() -> None:
    requests = read_requests(PACKAGED_PROMPTS)
    assert len(requests) == 240
    assert all(request.answer and request.answer.isdecimal() for request in requests)
    assert len({request.arrival for request in requests}) > 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ("Tom has 3 apples.\n", "line 1: not JSON .*one JSON object a line"),
        ('{"prompt": "a"}\n{"prompt": "b"', "line 2: not JSON"),
        ('{"prompt": "a"}\n["b"]\n', "line 2: not a JSON object"),
        ('{"text": "a"}\n', 'line 1: "prompt" is null, expected a text that is not empty'),
        ('{"prompt": ""}\n', 'line 1: "prompt" is ""'),
        ('{"prompt": "a", "arrival": -1}\n', 'line 1: "arrival" is -1, expected a step: 0 or more'),
        ('{"prompt": "a", "arrival": true}\n', '"arrival" is true'),
        ('{"prompt": "a", "answer": [1]}\n', r'"answer" is \[1\], expected a text'),
        ('{"prompt": "a", "id": 1.5}\n', '"id" is 1.5'),
        ('{"prompt": "a"}\n{"prompt": "b\\ud800"}\n', 'line 2: "prompt" is no text in UTF-8: character 1'),
        ('{"prompt": "a", "id": "\\udc80"}\n', 'line 1: "id" is no text in UTF-8: character 0'),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n', "line 2: id 'x' stands in line 1 already"),
    ],
)
def test_what_is_no_request_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PromptFileError, match=f"{path}.*{words}"):
        read_requests(path)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="cannot be read: no such file"):
        read_requests(tmp_path / "absent.jsonl")
    with pytest.raises(PromptFileError, match="cannot be read: is a directory"):
        read_requests(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(PromptFileError, match="not text in UTF-8"):
        read_requests(binary)


def test_the_parent_of_a_job_does_not_import_torch() -> None:
    code = (
        "import sys, json\n"
        "from dbo_greenlet.job import launch, replay, report, requests, spec\n"
        "from dbo_greenlet.cli import app, progress\n"
        "print(json.dumps([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(out.stdout) == []
