"""The README's section on testing overlap: its files, its commands, and that what it shows is what they print.

Each chapter of the section (a paragraph that begins with bold words) gets a folder with its own files and with what
earlier chapters wrote that is no test, and its commands run there one after the other, each in a process of its own.

White space, line wrapping and the length of rulers do not count, nor does the path of the folder, which the README
leaves out. `…` is a gap, also what comes before the first and behind the last line shown; between gaps every word
counts, in its order.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dbo_greenlet.testing.faults import Faults
from tests.testing.pytest_runs import ROOT, SECONDS, environment

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("\n## Testing overlap\n")[2].partition("\n## ")[0]
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Either a file (its name, then its text), or a block that is no file.
BLOCK = re.compile(r"(?:^`(?P<file>[\w.]+)`:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = "(Pdb) "


@dataclass
class Command:
    words: list[str]
    typed: str
    shown: str


@dataclass
class Chapter:
    text: str
    files: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


def command(block: str) -> Command:
    """What is behind the debugger's prompt was typed; the debugger prints the prompt alone."""
    line, _, output = block.removeprefix("$ ").partition("\n")
    typed = "".join(f"{text}\n" for text in re.findall(rf"^{re.escape(PROMPT)}(.*)$", output, re.MULTILINE))
    shown = re.sub(rf"^({re.escape(PROMPT)}).*$", r"\1", output, flags=re.MULTILINE)
    return Command(shlex.split(line), typed, shown)


def read_chapters() -> dict[str, Chapter]:
    found: dict[str, Chapter] = {}
    modules: dict[str, str] = {}
    for text in re.split(r"^(?=\*\*)", SECTION, flags=re.MULTILINE)[1:]:
        chapter = Chapter(text, modules=dict(modules))
        found[re.sub(r"[^\w ]", "", text[2:].partition("**")[0])] = chapter
        for block in BLOCK.finditer(text):
            if block["file"]:
                chapter.files[block["file"]] = block["text"]
            elif block["text"].startswith("$ "):
                chapter.commands.append(command(block["text"]))
            else:
                chapter.others.append(block["text"])
        modules |= {name: text for name, text in chapter.files.items() if not name.startswith("test_")}
    return found


CHAPTERS = read_chapters()
# What the commands on a user's path are: the program is looked up by its name, which is the file's.
SCRIPT = """
import sys
from importlib.metadata import entry_points
from pathlib import Path
program = next(iter(entry_points(group="console_scripts", name=Path(__file__).name)))
sys.exit(program.load()())
"""


# What pyproject.toml calls them, and what the metadata of an installation does.
ENTRY_POINTS = {"console_scripts": "[project.scripts]", "pytest11": "[project.entry-points.pytest11]"}


def entry_points(declared: str, group: str) -> str:
    lines = declared.partition(f"{ENTRY_POINTS[group]}\n")[2].partition("\n[")[0]
    assert lines, f"pyproject.toml has no {ENTRY_POINTS[group]}"
    return lines.replace('"', "")


class Shell:
    """A folder with a chapter's files, in an environment that has this package and its plugin installed."""

    def __init__(self, where: Path, chapter: Chapter) -> None:
        self.folder, self.bin = where / "tutorial", where / "bin"
        site = where / "site" / "dbo_greenlet_here-1.dist-info"
        for folder in (self.folder, self.bin, site):
            folder.mkdir(parents=True)
        declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: dbo-greenlet-here\nVersion: 1\n",
            "RECORD": "".join(
                f"{file.relative_to(ROOT).as_posix()},,\n" for file in (ROOT / "dbo_greenlet").rglob("*.py")
            ),
            "entry_points.txt": "".join(f"[{name}]\n{entry_points(declared, name)}\n" for name in ENTRY_POINTS),
        }.items():
            (site / name).write_text(text, encoding="utf-8")
        for name in ("pytest", "dbo-greenlet"):
            (self.bin / name).write_text(SCRIPT, encoding="utf-8")
        for name, text in (chapter.modules | chapter.files).items():
            self.write(name, text)
        self.environment = environment(autoload=True, path=str(site.parent))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name} has {text.count(old)} x {old}"
        self.write(name, text.replace(old, new))

    def run(self, words: list[str], typed: str = "") -> tuple[int, str]:
        """The exit code, and what is printed."""
        program = [] if words[0] == "python" else [str(self.bin / words[0])]
        done = subprocess.run(
            [sys.executable, *program, *words[1:]],
            cwd=self.folder,
            input=typed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            env=self.environment,
            check=False,
        )
        return done.returncode, ANSI.sub("", done.stdout).replace(str(self.folder) + os.sep, "")


