"""Checkpoints are saved once per session and set of overrides; making them is what costs time here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.moe.support import Loaded, make_reference, rope

# DeepSeek-V2's own shape in small: queries through a latent, grouped routing, scaled weights, YaRN with mscale.
V2 = {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rope_parameters": rope("yarn", mscale=0.707, mscale_all_dim=0.707),
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loaded]:
    """checkpoint(**overrides of the configuration) -> Loaded. What it returns is shared: tests must not change it."""
    made: dict[str, Loaded] = {}

    def make(**overrides: object) -> Loaded:
        key = repr(sorted(overrides.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            reference = make_reference(**overrides)
            reference.save_pretrained(folder)
            made[key] = Loaded(folder, reference)
        return made[key]

    return make


@pytest.fixture(scope="session")
def v2(checkpoint: Callable[..., Loaded]) -> Loaded:
    return checkpoint(**V2)
