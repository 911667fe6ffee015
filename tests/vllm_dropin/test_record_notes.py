"""What the drop-in tells `dbo-greenlet record` about why there may be nothing to see."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from dbo_greenlet import record_notes
from dbo_greenlet.vllm import engagement, plugin, step
from dbo_greenlet.vllm.settings import Settings
from tests.vllm_dropin import drive

pytestmark = pytest.mark.vllm


@pytest.fixture
def notes(monkeypatch, tmp_path):
    monkeypatch.setenv(record_notes.FOLDER, str(tmp_path))
    return lambda: record_notes.read(tmp_path)


def test_why_microbatches_are_left_to_vllm(notes):
    engagement.look_at_flags(drive.vllm_config(), enable_dbo=True, ubatch_size=0)
    (reason,) = notes()["left"]
    assert "vLLM's CPU platform switches DBO off" in reason


def test_that_the_drop_in_was_there(notes, monkeypatch):
    monkeypatch.setenv("DBO_GREENLET", "maybe")
    plugin.register()
    assert notes()["vllm"] == [""]
    (reason,) = notes()["left"]
    assert reason.startswith("dbo_greenlet is off: DBO_GREENLET='maybe' means nothing")


def test_nobody_is_told_where_nobody_records(notes, monkeypatch):
    monkeypatch.delenv(record_notes.FOLDER)
    engagement.look_at_flags(drive.vllm_config(), enable_dbo=True, ubatch_size=0)
    assert notes() == {}


def test_that_memory_is_not_recorded_of_its_steps(notes, monkeypatch, tmp_path, caplog):
    folder = tmp_path.with_name(f"{tmp_path.name}-traces")
    monkeypatch.setenv("DBO_GREENLET_TRACE", str(folder))
    monkeypatch.setenv("DBO_GREENLET_TRACE_MEMORY", "1")
    settings = Settings.from_environment()
    assert settings.trace_memory
    try:
        with caplog.at_level("WARNING", logger=engagement.logger.name):
            path = engagement._observe(drive.vllm_config(), settings, 0, 1, "V1", "0.32.0")
    finally:
        step.record_to(None)
    assert path is not None, "the rest is recorded"
    assert notes()["partial"] == [engagement.NO_MEMORY] and engagement.NO_MEMORY in caplog.text
