"""What the names in a profile mean: kernels.toml, and a user's file before it.

A kernel is communication or compute by its name alone, because nothing else in a profile says so. The patterns are
data, since libraries rename their kernels: the all-to-all of DeepEP has had four names so far, and an analyser that
does not know one of them books it as compute, so that overlap comes out as 0 of 0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["KINDS", "STAGES", "Annotation", "KernelClass", "KernelTable", "function_name"]

KINDS = ("communication", "compute", "copy", "fused")
# In the order in which a layer runs them.
STAGES = ("attention", "dispatch", "experts", "combine", "shared")

_KERNEL_KEYS = {"pattern", "search", "kind", "library", "operation", "stage", "background"}
_ANNOTATION_KEYS = {"pattern", "stage"}
# A name with one of these that no rule takes for communication is worth a question to the user.
_LOOKS_LIKE_COMMUNICATION = re.compile(
    r"(?i)(nccl|all_?to_?all|all_?gather|reduce_?scatter|all_?reduce|a2a|(?<![a-z])dispatch|combine|sendrecv)"
)
# As frameworks use these words for what is local: torch's reductions by "splitkv_combine", for example.
_LOCAL = re.compile(r"(?i)^(void )?at::|splitkv|flash|fmha|mla|triton_|elementwise|combine_moe|finalize")


@dataclass(frozen=True)
class KernelClass:
    """What one name means.

    Attributes:
        kind: one of `KINDS`; "fused" is both in one kernel, "copy" neither (it uses no multiprocessor to compute, and
            sends nothing to another GPU).
        library, operation: "" where the table does not say.
        stage: one of `STAGES` or a user's own; "" where the name does not tell.
        background: its bytes fly while no kernel runs, between a sending and a receiving launch of the same kernel.
        doubtful: compute, by a name that looks like communication.
    """

    kind: str
    library: str = ""
    operation: str = ""
    stage: str = ""
    background: bool = False
    doubtful: bool = False


@dataclass(frozen=True)
class Annotation:
    """What the name of a range says: "" or None where it does not.

    Attributes:
        stage, layer, microbatch: whose work is in it.
        slice: the how-manieth slice of its microbatch it is, from 0; None for every other range.
        site: of a slice, the yield site behind which it begins; "" where the microbatch starts.
    """

    stage: str = ""
    layer: int | None = None
    microbatch: int | None = None
    slice: int | None = None
    site: str = ""


@dataclass(frozen=True)
class _KernelRule:
    pattern: re.Pattern[str]
    whole: bool
    meaning: KernelClass


@dataclass(frozen=True)
class _AnnotationRule:
    pattern: re.Pattern[str]
    stage: str


class KernelTable:
    """The rules that classify names.

    Args:
        extra: a user's TOML file in the form that kernels.toml explains, whose rules come first.

    Raises:
        ConfigurationError: `extra` cannot be read, is no TOML, or holds a rule that cannot be meant; names the file and
            the rule.
    """

    def __init__(self, extra: str | Path | None = None) -> None:
        self._kernels: list[_KernelRule] = []
        self._annotations: list[_AnnotationRule] = []
        if extra is not None:
            self._add(_read(Path(extra)), str(extra))
        self._add(_packaged(), "kernels.toml")
        self._known: dict[str, KernelClass] = {}

    def classify(self, name: str) -> KernelClass:
        """What the GPU activity of this name does."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._classify(name)
        return found

    def annotation(self, name: str) -> Annotation:
        """What a profiler's range of this name says."""
        stage, layer, microbatch = "", None, None
        for rule in self._annotations:
            if (match := rule.pattern.search(name)) is None:
                continue
            groups = match.groupdict()
            if groups.get("slice") is not None:
                return Annotation(
                    rule.stage, layer, _number(groups.get("microbatch")), int(groups["slice"]), groups.get("site") or ""
                )
            stage = stage or rule.stage
            layer = _number(groups.get("layer")) if layer is None else layer
            microbatch = _number(groups.get("microbatch")) if microbatch is None else microbatch
        return Annotation(stage, layer, microbatch)

    def _classify(self, name: str) -> KernelClass:
        function = function_name(name)
        whole = _without_parameters(name)
        for rule in self._kernels:
            if rule.pattern.search(whole if rule.whole else function):
                meaning = rule.meaning
                break
        else:
            meaning = KernelClass("compute")
        looks = meaning.kind == "compute" and _LOOKS_LIKE_COMMUNICATION.search(function)
        if looks and not _LOCAL.search(whole):
            return KernelClass("compute", meaning.library, meaning.operation, meaning.stage, doubtful=True)
        return meaning

    def _add(self, rules: Mapping[str, Any], file: str) -> None:
        if unknown := sorted(rules.keys() - {"kernel", "annotation"}):
            raise ConfigurationError(f"{file}: unknown table {unknown[0]!r}; use [[kernel]] and [[annotation]]")
        for number, rule in enumerate(_rules(rules, "kernel", file), 1):
            where = f"{file}, [[kernel]] {number}"
            pattern = _pattern(rule, _KERNEL_KEYS, where)
            kind = _choice(rule, "kind", KINDS, where)
            whole = _choice(rule, "search", ("function", "whole"), where, "function") == "whole"
            background = rule.get("background", False)
            if not isinstance(background, bool):
                raise ConfigurationError(f"{where}: background is {background!r}; use true or false")
            library, operation, stage = (_text(rule, key, where) for key in ("library", "operation", "stage"))
            self._kernels.append(_KernelRule(pattern, whole, KernelClass(kind, library, operation, stage, background)))
        for number, rule in enumerate(_rules(rules, "annotation", file), 1):
            where = f"{file}, [[annotation]] {number}"
            pattern = _pattern(rule, _ANNOTATION_KEYS, where)
            self._annotations.append(_AnnotationRule(pattern, _text(rule, "stage", where)))


