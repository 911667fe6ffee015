"""Lists of yield sites as short text: a model of sixty layers passes the same few sites sixty times.

    layer0.dispatch, layer0.combine, layer1.dispatch, layer1.combine, returned
    (layer#.dispatch,layer#.combine*2+0),.

    ,            between sites
    .            the microbatch returned
    (A,B*T)      A and B, T times
    (A,B*T+F)    the same, with `#` in A or B for a number that begins at F and grows by one each time
    %XX          a byte of whatever else a site has in it, in UTF-8

The lists of a step's microbatches are mostly the same one. The longest is the reference, and another is written by what
it has of it: `=` is its beginning, as long as this microbatch has slices; `=K` its first K sites, then come others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote, unquote

from .errors import ReplayStringError

__all__ = ["pack_lists", "pack_sites", "pack_text", "unpack_lists", "unpack_sites", "unpack_text"]

_MAX_PERIOD = 16  # sites a layer: four are usual
_SAFE = "/:@<>[]"
_RETURNED = "."
_NUMBERS = re.compile(r"(\d+)")
_PARTS = re.compile(r"\(([^()*]*)\*([1-9]\d{0,8})(?:\+(\d{1,9}))?\)|([^(),]+)|(.)")


def pack_text(text: str, also_safe: str = "") -> str:
    """`text` with everything escaped that has a meaning here or in a shell."""
    return quote(text, safe=_SAFE + also_safe, errors="surrogatepass")


def unpack_text(text: str) -> str:
    """What `pack_text` was given.

    Raises:
        ReplayStringError: the escapes are no UTF-8.
    """
    try:
        return unquote(text, errors="surrogatepass")
    except UnicodeDecodeError:
        raise ReplayStringError(f"the replay string has {text[:40]!r} in it, whose escapes are not UTF-8") from None


def pack_sites(sites: Sequence[str]) -> str:
    """One list, "" being a microbatch's return."""
    words: list[str] = []
    position = 0
    while position < len(sites):
        word, length = _best_group(sites, position)
        words.append(word)
        position += length
    return ",".join(words)


def unpack_sites(text: str, length: int) -> list[str]:
    """The list that `pack_sites` was given, of `length` sites.

    Raises:
        ReplayStringError: it is another number of sites, or no such list.
    """
    sites: list[str] = []
    expected_comma = False
    for match in _PARTS.finditer(text):
        group, times, first, word, other = match.groups()
        if expected_comma != (other == ",") or other not in (None, ","):
            raise ReplayStringError(f"the list of sites in the replay string has an unexpected {match[0]!r}")
        expected_comma = not expected_comma
        if other:
            continue
        templates = [word] if group is None else group.split(",")
        repeats = 1 if times is None else int(times)
        if len(sites) + repeats * len(templates) > length:
            raise ReplayStringError("the replay string lists more sites than its decisions have")
        for number in range(repeats):
            running = "" if first is None else str(int(first) + number)
            sites.extend(_filled(template, running) for template in templates)
    if len(sites) != length or (text and not expected_comma):
        raise ReplayStringError("the replay string lists fewer sites than its decisions have")
    return sites


def pack_lists(lists: Sequence[Sequence[str]]) -> str:
    """The lists of all microbatches, `|` between them."""
    reference = _reference([len(each) for each in lists])
    words = []
    for index, each in enumerate(lists):
        full = pack_sites(each)
        same = _common(each, lists[reference])
        if index == reference or not same:
            words.append(full)
        elif same == len(each):
            words.append("=")
        else:
            words.append(min(f"={same},{pack_sites(each[same:])}", full, key=len))
    return "|".join(words)


