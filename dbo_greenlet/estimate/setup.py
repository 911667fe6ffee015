"""A setup from plain values: those of the command line, or of a row of measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .costs import Communication, Workload
from .engines import CARRIERS, Engine, engine_named
from .gpus import Gpu, gpu_named, link_named
from .models import ModelShape, read_model, toml_of
from .predict import Setup
from .values import check_engine, check_gpu, check_values

__all__ = ["make_setup", "read_values"]

# The all-to-all decides what runs the experts in vLLM.
_ENGINES = {"deepep_ll": "vllm-ll", "deepep_ht": "vllm-ht", "stream": "torch"}
_LOW_LATENCY_LINKS = {"rdma": "rdma-ll"}
# DeepEP's default for kernels within a node, and vLLM's for its DBO.
_MULTIPROCESSORS = {"deepep_ll": 0, "deepep_ht": 20, "stream": 0}


def make_setup(values: Mapping[str, Any]) -> Setup:
    """The setup that `values` describe.

    Keys, all but the first two optional: `model` (a name or file, or a `ModelShape`), `tokens` (of a rank); `layers`,
    and other fields of the shape in `shape`; `gpu` (a name, or the fields of a `Gpu`), `engine`, `all2all`, `ranks`,
    `link` (a name) with `gbs` and `latency_us`, `dispatch_bytes`, `sms`, `ranks_per_node`, `loopback`; `context`,
    `prefill`, `shared_context`; `graph`, `carrier`, `handoff_us`, `call_us`, `outside_ms`, `margin`; other figures of
    the engine in `calibration`.

    Raises:
        ConfigurationError: an unknown key, name or file, or a value out of range.
    """
    rest = dict(values)
    try:
        model, tokens = rest.pop("model"), rest.pop("tokens")
    except KeyError as missing:
        raise ConfigurationError(f"an estimate needs {missing.args[0]}") from None
    check_values(values)
    shape = _shape(model, rest.pop("shape", {}), rest.pop("layers", None))
    kind = rest.pop("all2all", "deepep_ll")
    usual = "deepgemm" if shape.weight_bytes < 2 else _ENGINES.get(kind, "torch")
    engine = _engine(rest.pop("engine", None) or usual, rest)
    carrier = CARRIERS.get(rest.pop("carrier", "greenlets"))
    if carrier is None:
        raise ConfigurationError(f"no carrier {values['carrier']!r}; use one of {', '.join(map(repr, CARRIERS))}")
    if rest.get("handoff_us") is not None:
        carrier = replace(carrier, handoff_us=float(rest["handoff_us"]))
    rest.pop("handoff_us", None)
    name = rest.pop("link", "nvlink")
    ranks = rest.pop("ranks", 2)
    link = link_named(_LOW_LATENCY_LINKS.get(name, name) if kind == "deepep_ll" else name).between(ranks)
    if (gbs := rest.pop("gbs", None)) is not None:
        link = replace(link, gbs=float(gbs), source="given")
    if (latency := rest.pop("latency_us", None)) is not None:
        link = replace(link, latency_us=float(latency), source="given")
    if link.gbs == 0:
        raise ConfigurationError("a link of 0 GB/s carries nothing")
    communication = Communication(
        kind,
        ranks,
        link,
        rest.pop("dispatch_bytes", 2),
        rest.pop("sms", _MULTIPROCESSORS.get(kind, 0)),
        rest.pop("ranks_per_node", 8),
        rest.pop("loopback", False),
    )
    work = Workload(tokens, rest.pop("context", 1024), rest.pop("prefill", False), rest.pop("shared_context", False))
    gpu = _gpu(rest.pop("gpu", "H200"))
    if communication.sms >= gpu.sms:
        raise ConfigurationError(
            f"sms is {communication.sms}: a {gpu.name} has {gpu.sms} multiprocessors, and compute needs some of them"
        )
    graph, margin = rest.pop("graph", False), rest.pop("margin", 0.1)
    if rest:
        raise ConfigurationError(f"an estimate knows no {', '.join(sorted(rest))}")
    return Setup(shape, gpu, engine, communication, work, graph, carrier, margin=margin)


def read_values(path: Path) -> dict[str, Any]:
    """The values that a TOML file has for `make_setup`.

    Raises:
        ConfigurationError: no such file, or no TOML.
    """
    try:
        return toml_of(path)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        raise ConfigurationError(f"{path} cannot be read as TOML: {reason}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} cannot be read as TOML: {error}") from error


def _shape(model: str | ModelShape, changes: Mapping[str, Any], layers: int | None) -> ModelShape:
    shape = model if isinstance(model, ModelShape) else read_model(model)
    _refuse_unknown("a model's shape", changes, ModelShape)
    shape = replace(shape, **changes)
    return shape if layers is None else shape.with_layers(layers)


def _engine(name: str, rest: dict[str, Any]) -> Engine:
    """The engine with what `rest` has of it, which is taken out."""
    changes: dict[str, Any] = dict(rest.pop("calibration", {}))
    if (call := rest.pop("call_us", None)) is not None:
        changes["call_us"] = float(call)
    if (outside := rest.pop("outside_ms", None)) is not None:
        changes |= {"outside_us": 1e3 * outside, "outside_us_per_request": 0.0}
    _refuse_unknown("a calibration", changes, Engine)
    check_engine(changes)
    if "padded_us" in changes:
        changes.setdefault("padded_for", 0.0)  # given for this model
    changes = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
    return replace(engine_named(name), **changes)


def _gpu(given: str | Mapping[str, Any]) -> Gpu:
    if isinstance(given, str):
        return gpu_named(given)
    _refuse_unknown("a GPU", given, Gpu)
    missing = [each.name for each in fields(Gpu) if each.name not in given and each.name != "source"]
    if missing:
        raise ConfigurationError(f"a GPU needs {', '.join(missing)}")
    check_gpu(given)
    return Gpu(**{"source": "given", **given})


def _refuse_unknown(what: str, changes: Mapping[str, Any], kind: type[Any]) -> None:
    unknown = set(changes) - {each.name for each in fields(kind)}
    if unknown:
        raise ConfigurationError(f"{what} has no {', '.join(sorted(unknown))}")
