"""Does yielding inside custom operators work with the torch that is installed here?

What would go wrong ends the process (SIGABRT, not an exception), so the cases run in a subprocess, which reports each
case as it ends. If it dies in the middle, that case has failed and the rest runs in another one.

    python -m dbo_greenlet.selftest        a table; exit code 0 if everything holds, else 1

Whoever relies on direct operators in a serving process should run this once and not engage where it fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["SelfTestCase", "SelfTestResult", "run_selftest"]


@dataclass(frozen=True)
class SelfTestCase:
    """One case: `status` is "ok", "failed" or "skipped"; `detail` says why it is not ok; `seconds` it took."""

    name: str
    status: str
    detail: str
    seconds: float


@dataclass(frozen=True)
class SelfTestResult:
    """`ok` is true if no case failed. A case that cannot run here (no compiler) is skipped and does not count."""

    ok: bool
    cases: tuple[SelfTestCase, ...]


def run_selftest(timeout: float = 60.0) -> SelfTestResult:
    """Run every case in a subprocess.

    Args:
        timeout: seconds for each case, the first one's import of torch included. A case that takes longer has failed.

    Returns:
        The cases in the order in which they ran. Nothing is raised for a case that fails, dies or hangs.
    """
    waiting = list(CASES)
    done: list[SelfTestCase] = []
    while waiting:
        finished = _run_in_subprocess(waiting, timeout)
        done += finished
        waiting = waiting[len(finished) :]
    return SelfTestResult(all(case.status != "failed" for case in done), tuple(done))


def _run_in_subprocess(names: list[str], timeout: float) -> list[SelfTestCase]:
    """Cases as they were reported; if the subprocess died, the last one is the one it died of. At least one."""
    environment = dict(os.environ)
    # The subprocess must test this package, wherever it was imported from.
    paths = [str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    reported: list[SelfTestCase] = []
    timed_out = threading.Event()
    with tempfile.TemporaryFile(mode="w+", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", "from dbo_greenlet.selftest import _child; _child()", *names],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )

        def stop() -> None:
            timed_out.set()
            child.kill()

        begin = time.monotonic()
        timer = threading.Timer(timeout, stop)
        timer.start()
        with child:
            for line in child.stdout or ():
                if line.startswith(_REPORT):
                    timer.cancel()
                    reported.append(SelfTestCase(**json.loads(line.removeprefix(_REPORT))))
                    begin = time.monotonic()
                    timer = threading.Timer(timeout, stop)
                    timer.start()
            code = child.wait()
        timer.cancel()
        if len(reported) < len(names):
            if timed_out.is_set():
                detail = f"not finished within {timeout:g} s"
            elif code < 0:
                detail = f"the process died of {signal.Signals(-code).name}"
            else:
                detail = f"the process ended with code {code}"
            errors.seek(0)
            last_words = errors.read().strip().splitlines()[-1:]
            spent = round(time.monotonic() - begin, 3)
            reported.append(SelfTestCase(names[len(reported)], "failed", ": ".join([detail, *last_words]), spent))
    return reported


# -- what runs in the subprocess --------------------------------------------------------------------------------------

# Marks a line of the subprocess as a report: whatever else is printed there is not ours.
_REPORT = "dbo_greenlet.selftest: "


class _Skip(Exception):
    """The case cannot run here; the message says why."""


class _Wrong(Exception):
    """The case ran and the result is wrong; the message says how."""


def _child() -> None:
    for name in sys.argv[1:]:
        begin = time.monotonic()
        status, detail = "ok", ""
        try:
            CASES[name]()
        except _Skip as reason:
            status, detail = "skipped", str(reason)
        except Exception as error:
            # A case may fail in any way the installed torch makes it fail; the report goes to the parent.
            status, detail = "failed", f"{type(error).__name__}: {error}"
        case = SelfTestCase(name, status, detail, round(time.monotonic() - begin, 3))
        print(_REPORT + json.dumps(asdict(case)), flush=True)


_LAYERS = 4


def _mix(x: Any, layer: int) -> Any:
    """The operator's implementation: two yields, as a dispatch and a combine."""
    from dbo_greenlet.yields import dbo_yield

    y = x * (layer + 1.5)
    dbo_yield("selftest.dispatch")
    y = y.sin() + x
    dbo_yield("selftest.combine")
    return y * 0.5


def _operator() -> Any:
    """`torch.ops.dbo_greenlet_selftest.mix`, defined on first use."""
    import torch

    library = torch.library
    if not hasattr(torch.ops.dbo_greenlet_selftest, "mix"):
        library.define("dbo_greenlet_selftest::mix", "(Tensor x, int layer) -> Tensor")
        library.impl("dbo_greenlet_selftest::mix", "CompositeExplicitAutograd", _mix)
        library.register_fake("dbo_greenlet_selftest::mix", lambda x, layer: torch.empty_like(x))
    return torch.ops.dbo_greenlet_selftest.mix


