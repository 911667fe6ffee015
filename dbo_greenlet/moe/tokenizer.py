"""Text to token ids and back, from the tokenizer.json of a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HuggingFaceTokenizer

from dbo_greenlet.errors import CheckpointError

__all__ = ["Tokenizer"]


class Tokenizer:
    """Encodes and decodes text; knows which ids end an answer.

    A byte-level tokenizer (every byte has an id) round-trips any text, byte for byte; a cut through a character
    decodes to U+FFFD.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, eos_ids: Sequence[int] = (), bos_id: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        # Put in front of every prompt if not None.
        self.bos_id = bos_id

    @classmethod
    def from_folder(cls, folder: str | Path, eos_ids: Sequence[int] = ()) -> Tokenizer:
        """Read `folder`/tokenizer.json; `eos_ids` are those of the model's configuration.

        `folder`/tokenizer_config.json is read if it is there: its `eos_token` ends answers too, and with
        `add_bos_token` its `bos_token` begins prompts, which DeepSeek's tokenizer.json does not say by itself.

        Raises `CheckpointError` naming the file that is missing or cannot be read.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist; export the tokenizer in the fast format (save_pretrained of transformers "
                "writes it)"
            )
        try:
            tokenizer = HuggingFaceTokenizer.from_file(str(path))
        # The library raises plain Exception for whatever is wrong with the file; nothing else runs in here.
        except Exception as error:
            raise CheckpointError(f"{path} is not a tokenizer that can be read ({error}); export it again") from error
        settings = _read_settings(Path(folder) / "tokenizer_config.json")
        end = _token_id(tokenizer, settings.get("eos_token"))
        ends = dict.fromkeys([*eos_ids, *([] if end is None else [end])])
        begin = _token_id(tokenizer, settings.get("bos_token")) if settings.get("add_bos_token") is True else None
        return cls(tokenizer, tuple(ends), begin)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included; ids are below it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def eos_id(self) -> int | None:
        """The first id that ends an answer, or None if none is known."""
        return self.eos_ids[0] if self.eos_ids else None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens the tokenizer puts round a prompt."""
        ids = self._tokenizer.encode(text).ids
        if self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _read_settings(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); export the tokenizer again") from error
    return settings if isinstance(settings, dict) else {}


def _token_id(tokenizer: HuggingFaceTokenizer, token: object) -> int | None:
    """Id of a token given as text, or as transformers' {"content": text}."""
    text = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(text) if isinstance(text, str) else None
