"""The client of scripts/gpu_vllm_serve.py: a process that imports `vllm bench serve` once and runs it many times.

It reads one JSON object a line from its standard input and answers with one line, "RESULT " and a JSON object:
{"bench": [arguments of `vllm bench serve`]} gives what that command saves, {"greedy": {...}} the answers to prompts
that are all sent at once. The command itself prints; that goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import urllib.request
from typing import Any


def bench(arguments: list[str]) -> dict[str, Any]:
    """`vllm bench serve` with these arguments."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return main(parser.parse_args(arguments))


def complete(url: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
    """POST to /v1/completions; raises urllib's errors."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.loads(response.read())


def greedy(url: str, model: str, prompts: list[list[int]], tokens: int, timeout: float) -> list[dict[str, Any]]:
    """Greedy tokens and their log-probabilities, for each prompt."""
    body = {
        "model": model,
        "prompt": prompts,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    choices = sorted(complete(url, body, timeout)["choices"], key=lambda choice: choice["index"])
    return [
        {"tokens": choice["token_ids"], "logprobs": [round(x, 5) for x in choice["logprobs"]["token_logprobs"]]}
        for choice in choices
    ]


def main() -> None:
    # Only results are for the parent.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm.benchmarks.serve  # noqa: F401

    print("RESULT", json.dumps({"ready": True}), file=results)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            found = bench(job["bench"]) if "bench" in job else {"answers": greedy(**job["greedy"])}
        except (Exception, SystemExit) as error:  # whatever a client of the server runs into is its result
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        print("RESULT", json.dumps(found), file=results)


if __name__ == "__main__":
    main()
