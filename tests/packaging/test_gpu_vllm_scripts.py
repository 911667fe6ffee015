"""What of scripts/gpu_vllm*.py and scripts/vllm_bundle.py needs no GPU: tables, merging, the surgery on libraries."""

from __future__ import annotations

import json
import struct
from types import SimpleNamespace

import pytest
import vllm_bundle
from gpu_vllm import Pair, Sitting, gpus_to_use, merge, put
from gpu_vllm_engine import environment
from gpu_vllm_probe import in_words, quantiles
from gpu_vllm_rows import FAMILIES, MODES, ROWS, model_config
from gpu_vllm_table import FAULTS, tables


def session(*modes, status="done", gpus=1, date="2026-01-02 03:04", requests=(64,), **rank):
    ranks = [{"rank": number, **rank} for number in (0, 1)]
    held = {"modes": list(modes), "status": status, "ranks": ranks, "gpus": gpus, "date": date}
    return held | {"requests": list(requests)}


def served(answers, **times):
    return {
        "step_ms": None,
        "forward_ms": None,
        "hand_off_us": None,
        "yields_per_step": None,
        "threads_started_per_step": 0,
        "most_threads": 0,
        "rounds_like_the_first": [len(answers)],
        "answers": answers,
        **times,
    }


def results(name, *sessions):
    held = {}
    for one in sessions:
        put(held, one)
    return {"rows": {name: {"row": ROWS[name].describe(), "sessions": held}}}


class TestRows:
    def test_every_mode_is_known_and_in_one_session_of_its_row(self):
        for row in ROWS.values():
            modes = [mode for one in row.sessions for mode in one]
            assert len(modes) == len(set(modes)), row.name
            assert set(modes) <= set(MODES), row.name

    def test_graphs_are_never_shared_by_two_modes(self):
        # A graph stays what it was captured as, whatever mode is switched to afterwards.
        for row in ROWS.values():
            if row.execution == "graph":
                assert all(len(one) == 1 for one in row.sessions), row.name

    def test_every_fault_says_where_it_is_and_by_what_it_is_known(self):
        faults = [row for row in ROWS.values() if row.kind == "fault"]
        assert all(row.options["ranks"] for row in faults)
        # Who is killed says nothing.
        assert all((row.options["fault"] == "kill") != ("original" in row.options) for row in faults)

    def test_every_fault_has_words(self):
        assert {row.name for row in ROWS.values() if row.kind == "fault"} == set(FAULTS)

    @pytest.mark.parametrize("family", sorted(FAMILIES))
    def test_experts_can_be_shared_out_between_two_ranks(self, family):
        config = model_config(family, layers=3)
        experts = config.get("n_routed_experts") or config["num_experts"]
        assert config["num_hidden_layers"] == 3
        assert experts % 2 == 0


ORIGINAL = "InjectedFault: layer 2 of the second microbatch failed, on purpose"
READ = {"outcome": "error", "user_reads": [f"MicrobatchFailed: Microbatch 1 of 2 failed: {ORIGINAL}", ORIGINAL]}
OTHER_READ = {"outcome": "error", "user_reads": ["ValueError: torch.cat(): expected a non-empty list of Tensors"]}
HANG = {"outcome": "hang", "waited_s": 20, "main_thread": ["threading.py:1147 join"]}
NONE = {"outcome": "none", "complete": 64, "requests": 64}


