"""Replay strings: short, exact, refused when damaged; and the policy that makes their decisions again."""

from __future__ import annotations

import shlex
from functools import partial

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dbo_greenlet import RoundRobin, Schedule, dbo_yield
from dbo_greenlet.errors import ConfigurationError, MicrobatchFailed, ReplayMismatch, ScheduleDecodeError
from dbo_greenlet.policies import PhaseOffset, SeededRandom
from dbo_greenlet.testing import ReplayCase, ReplayStringError, high_throughput, low_latency, run_step
from dbo_greenlet.testing.site_words import pack_lists, pack_sites, unpack_lists, unpack_sites

ANYTHING = st.one_of(
    st.text(min_size=1, max_size=8),
    st.sampled_from([".", "..", "#", "%2E", "=", "=1,", "a|b", "(a*2)", "layer0.dispatch", "7", "007", "é\ud800", "'"]),
    st.builds("layer{}.{}".format, st.integers(0, 12), st.sampled_from(["dispatch", "combine"])),
)


@st.composite
def cases(draw: st.DrawFn) -> ReplayCase:
    count = draw(st.integers(1, 5))
    decisions = tuple(draw(st.lists(st.integers(0, count - 1), max_size=30)))
    missing = draw(st.sampled_from([0, 0, 1, len(decisions)]))
    ended = max(0, len(decisions) - missing)
    if draw(st.booleans()):
        sites = tuple(draw(st.one_of(st.just(""), ANYTHING)) for _ in range(ended))
    else:  # as in a model: the same list for each, as far as each came
        passed = draw(st.lists(st.one_of(st.just(""), ANYTHING), min_size=30, max_size=30))
        sites = tuple(passed[decisions[:position].count(index)] for position, index in enumerate(decisions[:ended]))
    return ReplayCase(Schedule(count, decisions, sites), draw(st.text(max_size=20)), draw(st.integers(0, 10**6)))


@given(cases())
def test_a_string_gives_back_the_case(case: ReplayCase) -> None:
    text = case.encode()
    assert ReplayCase.decode(text) == case
    assert text.isascii() and text.isprintable() and " " not in text and "'" not in text
    assert shlex.split(f"'{text}'") == [text]
    assert str(case) == text


@given(cases(), st.data())
def test_a_damaged_string_is_refused_or_means_the_same(case: ReplayCase, data: st.DataObject) -> None:
    text = case.encode()
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 6)))
    put = data.draw(st.one_of(st.text(max_size=4), st.text(alphabet="0123456789abcdef#*().,=|;:@?+%dbor", max_size=4)))
    damaged = text[:begin] + put + text[end:]
    assume(damaged != text)
    try:
        assert ReplayCase.decode(damaged) == case
    except ReplayStringError as error:
        assert str(error) and "\n" not in str(error)


@given(cases(), st.integers(0, 200))
def test_a_truncated_string_is_refused(case: ReplayCase, kept: int) -> None:
    text = case.encode()
    assume(kept < len(text))
    with pytest.raises(ReplayStringError):
        ReplayCase.decode(text[:kept])


@given(st.lists(st.one_of(st.just(""), ANYTHING), max_size=40))
@example(["a9", "a10", "a11", "a12"])
@example(["999999999", "1000000000", "1000000001"])
@example(["²", "³", "⁴"])
@example(["layer00", "layer01", "layer02"])
def test_a_list_of_sites_comes_back(sites: list[str]) -> None:
    assert unpack_sites(pack_sites(sites), len(sites)) == sites


@given(st.lists(st.lists(st.sampled_from(["a", "b1", "b2", ""]), max_size=6), min_size=1, max_size=4))
def test_lists_that_share_their_beginning_come_back(lists: list[list[str]]) -> None:
    assert unpack_lists(pack_lists(lists), [len(each) for each in lists]) == lists


