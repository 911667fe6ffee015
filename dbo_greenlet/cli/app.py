"""The Typer application: the subcommands under one name."""

from __future__ import annotations

import typer

from .._version import __version__
from . import critical_path, diff, doctor, estimate, export, import_, lint, overlap, record, replay, run, selftest, show

__all__ = ["app"]

app = typer.Typer(
    name="dbo-greenlet",
    help="Dual batch overlap with greenlets: run it, look at a step, replay a run.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dbo-greenlet {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Dual batch overlap with greenlets: run it, look at a step, replay a run.

    A file that an option names to be written replaces one that is there, when there is something to put in its place;
    never one that the command reads, and what keeps it from being written is said before the work begins.

    Exit codes: 0 all is well, 1 something was found, 2 the command could not run, 130 Ctrl-C,
    143 SIGTERM.
    """


app.command("run")(run.run)
app.command("record", context_settings=record.CONTEXT_SETTINGS)(record.record)
app.command("show")(show.show)
app.command("overlap")(overlap.overlap)
app.command("critical-path")(critical_path.critical_path)
app.command("diff")(diff.diff)
app.command("lint")(lint.lint)
app.command("estimate")(estimate.estimate)
app.command("export")(export.export)
app.command("import")(import_.import_profile)
app.command("replay")(replay.replay)
app.command("selftest")(selftest.selftest)
app.command("doctor", context_settings=doctor.CONTEXT_SETTINGS)(doctor.doctor)
