"""Functions of other libraries by name: each in a process of its own, whose end is a finding."""

import json

import numpy as np
import pytest

from polyattn import conformance
from polyattn.cli import main
from polyattn.conformance import CASES
from polyattn.conformance.functions import subjects
from polyattn.conformance.functions.check import AGREES, DIFFERS, RAISES
from polyattn.conformance.functions.subjects import SUBJECTS, Peer, measure, subject_of

OURS = Peer("ours", "numpy", "from polyattn import attention as attend")
#: Ends its process where there is no key, and takes long without a row.
ENDS = """
import os, time
from polyattn import attention


def attend(q, k, v, is_causal=False):
    if k.shape[-2] == 0:
        os.abort()
    if q.shape[-2] == 0:
        time.sleep(600)
    return attention(q, k, v, is_causal=is_causal, query_offset=0 if is_causal else None)
"""


def test_a_call_that_ends_its_process_or_never_ends_is_a_finding_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(subjects, "PATIENCE", 8)
    names = ("plain", "S = 0", "L = 0", "causal, L > S", "33 x 31")
    rows = measure(Peer("", "numpy", ENDS), [CASES[name] for name in names])
    results = {n: f for row in rows if row.kind != "parts" for n, f in row.findings.items()}
    assert {name: results[name].status for name in names} == {
        "plain": AGREES,
        "S = 0": RAISES,
        "L = 0": RAISES,
        "causal, L > S": DIFFERS,
        "33 x 31": AGREES,
    }
    assert results["S = 0"].error == "the process ended: SIGABRT"
    assert results["L = 0"].error == "the process ended: no answer within 8 s"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["torch.sdp"], "there is no subject 'torch.sdp'; did you mean 'torch.sdpa'?"),
        (["einops,qqq"], "there is no subject 'qqq'; the subjects are torch.sdpa, torch.flex,"),
        (["absent"], "absent needs pip install no-such-distribution: "),
        (["torch.sdpa", "numpy"], "--subject takes the place of a backend; got numpy"),
    ],
)
def test_a_wrong_command_is_refused_before_any_work(options, reason, monkeypatch, capsys):
    monkeypatch.setitem(SUBJECTS, "absent", Peer("", "no-such-distribution", ""))
    assert main(["check", "--subject", *options]) == 2
    assert reason in capsys.readouterr().err


def test_the_command_checks_one_subject_after_another(monkeypatch, capsys):
    few = {name: CASES[name] for name in ("causal", "causal, L > S")}
    monkeypatch.setattr(conformance, "ESSENTIAL", few)
    monkeypatch.setitem(SUBJECTS, "ours", OURS)
    monkeypatch.setitem(SUBJECTS, "ends", Peer("", "numpy", ENDS))
    version = np.__version__
    command = ["check", "--quick", "--subject"]
    assert main([*command, "ours", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)[f"ours (numpy {version})"]
    assert (rows[0]["name"], list(rows[0]["cases"])) == ("causal", ["causal"])
    assert main([*command, "ours,ends"]) == 1
    said = capsys.readouterr().out
    assert said.index(f"ours (numpy {version})") < said.index("no cases differ")
    assert said.index(f"ends (numpy {version})") < said.index("rows count from the first key")
    assert "1 case differs" in said


def test_the_table_is_complete_and_subjects_that_are_installed_say_their_versions():
    for name, subject in SUBJECTS.items():
        assert subject.title
        assert "attend" in subject.setup
        assert not subject.title.endswith(".")
        compile(subject.setup, name, "exec")
    assert subject_of("onnx.reference").versions.keys() == {"onnx"}