@given(st.text(alphabet="ab1#*().,=|%2E+0", max_size=14), st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_whatever_is_no_list_of_sites_is_refused(text: str, lengths: list[int]) -> None:
    """As in a string that somebody made with fitting check characters."""
    try:
        lists = unpack_lists(text, lengths)
    except ReplayStringError:
        return
    assert [len(each) for each in lists] == lengths


def test_what_a_string_looks_like() -> None:
    run = run_step(low_latency(60), RoundRobin())
    text = ReplayCase.of(run).encode()
    assert text[:-8] == "dbor1:2;(01*121);(layer#.dispatch,layer#.combine*60+0),.|=;;"
    run = run_step(high_throughput(3), PhaseOffset(2), count=3)
    assert ReplayCase.of(run, call=4).encode()[:-8] == (
        "dbor1:3@4;001010(210*6)212122;(layer#.before_dispatch,layer#.before_combine,layer#.combine*3+0),.|=|=;;"
    )
    by_line = Schedule(1, (0,) * 5, ("moe.py:12", "moe.py:40", "moe.py:12", "moe.py:40", ""))
    assert ReplayCase(by_line, "late@0.1:50us+raise@0.2").encode() == (
        "dbor1:1;00000;(moe.py:12,moe.py:40*2),.;late@0.1:50us+raise@0.2;77b7db93"
    )


def test_a_step_of_sixty_layers_by_chance_stays_short() -> None:
    run = run_step(low_latency(60), SeededRandom(5))
    assert len(ReplayCase.of(run).encode()) < 320  # of 242 decisions


def test_line_breaks_blanks_and_quotes_around_it_do_not_count() -> None:
    case = ReplayCase.of(run_step(low_latency(1), RoundRobin()))
    text = case.encode()
    for copied in (f"'{text}'", f'"{text}"\n', f"  {text[:20]}\n   {text[20:]} "):
        assert ReplayCase.decode(copied) == case


def with_check(body: str) -> str:
    """A string that is whole, whatever it says."""
    from dbo_greenlet.testing.replay_case import _check

    return f"{body};{_check(body)}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "begins with 'dbor1:' and this begins with ''"),
        ("raise@1.3", "begins with 'dbor1:' and this begins with 'raise@1.3'"),
        ("dbo1:2:(01*3):9a41c2", "a schedule string, which has no sites"),
        ("dbor2:2;(01*3);;;12345678", "is of version 2 of the encoding and this dbo_greenlet reads version 1"),
        ("dbor1:2;(01*3);;;12345678", "truncated or mistyped"),
        ("dbor1:2", "truncated or mistyped"),
        (with_check("dbor1:2;01"), "truncated or mistyped"),
        (with_check("dbor1:0;;;"), "for '0' microbatches; N is 1 to 36"),
        (with_check("dbor1:37;;;"), "for '37' microbatches; N is 1 to 36"),
        (with_check("dbor1:2;02;;"), "a microbatch that is not below its N = 2"),
        (with_check("dbor1:2;0(;;"), "unexpected '('"),
        (with_check("dbor1:2;(0*999999999);;"), "more than 50000000 decisions"),
        (with_check("dbor1:2;01;a|b|c;"), "sites of 3 microbatches and decisions of 2"),
        (with_check("dbor1:1;00;a;"), "fewer sites than its decisions have"),
        (with_check("dbor1:1;00;a,b,c;"), "more sites than its decisions have"),
        (with_check("dbor1:1;00;(a*99999999);"), "more sites than its decisions have"),
        (with_check("dbor1:1;0;%FF;"), "not UTF-8"),
    ],
)
def test_what_is_no_replay_string_is_one_clear_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ReplayStringError) as caught:
        ReplayCase.decode(text)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, ScheduleDecodeError)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(2, (0, 1, 0), ("a",)),
        Schedule(2, (0,), ("a", "b")),
        Schedule(0, ()),
        Schedule(2, (0, 2), ("a", "b")),
        Schedule(37, ()),
    ],
)
def test_what_is_no_step_cannot_be_encoded(schedule: Schedule) -> None:
    with pytest.raises(ConfigurationError, match="is no step"):
        ReplayCase(schedule).encode()


# -- replaying ---------------------------------------------------------------------------------------------------------


def program(*sites: str, bug: str = "") -> object:
    """A microbatch that passes `sites`, and raises where it comes to `bug`."""

    def build(bed: object) -> list:
        def forward(i: int) -> int:
            for site in sites:
                if i and site == bug:
                    raise ValueError(f"at {site}")
                dbo_yield(site)
            return i

        return [partial(forward, i) for i in range(bed.count)]

    return build


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
@pytest.mark.parametrize("seed", range(5))
def test_replay_makes_the_same_decisions(seed: int, carrier: str) -> None:
    recorded = run_step(low_latency(3), SeededRandom(seed), count=3)
    case = ReplayCase.decode(ReplayCase.of(recorded).encode())
    again = run_step(low_latency(3), case.policy(), count=3, carrier=carrier)
    assert again.succeeded and again.schedule == recorded.schedule and again.checksum == recorded.checksum


@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
def test_a_step_that_failed_is_repeated_up_to_its_failure(carrier: str) -> None:
    build = program("a", "b", "c", bug="c")
    recorded = run_step(build, PhaseOffset(2), carrier=carrier)
    assert isinstance(recorded.error, MicrobatchFailed)
    case = ReplayCase.of(recorded)
    assert case.schedule.decisions == (*recorded.schedule.decisions, 1)
    assert case.encode()[:-8] == "dbor1:2;0010101?;a,b,c,.|=;;"
    again = run_step(build, ReplayCase.decode(case.encode()).policy())
    assert str(again.error) == str(recorded.error) and again.schedule == recorded.schedule


