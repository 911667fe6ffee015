"""Real vLLM and this package for a GPU machine without a package index: built here, unpacked there.

    python scripts/vllm_bundle.py build  [--folder build/vllm_bundle] [--wheel-only]
    python3 scripts/vllm_bundle.py unpack TARGET [--folder build/vllm_bundle]

`build` writes two files: site.tar.xz (about 40 MB: vLLM, DeepEP, greenlet and what they import, pinned in
scripts/requirements/vllm_gpu.txt) and the wheel of this package, which changes daily and is rebuilt in a second with
--wheel-only. `unpack` makes TARGET/site and, with pip, TARGET/plugin: the wheel installed as a user installs it, with
the metadata by which vLLM finds plug-ins; a PYTHONPATH without TARGET/plugin is a vLLM without it.

What makes site.tar.xz small: of vLLM's two libraries of kernels only the machine code for one GPU architecture is kept
(the rest of the device code is overwritten with zeros, which compress to nothing), and its FlashAttention is replaced
by a few lines of torch (gpu_vllm_attention.py). Lost are the kernels that exist as PTX alone (quantised ones): the runs
use bfloat16 weights.
"""

from __future__ import annotations

import argparse
import compileall
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "scripts" / "requirements" / "vllm_gpu.txt"
ATTENTION = ROOT / "scripts" / "gpu_vllm_attention.py"
PYTHON_THERE = "3.12"
# pip takes each tag literally, so every one that a wheel of the list may carry is named.
PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (17, 24, 27, 28, 31, 34, 35)))
KERNEL_LIBRARIES = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so")
LEFT_OUT = ("vllm/vllm_flash_attn/", "mistral_common/data/", "pycountry/locales/")

# CUDA's container of device code (fatbinary.h): a header of magic, version, header size and payload size; then entries
# of kind, version, header size, payload size, ... and, 28 bytes in, the architecture.
FATBINARY_MAGIC = 0xBA55ED50
FATBINARY_HEADER = struct.Struct("<IHHQ")
ENTRY_HEADER = struct.Struct("<HHIQIIHHI")
MACHINE_CODE = 2  # 1 is PTX


class BundleFailed(Exception):
    """The bundle could not be built or unpacked; the message says why."""


def build_site(out: Path, architecture: int) -> None:
    """Download the pinned wheels, keep what the runs need and pack it into `out`."""
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch) / "wheels", Path(scratch) / "site"
        _download(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            _extract(wheel, site)
        for library in KERNEL_LIBRARIES:
            kept = keep_architecture(site / library, architecture)
            print(f"{library}: {kept} entries of device code kept", flush=True)
        replacement = site / "vllm" / "vllm_flash_attn" / "__init__.py"
        replacement.parent.mkdir(exist_ok=True)
        shutil.copyfile(ATTENTION, replacement)
        plain = Path(scratch) / "site.tar"
        with tarfile.open(plain, "w") as archive:
            archive.add(site, arcname="site")
        with out.open("wb") as packed:
            _run(["xz", "-T0", "-6", "-c", str(plain)], stdout=packed)


def build_wheel(folder: Path) -> Path:
    """Build this package's wheel in `folder`, which then holds no other version of it."""
    for old in folder.glob("dbo_greenlet-*.whl"):
        old.unlink()
    _run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)])
    return next(folder.glob("dbo_greenlet-*.whl"))


def unpack(folder: Path, target: Path) -> None:
    """Unpack both parts below `target`, which is made; the byte code is compiled, since every process reads it."""
    target.mkdir(parents=True, exist_ok=True)
    # tar and xz as programs: both use several cores, Python's own modules one.
    _run(["tar", "-C", str(target), "-I", "xz -T0", "-xf", str(folder / "site.tar.xz")])
    (wheel,) = folder.glob("dbo_greenlet-*.whl")
    options = ["--quiet", "--no-index", "--no-deps", "--upgrade", "--target", str(target / "plugin")]
    _run([sys.executable, "-m", "pip", "install", *options, str(wheel)])
    compileall.compile_dir(target / "site", quiet=2, workers=0)


def keep_architecture(library: Path, architecture: int) -> int:
    """Overwrite all device code in an ELF file but the machine code for `architecture` (90 is Hopper); return how many
    entries are left. The file keeps its size, so nothing in it moves.
    """
    data = bytearray(library.read_bytes())
    kept = 0
    for begin, end in _fatbinary_sections(data):
        position = begin
        while position + FATBINARY_HEADER.size <= end:
            magic, _, header, payload = FATBINARY_HEADER.unpack_from(data, position)
            if magic != FATBINARY_MAGIC:
                position += 8  # padding between two containers
                continue
            stop = position + header + payload
            position += header
            while position < stop:
                fields = ENTRY_HEADER.unpack_from(data, position)
                kind, entry_header, entry_payload, entry_architecture = fields[0], fields[2], fields[3], fields[8]
                code = position + entry_header
                if kind == MACHINE_CODE and entry_architecture == architecture:
                    kept += 1
                else:
                    data[code : code + entry_payload] = bytes(entry_payload)
                position = code + entry_payload
    if not kept:
        raise BundleFailed(f"{library.name} holds no machine code for sm_{architecture}")
    library.write_bytes(data)
    return kept


def _fatbinary_sections(data: bytearray) -> Iterator[tuple[int, int]]:
    """Begin and end, in bytes, of the sections .nv_fatbin of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", data, table + entry_size * index) for index in range(count)]
    names_begin = sections[names][4]
    for name, _, _, _, offset, size in sections:
        begin = names_begin + name
        if data[begin : data.index(0, begin)] == b".nv_fatbin":
            yield offset, offset + size


def _download(wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON_THERE, "--implementation", "cp", "--dest", str(wheels)]
    for abi in (f"cp{PYTHON_THERE.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_x86_64"]
    _run([*command, "--requirement", str(PINS)])


def _extract(wheel: Path, site: Path) -> None:
    of_vllm = wheel.name.startswith("vllm-")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(LEFT_OUT):
                continue
            wanted = name.endswith((".py", ".json")) or ".dist-info/" in name or name in KERNEL_LIBRARIES
            if wanted or not of_vllm:
                archive.extract(name, site)


def _run(command: list[str], **options: object) -> None:
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False, **options)
    if done.returncode != 0:
        raise BundleFailed(f"{' '.join(command[:4])} ... exited with {done.returncode}: {done.stderr.strip()[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    building = actions.add_parser("build", help="make the bundle (downloads about 500 MB)")
    building.add_argument("--wheel-only", action="store_true", help="this package's wheel alone")
    building.add_argument("--architecture", type=int, default=90, help="compute capability to keep (default 90)")
    unpacking = actions.add_parser("unpack", help="unpack it on the GPU machine")
    unpacking.add_argument("target", type=Path)
    for action in (building, unpacking):
        action.add_argument("--folder", type=Path, default=ROOT / "build" / "vllm_bundle")
    arguments = parser.parse_args()
    try:
        if arguments.action == "unpack":
            unpack(arguments.folder, arguments.target)
            return 0
        arguments.folder.mkdir(parents=True, exist_ok=True)
        built = [build_wheel(arguments.folder)]
        if not arguments.wheel_only:
            built.append(arguments.folder / "site.tar.xz")
            build_site(built[-1], arguments.architecture)
    except (BundleFailed, OSError, ValueError) as failure:
        print(f"vllm_bundle: {failure}", file=sys.stderr)
        return 1
    for path in built:
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
