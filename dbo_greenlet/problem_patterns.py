"""Words and sentence patterns of the arithmetic word problems (see problems.py, which puts them together).

A pattern is a sentence without its full stop, in lower case except where a slot brings a capital. Slots:
`{n}` a name, `{p}` and `{m}` its pronouns (he, him), `{f}` another name, `{o}` things in the plural, `{box}` and
`{boxes}` a container, `{x}` a place, `{t}` a time, `{k}` the number of the sentence, `{a}` and `{b}` the two numbers
of a sentence about equal groups. Two slots stand for other patterns: `{s}` for one of `subjects`, `{np}` for one of
`amounts`.

The two sides TRAIN and HELD_OUT share no pattern, and HELD_OUT is made of words that TRAIN knows: what a held-out
problem asks of a model is to read a new sentence, not to guess a new word. Both are enforced by tests. The verb alone
tells a gain from a loss: "more", "another", "of them" and the words of the question occur with both, so that a model
cannot get by on those.
"""

from __future__ import annotations

from typing import NamedTuple

NAMES = (
    ("Tom", "he", "him"), ("Ben", "he", "him"), ("Max", "he", "him"), ("Leo", "he", "him"), ("Sam", "he", "him"),
    ("Paul", "he", "him"), ("Omar", "he", "him"), ("Ivan", "he", "him"), ("Kofi", "he", "him"), ("Hugo", "he", "him"),
    ("Ann", "she", "her"), ("Mia", "she", "her"), ("Eva", "she", "her"), ("Lily", "she", "her"),
    ("Zoe", "she", "her"), ("Nora", "she", "her"), ("Rosa", "she", "her"), ("Yuki", "she", "her"),
    ("Ada", "she", "her"), ("Ines", "she", "her"),
)  # fmt: skip
THINGS = (
    "apples", "pears", "plums", "eggs", "nuts", "books", "cards", "pens", "cups", "keys", "toys", "balls", "beads",
    "shells", "stones", "stamps", "flowers", "pencils", "marbles", "stickers", "buttons", "ribbons", "candles",
    "hats",
)  # fmt: skip
CONTAINERS = (("box", "boxes"), ("bag", "bags"), ("jar", "jars"), ("basket", "baskets"), ("drawer", "drawers"))
PLACES = ("park", "shop", "school", "market", "house", "garden", "beach", "river")
TIMES = ("on Monday", "on Friday", "on Sunday", "today", "at noon", "in the morning", "in the evening", "at night")


class Patterns(NamedTuple):
    """One side's patterns, by the part they play in a problem.

    `leads` and `tails` go before and after a gain or a loss; with `subjects` and `amounts` they make some ten thousand
    sentences of a few dozen patterns.
    """

    state: tuple[str, ...]
    gain: tuple[str, ...]
    loss: tuple[str, ...]
    leads: tuple[str, ...]
    tails: tuple[str, ...]
    subjects: tuple[str, ...]
    amounts: tuple[str, ...]
    ask_now: tuple[str, ...]
    ask_total: tuple[str, ...]
    ask_difference: tuple[str, ...]
    more: tuple[str, ...]
    fewer: tuple[str, ...]
    ask_one: tuple[str, ...]
    groups: tuple[str, ...]
    price: tuple[str, ...]
    ask_price: tuple[str, ...]
    two_sentences: tuple[str, ...]
    three_sentences: tuple[str, ...]