def test_a_step_whose_bug_is_mended_runs_on_to_its_end() -> None:
    case = ReplayCase.of(run_step(program("a", "b", "c", bug="b"), RoundRobin()))
    again = run_step(program("a", "b", "c"), case.policy())
    assert again.succeeded and again.schedule.decisions == (0, 1, 0, 1, 0, 0, 1, 1)


RECORDED = ReplayCase.of(run_step(program("a", "b", "c"), PhaseOffset(2)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("a", "x", "c"), "decision 1: microbatch 0 yielded at 'x', in the recorded step it yielded at 'b'"),
        (("a",), "decision 1: microbatch 0 returned, in the recorded step it yielded at 'b'"),
        (("a", "b"), "decision 3: microbatch 0 returned, in the recorded step it yielded at 'c'"),
        (("a", "b", "c", "d"), "decision 5: microbatch 0 yielded at 'd', in the recorded step it returned"),
        (("b", "a", "c"), "decision 0: microbatch 0 yielded at 'b', in the recorded step it yielded at 'a'"),
    ],
)
@pytest.mark.parametrize("carrier", ["greenlet", "thread"])
def test_replay_of_a_changed_program_stops_at_the_first_decision_that_differs(
    changed: tuple[str, ...], message: str, carrier: str
) -> None:
    assert RECORDED.schedule.decisions == (0, 0, 1, 0, 1, 0, 1, 1)
    run = run_step(program(*changed), RECORDED.policy(), carrier=carrier)
    assert type(run.error) is ReplayMismatch and str(run.error) == f"replay parts at {message}"


def test_the_last_site_of_a_step_is_compared_too() -> None:
    """There is no decision after it at which it would be."""

    def build(bed: object) -> list:
        return [lambda: dbo_yield("a"), lambda: None]

    complete = Schedule(2, (0, 0, 1), ("a", "", "b"))
    run = run_step(build, ReplayCase(complete).policy(), strict=False)
    assert str(run.error) == (
        "replay parts at decision 2: microbatch 1 returned, in the recorded step it yielded at 'b'"
    )


def test_a_step_that_is_over_too_early_or_too_late_is_told() -> None:
    two = run_step(program("a", "b"), RoundRobin()).schedule
    longer = Schedule(2, (*two.decisions, 1), two.sites)
    run = run_step(program("a", "b"), ReplayCase(longer).policy())
    assert str(run.error) == (
        "replay parts at decision 6: the recorded step went on with microbatch 1, this one is complete after 6 "
        "decisions"
    )
    # One that does not know its sites, and so not that it was complete, may go on.
    assert run_step(program("a", "b"), ReplayCase(Schedule(2, two.decisions)).policy()).succeeded
    assert run_step(program("a", "b", "c"), ReplayCase(Schedule(2, two.decisions)).policy()).succeeded


def test_a_microbatch_that_may_not_run_is_named_with_its_site() -> None:
    schedule = Schedule(2, (0, 0, 1, 1, 1), ("a", "b", "a", "b"))
    run = run_step(program("a", "b", "c"), ReplayCase(schedule).policy())
    assert str(run.error) == (
        "replay parts at decision 4: the recorded step resumed microbatch 1, parked at 'b', which may not run yet "
        "here; runnable are [0]"
    )


def test_a_string_of_another_model_is_told_as_such() -> None:
    run = run_step(low_latency(2), RECORDED.policy())
    assert type(run.error) is ReplayStringError
    assert str(run.error) == (
        "the replay string is of another model or another test: microbatch 0 first yielded at 'layer0.dispatch', and "
        "no slice of the recorded step ends there; its first one yielded at 'a'"
    )
    run = run_step(program("a", "b", "c"), RECORDED.policy(), count=3)
    assert type(run.error) is ReplayStringError
    assert "is for a step of 2 microbatches and this one has 3" in str(run.error)


@given(st.integers(0, 1000), st.integers(0, 12))
def test_any_beginning_of_a_step_can_be_replayed(seed: int, length: int) -> None:
    """What an exploration found is such a beginning; behind it the lowest one that may run goes on."""
    whole = run_step(low_latency(2), SeededRandom(seed)).schedule
    part = Schedule(2, whole.decisions[:length], whole.sites[:length])
    run = run_step(low_latency(2), ReplayCase.decode(ReplayCase(part).encode()).policy())
    assert run.succeeded and run.schedule.decisions[:length] == part.decisions