def function_name(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters; a mangled name as it is.

    "void deep_ep::intranode::combine<8>(int4*)" gives "deep_ep::intranode::combine". Copies keep all of theirs
    ("Memcpy PtoP (Device -> Device)"), since only a name that is one word has parameters.
    """
    if name.startswith(("Memcpy", "Memset", "Copy")):
        return name
    bare = name.removeprefix("void ").replace("(anonymous namespace)", "anonymous")
    for mark in "<(":
        bare = bare.partition(mark)[0]
    return bare.strip()


def _without_parameters(name: str) -> str:
    # The parameters begin at the last "(" outside of all brackets; types in them name other libraries.
    depth = 0
    for place in range(len(name) - 1, -1, -1):
        letter = name[place]
        if letter in ")>":
            depth += 1
        elif letter in "(<":
            depth -= 1
            if depth == 0 and letter == "(" and place and name.endswith(")"):
                return name[:place]
    return name


def _number(text: str | None) -> int | None:
    return int(text) if text is not None else None


@cache
def _packaged() -> dict[str, Any]:
    rules: dict[str, Any] = tomllib.loads(
        resources.files(__package__).joinpath("kernels.toml").read_text(encoding="utf-8")
    )
    return rules


def _read(path: Path) -> dict[str, Any]:
    try:
        rules: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        raise ConfigurationError(f"{path} cannot be read: {reason}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no TOML: {error}") from error
    return rules


def _rules(rules: Mapping[str, Any], table: str, file: str) -> Sequence[dict[str, Any]]:
    found = rules.get(table, [])
    if not isinstance(found, list) or not all(isinstance(rule, dict) for rule in found):
        raise ConfigurationError(f"{file}: {table} is no list of tables; write [[{table}]]")
    return found


def _pattern(rule: Mapping[str, Any], keys: set[str], where: str) -> re.Pattern[str]:
    if unknown := sorted(rule.keys() - keys):
        raise ConfigurationError(f"{where}: unknown key {unknown[0]!r}; use {', '.join(sorted(keys))}")
    text = rule.get("pattern")
    if not isinstance(text, str):
        raise ConfigurationError(f"{where} needs a pattern, a regular expression as a string")
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigurationError(f"{where}: the pattern {text!r} is no regular expression: {error}") from error


def _choice(rule: Mapping[str, Any], key: str, choices: Sequence[str], where: str, default: str | None = None) -> str:
    value = rule.get(key, default)
    if value not in choices:
        raise ConfigurationError(f"{where}: {key} is {value!r}; use one of {', '.join(choices)}")
    return str(value)


def _text(rule: Mapping[str, Any], key: str, where: str) -> str:
    value = rule.get(key, "")
    if not isinstance(value, str):
        raise ConfigurationError(f"{where}: {key} is {value!r}; use a string")
    return value