class TestFaults:
    def outcome(self, tmp_path, row, mode, ranks, codes=None):
        """Of a pair of ranks that ended so."""
        pair = object.__new__(Pair)
        pair.over_limit, pair.begin, pair.ended = False, 0.0, 1.0
        pair.job = {"kind": "fault", "modes": [mode], "gpus": 1, "options": dict(ROWS[row].options)}
        pair.results = [tmp_path / f"{number}.json" for number in (0, 1)]
        for path, rank in zip(pair.results, ranks, strict=True):
            path.write_text(json.dumps(rank))
        codes = codes or [3 if rank["outcome"] == "hang" else 0 for rank in ranks]
        pair.ranks = [SimpleNamespace(exitcode=code) for code in codes]
        return pair.outcome()

    @pytest.mark.parametrize(
        ("row", "mode", "ranks"),
        [
            ("fault-both-ranks", "drop-in", [READ, READ]),
            ("fault-one-rank", "drop-in", [READ, HANG]),  # the other rank waits for it in the next collective call
            ("fault-both-ranks", "threads", [OTHER_READ, OTHER_READ]),
            ("fault-both-ranks-ht", "threads", [HANG, HANG]),
            ("stock-queue-depth", "threads", [OTHER_READ, HANG]),
        ],
    )
    def test_a_fault_that_shows_as_it_should_is_done(self, tmp_path, row, mode, ranks):
        done = self.outcome(tmp_path, row, mode, ranks)
        assert (done["status"], done["ranks"]) == ("done", ranks)

    @pytest.mark.parametrize(
        ("row", "mode", "ranks", "words"),
        [
            ("fault-both-ranks", "drop-in", [HANG, HANG], "the outcome is 'hang' with the drop-in"),
            ("fault-one-rank", "drop-in", [HANG, READ], "the outcome is 'hang' with the drop-in"),
            (
                "fault-both-ranks",
                "drop-in",
                [READ, OTHER_READ],
                "not in what the caller reads: ValueError: torch.cat()",
            ),
            ("fault-queue-depth", "drop-in", [READ, READ], "'nvshmem_qp_depth' is not in what the caller reads"),
            ("fault-both-ranks-ht", "drop-in", [NONE, NONE], "the fault did not show"),
            ("fault-one-rank", "threads", [NONE, HANG], "the fault did not show"),
        ],
    )
    def test_a_fault_that_does_not_is_no_success(self, tmp_path, row, mode, ranks, words):
        failed = self.outcome(tmp_path, row, mode, ranks)
        assert failed["status"] == "failed"
        # What was found is kept, and the table says what is wrong with it.
        assert [rank["outcome"] for rank in failed["ranks"]] == [rank["outcome"] for rank in ranks]
        failed["date"] = "2026-01-02 03:04"
        for rank in failed["ranks"]:
            rank.update(after_s=1.0, printed_by_threads=[])
        held = {"rows": {row: {"row": ROWS[row].describe(), "sessions": {mode: failed}}}}
        (last,) = [part for part in tables(held) if part.startswith("**Not done**")]
        assert f"| {row} | one GPU | {mode} | failed | not what the row says: " in last
        assert words.replace("`", "'") in last

    def test_a_rank_that_died_is_no_success(self, tmp_path):
        assert (
            self.outcome(tmp_path, "fault-both-ranks", "threads", [OTHER_READ, OTHER_READ], [0, 1])["status"]
            == "failed"
        )


class TestGpus:
    @pytest.mark.parametrize("asked, found, used", [(None, 1, 1), (None, 2, 2), (None, 8, 2), (1, 2, 1), (2, 2, 2)])
    def test_each_rank_has_its_own_where_there_are_two(self, asked, found, used):
        assert gpus_to_use(asked, found) == used

    @pytest.mark.parametrize("asked, found", [(2, 1), (None, 0), (1, 0)])
    def test_more_than_there_are_is_refused(self, asked, found):
        with pytest.raises(SystemExit, match=f"there are {found}"):
            gpus_to_use(asked, found)

    def test_only_ranks_that_share_one_pass_for_two_hosts(self):
        job = {"gpus": 1, "port": 1, "scratch": "s", "modes": ["threads"]}
        shared, apart = ([environment(rank, job | {"gpus": gpus}) for rank in (0, 1)] for gpus in (1, 2))
        assert [one["LOCAL_RANK"] for one in shared] == ["0", "0"]
        assert len({one["NCCL_HOSTID"] for one in shared}) == 2
        assert [one["LOCAL_RANK"] for one in apart] == ["0", "1"]
        assert not any(name.startswith("NCCL") for one in apart for name in one)


@pytest.mark.parametrize("fails", [False, True])
def test_a_sitting_leaves_no_scratch_behind(tmp_path, fails):
    seen = []

    class Observed(Sitting):
        def __init__(self):
            self.json, self.together = tmp_path / "results.json", 1

        def _outcomes(self, sessions, at_once):
            (self.scratch / "vllm_cache_0").mkdir()
            seen.append(self.scratch)
            if fails:
                raise KeyboardInterrupt
            return [(sessions[0][0], session("threads"))]

    sitting = Observed()
    if fails:
        with pytest.raises(KeyboardInterrupt):
            sitting.run([ROWS["ll-graph-8"]], None)
    else:
        assert sitting.run([ROWS["ll-graph-8"]], None)
    assert seen and not seen[0].exists()


