"""Words and sentence patterns of the arithmetic word problems (see problems.py, which puts them together).

A pattern is a sentence without its full stop, in lower case except where a slot brings a capital. Slots:
`{n}` a name, `{p}` and `{m}` its pronouns (he, him), `{f}` another name, `{o}` things in the plural, `{box}` and
`{boxes}` a container, `{x}` a place, `{t}` a time, `{k}` the number of the sentence, `{a}` and `{b}` the two numbers
of a sentence about equal groups.

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
    ("Ann", "she", "her"), ("Mia", "she", "her"), ("Eva", "she", "her"), ("Lily", "she", "her"), ("Zoe", "she", "her"),
    ("Nora", "she", "her"), ("Rosa", "she", "her"), ("Yuki", "she", "her"), ("Ada", "she", "her"), ("Ines", "she", "her"),
)  # fmt: skip
THINGS = (
    "apples", "pears", "plums", "eggs", "nuts", "books", "cards", "pens", "cups", "keys", "toys", "balls", "beads",
    "shells", "stones", "stamps", "flowers", "pencils", "marbles", "stickers", "buttons", "ribbons", "candles", "hats",
)  # fmt: skip
CONTAINERS = (("box", "boxes"), ("bag", "bags"), ("jar", "jars"), ("basket", "baskets"), ("drawer", "drawers"))
PLACES = ("park", "shop", "school", "market", "house", "garden", "beach", "river")
TIMES = ("on Monday", "on Friday", "on Sunday", "today", "at noon", "in the morning", "in the evening", "at night")


class Patterns(NamedTuple):
    """One side's patterns, by the part they play in a problem.

    `leads` and `tails` go before and after a gain or a loss, so that a few dozen patterns become several hundred.
    """

    state: tuple[str, ...]
    gain: tuple[str, ...]
    loss: tuple[str, ...]
    leads: tuple[str, ...]
    tails: tuple[str, ...]
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
        "{p} buys {k} more {o}", "{p} buys {k} more", "{p} finds {k} {o}", "{p} gets {k} {o} from {f}",
        "{f} gives {n} {k} {o}", "{f} gives {m} {k} more {o}", "{f} gives {k} {o} to {n}", "{p} picks up {k} {o}",
        "{p} wins {k} more {o}", "{k} more {o} are added", "{n} collects another {k} {o}", "{p} receives {k} new {o}",
        "{f} brings {m} {k} {o}", "{n} takes {k} {o} from {f}", "another {k} {o} come from {f}",
        "{f} hands {k} {o} to {n}", "{p} makes {k} new {o}", "{n} earns {k} more", "{p} borrows {k} {o} from {f}",
        "{k} {o} are given to {n} by {f}", "{p} also finds {k}", "{n} finds {k} of them", "{p} buys {k} of the {o}",
        "{f} sends {n} {k} {o}", "{k} {o} are sent to {m} by {f}", "{p} buys another {k} {o} from {f}",
    ),
    loss=(
        "{p} loses {k} {o}", "{p} loses {k} of them", "{p} gives {k} {o} to {f}", "{p} gives {f} {k} {o}",
        "{f} takes {k} {o} from {n}", "{f} gets {k} {o} from {n}", "{p} sells {k} {o}", "{n} sells {k} {o} to {f}",
        "{k} {o} are lost", "{k} more {o} are lost", "{p} drops {k} {o}", "{p} breaks {k} of the {o}",
        "{n} throws away {k} {o}", "{p} throws {k} away", "{p} uses {k} of them", "{p} hands {k} of the {o} to {f}",
        "{f} buys {k} {o} from {m}", "{p} lends {k} {o} to {f}", "{p} lends {f} {k} {o}", "{k} of the {o} are broken",
        "{n} leaves {k} {o} behind", "{k} {o} are taken away by {f}", "{p} sends {k} {o} to {f}",
        "{p} sells another {k}", "{k} of them are sold", "{p} also gives away {k} {o}", "{f} borrows {k} {o} from {m}",
        "{k} {o} are given to {f} by {n}",
    ),
    leads=("", "", "then ", "later ", "after that ", "{t} ", "at the {x} "),
    tails=("", "", "", " at the {x}", " {t}"),
    ask_now=(
        "how many {o} does {n} have now?", "how many {o} does {n} have in the end?", "how many {o} does {p} have now?",
        "how many {o} are there now?", "how many {o} has {n} now?", "what is the number of {o} that {n} has now?",
        "count the {o} that {n} has now.", "find the number of {o} of {n}.", "say how many {o} {n} has in the end.",
        "now {n} has how many {o}?", "how many are there in the end?", "find how many {o} {n} now has.",
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
    ),
    fewer=(
        "{n} has {k} fewer {o} than {f}", "{n} has {k} fewer than {f}", "{f} has {k} more {o} than {n}",
        "{f} has {k} more than {n}", "{f} is {k} {o} ahead of {n}", "{n} owns {k} {o} fewer than {f} does",
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
    ask_now=(
        "in the end {n} has how many {o}?", "say how many {o} {p} has now.", "find how many {o} there are in the end.",
        "what is now the number of {o} of {n}?", "how many {o} does {n} now have?", "count how many {o} {n} has.",
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