TRAIN = Patterns(
    state=(
        "{n} has {k} {o}", "{n} had {k} {o}", "{n} owns {k} {o}", "{n} starts with {k} {o}", "{n} holds {k} {o}",
        "{n} counts {k} {o}", "{n} keeps {k} {o} in a {box}", "{k} {o} belong to {n}", "{n} has {k} {o} at the {x}",
        "there are {k} {o} in the {box} of {n}", "the {box} of {n} has {k} {o} in it", "in a {box} {n} has {k} {o}",
        "{n} comes to the {x} with {k} {o}", "we know that {n} has {k} {o}", "at first {n} has {k} {o}",
        "{t} {n} has {k} {o}", "{t} there are {k} {o} with {n}", "{n} comes with a {box} of {k} {o}",
    ),
    gain=(
        "{s} buys {np}", "{s} buys {np} from {f}", "{s} finds {np}", "{s} gets {np}", "{n} gets {np} of {f}",
        "{f} gives {n} {np}", "{f} gives {m} {np}", "{f} gives {np} to {n}", "{f} gives {np} away to {m}",
        "{s} picks up {np}", "{s} wins {np}", "{np} are added", "{s} collects {np}", "{s} receives {np}",
        "{s} receives {np} of {f}", "{f} brings {m} {np}", "{f} brings {n} {np}", "{s} takes {np} from {f}",
        "{np} come from {f}", "{f} hands {np} to {n}", "{f} hands {n} {np}", "{s} makes {np}", "{s} earns {np}",
        "{s} borrows {np} from {f}", "{np} are given to {n} by {f}", "{np} are handed to {m}", "{s} also gets {np}",
        "{s} also wins {np}", "{f} sends {n} {np}", "{f} sends {np} to {m}", "{np} are sent to {m} by {f}",
        "from {f} come {np}", "{f} loses {np} and {n} finds them", "{f} leaves {np} to {n}", "{f} lends {m} {np}",
        "{f} sells {np} to {n}", "{f} sells {m} {np}", "{f} drops {np} and {n} takes them",
        "{s} wins {np} in the {x}",
    ),
    loss=(
        "{s} loses {np}", "{s} also gives {f} {np}", "{s} gives {np} to {f}", "{s} gives {f} {np}",
        "{s} gives {np} away", "{f} takes {np} from {n}", "{f} takes {np} from {m}", "{f} gets {np} from {n}",
        "{s} sells {np}", "{s} sells {np} to {f}", "{s} sells {f} {np}", "{np} are lost", "{s} drops {np}",
        "{s} breaks {np}", "{s} throws away {np}", "{s} uses {np}", "{s} hands {np} to {f}", "{s} hands {f} {np}",
        "{f} wins {np} from {m}", "{f} buys {np} from {m}", "{s} lends {np} to {f}", "{s} lends {f} {np}",
        "{np} are broken", "{np} are sold", "{s} leaves {np} behind", "{np} are taken away by {f}",
        "{np} are taken from {m}", "{s} sends {np} to {f}", "{s} also gives away {np}", "{f} borrows {np} from {m}",
        "{np} are given to {f} by {n}", "{s} also drops {np}", "{f} finds and takes away {np}",
        "{np} are handed to {f}", "{s} brings {f} {np}", "{s} throws {f} {np}",
        "{f} picks {np} and takes them away from {n}", "{s} leaves {np} to {f}", "{f} receives {np} of {n}",
    ),
    leads=("", "", "then ", "later ", "after that ", "{t} ", "at the {x} "),
    tails=("", "", "", " at the {x}", " {t}"),
    subjects=("{n}", "{p}"),
    amounts=(
        "{k} {o}", "{k} {o}", "{k} of the {o}", "{k} of them", "another {k} {o}", "another {k}", "{k} more {o}",
        "{k} more", "{k} new {o}", "{k}",
    ),
    ask_now=(
        "how many {o} does {n} have now?", "how many {o} does {n} have in the end?",
        "how many {o} does {p} have now?", "how many {o} are there now?", "how many {o} has {n} now?",
        "what is the number of {o} that {n} has now?", "count the {o} that {n} has now.",
        "find the number of {o} of {n}.", "say how many {o} {n} has in the end.", "now {n} has how many {o}?",
        "how many are there in the end?", "find how many {o} {n} now has.",
    ),
    ask_total=(
        "how many {o} do they have together?", "how many {o} do {n} and {f} have in all?", "count all the {o}.",
        "what is the total number of {o}?", "how many {o} are there in all?", "how many {o} are there together?",
        "find the number of {o} they both have together.", "they have how many {o} together?",
    ),
    ask_difference=(
        "how many more {o} does {n} have than {f}?", "how many fewer {o} does {f} have than {n}?",
        "by how many {o} is {n} ahead of {f}?", "what is the difference between the two numbers of {o}?",
        "find how many {o} {f} must get to have as many as {n}.", "say how many more {n} has than {f}.",
    ),
    more=(
        "{n} has {k} more {o} than {f}", "{n} has {k} more than {f}", "{f} has {k} fewer {o} than {n}",
        "{f} has {k} fewer than {n}", "{n} is {k} {o} ahead of {f}", "{n} owns {k} {o} more than {f} does",
        "{n} holds {k} more {o} than {f} has", "{f} holds {k} fewer {o} than {n} has",
        "by {k} {o} {n} is ahead of {f}", "{f} owns {k} {o} fewer than {n} does", "{f} is {k} {o} behind {n}",
        "{f} is behind {n} by {k}", "than {f} {n} has {k} more {o}", "{f} needs {k} more {o} to have as many as {n}",
        "{n} is ahead by {k} of {f}", "{n} needs {k} fewer {o} to have as many as {f}",
    ),
    fewer=(
        "{n} has {k} fewer {o} than {f}", "{n} has {k} fewer than {f}", "{f} has {k} more {o} than {n}",
        "{f} has {k} more than {n}", "{f} is {k} {o} ahead of {n}", "{n} owns {k} {o} fewer than {f} does",
        "{n} holds {k} fewer {o} than {f} has", "{f} holds {k} more {o} than {n} has",
        "by {k} {o} {f} is ahead of {n}", "{f} owns {k} {o} more than {n} does", "{n} is {k} {o} behind {f}",
        "{n} is behind {f} by {k}", "than {f} {n} has {k} fewer {o}", "{n} needs {k} more {o} to have as many as {f}",
        "{f} is ahead by {k} of {n}", "{f} needs {k} fewer {o} to have as many as {n}",
    ),
    ask_one=(
        "how many {o} does {n} have?", "what is the number of {o} of {n}?", "say how many {o} {n} has.",
        "find the number of {o} that {n} owns.", "how many {o} belong to {n}?",
    ),
    groups=(
        "{n} has {a} {boxes} with {b} {o} in each {box}", "{n} buys {a} {boxes} of {b} {o} each",
        "there are {a} {boxes} of {n} and each {box} has {b} {o}", "{n} fills {a} {boxes} with {b} {o} each",
        "each of the {a} {boxes} of {n} has {b} {o} in it", "{n} puts {b} {o} in each of {a} {boxes}",
        "in each {box} there are {b} {o} and {n} has {a} {boxes}", "{n} owns {a} {boxes} and every {box} has {b} {o}",
        "every {box} of {n} has {b} {o} and there are {a} {boxes}", "{n} gets {b} {o} from each of {a} friends",
    ),
    price=(
        "{n} buys {a} {o} for {b} coins each", "each of the {o} costs {b} coins and {n} buys {a} of them",
        "the {o} cost {b} coins each and {n} takes {a}", "{n} takes {a} {o} and pays {b} coins for each",
        "at the {x} {n} buys {a} {o} at {b} coins each", "for each of {a} {o} {n} pays {b} coins",
    ),
    ask_price=(
        "how many coins does {n} pay?", "how many coins does {p} need?", "what is the total number of coins?",
        "how many coins is that in all?", "find how many coins {n} must pay.", "say what {p} pays in all.",
    ),
    two_sentences=("{1}. {2}. {q}", "{1}. {2}. {q}", "{1}, and {2}. {q}", "if {1} and {2}, {q}"),
    three_sentences=("{1}. {2}. {3}. {q}", "{1}. {2}, and {3}. {q}", "{1}, and {2}. {3}. {q}"),
)  # fmt: skip