class TestMerging:
    def test_done_gives_way_to_done_only(self):
        done, failed = session("threads"), session("threads", status="failed")
        held = {}
        put(held, failed)
        put(held, done)
        put(held, failed)
        assert list(held.values()) == [done]

    def test_a_session_takes_the_place_of_those_that_share_a_mode(self):
        held = {}
        for one in (session("no DBO"), session("threads"), session("no DBO", "threads", "drop-in")):
            put(held, one)
        assert list(held) == ["no DBO + threads + drop-in"]

    def test_one_gpu_and_two_stand_side_by_side(self):
        into = results("ll-graph-8", session("threads"), session("drop-in", gpus=2))
        merge(into, results("ll-graph-8", session("threads", gpus=2), session("drop-in", status="failed", gpus=2)))
        held = into["rows"]["ll-graph-8"]["sessions"]
        assert {key: (one["gpus"], one["status"]) for key, one in held.items()} == {
            "threads": (1, "done"),
            "drop-in on 2 GPUs": (2, "done"),
            "threads on 2 GPUs": (2, "done"),
        }

    def test_what_had_other_numbers_of_requests_is_kept(self):
        held = {}
        more, fewer = session("threads", requests=(64, 8)), session("threads", requests=(8,))
        for one in (session("threads"), more, fewer):
            put(held, one)
        assert list(held.values()) == [more, fewer]

    def test_a_file_from_before_requests_were_recorded(self):
        old = session("threads")
        del old["requests"]
        held = {}
        put(held, old)
        put(held, session("threads", status="failed"))
        assert list(held) == ["threads"]
        put(held, new := session("threads"))
        assert list(held.values()) == [new]

    def test_rows_of_both_files_are_kept(self):
        into = results("ll-graph-8", session("threads"))
        merge(into, results("ll-graph-8", session("drop-in")))
        merge(into, results("ll-graph-27", session("threads")))
        assert {name: list(entry["sessions"]) for name, entry in into["rows"].items()} == {
            "ll-graph-8": ["threads", "drop-in"],
            "ll-graph-27": ["threads"],
        }


SAME = [[[1, 2], [-0.5, -0.25]], [[3, 4], [-1.0, -2.0]]]
OTHER = [[[1, 2], [-0.5, -0.25]], [[3, 5], [-1.5, -2.0]]]


class TestTables:
    def table(self, threads, drop_in):
        one = session("threads", "drop-in", modes={"threads": served(threads), "drop-in": served(drop_in)})
        return "\n".join(tables(results("ll-compile-8", one)))

    def test_equal_answers_are_called_identical(self):
        assert "| identical (4 requests) |" in self.table(SAME, SAME)

    def test_other_answers_are_counted(self):
        text = self.table(SAME, OTHER)
        assert "2 of 4; first token 4, its log-probability within 0.50" in text
        assert "identical (" not in text

    def test_numbers_of_gpus_and_of_requests_are_never_mixed(self):
        half, full = SAME[:1], SAME
        one = session("threads", "drop-in", modes={"threads": served(SAME), "drop-in": served(OTHER)})
        modes = {"threads": served(full), "drop-in": served(full)}
        modes_at = {"8": {"threads": served(half), "drop-in": served(half)}}
        two = session("threads", "drop-in", gpus=2, requests=(64, 8), modes=modes, modes_at=modes_at)
        lines = "\n".join(tables(results("ll-compile-8", one, two))).splitlines()
        first, second, third = [line for line in lines if "2 of 4" in line or "identical (" in line]
        assert "64 requests, one GPU |" in first and "2 of 4" in first
        assert "8 requests, a GPU each |" in second and "identical (2 requests)" in second
        assert "64 requests, a GPU each |" in third and "identical (4 requests)" in third

    def test_times_are_those_of_their_case(self):
        quick, slow = ({"p10": ms, "p50": ms + 1, "p90": ms + 2, "count": 9} for ms in (10.0, 20.0))
        modes = dict.fromkeys(("no DBO", "drop-in"), served(SAME, step_ms=quick, forward_ms=quick))
        modes_at = {"256": dict.fromkeys(modes, served(SAME, step_ms=slow, forward_ms=slow))}
        one = session(*modes, gpus=2, requests=(4, 256), modes=modes, modes_at=modes_at)
        text = "\n".join(tables(results("ht-prefill-qwen3-8", one)))
        name = "HT, eager, Qwen3-MoE, 8 layers, prefill, 2048 tokens a request"
        assert f"| {name}, 4 requests, a GPU each | no DBO | 10.0 / 11.0 / 12.0 | 10.0 / 11.0 |" in text
        assert f"| {name}, 256 requests, a GPU each | no DBO | 20.0 / 21.0 / 22.0 | 20.0 / 21.0 |" in text

    def test_an_error_without_its_causes_text_shows_the_cause(self):
        read = [
            "MicrobatchFailed: Microbatch 0 of 2 failed: AssertionError: ",
            "AssertionError: buffer.py:1 assert x > 0",
        ]
        one = session("drop-in", outcome="error", user_reads=read, after_s=1.0, printed_by_threads=[])
        assert "from `AssertionError: buffer.py:1 assert x > 0`" in "\n".join(tables(results("fault-queue-depth", one)))

    def test_what_failed_is_named_and_gives_no_numbers(self):
        text = "\n".join(tables(results("ll-graph-8", session("threads", status="failed", error=["OSError: no disk"]))))
        assert "OSError: no disk" in text
        assert "Host time" not in text

    def test_nothing_run(self):
        assert tables({"rows": {}}) == ["Nothing has been run."]