def unpack_lists(text: str, lengths: Sequence[int]) -> list[list[str]]:
    """The lists that `pack_lists` was given; `lengths` are their numbers of sites.

    Raises:
        ReplayStringError: not such lists.
    """
    words = text.split("|")
    if len(words) != len(lengths):
        raise ReplayStringError(
            f"the replay string has sites of {len(words)} microbatches and decisions of {len(lengths)}"
        )
    at = _reference(lengths)
    reference = unpack_sites(words[at], lengths[at])
    return [
        reference if index == at else _resolved(word, length, reference)
        for index, (word, length) in enumerate(zip(words, lengths, strict=True))
    ]


def _resolved(word: str, length: int, reference: list[str]) -> list[str]:
    if word == "=":
        return reference[:length]
    if match := re.fullmatch(r"=([1-9]\d{0,8}),(.+)", word):
        same = int(match[1])
        if same < length:
            return reference[:same] + unpack_sites(match[2], length - same)
        raise ReplayStringError("the replay string lists more sites than its decisions have")
    return unpack_sites(word, length)


def _reference(lengths: Sequence[int]) -> int:
    return max(range(len(lengths)), key=lambda index: (lengths[index], -index))


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return min(len(one), len(other))


def _best_group(sites: Sequence[str], start: int) -> tuple[str, int]:
    """The shortest way, a site, to write what begins at `start`, and how many sites it covers."""
    best, covered = _word(sites[start]), 1
    for period in range(1, _MAX_PERIOD + 1):
        group = sites[start : start + period]
        templates, first = _templates(group, sites[start + period : start + 2 * period])
        if templates is None:
            continue
        times = 2
        while _repeats(sites, start + times * period, templates, first, times):
            times += 1
        running = "" if first is None else f"+{first}"
        written = f"({','.join('#'.join(map(_piece, each)) or _RETURNED for each in templates)}*{times}{running})"
        plain = ",".join(map(_word, sites[start : start + times * period]))
        # By characters saved. Longer stretches win where two save the same.
        if len(written) < len(plain) and len(plain) - len(written) > _saved(best, sites, start, covered):
            best, covered = written, times * period
    return best, covered


def _saved(written: str, sites: Sequence[str], start: int, covered: int) -> int:
    return len(",".join(map(_word, sites[start : start + covered]))) - len(written)


def _templates(group: Sequence[str], following: Sequence[str]) -> tuple[list[list[str]] | None, int | None]:
    """The sites of a group, each cut where a number grows by one in `following`; and the number. None: no repeat."""
    if len(group) != len(following):
        return None, None
    first: int | None = None
    templates = []
    for now, later in zip(group, following, strict=True):
        parts, others = _NUMBERS.split(now), _NUMBERS.split(later)
        if len(parts) != len(others):
            return None, None
        pieces = [""]
        for place, (part, other) in enumerate(zip(parts, others, strict=True)):
            if part == other:
                pieces[-1] += part
            elif place % 2 and _grows(part, other) and first in (None, int(part)):
                first = int(part)
                pieces.append("")
            else:
                return None, None
        templates.append(pieces)
    return templates, first


def _grows(now: str, later: str) -> bool:
    # ASCII and without leading zeros: only such a number comes back as the digits that it was.
    return len(now) <= 9 and now.isascii() and later.isascii() and str(int(now)) == now and str(int(now) + 1) == later


def _repeats(sites: Sequence[str], start: int, templates: list[list[str]], first: int | None, times: int) -> bool:
    if start + len(templates) > len(sites):
        return False
    running = "" if first is None else str(first + times)
    return all(sites[start + place] == running.join(pieces) for place, pieces in enumerate(templates))


def _word(site: str) -> str:
    return _piece(site) if site else _RETURNED


def _piece(text: str) -> str:
    return "%2E" if text == _RETURNED else pack_text(text)


def _filled(template: str, running: str) -> str:
    if template == _RETURNED:
        return ""
    if not template or re.search(r"[^A-Za-z0-9_.~%#/:@<>\[\]-]", template) or ("#" in template and not running):
        raise ReplayStringError(f"the list of sites in the replay string has an unexpected {template!r}")
    return running.join(map(unpack_text, template.split("#")))
