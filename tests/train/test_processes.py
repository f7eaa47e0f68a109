"""The processes of one training."""

from __future__ import annotations

import subprocess
import sys
import time

SLOWLY = """
import datetime, os, socket, time
import torch.distributed as dist
from fnpipe.train.distributed import processes

with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
join = dist.init_process_group
dist.init_process_group = lambda backend: join(backend, timeout=datetime.timedelta(seconds=1))
second = os.fork()
os.environ["RANK"] = "0" if second else "1"
with processes("cpu") as group:
    if group.first:
        time.sleep(3)
    group.wait()
if second:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
"""


def test_the_others_wait_for_the_first_as_long_as_it_takes():
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", SLOWLY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert time.monotonic() - start > 3
