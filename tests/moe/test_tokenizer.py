"""The tokenizer of a checkpoint folder: byte-level round trips, special tokens, broken files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

from dbo_greenlet.errors import CheckpointError
from dbo_greenlet.moe import Tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BEGIN, END = "<begin>", "<end>"


def byte_tokenizer() -> Library:
    library = Library(models.BPE(vocab={char: i for i, char in enumerate(BYTES)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(BEGIN, special=True), AddedToken(END, special=True)])
    return library


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_survives_byte_for_byte(text: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    ids = tokenizer.encode(text)
    if BEGIN not in text and END not in text:
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_ids_and_special_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder, eos_ids=(257,))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.eos_ids, tokenizer.bos_id) == (258, 257, (257,), None)
    ids = tokenizer.encode("né")
    assert ids == [BYTES.index("n"), BYTES.index("Ã"), BYTES.index("©")]
    assert tokenizer.decode([256, *ids, 257]) == "né"
    assert tokenizer.decode(ids[:2]) == "n�"
    assert (tokenizer.encode(""), tokenizer.decode([])) == ([], "")
    assert Tokenizer.from_folder(folder).eos_id is None


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("add", [True, False, None])
def test_settings_of_tokenizer_config(folder: Path, as_dict: bool, add: bool | None) -> None:
    def token(text: str) -> object:
        return {"__type": "AddedToken", "content": text} if as_dict else text

    settings = {"add_bos_token": add, "bos_token": token(BEGIN), "eos_token": token(END)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(folder, eos_ids=(4,))
    assert tokenizer.eos_ids == (4, 257)
    assert tokenizer.encode("a")[:-1] == ([256] if add else [])
    assert tokenizer.encode(BEGIN + "a")[:-1] == [256]  # not twice


def test_agrees_with_transformers(folder: Path) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    for text in ("plain", "two  spaces\n", "日本", f"a{END}b"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.eos_id == theirs.eos_token_id


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "{", '{"model": {"type": "Unheard"}}'])
def test_an_unreadable_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_unreadable_settings_are_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_folder(folder)
