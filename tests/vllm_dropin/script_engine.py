"""Serve a model with vLLM's offline interface and write what came out as JSON.

usage: script_engine.py MODEL_FOLDER RESULT_FILE [FLAG=JSON ...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [1, 1, 2, 3, 5, 8, 13, 21, 34, 55]]
NEW_TOKENS = 12


def main() -> None:
    model, result, *flags = sys.argv[1:]
    from vllm import LLM, SamplingParams

    more = {name: json.loads(value) for name, value in (flag.split("=", 1) for flag in flags)}
    engine = LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=4, **more)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    Path(result).write_text(json.dumps({"tokens": tokens, "pid": os.getpid()}))


if __name__ == "__main__":
    main()
