"""A federation whose root, coordinator and one site keep their keys in PKCS#11 tokens, as processes over mTLS."""

from __future__ import annotations

from pathlib import Path

from security.identity import keystore
from security.identity.enrolment import Identity
from security.log.events import AgentStop
from security.log.reader import LogReader
from tests.support.federation import NumberFederation
from tests.support.soft_token import PIN, needs_softhsm, soft_tokens

pytestmark = needs_softhsm


def test_rounds_with_keys_in_tokens_and_a_site_whose_token_is_pulled_out(tmp_path: Path) -> None:
    made = soft_tokens()
    tokens = {"consortium": "consortium", "coordinator": "coordinator", "site0": "pulled"}
    init_words = {name: ["--token", made.uri(label)] for name, label in tokens.items()}
    federation = NumberFederation(tmp_path, sites=4, rounds=60, words=3_000, init_words=init_words)
    identity = Identity(folder=federation.folders.site("site0") / "identity")
    assert keystore.token_of(identity.tls_key_path()) is not None and identity.token() is not None
    site = federation.sites["site0"]
    with federation.running():
        federation.wait_published(1)
        made.remove("pulled")
        try:
            code = site.wait_dead(seconds=60)
            federation.wait_published(federation.published + 1)  # the others go on without it
        finally:
            made.put_back("pulled")
        # One line, exit code 1: the service manager starts it again, and it takes part again.
        said = [line for line in site.text().splitlines() if "error" in line]
        assert code == 1 and len(said) == 1 and "the token does not sign" in said[0], site.text()[-2000:]
        stop = next(LogReader(federation.folders.site("site0") / "state" / "log").backwards(AgentStop.type))
        assert stop.body["reason"] == "key"
        site.start()
        site.wait_for("sum of 4 sites accepted", times=2, seconds=60)
        federation.wait_published(federation.published + 6)  # its log is witnessed with the next rounds
    assert PIN not in "".join(party.text() for party in federation.parties)
    sums = federation.check_sums()
    with_it = ["site0" in survivors for _, survivors in sums]
    assert with_it[0] and with_it[-1] and not all(with_it), sums
    federation.check_logs()