def test_an_assertion_without_text_is_known_by_its_line():
    try:
        assert len("ab") == 3
    except AssertionError as error:
        error.args = ()
        assert 'assert len("ab") == 3' in in_words(error)[0]


def test_quantiles_of_a_ramp():
    assert quantiles([float(value) for value in range(101)]) == {"p10": 10.0, "p50": 50.0, "p90": 90.0, "count": 101}
    assert quantiles([1.0]) is None


def library(path, *entries):
    """An ELF file with one section .nv_fatbin that holds `entries` (kind, architecture, code) in one container."""
    payload = b"".join(
        vllm_bundle.ENTRY_HEADER.pack(kind, 0, vllm_bundle.ENTRY_HEADER.size, len(code), 0, 0, 0, 0, architecture)
        + code
        for kind, architecture, code in entries
    )
    container = struct.pack("<IHHQ", vllm_bundle.FATBINARY_MAGIC, 1, vllm_bundle.FATBINARY_HEADER.size, len(payload))
    names = b"\0.nv_fatbin\0.shstrtab\0"
    body = bytes(8) + container + payload  # the padding comes first: it has to be skipped
    table = 64 + len(body) + len(names)
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)
    sections = [(0, 0, 0, 0, 0, 0), (1, 1, 0, 0, 64, len(body)), (12, 3, 0, 0, 64 + len(body), len(names))]
    path.write_bytes(
        bytes(header) + body + names + b"".join(struct.pack("<IIQQQQ", *one) + bytes(24) for one in sections)
    )
    return path


class TestBundle:
    def test_only_machine_code_of_the_architecture_is_left(self, tmp_path):
        path = library(tmp_path / "lib.so", (1, 90, b"ptx-for-90"), (2, 80, b"code-for-80"), (2, 90, b"code-for-90"))
        before = path.stat().st_size
        assert vllm_bundle.keep_architecture(path, 90) == 1
        left = path.read_bytes()
        assert b"code-for-90" in left
        assert b"code-for-80" not in left
        assert b"ptx-for-90" not in left
        assert len(left) == before

    def test_a_library_without_it_is_refused_and_untouched(self, tmp_path):
        path = library(tmp_path / "lib.so", (2, 80, b"code-for-80"))
        with pytest.raises(vllm_bundle.BundleFailed, match="sm_90"):
            vllm_bundle.keep_architecture(path, 90)
        assert b"code-for-80" in path.read_bytes()

    @pytest.mark.parametrize("causal", [False, True])
    def test_the_attention_that_is_put_in_is_torchs(self, causal):
        import torch
        from gpu_vllm_attention import flash_attn_varlen_func

        torch.manual_seed(0)
        bounds_q, bounds_k = [0, 3, 7], [0, 5, 9]  # the first sequence has two keys from before
        q, k, v = torch.randn(7, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 6)
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=torch.tensor(bounds_q), cu_seqlens_k=torch.tensor(bounds_k), causal=causal,
            return_softmax_lse=True,
        )  # fmt: skip
        for number in (0, 1):
            here, there = slice(*bounds_q[number : number + 2]), slice(*bounds_k[number : number + 2])
            m, n = here.stop - here.start, there.stop - there.start
            mask = torch.ones(m, n, dtype=torch.bool).tril(n - m) if causal else None
            parts = [x.transpose(0, 1)[None].double() for x in (q[here], k[there], v[there])]
            expected = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
            torch.testing.assert_close(out[here].double(), expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
        assert lse.shape == (4, 7)
        first = torch.logsumexp((q[0, 0] * k[: 3 if causal else 5, 0]).sum(-1) * 8**-0.5, -1)
        torch.testing.assert_close(lse[0, 0], first)