def normal(text: str) -> str:
    """One line; pytest's margin before what a test raised is no part of it."""
    text = re.sub(r"^E(?: {3}|$)", "", text, flags=re.MULTILINE)
    return re.sub(r"([-=_>])\1{3,}", r"\1\1\1\1", " ".join(text.split()))


def check_shown(shown: str, printed: str) -> None:
    real, position = normal(printed), 0
    pieces = [piece for part in shown.split("…") if (piece := normal(part))]
    assert pieces
    for piece in pieces:
        found = real.find(piece, position)
        assert found >= 0, f"the README shows\n  {piece}\nwhich is not, or not there, in what is printed:\n{printed}"
        position = found + len(piece)


# -- what the text says in words ---------------------------------------------------------------------------------------


def said(chapter: Chapter, pattern: str) -> tuple[str, ...]:
    match = re.search(pattern, " ".join(chapter.text.split()))
    assert match, f"the README no longer says {pattern}"
    return match.groups()


def golden_first(shell: Shell, chapter: Chapter) -> None:
    (words,) = said(chapter, r"`(pytest --dbo-update-golden)` writes `goldens/test_order\.txt`")
    code, printed = shell.run(words.split())
    assert code == 0 and (shell.folder / "goldens" / "test_order.txt").exists(), printed
    new, old = said(chapter, r'With `("\w+")` in place of `("\w+")`')
    shell.replace("test_order.py", old, new)


def orders_afterwards(shell: Shell, chapter: Chapter) -> None:
    explore, until = chapter.commands
    # The line that was printed is the one that the next command of the chapter begins with.
    assert shlex.join(until.words[:1] + until.words[2:4]) in shlex.join(
        shlex.split(explore.shown.split("again ----")[1])
    )
    if importlib.util.find_spec("typer") is not None:
        said(chapter, r"`dbo-greenlet replay TEST STRING --until 2` does the same")
        name, string, decision = until.words[2], until.words[3].partition("=")[2], until.words[4].partition("=")[2]
        _, printed = shell.run(["dbo-greenlet", "replay", name, string, "--until", decision], until.typed)
        check_shown(until.shown, printed)

    (separate,) = said(
        chapter, r'With `(ROWS = "[^"]+")` the string\'s schedule passes \(.* skipped:.*\), and so do all five'
    )
    shell.replace("layer.py", 'ROWS = "rows"', separate)
    code, printed = shell.run([*until.words[:4], "-rs"])
    assert code == 0 and "1 skipped" in printed and "the replayed schedule passes every verdict" in printed, printed
    code, printed = shell.run([*explore.words, "-s"])
    assert code == 0 and "1 passed" in printed and "exploring all 5 schedules" in printed, printed

    layers, schedules, fewer, how, exit_code = said(
        chapter, r'(\w+) layers have ([\d,]+) schedules, .* \(`(preemptions=\d+)`, `how="(\w+)"`\), and exits with (\d)'
    )
    several = f"[forward(bed.device, i) for layer in range({NUMBERS.index(layers)})]"
    shell.replace("layer.py", "lambda i=i: forward(bed.device, i)", f"lambda i=i: {several}")
    code, printed = shell.run(explore.words)
    assert code == int(exit_code), printed
    check_shown(f"there are {schedules} schedules … Use {fewer}, … how='{how}'", printed)


NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
BEFORE: dict[str, Callable[[Shell, Chapter], None]] = {"Golden schedules": golden_first}
AFTERWARDS: dict[str, Callable[[Shell, Chapter], None]] = {"Every order of a layer": orders_afterwards}
# Where what is shown goes by chance, and where it is part of a script: tests of their own, below.
APART = ("Hypothesis", "Ranks")


def test_nothing_of_the_section_is_left_out() -> None:
    assert {*BEFORE, *AFTERWARDS, *APART} <= set(CHAPTERS)
    assert sum(len(chapter.commands) for chapter in CHAPTERS.values()) == len(
        re.findall(r"^\$ ", SECTION, re.MULTILINE)
    )
    files = [name for chapter in CHAPTERS.values() for name in chapter.files]
    assert len(files) == len(set(files)) == len(re.findall(r"^`[\w.]+`:$", SECTION, re.MULTILINE))
    # Of blocks that are neither file nor command there is the script's part with its output, and nothing else.
    assert {title: len(chapter.others) for title, chapter in CHAPTERS.items() if chapter.others} == {"Ranks": 2}


