"""Stage times by tokens, and the tables they are made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dbo_greenlet.errors import ConfigurationError
from dbo_greenlet.estimate import (
    CARRIERS,
    ENGINES,
    GPUS,
    LINKS,
    PRESETS,
    Communication,
    Engine,
    Gpu,
    Link,
    ModelShape,
    Workload,
    make_setup,
    read_model,
    stage_times,
)
from dbo_greenlet.estimate.costs import padding_us
from dbo_greenlet.estimate.gpus import gpu_named, link_named

# A machine on which everything is one round number: 1 FLOP and 1 byte a microsecond, all of it reached.
UNIT = Gpu("unit", 1e-6, 1e-6, 1e-6, 100, "made up")
PLAIN = Engine(
    "plain", "made up", dense_flops=1, grouped_flops=1, attention_flops=1, padded_rows=0, dense_bandwidth=1,
    grouped_bandwidth=1, activation_bandwidth=1e30, unpack_bandwidth=1e30, kernel_us=0,
)  # fmt: skip
WIRE = Link("wire", 1, 0, 0, "made up")
ALONE = Communication("stream", 1, WIRE)
TINY = ModelShape("tiny", 1, 10, 4, 1, 5, 2, kv_heads=1, head_dim=4)


def parameters(shape: ModelShape) -> float:
    """Of all layers; embeddings are left out."""
    expert = 3 * shape.hidden * shape.inner
    sparse = shape.experts * expert + 3 * shape.hidden * shape.shared_inner + shape.experts * shape.hidden
    dense = 3 * shape.hidden * shape.dense_inner
    return shape.layers * shape.attention_weights + shape.moe_layers * sparse + shape.dense_layers * dense


@pytest.mark.parametrize(
    ("preset", "published", "vocabulary"),
    [
        ("deepseek-v2-lite", 15.7e9, 102400),
        ("deepseek-v3", 671e9, 129280),
        ("qwen3-30b-a3b", 30.5e9, 151936),
        ("qwen3-235b-a22b", 235e9, 151936),
    ],
)
def test_presets_have_as_many_parameters_as_published(preset: str, published: float, vocabulary: int) -> None:
    shape = PRESETS[preset]
    assert parameters(shape) + 2 * vocabulary * shape.hidden == pytest.approx(published, rel=0.01)


def test_every_figure_has_a_source() -> None:
    for each in (*GPUS.values(), *LINKS.values(), *ENGINES.values(), *CARRIERS.values()):
        assert len(each.source) > 10, each.name


def test_few_rows_take_what_reading_the_weights_takes() -> None:
    # 1 row through 3 x 10 x 5 weights of 2 bytes: 300 us to read. 1 of 4 experts is touched: a quarter of 4 x 300 us.
    times = stage_times(TINY, UNIT, PLAIN, ALONE, Workload(1, 0), 1)
    both = (300.0**4 + (2 * 1 * 150) ** 4) ** 0.25
    assert times.experts == pytest.approx(both)


def test_many_rows_take_what_multiplying_takes() -> None:
    # All four experts are touched; 1000 rows x 150 weights x 2 FLOP is far above reading 4 x 300 bytes.
    times = stage_times(TINY, UNIT, PLAIN, ALONE, Workload(1000, 0), 1000)
    assert times.experts == pytest.approx(300_000, rel=1e-3)


def test_experts_that_no_token_takes_are_not_read() -> None:
    read_only = replace(PLAIN, grouped_flops=1e30)
    for tokens, ranks in ((1, 1), (2, 1), (3, 2), (50, 2)):
        found = stage_times(
            TINY, UNIT, read_only, replace(ALONE, ranks=ranks, link=WIRE), Workload(tokens, 0), tokens
        ).experts
        touched = 4 * (1 - (3 / 4) ** (tokens * ranks)) / ranks
        assert found == pytest.approx(touched * 300)


def test_splitting_reads_the_weights_twice_where_they_are_the_bound() -> None:
    setup = make_setup({"model": "deepseek-v3", "tokens": 64, "ranks": 8, "all2all": "stream", "context": 16})
    whole, half = setup.times(64), setup.times(32)
    assert half.reads_weights == pytest.approx(whole.reads_weights, rel=0.15)
    assert half.reads_weights > 0.8 * half.compute
    assert 1.7 < 2 * half.compute / whole.compute < 2.0


def test_large_batches_cost_little_more_when_halved() -> None:
    setup = make_setup({"model": "deepseek-v3", "tokens": 65536, "ranks": 8, "all2all": "stream", "context": 16})
    assert 1.0 < 2 * setup.times(32768).compute / setup.times(65536).compute < 1.02


def test_decode_reads_every_context_and_a_shared_one_once() -> None:
    read_only = replace(PLAIN, dense_flops=1e30, attention_flops=1e30)

    def attention(tokens: int, seen: int, shared: bool) -> float:
        return stage_times(TINY, UNIT, read_only, ALONE, Workload(8, seen, shared_context=shared), tokens).attention

    # A key and a value of one head, 4 elements of 2 bytes each.
    one = 1000 * 2 * 4 * 2
    assert attention(8, 1000, False) - attention(8, 0, False) == pytest.approx(8 * one)
    assert attention(8, 1000, True) - attention(8, 0, True) == pytest.approx(one)
    assert attention(4, 1000, True) - attention(4, 0, True) == pytest.approx(one)


def test_a_microbatch_of_prompts_reads_the_keys_of_its_own() -> None:
    read_only = replace(PLAIN, dense_flops=1e30, attention_flops=1e30)

    def attention(tokens: int, prompt: int) -> float:
        work = Workload(8000, prompt, prefill=True)
        none = replace(work, context=0)
        times = [stage_times(TINY, UNIT, read_only, ALONE, each, tokens).attention for each in (work, none)]
        return times[0] - times[1]

    # Eight prompts are cut between two of them; one is cut in two, and both halves have all of its keys to read.
    assert 2 * attention(4000, 1000) == pytest.approx(attention(8000, 1000))
    assert attention(4000, 8000) == pytest.approx(attention(8000, 8000))


def test_padding_grows_with_the_model_and_not_with_the_ranks() -> None:
    engine, gpu = ENGINES["vllm-ll"], GPUS["H200"]
    assert padding_us(PRESETS["deepseek-v2-lite"], gpu, engine) == pytest.approx(engine.padded_us)
    twice = replace(PRESETS["deepseek-v2-lite"], experts=128)
    assert padding_us(twice, gpu, engine) == pytest.approx(2 * engine.padded_us)
    assert padding_us(twice, replace(gpu, memory=2.4), engine) == pytest.approx(4 * engine.padded_us)
    assert padding_us(twice, gpu, replace(engine, padded_for=0.0)) == engine.padded_us
    given = make_setup({"model": "qwen3-moe", "tokens": 8, "calibration": {"padded_us": 100}})
    assert padding_us(given.shape, given.gpu, given.engine) == 100


@pytest.mark.parametrize(
    ("kind", "ranks", "copies"),
    [
        ("deepep_ll", 4, 8 * 3 / 4),  # one for each expert, a quarter of them at home
        ("deepep_ht", 4, 3 * (1 - 0.75**8)),  # one for each other rank that has one
        ("deepep_ht", 32, 3 * (1 - 0.75**8)),  # four nodes
        ("stream", 1, 0.0),
    ],
)
def test_how_often_a_row_leaves_its_rank(kind: str, ranks: int, copies: float) -> None:
    communication = Communication(kind, ranks, WIRE)
    assert communication.copies(8) == pytest.approx(copies)
    times = stage_times(PRESETS["deepseek-v3"], UNIT, PLAIN, replace(communication, dispatch_bytes=1), Workload(5), 5)
    assert times.dispatch_bytes == pytest.approx(5 * copies * 7168)
    assert times.combine_bytes == pytest.approx(2 * 5 * copies * 7168)


def test_rates_between_numbers_of_ranks_lie_between_them() -> None:
    link = link_named("rdma-ll")
    assert [link.between(ranks).gbs for ranks in (2, 8, 16, 128, 500)] == [142, 142, 79, 42, 42]
    assert link.between(24).gbs == pytest.approx((79 + 56) / 2)


def test_a_gpu_is_found_by_what_its_driver_says() -> None:
    assert gpu_named("NVIDIA H200").name == "H200"
    assert gpu_named("NVIDIA H20").name == "H20"
    with pytest.raises(ConfigurationError, match="no GPU 'V100'.*H200"):
        gpu_named("V100")


def test_a_config_of_hugging_face_is_the_preset(tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "num_attention_heads": 128, "intermediate_size": 18432,
        "first_k_dense_replace": 3, "n_shared_experts": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert replace(read_model(str(tmp_path)), name="deepseek-v3") == PRESETS["deepseek-v3"]
    broken = (({"n_routed_experts": None}, "none of n_routed_experts"), ({"hidden_size": "x"}, "hidden='x'"))
    for changes, wrong in broken:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ConfigurationError, match=wrong):
            read_model(str(tmp_path))


def test_a_model_from_toml(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    path = tmp_path / "mine.toml"
    path.write_text('like = "deepseek-v3"\nlayers = 10\n')
    assert read_model(str(path)) == replace(PRESETS["deepseek-v3"], name="mine", layers=10)
    path.write_text('like = "deepseek-v3"\nexpertz = 10\n')
    with pytest.raises(ConfigurationError, match=r"mine.toml: unknown keys expertz"):
        read_model(str(path))


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"tokens": 0}, "tokens is 0; use a whole number from 1"),
        ({"model": "gpt-5"}, "no model 'gpt-5'"),
        ({"ranks": 0}, "ranks is 0; use a whole number from 1"),
        ({"all2all": "pigeon"}, "no all-to-all 'pigeon'"),
        ({"link": "string"}, "no link 'string'"),
        ({"gbs": 0}, "carries nothing"),
        ({"gbs": -1}, "gbs is -1"),
        ({"engine": "steam"}, "no engine 'steam'"),
        ({"carrier": "fibers"}, "no carrier 'fibers'"),
        ({"colour": "red"}, "knows no colour"),
        ({"shape": {"legs": 4}}, "a model's shape has no legs"),
        ({"calibration": {"legs": 4}}, "a calibration has no legs"),
        ({"gpu": {"name": "mine"}}, "a GPU needs bf16, fp8, memory, sms"),
        ({"layers": 1}, "1 of 1 layers dense"),
        ({"tokens": "x"}, "tokens is 'x'; use a whole number"),
        ({"tokens": True}, "tokens is True"),
        ({"ranks": 2.5}, "ranks is 2.5; use a whole number"),
        ({"gbs": float("nan")}, "gbs is nan; use a number"),
        ({"dispatch_bytes": -1}, "dispatch_bytes is -1"),
        ({"margin": 2.0}, "margin is 2.0; use a number from 0 to 1"),
        ({"all2all": "deepep_ht", "sms": 500}, "sms is 500: a H200 has 132 multiprocessors"),
        ({"carrier": 3}, "carrier is 3; use a name"),
        ({"prefill": "yes"}, "prefill is 'yes'; use true or false"),
        ({"shape": "a"}, "shape is 'a'; use a table"),
        ({"shape": {"layers": 2.5}}, "layers=2.5; use a whole number"),
        ({"shape": {"weight_bytes": 0}}, "weight_bytes=0; use a number above 0"),
        ({"calibration": 3}, "calibration is 3; use a table"),
        ({"calibration": {"dense_flops": 0}}, "dense_flops is 0; use a number from 0.0001 to 1"),
        ({"calibration": {"kernels": [1, 2]}}, "kernels is .1, 2.; use 4 numbers"),
        ({"calibration": {"kernels": 3}}, "kernels is 3; use 4 numbers"),
        ({"calibration": {"call_us": -5}}, "call_us is -5"),
        ({"calibration": {"outside_us": "a"}}, "outside_us is 'a'"),
        ({"calibration": {"shared_first": 1}}, "shared_first is 1; use true or false"),
        ({"calibration": {"fitted_to": "x"}}, "a calibration has no fitted_to"),
        ({"calibration": {"source": 1}}, "source is 1; use a text"),
        ({"model": 3}, "model is 3; use a name or a file"),
        ({"shape": {"name": 3}}, "a model's name is 3"),
        ({"gpu": 3}, "gpu is 3; use a name, or a table"),
        ({"gpu": {"name": "x", "bf16": "a", "fp8": 1, "memory": 1, "sms": 1}}, "a GPU's bf16 is 'a'"),
        ({"gpu": {"name": "x", "bf16": 1, "fp8": 1, "memory": 0, "sms": 1}}, "a GPU's memory is 0"),
        ({"all2all": "deepep_ht", "graph": True}, "cannot be captured"),
    ],
)
def test_what_describes_no_step_is_refused(values: dict[str, object], wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=wrong):
        make_setup({"model": "deepseek-v2-lite", "tokens": 64, **values})