HELD_OUT = Patterns(
    state=(
        "at first there are {k} {o} in the {box} of {n}", "we know that {k} {o} belong to {n}",
        "{t} {n} comes with {k} {o} in a {box}", "{n} has a {box} with {k} {o} in it",
        "the {box} that {n} holds has {k} {o}", "{n} had {k} {o} at first",
    ),
    gain=(
        "{n} gets another {k} from {f}", "{k} more {o} are given to {m}", "{f} brings {k} more {o} to {n}",
        "from {f} {n} receives {k} {o}", "{p} also finds another {k} {o}", "{n} wins {k} {o} from {f}",
        "{n} picks up {k} new {o} and keeps them", "later {f} hands {m} {k} {o}",
    ),
    loss=(
        "{k} of the {o} are taken by {f}", "{n} gives away {k} of them", "{p} also loses another {k} {o}",
        "{n} throws {k} of the {o} away", "{p} leaves {k} of them at the {x}", "{k} {o} are sold to {f}",
        "{n} drops {k} of the {o} and breaks them", "then {f} takes away {k} of the {o}",
    ),
    leads=("",),
    tails=("",),
    subjects=("{n}", "{p}"),
    amounts=("{k} {o}",),
    ask_now=(
        "in the end {n} has how many {o}?", "say how many {o} {p} has now.",
        "find how many {o} there are in the end.", "what is now the number of {o} of {n}?",
        "how many {o} does {n} now have?", "count how many {o} {n} has.",
    ),
    ask_total=(
        "in all they have how many {o}?", "say how many {o} there are in all.", "find the total number of {o}.",
        "how many {o} are there in total?",
    ),
    ask_difference=(
        "{f} has how many fewer {o} than {n}?", "how many {o} more than {f} does {n} have?",
        "find how many more {o} {n} has than {f}.",
    ),
    more=("{n} has {k} {o} more than {f}", "{n} is ahead of {f} by {k} {o}", "{f} has {k} {o} fewer than {n} has"),
    fewer=("{n} has {k} {o} fewer than {f}", "{f} is ahead of {n} by {k} {o}", "{f} has {k} {o} more than {n} has"),
    ask_one=("{n} has how many {o}?", "say what number of {o} {n} has.", "count the {o} of {n}."),
    groups=(
        "there are {b} {o} in every {box} and {n} owns {a} {boxes}", "{n} has {a} {boxes} and puts {b} {o} in each",
        "each {box} of {n} has {b} {o} in it and there are {a} of them", "with {b} {o} each {n} fills {a} {boxes}",
    ),
    price=(
        "{n} takes {a} {o} that cost {b} coins each", "for {b} coins each {n} buys {a} of the {o}",
        "{n} pays {b} coins for each of {a} {o}",
    ),
    ask_price=("how many coins must {n} pay?", "say how many coins {p} pays in all.", "what does {n} pay in total?"),
    two_sentences=("{1}. {2}. {q}", "{1}. If {2}, {q}"),
    three_sentences=("{1}. {2}. {3}. {q}", "{1}. If {2} and {3}, {q}"),
)  # fmt: skip
