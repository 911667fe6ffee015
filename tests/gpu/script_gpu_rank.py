"""One of two ranks, with a GPU each or one for both: runs the cases of one transport and prints what each gave.

    script_gpu_rank.py RANK PORT {ll,ht,nccl} HIDDEN [CASE ...]

A line "RESULT {json}" for each case, with "error" (a traceback) where it raised. Two ranks on one GPU pass for two
hosts to NCCL. One GPU gives each process a slice of milliseconds in turn, so nothing here says anything about time.
"""

from __future__ import annotations

import json
import os
import sys


def main(rank: int, port: int, kind: str, hidden: int, wanted: list[str]) -> None:
    import torch

    from dbo_greenlet.ranks import RankGroup
    from tests.all2all.transport_cases import run_cases
    from tests.all2all.transport_ranks import WORLD, Ranks

    gpus = torch.cuda.device_count()
    if gpus < WORLD:
        # NCCL reads them when the first group is made.
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    with RankGroup.connect(rank, WORLD, port, device=device, timeout=25.0) as group:
        free = torch.cuda.mem_get_info()[0]
        ranks = Ranks(kind, group, hidden)
        taken = (free - torch.cuda.mem_get_info()[0]) >> 20
        print(f"{gpus} GPUs; MiB of memory taken on this rank's: {taken}", flush=True)
        for result in run_cases(ranks, wanted):
            print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:])
