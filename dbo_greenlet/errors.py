"""Every exception that dbo_greenlet raises.

Three roots, because a caller treats the three differently:

* `DboError`: something went wrong in a step, in a configuration or in a file. The message names the microbatch and the
  site where there is one, and what to do about it.
* `SchedulerInternalError`: a fault of this package. Nothing the caller did should ever produce it.
* `StepAborted`: not an error at all but the signal that unwinds a parked microbatch after a sibling failed. It derives
  from `BaseException`, like `GreenletExit` and trio's `Cancelled`, so that an `except Exception` in model code
  cannot swallow it.

Nothing here imports torch: the core, and a command line that only reports an error, must stay light.
"""

from __future__ import annotations

__all__ = [
    "BrokenGroupError",
    "CheckpointError",
    "ConfigurationError",
    "DboError",
    "ForeignSwitchError",
    "GraphCaptureError",
    "IncompatibleHostError",
    "MicrobatchFailed",
    "NotEngagedError",
    "PolicyError",
    "PromptFileError",
    "RankFailedError",
    "RanksDisagreeError",
    "ReceiveHookError",
    "ReceiveNotFinishedError",
    "ReplayMismatch",
    "ScheduleDecodeError",
    "ScheduleDivergence",
    "SchedulerInternalError",
    "StepAborted",
    "TraceFileError",
    "UnsafeYieldError",
]


class DboError(Exception):
    """Root of the errors a user of the package can cause or must handle."""


class SchedulerInternalError(Exception):
    """A fault of dbo_greenlet itself; please report it with the message."""

    def __init__(self, what: str) -> None:
        super().__init__(f"internal error in dbo_greenlet, please report it: {what}")


class StepAborted(BaseException):
    """Thrown into a parked microbatch at its yield point when the step cannot go on.

    `finally` and `with` blocks of the microbatch run. Code that catches it should re-raise it; a microbatch that
    swallows it and yields again gets it again.
    """


class ConfigurationError(DboError):
    """A setting that cannot work; the message names the setting, its value and the values that do."""


class PolicyError(DboError):
    """A policy picked a microbatch that may not run now (law 6, or a finished one), or cannot serve this step."""


class MicrobatchFailed(DboError, RuntimeError):
    """A microbatch raised; `__cause__` is what it raised. A RuntimeError, because that is what vLLM's V2 runner raises.

    Attributes: `index` and `count` (microbatch `index` of `count`), `slice_number` (0-based slice in which it raised),
    `site` (the yield point it had last passed, "" if none), `secondary` (what siblings raised while they were unwound,
    as (index, exception) pairs).
    """

    def __init__(self, index: int, count: int, slice_number: int, site: str) -> None:
        self.index = index
        self.count = count
        self.slice_number = slice_number
        self.site = site
        self.secondary: list[tuple[int, BaseException]] = []
        after = f" after the yield at {site!r}" if site else " before its first yield"
        super().__init__(f"Microbatch {index} of {count} failed in slice {slice_number}{after}")

    def __str__(self) -> str:
        text: str = self.args[0]
        if self.__cause__ is not None:
            text += f": {_in_words(self.__cause__)}"
        for index, error in self.secondary:
            text += f"; while being unwound, microbatch {index} raised {_in_words(error)}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by calling cls(*args); ours takes other arguments than the message, and it must survive a
        # multiprocessing queue.
        return (type(self), (self.index, self.count, self.slice_number, self.site))


class ReceiveHookError(DboError):
    """The receive hook of one microbatch raised, possibly while a sibling (or the hub) was running it.

    Attributes: `owner` (the microbatch that registered the hook) and `ran_by` (the microbatch that ran it, or None for
    the hub). `__cause__` is what the hook raised.
    """

    def __init__(self, owner: int, ran_by: int | None, site: str) -> None:
        self.owner = owner
        self.ran_by = ran_by
        self.site = site
        runner = "the hub" if ran_by is None else f"microbatch {ran_by}"
        super().__init__(f"the receive hook that microbatch {owner} registered before {site!r} failed; {runner} ran it")

    def __str__(self) -> str:
        text: str = self.args[0]
        return text if self.__cause__ is None else f"{text}: {_in_words(self.__cause__)}"

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.owner, self.ran_by, self.site))


class ReceiveNotFinishedError(DboError):
    """The result of a dispatch or combine was read before its receive part ran (law 4)."""


class IncompatibleHostError(DboError):
    """The installed vLLM lacks names or signatures that the drop-in replaces; the message lists them."""


class NotEngagedError(DboError):
    """DBO_GREENLET=require is set, and the drop-in cannot take over; the message says why."""


class ScheduleDivergence(DboError):
    """Two microbatches of one step, or a step and its replay, passed different yield sites.

    Strict mode raises it; the message names both sides and the first yield at which they part.
    """


class ReplayMismatch(ScheduleDivergence):
    """A replayed step met another decision, site or checksum than the recorded one."""


class UnsafeYieldError(DboError):
    """A yield under a live C++ frame (a `torch.ops` call that is not direct): going on would abort the process.

    Attribute `op`: the qualified name of the operator, for example "vllm::moe_forward".
    """

    def __init__(self, message: str, op: str | None = None) -> None:
        self.op = op
        super().__init__(message)


class ForeignSwitchError(DboError):
    """Somebody else's greenlet took part in a step: it switched into a microbatch or the hub, or called a yield."""


class GraphCaptureError(DboError):
    """A step could not be captured into a CUDA graph; the cause is what was raised inside the capture."""


class ScheduleDecodeError(DboError):
    """A schedule string is of another version, truncated or mistyped."""


class RankFailedError(DboError):
    """Another rank failed, died or stalled, so this step cannot complete here either.

    Attributes: `rank` (the one that failed), `microbatch` (its microbatch, or None where it is not known), `reason`.
    """

    def __init__(self, rank: int, microbatch: int | None, reason: str) -> None:
        self.rank = rank
        self.microbatch = microbatch
        self.reason = reason
        where = f"rank {rank}" if microbatch is None else f"rank {rank}, microbatch {microbatch}"
        super().__init__(f"{where} failed: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.rank, self.microbatch, self.reason))


class BrokenGroupError(DboError):
    """A step was asked of a group of ranks that is broken since an earlier failure and was not reset."""


class RanksDisagreeError(DboError):
    """Ranks were started with different versions or settings; the message names each difference."""


class CheckpointError(DboError):
    """A checkpoint folder that cannot be loaded; the message names the file and what is wrong with it."""


class PromptFileError(DboError):
    """A prompt file that cannot be used; the message names the file and the line."""


class TraceFileError(DboError):
    """A trace that cannot be read or written; the message names the file and what is wrong with it."""


def _in_words(error: BaseException) -> str:
    """Type and message; where there is no message, as in a bare assert, the line that raised."""
    name = type(error).__name__
    try:
        message = str(error)
    except Exception:  # whatever a foreign __str__ raises: this is on the way of another error
        return f"{name} (its text cannot be had)"
    if message or error.__traceback__ is None:
        return f"{name}: {message}"
    import traceback

    place = traceback.extract_tb(error.__traceback__)[-1]
    file = place.filename.replace("\\", "/").rpartition("/")[2]
    return f"{name} at {file}:{place.lineno}" + (f": {place.line}" if place.line else "")