def _model(x: Any) -> Any:
    mix = _operator()
    for layer in range(_LAYERS):
        x = mix(x, layer) if layer % 2 else mix.default(x, layer)
        x = x + layer
    return x


def _compare_with_sequential(model: Callable[[Any], Any], counts: tuple[int, ...]) -> None:
    import torch

    from dbo_greenlet.direct_ops import register_direct_op
    from dbo_greenlet.scheduler import Scheduler

    _operator()
    registered = register_direct_op("dbo_greenlet_selftest::mix", _mix)
    try:
        with torch.inference_mode():
            for count in counts:
                inputs = [torch.arange(12.0).reshape(3, 4) * (i + 1) for i in range(count)]
                step = Scheduler(strict=True).run([lambda x=x: model(x) for x in inputs])
                expected = [model(x) for x in inputs]
                if step.schedule.decisions[:count] != tuple(range(count)):
                    raise _Wrong(f"{count} microbatches were not interleaved: {step.schedule.decisions}")
                for index, (got, wanted) in enumerate(zip(step.outputs, expected, strict=True)):
                    if not torch.equal(got, wanted):
                        raise _Wrong(f"microbatch {index} of {count} differs from the same one run by itself")
    finally:
        registered.remove()


def _eager() -> None:
    _compare_with_sequential(_model, (2, 3))


def _compiled() -> None:
    import torch

    _operator()
    try:
        compiled = torch.compile(_model, backend="aot_eager", fullgraph=True)
        compiled(torch.ones(3, 4))
    except (ImportError, RuntimeError) as error:
        raise _Skip(f"torch.compile does not work here: {error}") from error
    torch.compiler.reset()
    # Its first compilation in inference mode happens inside the microbatches.
    _compare_with_sequential(torch.compile(_model, backend="aot_eager", fullgraph=True), (2,))


def _refused() -> None:
    import torch

    from dbo_greenlet.errors import UnsafeYieldError
    from dbo_greenlet.scheduler import Scheduler

    name = "dbo_greenlet_selftest::mix"
    before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    _operator()
    for _ in range(2):
        try:
            Scheduler().run([lambda: _model(torch.ones(3, 4))] * 2)
        except UnsafeYieldError as error:
            if error.op != name:
                raise _Wrong(f"the error names {error.op!r} instead of {name!r}") from error
        else:
            raise _Wrong("a yield under an operator that is not direct was not refused")
    if (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) != before:
        raise _Wrong("the refused yield left the thread in another state")
    if not torch.equal(_model(torch.ones(3, 4)), _model(torch.ones(3, 4))):
        raise _Wrong("the operator does not work after the refused yield")


def _thread_state() -> None:
    import torch

    from dbo_greenlet.scheduler import Scheduler
    from dbo_greenlet.yields import dbo_yield

    def entry() -> tuple[bool, bool]:
        with torch.inference_mode():
            dbo_yield("selftest.inside")
            inside = torch.is_inference_mode_enabled()
            dbo_yield("selftest.again")
        return inside, torch.is_inference_mode_enabled()

    outputs = Scheduler().run([entry, entry]).outputs
    if outputs != [(True, False)] * 2:
        raise _Wrong(f"the microbatches saw inference mode (inside, after it) as {outputs}")
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise _Wrong("the thread is left in inference mode")


def _failure() -> None:
    import torch

    from dbo_greenlet.direct_ops import register_direct_op
    from dbo_greenlet.errors import MicrobatchFailed
    from dbo_greenlet.scheduler import Scheduler
    from dbo_greenlet.yields import dbo_yield

    def failing() -> None:
        dbo_yield("selftest.dispatch")
        raise ArithmeticError("on purpose")

    _operator()
    registered = register_direct_op("dbo_greenlet_selftest::mix", _mix)
    try:
        Scheduler().run([lambda: _model(torch.ones(3, 4)), failing, lambda: _model(torch.ones(3, 4))])
    except MicrobatchFailed as error:
        if error.index != 1 or not isinstance(error.__cause__, ArithmeticError):
            raise _Wrong(f"the failure is charged to microbatch {error.index}: {error}") from error
    else:
        raise _Wrong("the failing microbatch did not fail the step")
    finally:
        registered.remove()


CASES: dict[str, Callable[[], None]] = {
    "ping-pong inside an operator, eager": _eager,
    "unsafe yield is refused": _refused,
    "interleaved inference mode": _thread_state,
    "failure with parked siblings": _failure,
    "ping-pong inside an operator, compiled": _compiled,
}


def main() -> int:
    """Print the table; 0 if everything holds."""
    result = run_selftest()
    width = max(len(case.name) for case in result.cases)
    for case in result.cases:
        print(f"{case.name:<{width}}  {case.status:<7}  {case.seconds:6.2f} s  {case.detail}".rstrip())
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
