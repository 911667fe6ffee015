"""Names for vLLM's yield points: which of them it is, and in the how-manieth MoE layer.

vLLM's yields carry no label, and one line of code serves all layers. Who reads a schedule or an error wants both, for
each yield, and a yield must not cost more for it than a look at who called. So the yields that microbatches have passed
are kept as a tree, each with its name, and each expects the one that followed it last time: all microbatches of all
steps of one model walk down one branch.
"""

from __future__ import annotations

from types import CodeType, FrameType

from vllm.v1.worker import ubatching

__all__ = ["START", "Passed", "passed_next"]

# (start of the file's name, function) -> what the yield in it comes before. In low latency the all-to-all's send lies
# before the yield, which is therefore named after it; in high throughput the yield comes first.
_SITES = {
    ("modular_kernel", "_prepare"): "dispatch",
    ("modular_kernel", "_finalize"): "combine",
    ("deepep_ht", "_do_dispatch"): "before_dispatch",
    ("deepep_ht", "_finalize"): "before_combine",
    ("deepep_ht", "_receiver"): "combine",
}
# How many calls up from the hand-over a yield's caller is looked for at once. Not deeper, because the bottom of a
# greenlet's stack may be near.
_DEEPEST = 4
# A model that never takes the same way twice must not fill the memory. What is beyond is named, but not kept.
_MOST_KEPT = 65536
_HOST_GLOBALS = ubatching.__dict__


class Passed:
    """One yield, after all those that the microbatch has passed before it.

    Attributes:
        site: the name.
        likely: the yield that followed last time.
        code, instruction: where the yield was called for. The code is kept, so that an identity is not used twice.
        depth: how many calls up from the hand-over that is.
        safe_stack: bytes of C stack with which this yield was found free of C++ frames; -1: with none yet.
    """

    __slots__ = ("_before", "_following", "_kind", "code", "depth", "instruction", "likely", "safe_stack", "site")

    def __init__(self, before: Passed | None, code: CodeType | None, instruction: int, depth: int) -> None:
        self._before = before
        self._following: dict[tuple[int, int], Passed] = {}
        self._kind: str | None = None
        self.code = code
        self.instruction = instruction
        self.depth = depth
        self.likely: Passed = _UNKNOWN if before is not None else self
        self.safe_stack = -1
        self.site = ""


_UNKNOWN = Passed(None, None, -1, 1)  # has the code of no frame
START = Passed(_UNKNOWN, None, -1, 1)
_kept = 0


def passed_next(last: Passed, frame: FrameType | None) -> Passed:
    """The yield after `last` that `frame`, a function of vLLM's `ubatching`, was called for.

    A look that costs as much as a hand-over: for yields that `last.likely` does not tell.
    """
    global _kept
    depth = 1
    while frame is not None and frame.f_globals is _HOST_GLOBALS:
        frame = frame.f_back
        depth += 1
    key = (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)
    found = last._following.get(key)
    if found is None:
        found = _new(last, frame)
        if _kept >= _MOST_KEPT:
            return found
        _kept += 1
        last._following[key] = found
    if depth <= _DEEPEST:
        # Each time: somebody may have wrapped a function of vLLM's since.
        found.depth = depth
        last.likely = found
    return found


def _new(last: Passed, frame: FrameType | None) -> Passed:
    if frame is None:
        passed = Passed(last, None, -1, 1)
        passed.site = "yield"
        return passed
    code = frame.f_code
    passed = Passed(last, code, frame.f_lasti, 1)
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    passed._kind = kind = next(
        (k for (start, name), k in _SITES.items() if file.startswith(start) and name == code.co_name), None
    )
    passed.site = f"{file}:{frame.f_lineno}" if kind is None else f"layer{_count(last, kind)}.{kind}"
    return passed


def _count(last: Passed | None, kind: str) -> int:
    """How many yields of that kind were passed: the layer's number."""
    count = 0
    while last is not None:
        count += last._kind == kind
        last = last._before
    return count
