"""Names for vLLM's yield points: which of them it is, and in the how-manieth MoE layer.

vLLM's yields carry no label, and one line of code serves all layers. Who reads a schedule or an error wants both.
"""

from __future__ import annotations

from types import CodeType, FrameType

from vllm.v1.worker import ubatching

__all__ = ["site_of"]

# (start of the file's name, function) -> what the yield in it comes before. In low latency the all-to-all's send lies
# before the yield, which is therefore named after it; in high throughput the yield comes first.
_SITES = {
    ("modular_kernel", "_prepare"): "dispatch",
    ("modular_kernel", "_finalize"): "combine",
    ("deepep_ht", "_do_dispatch"): "before_dispatch",
    ("deepep_ht", "_finalize"): "before_combine",
    ("deepep_ht", "_receiver"): "combine",
}
# By code object and instruction: kind of site, and whether it is counted in layers. The value keeps the code alive, so
# that an identity cannot be used twice.
_kinds: dict[tuple[int, int], tuple[CodeType, str, bool]] = {}
_names: dict[str, list[str]] = {}
_HOST_GLOBALS = ubatching.__dict__


def site_of(passed: dict[str, int], frame: FrameType | None) -> str:
    """The label of the yield that `frame`, a function of vLLM's `ubatching`, was called for.

    Args:
        passed: how often the microbatch passed each kind of site so far; counted on here.
    """
    while frame is not None and frame.f_globals is _HOST_GLOBALS:
        frame = frame.f_back
    if frame is None:
        return "yield"
    known = _kinds.get((id(frame.f_code), frame.f_lasti))
    if known is None:
        known = _kind(frame)
    _, kind, counted = known
    if not counted:
        return kind
    layer = passed.get(kind, 0)
    passed[kind] = layer + 1
    names = _names.setdefault(kind, [])
    while len(names) <= layer:
        names.append(f"layer{len(names)}.{kind}")
    return names[layer]


def _kind(frame: FrameType) -> tuple[CodeType, str, bool]:
    code = frame.f_code
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    kind = next((k for (start, name), k in _SITES.items() if file.startswith(start) and name == code.co_name), None)
    known = (code, f"{file}:{frame.f_lineno}" if kind is None else kind, kind is not None)
    _kinds[(id(code), frame.f_lasti)] = known
    return known
