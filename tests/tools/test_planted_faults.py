"""The faults that `mutations.py` plants fit the code of now; whether tests notice them takes many minutes to say."""

from __future__ import annotations

import runpy

from conftest import ROOT

ROBUSTNESS = ROOT / "tools" / "robustness"


def test_every_planted_fault_changes_one_place_and_names_tests():
    faults = list(runpy.run_path(str(ROBUSTNESS / "mutations.py"))["read_faults"](ROBUSTNESS / "faults.txt"))
    assert len(faults) > 200
    for fault in faults:
        says = f"{fault.file}: {fault.says}"
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, says
        assert fault.new != fault.old, says
        assert (ROOT / fault.tests[0].partition("::")[0]).is_file(), says