@pytest.mark.parametrize(
    "title", [title for title, chapter in CHAPTERS.items() if chapter.commands and title not in APART]
)
def test_the_chapter_shows_what_its_commands_print(title: str, tmp_path: Path) -> None:
    chapter = CHAPTERS[title]
    if any(re.search("^import torch$", text, re.MULTILINE) for text in chapter.files.values()):
        pytest.importorskip("torch")
    shell = Shell(tmp_path, chapter)
    if title in BEFORE:
        BEFORE[title](shell, chapter)
    for each in chapter.commands:
        code, printed = shell.run(each.words, each.typed)
        if each.words[0] == "python":
            assert (code, normal(printed)) == (0, normal(each.shown))
        else:
            assert code == 1, printed
            check_shown(each.shown, printed)
    if title in AFTERWARDS:
        AFTERWARDS[title](shell, chapter)


def test_each_class_of_bug_is_shown() -> None:
    (chapter,) = (chapter for chapter in CHAPTERS.values() if "planted.py" in chapter.files)
    shown = re.findall(r"^([a-z-]+): ", chapter.commands[0].shown, re.MULTILINE)
    assert shown == [
        name.replace("_", "-") for name in re.findall(r"^def (\w+)\(bed, i\)", chapter.files["planted.py"], re.M)
    ]
    assert len(set(shown)) == 7


def test_the_state_machine_finds_the_mailbox(tmp_path: Path) -> None:
    """Which program it finds goes by chance, and how small it gets takes long.

    So the machine runs here without shrinking, and is held to the lines that every find has; and the program that the
    README shows runs as the code that it is, and is held to the sentence above it.
    """
    chapter = CHAPTERS["Hypothesis"]
    (find,) = chapter.commands
    shell = Shell(tmp_path, chapter)
    shell.write(
        "conftest.py",
        "from hypothesis import Phase, settings\n"
        "only = dict(phases=[Phase.generate], report_multiple_bugs=False, database=None, derandomize=True)\n"
        "settings.register_profile('only found', deadline=None, **only)\n"
        "settings.load_profile('only found')\n",
    )
    code, printed = shell.run(find.words)
    assert code == 1, printed
    always = ["Finding: the step did not run as the model says: event ", "state = OverMailbox()", "state.teardown()"]
    assert all(line in find.shown for line in always)
    check_shown("…".join(always), printed)

    *_, program = find.shown.split("…")
    shell.write("program.py", f"from test_machine import OverMailbox\n\n{program}")
    code, printed = shell.run(["python", "program.py"])
    assert code == 1, printed
    check_shown(find.shown.removesuffix(program), printed)


RANKS = """
import multiprocessing

import torch.distributed as dist

from dbo_greenlet import PhaseOffset
from dbo_greenlet.rank_schedules import compare_with_ranks
from dbo_greenlet.ranks import RankGroup
from dbo_greenlet.testing import run_step
from layer import build

{part}

def at_port(rank, ports):
    rank_main(rank, ports.get())


# Forked, so that torch is imported once; and before the store has threads, which a fork would leave behind.
fork = multiprocessing.get_context("fork")
ports = fork.Queue()
ranks = [fork.Process(target=at_port, args=(rank, ports)) for rank in range(3)]
for rank in ranks:
    rank.start()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
for rank in ranks:
    ports.put(store.port)
for rank in ranks:
    rank.join()
print([rank.exitcode for rank in ranks])
"""


def test_the_ranks_say_which_of_them_differs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    chapter = CHAPTERS["Ranks"]
    part, shown = chapter.others
    shell = Shell(tmp_path, chapter)
    shell.write("ranks.py", RANKS.format(part=part))
    code, printed = shell.run(["python", "ranks.py"])
    assert code == 0, printed
    check_shown(f"{shown} [0, 0, 0]", printed)


def test_the_faults_of_the_table_can_be_written_so() -> None:
    (chapter,) = (chapter for chapter in CHAPTERS.values() if "test_faults.py" in chapter.files)
    faults = [
        fault
        for row in re.findall(r"^\| (`.*?) \|", chapter.text, re.MULTILINE)
        for fault in re.findall("`(.+?)`", row)
    ]
    assert len(faults) >= 10
    for fault in faults:
        assert str(Faults.parse(fault)) == fault
