"""The set-up takes a CPU build of torch or nothing: real pip, on wheels made here, with no network."""

from __future__ import annotations

import functools
import http.server
import os
import socket
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import cpu_torch
import pytest

PIN = "torch==2.13.0"
CUDA_ON_LINUX = "nvidia-cublas==13.1 ; platform_system == 'Linux'"


def write_wheel(folder: Path, version: str, requires: tuple[str, ...] = ()) -> Path:
    """A wheel of a package named torch that holds nothing but its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"torch-{version}-py3-none-any.whl"
    info = f"torch-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata + "".join(f"Requires-Dist: {line}\n" for line in requires))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return wheel


def write_index(folder: Path, wheel: Path | None) -> str:
    """A package index as a folder, with that wheel or with nothing; returns its address."""
    page = folder / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    link = f'<a href="{wheel.as_uri().replace("+", "%2B")}">{wheel.name}</a>' if wheel else ""
    page.write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
    return folder.as_uri()


@pytest.fixture
def no_index(tmp_path: Path) -> str:
    return write_index(tmp_path / "empty-index", None)


@pytest.fixture(autouse=True)
def closed_world(monkeypatch: pytest.MonkeyPatch, no_index: str) -> None:
    """pip without this machine's configuration: an empty default index and no wheel files."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", no_index)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")


@pytest.fixture
def silent_index() -> Iterator[str]:
    """An index that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/whl/cpu"


def test_a_wheel_file_that_pip_is_configured_with_wins_and_the_index_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(tmp_path / "wheels", "2.13.0+cpu", ("filelock",))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(cpu_torch, "probe", lambda index: pytest.fail(f"{index} was probed"))
    source, offer = cpu_torch.choose(PIN, "http://127.0.0.1:9/")
    assert source.pip_arguments == ("--no-index",)
    assert offer == cpu_torch.Offer(wheel.name, "2.13.0+cpu", ())


def test_the_cpu_index_is_used_alone_even_where_the_default_index_has_a_cuda_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = write_wheel(tmp_path / "cuda", "2.13.0", (CUDA_ON_LINUX,))
    monkeypatch.setenv("PIP_INDEX_URL", write_index(tmp_path / "default-index", cuda))
    index = write_index(tmp_path / "cpu-index", write_wheel(tmp_path / "cpu", "2.13.0+cpu"))
    source, offer = cpu_torch.choose(PIN, index)
    assert source.pip_arguments == ("--index-url", index)
    assert offer.version == "2.13.0+cpu"


def test_a_cuda_build_is_refused_with_every_source_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_index: str
) -> None:
    monkeypatch.setattr(cpu_torch, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(cpu_torch, "probe", functools.partial(cpu_torch.probe, seconds=0.2))
    requires = ("filelock", "nvidia-cublas==13.1", "triton==3.9 ; platform_system != 'nowhere'")
    cuda = write_wheel(tmp_path / "cuda", "2.13.0", requires)
    monkeypatch.setenv("PIP_INDEX_URL", write_index(tmp_path / "default-index", cuda))
    with pytest.raises(cpu_torch.SetupRefused) as refusal:
        cpu_torch.choose(PIN, silent_index)
    message = str(refusal.value)
    assert "No matching distribution" in message
    assert f"{silent_index} does not answer" in message
    assert f"offers {cuda.name}, a CUDA build of several GB (it needs nvidia-cublas, triton, ...)" in message
    assert "TORCH_INDEX=URL" in message and "PIP_FIND_LINKS=FOLDER" in message


def test_a_default_index_with_a_cpu_build_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_index: str
) -> None:
    elsewhere = "nvidia-cublas==13.1 ; platform_system == 'nowhere'"
    wheel = write_wheel(tmp_path / "wheels", "2.13.0", (elsewhere, "triton ; extra == 'compile'"))
    monkeypatch.setenv("PIP_INDEX_URL", write_index(tmp_path / "default-index", wheel))
    source, offer = cpu_torch.choose(PIN, no_index)
    assert source.pip_arguments == ()
    assert offer.is_cpu


@pytest.mark.parametrize("label", ["cu126", "cu130", "rocm7.0", "xpu"])
def test_a_label_of_another_device_is_not_a_cpu_build(label: str) -> None:
    assert not cpu_torch.Offer("torch.whl", f"2.13.0+{label}", ()).is_cpu


def test_the_probe_gives_up_on_a_silent_server_and_says_so(silent_index: str) -> None:
    assert cpu_torch.probe(silent_index, seconds=0.2) is not None


def test_the_probe_reports_a_refused_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "refused" in str(cpu_torch.probe(f"http://127.0.0.1:{port}/"))


def test_the_probe_is_content_with_an_answer(tmp_path: Path) -> None:
    write_index(tmp_path / "index", None)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert cpu_torch.probe(f"http://127.0.0.1:{server.server_port}") is None
        finally:
            server.shutdown()
            thread.join()


def test_the_installed_torch_is_the_pinned_cpu_build() -> None:
    assert (cpu_torch.installed_version() or "").partition("+")[0] == cpu_torch.read_pin().partition("==")[2]
    cpu_torch.verify()
