"""Writes a line for each process in which vLLM calls the plugin.

Python imports a module of this name at every start, so a folder on PYTHONPATH reaches all of vLLM's processes. Not the
plugin's own log line: the front end and the model registry's subprocess load plugins before vLLM has set up logging.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable

from dbo_greenlet.vllm import plugin


def noting(register: Callable[[], None]) -> Callable[[], None]:
    def register_and_note() -> None:
        register()
        name = multiprocessing.current_process().name
        line = json.dumps({"pid": os.getpid(), "name": name, "program": os.path.basename(sys.argv[0])})
        with open(os.environ["PLUGIN_PROCESSES"], "a") as file:
            file.write(line + "\n")

    return register_and_note


plugin.register = noting(plugin.register)
