"""Every script says what it does, and no shell script names one that is not there."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import ROOT

FOLDERS = ("benchmarks", "experiments", "tools")

# One interpreter has the large libraries and the product; each script runs in a fork of it.
ASK_ALL = """
import os, runpy, sys
os.environ["OMP_NUM_THREADS"] = "1"
import datasets, faiss, hypothesis, open_clip, pytest, torch
import fnpipe.cli.main, fnpipe.mining.views.audit, fnpipe.mining.plans.stage, fnpipe.train.demo, fnpipe.train.methods
for script in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        sys.argv = [script, "--help"]
        sys.path.insert(0, os.path.dirname(script))
        code = 3
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        # At once: to take the libraries down again costs far more than the script.
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"{script} --help: {code}"
"""


def test_every_script_says_what_it_does():
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    scripts = [str(path) for path in paths if "argparse" in path.read_text()]
    assert len(scripts) > 20
    done = subprocess.run([sys.executable, "-c", ASK_ALL, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(scripts)


def test_the_scripts_of_a_table_name_what_is_there():
    for script in (ROOT / "experiments").rglob("run.sh"):
        named = re.findall(r"\$here/([\w./]+\.py)", script.read_text())
        assert named
        assert all((script.parent / name).is_file() for name in named), script
        subprocess.run(["bash", "-n", script], check=True)
