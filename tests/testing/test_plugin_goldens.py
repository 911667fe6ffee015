"""Golden schedules by the pytest plugin: written, compared, and guarded against edits."""

from __future__ import annotations

from tests.testing.pytest_runs import Suite, the_line


def test_golden_files_are_written_compared_and_guarded(suite: Suite) -> None:
    suite.write(
        "deeper/test_it.py",
        """
        import pytest
        from dbo_greenlet.testing import low_latency

        @pytest.mark.parametrize("policy", ["round_robin", "phase_offset:2"])
        def test_it(dbo_run, dbo_golden, policy):
            dbo_golden(dbo_run(low_latency(2), policy))

        def test_by_name(dbo_run, dbo_golden):
            dbo_golden(dbo_run(low_latency(1)).schedule, name="one_layer")
        """,
    )
    missing = suite.pytest()
    assert missing.returncode == 2 and "3 failed" in missing.stdout
    assert "one_layer.txt does not exist; write it with pytest --dbo-update-golden" in missing.stdout
    written = suite.pytest("--dbo-update-golden")
    assert written.returncode == 0 and "golden schedules written" in written.stdout
    goldens = suite.folder / "deeper" / "goldens"
    names = {"one_layer.txt", "test_it-phase_offset-2.txt", "test_it-round_robin.txt"}
    assert {path.name for path in goldens.iterdir()} == names
    again = suite.pytest("--dbo-update-golden")
    assert again.returncode == 0 and "golden schedules written" not in again.stdout
    assert suite.pytest().returncode == 0
    # Another schedule is a failure with a difference; a hand-edited file a mistake. Both at once: the mistake counts.
    swapped = goldens / "test_it-round_robin.txt"
    (goldens / "test_it-phase_offset-2.txt").replace(swapped)
    differing = suite.pytest("-k", "round_robin")
    assert differing.returncode == 1
    # The difference, and not the source of what compares.
    assert "def compare" not in differing.stdout
    assert "  > " in differing.stdout and "policy: golden phase_offset:2, this step round_robin" in differing.stdout
    the_line(differing.stdout)
    edited = goldens / "one_layer.txt"
    edited.write_text(edited.read_text(encoding="utf-8").replace("  1  ", "  0  ", 1), encoding="utf-8")
    refused = suite.pytest()
    assert refused.returncode == 2 and "3 failed" in refused.stdout
    assert "one_layer.txt was edited by hand: its check line does not fit" in refused.stdout


def test_two_steps_do_not_share_a_golden_file(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        from dbo_greenlet.testing import low_latency

        def test_it(dbo_run, dbo_golden):
            for layers in (1, 1, 2):
                dbo_golden(dbo_run(low_latency(layers)))
        """,
    )
    done = suite.pytest("--dbo-update-golden")
    assert done.returncode == 2 and "two steps of this run have the golden file" in done.stdout


def test_a_failed_step_is_no_golden_one(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        from model import build

        def test_it(dbo_run, dbo_golden):
            dbo_golden(dbo_run(build, faults="raise@0.1"))
        """,
    )
    done = suite.pytest("--dbo-update-golden")
    assert done.returncode == 1 and "Microbatch 0 of 2 failed in slice 1" in done.stdout
    assert not (suite.folder / "goldens").exists()
