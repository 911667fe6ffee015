"""What can be registered as a direct operator, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbo_greenlet import register_direct_op
from dbo_greenlet.errors import ConfigurationError
from tests.direct_ops.operators import mix

pytestmark = pytest.mark.usefixtures("thread_as_before")


@pytest.mark.parametrize(
    ("name", "implementation", "message"),
    [
        ("custom", None, "namespace::name"),
        ("dbo_test::custom.default", None, "namespace::name"),
        ("dbo_test::nothing", None, "there is no operator 'dbo_test::nothing'"),
        ("aten::add", None, "has the overloads"),
        ("dbo_test::raw", None, "pass it as implementation"),
        ("dbo_test::raw", lambda x: x, "names, order and defaults"),
        ("dbo_test::raw", lambda layer, x: x, "names, order and defaults"),
        ("dbo_test::raw", 3, "is not a Python function"),
    ],
)
def test_what_cannot_be_registered(name: str, implementation: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        register_direct_op(name, implementation)


def test_defaults_of_the_schema_must_be_the_implementations_too() -> None:
    torch.library.define("dbo_test::scale", "(Tensor x, float by=2.0) -> Tensor")
    with pytest.raises(ConfigurationError, match="defaults"):
        register_direct_op("dbo_test::scale", lambda x, by: x * by)
    register_direct_op("dbo_test::scale", lambda x, by=2.0: x * by).remove()
    register_direct_op("dbo_test::scale", lambda *args, **kwargs: args[0]).remove()


def test_an_operator_with_kernels_per_device_needs_to_be_told_which() -> None:
    @torch.library.custom_op("dbo_test::by_device", mutates_args=(), device_types="cpu")
    def by_device(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(ConfigurationError, match="kernels of its own for cpu"):
        register_direct_op("dbo_test::by_device")


def test_a_known_implementation_that_moved_is_said_to_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    from dbo_greenlet import direct_ops

    monkeypatch.setitem(direct_ops.KNOWN_IMPLEMENTATIONS, "dbo_test::raw", "json:no_such_function")
    with pytest.raises(ConfigurationError, match="not at json"):
        register_direct_op("dbo_test::raw")
    monkeypatch.setitem(direct_ops.KNOWN_IMPLEMENTATIONS, "dbo_test::raw", "tests.direct_ops.operators:mix")
    op = register_direct_op("dbo_test::raw")
    assert op.implementation is mix
    op.remove()
