"""The leg of an audit about isolation: a log that is silent, and one that admits a way out."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from security.audit.agreement import Agreement, Agreements, Keys
from security.audit.verify import verify
from security.log import events as ev
from tests.support.audit_attacks import Lonely
from tests.support.audit_parties import agent_start

TRAINED = ev.TrainDone(method="fednpr-per", steps=1, wall_ms=1, artefacts=())


def isolated(asked: str = "best", *, connection: bool = False, keys: bool = False, ranks: bool = False) -> ev.Event:
    return ev.TrainerIsolated(
        asked=asked,
        network_namespace=not connection,
        seccomp=not connection,
        landlock=not keys,
        connection=connection,
        keys=keys,
        ranks=ranks,
    )


CASES = {
    "isolated": ([isolated("required"), TRAINED], "best", set()),
    "silent": ([TRAINED], "best", {"IsolationMissing"}),
    "too late": ([TRAINED, isolated()], "best", {"IsolationMissing"}),
    "told before another start": ([isolated(), TRAINED, agent_start("graz"), TRAINED], "best", {"IsolationMissing"}),
    "admitted": ([isolated(connection=True), TRAINED], "best", {"NotIsolated"}),
    "against its own rule": ([isolated("required", connection=True), TRAINED], "best", {"IsolationWeak"}),
    "keys, against its own rule": ([isolated("required", keys=True), TRAINED], "best", {"IsolationWeak"}),
    "against the manifest": ([isolated(connection=True), TRAINED], "required", {"IsolationWeak"}),
    "several processes": ([isolated("required", connection=True, ranks=True), TRAINED], "required", {"RanksConnected"}),
    "several processes that read keys": (
        [isolated("required", connection=True, keys=True, ranks=True), TRAINED],
        "best",
        {"IsolationWeak"},
    ),
}
OURS = {"IsolationMissing", "IsolationWeak", "NotIsolated", "RanksConnected"}


@pytest.mark.parametrize("case", [*CASES])
def test_what_a_log_says_of_the_process_that_saw_images(case: str, lonely: Lonely) -> None:
    events, manifest, expected = CASES[case]
    for event in (agent_start("graz"), *events):
        lonely.log.append(event, run="run-1", round=1)
    lonely.log.checkpoint()
    roster = replace(lonely.roster, isolation=manifest)
    found = verify(lonely.folder, Keys.bare(roster))
    assert {finding.code for finding in found.findings} & OURS == expected
    assert (found.exit_code == 1) is bool(expected & {"IsolationMissing", "IsolationWeak"})


@pytest.mark.parametrize("connection", [True, False])
def test_a_manifest_that_comes_later_holds_for_what_is_trained_under_it(connection: bool, lonely: Lonely) -> None:
    """The process was started under a manifest that asked for nothing, and goes on under one that does."""
    lonely.log.append(isolated(connection=connection), run="run-1")
    lonely.log.append(TRAINED, run="run-1", round=1)
    lonely.log.adopt_manifest(b'{"version":2}\n', 2, lonely.roster)
    first, second = (hashlib.sha256(data).hexdigest() for data in (b"{}\n", b'{"version":2}\n'))
    agreed = {
        digest: Agreement(digest=digest, roster=replace(lonely.roster, isolation=asked), version=version)
        for version, (digest, asked) in enumerate({first: "best", second: "required"}.items(), start=1)
    }

    def weak() -> list[str]:
        lonely.log.checkpoint()
        found = verify(lonely.folder, Keys(agreements=Agreements(by_digest=agreed), pinned=True))
        return [finding.detail for finding in found.findings if finding.code == "IsolationWeak"]

    assert weak() == []
    lonely.log.append(TRAINED, run="run-1", round=2)
    assert bool(weak()) is connection
