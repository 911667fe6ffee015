"""What of scripts/gpu_vllm_serve*.py and scripts/bench_gpu_two_ranks.py needs no GPU and no vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import bench_gpu_two_ranks
import gpu_vllm_serve_faults
import pytest
from gpu_vllm_rows import DROP_IN, NO_DBO, THREADS
from gpu_vllm_serve import filed_under, write_tokenized
from gpu_vllm_serve_faults import KILLED, ruin, victim_of
from gpu_vllm_serve_left import ASKED, STACKS_FILE, look
from gpu_vllm_serve_plugin import FAULT_FILE, PLACE, PLACES, announce
from gpu_vllm_serve_process import Client, Server, ServerFailed, wait_until_up
from gpu_vllm_serve_rows import FAULTS, METRICS, ROWS, TOTALS
from gpu_vllm_serve_table import compare, main_thread, tables, totals

SCRIPTS = os.environ | {"PYTHONPATH": os.path.dirname(bench_gpu_two_ranks.__file__)}
STEPS = 'dbo_greenlet_steps_total{kind="eager",rank="0"}'
BOTH = 'dbo_greenlet_steps_total{kind="eager",rank="1"}'
VOTES = 'dbo_greenlet_decisions_total{rank="0",reason="split-decode",split="true"}'


STACKS = [
    "Thread 0x00007f (most recent call first):",
    '  File "/x/threading.py", line 3 in wait',
    "",
    "Current thread 0x00008f (most recent call first):",
    '  File "/x/deep_ep/buffer.py", line 90 in destroy',
    '  File "worker.py", line 7 in shutdown',
]


def run(rate):
    points = {f"{point}_{metric}_ms": 10.0 for metric in METRICS for point in ("mean", "p50", "p90", "p99")}
    return dict.fromkeys(TOTALS, 1.0) | points | {"request_throughput": rate}


def answers(*tokens):
    return [{"tokens": list(each), "logprobs": [-1.0] * len(each)} for each in tokens]


def entry(name, modes=None, faults=None, said=None):
    return {
        "status": "done",
        "row": ROWS[name].describe(),
        "modes": modes or {},
        "faults": faults or {},
        "said": said or {},
    }


def mode(rates=(1.0, 3.0, 2.0), counters=None, given=None):
    given = given or answers([1, 2], [3, 4])
    return {
        "bench": {load: [run(rate) for rate in rates] for load in ROWS["ll-eager"].loads},
        "answers": [given, given],
        "counters_before": {},
        "counters_after": {"128 at once": {}, "40 a second": counters or {}},
    }


class TestRows:
    @pytest.mark.parametrize("name", sorted(ROWS))
    def test_dbo_is_asked_for_in_all_modes_but_one_and_the_package_only_switched_off(self, name, tmp_path):
        row = ROWS[name]
        for _, which, fault in row.servers():
            command, variables = row.command(tmp_path, which, 1), row.variables(which, fault, tmp_path / "t")
            assert ("--enable-dbo" in command) == (which != NO_DBO and row.config is None)
            assert variables.get("DBO_GREENLET") == ("0" if which == THREADS else None)
            assert (FAULT_FILE in variables) == (fault in PLACES)
            assert variables.get(PLACE) == (fault if fault in PLACES else None)
            assert str(tmp_path) in variables[STACKS_FILE]

    def test_what_no_server_found_is_a_problem(self):
        row = ROWS["ll-eager"]
        good = {NO_DBO: mode(), THREADS: mode(), DROP_IN: mode(counters={STEPS: 3.0})}
        assert row.problem(entry("ll-eager", good), cpu=False) is None
        assert "not every load" in row.problem(
            entry("ll-eager", good | {THREADS: mode(rates=()) | {"bench": {}}}), cpu=False
        )
        assert DROP_IN in row.problem(entry("ll-eager", good | {DROP_IN: mode()}), cpu=False)
        assert THREADS in row.problem(entry("ll-eager", good | {THREADS: mode(counters={STEPS: 1.0})}), cpu=False)

    def test_a_client_that_got_no_error_is_a_problem(self):
        ended = {"fault": "kill", "client_gets": "HTTP 500", "client_s": 1.0}
        row = ROWS["kill"]
        assert row.problem(entry("kill", faults={"kill, threads": ended}), cpu=False) is None
        silent = ended | {"client_gets": None}
        assert "got no error" in row.problem(entry("kill", faults={"k": silent}), cpu=False)
        engine = entry("kill", faults={"k": silent | {"fault": "kill-engine"}})
        assert "got no error" in row.problem(engine | {"started": "spawn"}, cpu=False)
        assert row.problem(engine | {"started": "fork"}, cpu=False) is None

    def test_what_is_ruined_has_a_server_and_was_prepared_for_it(self):
        for row in ROWS.values():
            servers = {name: (mode, fault) for name, mode, fault in row.servers()}
            ruined = list(row.ruins())
            assert len(ruined) == len({name for name, _, _ in ruined})  # a server dies once
            for name, mode, fault in ruined:
                assert servers[name][0] == mode
                assert servers[name][1] == fault or fault in KILLED
                assert fault in FAULTS
        assert [mode for _, mode, _ in ROWS["ll-eager"].ruins()] == [THREADS, DROP_IN]


class TestTables:
    def test_the_median_of_the_rounds_stands_in_the_table(self):
        text = "\n\n".join(tables({"rows": {"ll-eager": entry("ll-eager", {DROP_IN: mode()})}}))
        assert "| ll-eager, 128 at once | drop-in | 2.00 | 1 | 10.0 / 10.0 |" in text
        assert "3, 1.00 to 3.00" in text

    def test_answers_are_compared_with_the_first_modes(self):
        other = [{"tokens": [1, 2], "logprobs": [-1.5, 0]}, {"tokens": [9, 4], "logprobs": [-1, 0]}]
        assert compare(answers([1, 2], [3, 4]), other) == (1, 1, 0.5)
        modes = {NO_DBO: mode(), DROP_IN: mode(given=other)}
        text = "\n\n".join(tables({"rows": {"ll-eager": entry("ll-eager", modes)}}))
        assert "| ll-eager | drop-in | 2 of 2 | 1 / 1 of 2 / 0.500 |" in text

    def test_counters_are_those_since_the_start_of_both_ranks(self):
        after = {STEPS: 5.0, BOTH: 4.0, VOTES: 7.0, VOTES.replace("decode", "prefill"): 0.0}
        assert totals(after, {STEPS: 2.0}) == ({"eager": 7.0}, {"split-decode": 7.0})

    def test_a_fault_says_who_was_gone_when_and_what_the_log_said(self):
        found = {
            "mode": DROP_IN,
            "fault": "kill",
            "client_gets": "HTTP 500: engine | dead",
            "client_s": 2.0,
            "gone_s": {"EngineCore_DP0": 3.25, "Worker_DP1_EP1": None},
            "patience_s": 30,
            "left": {"Worker_DP1_EP1": {"status": {"PPid": "1"}, "main": "python3 R 0", "stacks": STACKS, "gpus": []}},
            "server_exit_s": 4.0,
            "server_exit": 1,
            "said": ["something", "ERROR Engine core proc EngineCore_DP1 died unexpectedly"],
        }
        text = "\n\n".join(tables({"rows": {"kill": entry("kill", faults={"kill, drop-in": found})}}))
        gone = "EngineCore_DP0 3.2 s, Worker_DP1_EP1 not within 30 s"
        assert f"`HTTP 500: engine \\| dead` | 2.0 s | {gone} | 1, 4.0 s |" in text
        assert "EngineCore_DP1 died" in text
        left = "Worker_DP1_EP1 | 1 | python3 R 0 | - | `buffer.py:90 destroy` < `worker.py:7 shutdown` |"
        assert left in text

    def test_of_stacks_the_last_thread_counts_innermost_first(self):
        assert main_thread(STACKS) == ["`buffer.py:90 destroy`", "`worker.py:7 shutdown`"]
        assert main_thread([]) == []

    def test_what_was_not_done_says_why(self):
        left = entry("ll-graph") | {"status": "failed: threads: not up after 240 s"}
        assert tables({"rows": {"ll-graph": left}}) == [
            "**Not done**\n\n| row | status |\n|---|---|\n| ll-graph | failed: threads: not up after 240 s |"
        ]


class TestModelFolder:
    def test_every_word_is_one_token_and_back(self, tmp_path):
        tokenizers = pytest.importorskip("tokenizers")
        folder = write_tokenized(tmp_path / "m", ROWS["dry"])
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.encode("w3 w10 w127").ids == [3, 10, 127]
        assert tokenizer.get_vocab_size() == json.loads((folder / "config.json").read_text())["vocab_size"]

    def test_special_tokens_are_the_beginning_of_no_word(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        folder = write_tokenized(tmp_path / "m", ROWS["dry"])
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.encode("w11 w27") == [11, 27]

    def test_the_plug_in_is_found_by_its_metadata(self, tmp_path):
        announce(tmp_path)
        code = (
            "from importlib.metadata import entry_points\n"
            "print([e.value for e in entry_points(group='vllm.general_plugins') if 'serve' in e.name])"
        )
        said = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
        )
        assert said.stdout.strip() == "['gpu_vllm_serve_plugin:register']"

    def test_every_process_of_a_shared_gpu_passes_for_a_host_of_its_own(self):
        code = (
            "import multiprocessing as m, os, gpu_vllm_serve_plugin as p\n"
            "p._be_a_host_of_its_own(); os.register_at_fork(after_in_child=p._be_a_host_of_its_own)\n"
            "read, write = os.pipe()\n"
            "if os.fork() == 0: os.write(write, os.environ['NCCL_HOSTID'].encode()); os._exit(0)\n"
            "print(os.environ['NCCL_HOSTID'], os.read(read, 100).decode())"
        )
        said = subprocess.run([sys.executable, "-c", code], env=SCRIPTS, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
        one, other = said.stdout.split()
        assert one != other
        assert one.startswith("host")

    @pytest.mark.vllm
    def test_all_ranks_get_the_first_gpu_where_they_share_it(self, tmp_path):
        code = (
            "from vllm.engine.arg_utils import EngineArgs\n"
            "import gpu_vllm_serve_plugin as p; p._share_the_first_gpu()\n"
            f"print(EngineArgs(model={str(tmp_path)!r})._resolve_device_ids())"
        )
        said = subprocess.run([sys.executable, "-c", code], env=SCRIPTS, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
        assert said.stdout.splitlines()[-1] == "[0, 0]"

    def test_results_of_a_shared_gpu_stand_beside_those_of_two(self):
        assert filed_under(ROWS["raise"], 1) == "raise on one GPU"
        assert filed_under(ROWS["raise"], 2) == filed_under(ROWS["raise"], 0) == "raise"


class TestProcesses:
    def test_a_server_that_exits_is_named(self, tmp_path):
        command = [sys.executable, "-c", "print('Error: no such flag'); raise SystemExit(3)"]
        server = Server("threads", command, {}, 1, tmp_path / "log")
        with pytest.raises(ServerFailed, match="threads: exited with 3"):
            wait_until_up([server], 30)
        assert server.said() == ["Error: no such flag"]
        server.end()

    def test_a_server_that_is_late_is_named_and_its_idle_talk_left_out(self, tmp_path):
        code = "print('import_utils.py Error: deep_gemm'); print('last words', flush=True); import time; time.sleep(60)"
        server = Server("drop-in", [sys.executable, "-c", code], {}, 1, tmp_path / "log")
        with pytest.raises(ServerFailed, match="drop-in: not up after 0 s"):
            wait_until_up([server], 0.3)
        end = time.monotonic() + 20
        while "last words" not in server.last_words(1) and time.monotonic() < end:
            time.sleep(0.05)
        assert server.last_words(2).splitlines()[-1] == "drop-in | last words"
        assert server.said() == []
        server.end(politely=False)
        assert server.process.returncode == -9

    def test_ranks_are_those_of_the_servers_own_group(self, tmp_path):
        code = (
            "import subprocess, sys\n"
            "command = [sys.executable, '-c', 'import time; time.sleep(60)', 'VLLM::Worker_DP1_EP1']\n"
            "print(subprocess.Popen(command).wait())"
        )
        servers = [Server(f"s{i}", [sys.executable, "-c", code], {}, 1, tmp_path / f"log{i}") for i in (0, 1)]
        try:
            for server in servers:
                end = time.monotonic() + 20
                while not server.ranks() and time.monotonic() < end:
                    time.sleep(0.05)
            found = [server.ranks() for server in servers]
            assert [list(each) for each in found] == [["Worker_DP1_EP1"]] * 2
            assert found[0] != found[1]
        finally:
            for server in servers:
                server.end()
        assert not servers[0].ranks()

    def test_a_client_that_dies_is_an_error(self, tmp_path):
        client = Client({"PYTHONPATH": ""}, tmp_path / "log")  # without vLLM
        with pytest.raises(ServerFailed, match="the client said nothing"):
            client.ask({"bench": []}, 5)
        client.end()


# An engine core that ends when its worker has said something, and leaves a worker that asks nobody to end.
LEAVES = """
import subprocess, sys
code = "import sys, time; from gpu_vllm_serve_left import tell_when_asked; tell_when_asked()" + chr(10)
code += "def waits_for_its_peer():" + chr(10) + "  print('up', flush=True); time.sleep(60)" + chr(10)
code += "waits_for_its_peer()"
worker = subprocess.Popen([sys.executable, "-c", code, "VLLM::Worker_DP1_EP1"], stdout=subprocess.PIPE)
print(worker.stdout.readline(), flush=True)
if "stay" in sys.argv: worker.wait()
"""


def wait_for(what):
    end = time.monotonic() + 20
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


class TestWhatIsLeft:
    def test_an_orphan_says_where_it_is_and_stays(self, tmp_path):
        stacks = tmp_path / "stacks"
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), STACKS_FILE: str(stacks)}
        server = Server("drop-in", [sys.executable, "-c", LEAVES], variables, 1, tmp_path / "log")
        try:
            assert server.process.wait(30) == 0
            (process,) = server.ranks().values()
            seen = look(process, stacks)
            assert main_thread(seen["stacks"])[0].endswith(" waits_for_its_peer`")
            assert seen["status"]["PPid"] != str(server.process.pid)
            assert sum(seen["threads"].values()) >= 1
            assert seen["main"].split()[1] in "SDR"
            assert look(process, stacks)["stacks"] == seen["stacks"], "only what it says this time"
            assert list(server.ranks()) == ["Worker_DP1_EP1"]
        finally:
            server.end(politely=False)

    def test_who_does_not_catch_the_signal_is_not_sent_it(self, tmp_path):
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        try:
            seen = look(sleeper.pid, tmp_path / "none")
            assert "stacks" not in seen and not int(seen["status"]["SigCgt"], 16) >> (ASKED - 1) & 1
            assert sleeper.poll() is None
        finally:
            sleeper.kill()
            sleeper.wait()

    def test_of_a_process_that_is_gone_there_is_nothing_to_say(self, tmp_path):
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        assert set(look(ended.pid, tmp_path / "none")) <= {"gpus"}

    def test_the_worker_is_hit_unless_it_is_the_engines_fault(self):
        ranks = {"EngineCore_DP0": 1, "EngineCore_DP1": 2, "Worker_DP0_EP0": 3, "Worker_DP1_EP1": 4}
        hit = {fault: victim_of(fault, ranks) for fault in FAULTS}
        worker, engine = "Worker_DP1_EP1", "EngineCore_DP1"
        assert hit == {"kill": worker, "kill-engine": engine, "raise": worker, "raise-early": worker}
        assert victim_of("kill", {"EngineCore": 1}) == "EngineCore"

    def test_a_ruin_keeps_what_was_left(self, tmp_path, monkeypatch):
        stacks = tmp_path / "stacks"
        trigger = {FAULT_FILE: str(tmp_path / "t"), STACKS_FILE: str(stacks)}
        variables = {"PYTHONPATH": os.pathsep.join(sys.path)} | trigger
        server = Server("drop-in", [sys.executable, "-c", LEAVES, "stay"], variables, 1, tmp_path / "log")
        ask = iter([None])

        def answer(*_):
            # The first is the question before the fault; the server ends under the second.
            if next(ask, "fault") == "fault":
                wait_for((tmp_path / "t").exists)
                server.process.kill()
                raise ConnectionResetError("gone")

        monkeypatch.setattr(gpu_vllm_serve_faults, "complete", answer)
        monkeypatch.setattr(gpu_vllm_serve_faults, "LEFT_S", 0.2)
        monkeypatch.setattr(gpu_vllm_serve_faults, "PATIENCE_S", 2.5)
        try:
            assert wait_for(lambda: "b'up" in server.log.read_text())
            found = ruin(server, "raise", "m")
        finally:
            server.end(politely=False)
        assert found["gone_s"] == {"Worker_DP1_EP1": None} and found["server_exit"] == -9
        assert found["client_gets"] == "ConnectionResetError: gone"
        assert main_thread(found["left"]["Worker_DP1_EP1"]["stacks"])[0].endswith(" waits_for_its_peer`")


class TestTwoRanks:
    def report(self, view):
        return {"reliable": True, "kernels": view, "in_flight": None}

    def test_the_slower_rank_and_the_mean_of_the_communication(self):
        ranks = [
            {"ways": {way: {"done_ms": [t, t + 1, t + 2], "host_ms": [1, 1, 1]} for way in ways(t)}} for t in (4, 6)
        ]
        overlap = {
            "profile, split, eager": [self.report({"communication": c, "both": 500.0}) for c in (1000.0, 2000.0)],
            "trace, split, eager": [{"error": "TraceFileError: none"}] * 2,
        }
        found = {"status": "done", "ranks": ranks, "overlap": overlap, "estimates": {"split, eager": {"ratio": 1.25}}}
        lines = bench_gpu_two_ranks.table({"profiled": 2, "cases": {"ll-64": found}})
        cells = "7.00 (6.00) | 1.00 | 1.00 | 1.25 | 0.75, 33% | - | - |"
        assert lines[3] == f"| DeepEP LL, 64 tokens | split, eager | {cells}"

    def test_a_case_that_failed_is_a_line_of_its_own(self):
        lines = bench_gpu_two_ranks.table(
            {"cases": {"ht-64": {"status": "exit [1, None]", "ranks": [], "overlap": {}}}}
        )
        assert lines[2] == "| DeepEP HT, 64 tokens | exit [1, None] | | | | | | | |"

    def test_estimate_is_asked_about_each_split_way(self):
        times = {"unsplit, eager": 12.0, "split, eager": 25.0, "split by threads, eager": 30.0}
        rank = {"ways": {way: {"done_ms": [ms], "host_ms": [ms]} for way, ms in times.items()}}
        found = {"status": "done", "ranks": [rank, rank]}
        said = bench_gpu_two_ranks.predict("nccl-64", found, 8)
        # The host is the bound, and it launches everything twice.
        assert {way: 1.5 < each["ratio"] < 4 for way, each in said.items()} == dict.fromkeys(list(times)[1:], True)
        assert bench_gpu_two_ranks.predict("torch-64", found, 8) == {}


def ways(_):
    return ("unsplit, eager", "split, eager")
