"""What processes tell `dbo-greenlet record`, which started them, about why there may be nothing to see.

A program that records nothing is silent by nature: it never made a scheduler, or never ran a step, or runs in a server
that left microbatches to vLLM. So whoever knows leaves a note, in a folder that an environment variable names; where
nobody records, `leave` is one look at the environment.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["FOLDER", "leave", "read"]

FOLDER = "_DBO_GREENLET_RECORD"  # set by the command, not by users


def leave(kind: str, text: str = "") -> None:
    """Leave a note.

    Args:
        kind: "scheduler" (one was made), "vllm" (the drop-in was loaded), "left" (a server runs its microbatches by
            itself; the text says why), "problem" (something was not written; the text says what) or "partial" (what of
            a recording there is not, and why).
        text: one line.
    """
    if folder := os.environ.get(FOLDER):
        # The folder goes when the command ends, which may be before its last process does.
        with (
            contextlib.suppress(OSError),
            open(os.path.join(folder, f"{kind}-{os.getpid()}"), "a", encoding="utf-8") as file,
        ):
            file.write(" ".join(text.split()) + "\n")


def read(folder: str | os.PathLike[str]) -> dict[str, list[str]]:
    """kind -> the texts that were left, each once, in the order of the processes' numbers."""
    notes: dict[str, list[str]] = {}
    for name in sorted(os.listdir(folder)):
        kind = name.partition("-")[0]
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            for line in file:
                if (text := line.strip()) not in notes.setdefault(kind, []):
                    notes[kind].append(text)
    return notes
