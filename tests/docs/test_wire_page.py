"""docs/spec/wire.md names every message in its direction, and its example is real."""

from __future__ import annotations

import re
from pathlib import Path

from protos.parse import FROM_SITE, Parcel
from protos.schema import with_tables
from security.crypto.ring import MAX_PARCEL
from security.secagg import relay

PAGE = (Path(__file__).parents[2] / "docs" / "spec" / "wire.md").read_text()


def test_the_tables_are_the_registry() -> None:
    assert with_tables(PAGE) == PAGE, "run scripts/generate-protos"


def named(start: str, end: str) -> set[str]:
    part = PAGE[PAGE.index(start) : PAGE.index(end)]
    rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| ") and "message" not in line[:12]]
    return {name.strip() for row in rows for name in row.split(",")}


def test_every_message_is_on_the_page() -> None:
    assert named("From a site:", "From the coordinator:") == {cls.__name__ for cls in relay.FROM_SITE}
    assert named("From the coordinator:", "### Adding a message") == {cls.__name__ for cls in relay.FROM_COORDINATOR}


def test_the_example_is_real() -> None:
    signature = relay.HeadSignature(name="graz.lesions/audit", key_id=b"abcd", value=bytes(64))
    head = relay.SignedHead(origin="graz.lesions/audit", size=3, root=bytes(32), signatures=(signature,))
    data = FROM_SITE.encode(Parcel(message=relay.Pong(number=7), sequence=1, log_head=head))
    block = PAGE.split("```")[1]
    shown = "".join(re.findall(r"^(?:[0-9a-f]{2} )+", block, re.MULTILINE)).replace(" ", "")
    assert len(shown) == 52 and data.hex().startswith(shown)


def test_the_bound_is_the_codes() -> None:
    assert f"{MAX_PARCEL:,} bytes" in PAGE
