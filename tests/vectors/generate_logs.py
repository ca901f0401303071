"""Write the vectors in `logs`: ``PYTHONPATH=. python tests/vectors/generate_logs.py``, from the root of the tree.

A federation of three sites plays two rounds and does everything that leaves an entry, so that its four logs together
hold every event type. The keys are fresh, so another run writes other bytes. Whether what it writes is right, the
reference says (`reference/audit_verifier.py`), not the code that wrote it.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

from security.log import events as ev
from security.log.machine import Heartbeat
from security.log.reader import LogReader
from tests.support.audit_logs import Federation
from tests.support.audit_parties import digest
from tests.support.consortium_world import PLAN, World

ARCHIVE = Path(__file__).parent / "logs" / "federation.tar.xz"
MANY = 65_536  # so many entries make a segment


def federation(folder: Path) -> Federation:
    """Two rounds, and everything that can happen around them."""
    world = World.make(folder / "world")
    world.write_plan(world.write_plugin(PLAN + "[audit]\nstrict = true\nvote_drop = 0.05\n"))
    made = Federation.from_world(world, folder)
    made.play()
    made.republish()
    _settings(made)
    _people(made)
    _crash(made)
    _coordinator(made)
    _many(made)
    made.members["graz"].log.rotate("epoch over")
    made.play()
    differs = ev.SoftwareDiffers(count=1, packages=("numpy: 2.0 is installed, 2.1 is listed",))
    made.members["graz"].log.append(differs)
    _runs(made)
    made.stop()
    return made


def _settings(made: Federation) -> None:
    """Another policy; another configuration and back, so that no start is with an unannounced one."""
    graz = made.members["graz"].log
    here, there = digest("config", "graz"), digest("another configuration")
    graz.append(ev.PolicyChanged(old=digest("policy", "graz"), new=there, who="root", reason="stricter", document=None))
    for old, new in ((here, there), (there, here)):
        graz.append(ev.ConfigChanged(old=old, new=new, who="root", reason="a trial"))
    graz.append(
        ev.RoundDeclined(method="fednpr-per", attempt=0, context=None, rule="outside of hours"), run=made.run, round=2
    )
    at = graz.append(ev.EgressBlocked(rule="a trial of the filter", message="UploadFrame", bytes=100, sha256=None))
    graz.append(ev.OperatorAction(command=f"entry {at} was our own trial", role="operator"))


def _runs(made: Federation) -> None:
    """A run that came by wire was ended, and another one waits."""
    graz = made.members["graz"].log
    made.accept_run("graz")
    graz.append(ev.RunStopped(statement=digest("the operator's word")), run=made.run)
    offered = ev.RunOffered(next="run-2", version=2, manifest=digest("offered"), reason='accept_runs is "ask"')
    graz.append(offered, run=made.run)


def _people(made: Federation) -> None:
    graz = made.members["graz"]
    opened = next(LogReader(graz.folder).records("data.opened")).seq
    graz.log.erase_annex(opened, opened, "the ethics board")
    graz.log.append(ev.AccessExported(auditor="the regulator", purpose="yearly audit", size=graz.log.size))


def _crash(made: Federation) -> None:
    """linz is killed while it writes; its clock is half a second behind afterwards."""
    linz = made.members["linz"]
    made.clock.advance(50)
    linz.log._writer.close()
    with (linz.folder / "segments" / "00000000.jsonl").open("ab") as segment:
        segment.write(b'{"actor":"agent","annex_com')
    made.reopen(linz)
    made.clock.wall -= 500
    made._start(linz)
    made.clock.advance(2000)


def _coordinator(made: Federation) -> None:
    sent = next(record for record in LogReader(made.members["graz"].folder).records("egress") if record.round == 1)
    hub, site = made.hub.log, made.members["linz"].party
    hub.append(ev.PeerEnrolled(site="linz", spki=digest("linz spki"), vkey=str(site.root)))
    hub.append(ev.PeerRevoked(site="wels", spki=digest("wels spki"), reason="left the consortium"))
    hub.append(ev.IngressPartial(msg_id=sent.body["msg_id"], sender="graz", bytes=1))


def _many(made: Federation) -> None:
    """Enough entries of vienna for a second segment, which begins with the seal of the first."""
    vienna = made.members["vienna"].log
    while vienna.size <= MANY:
        vienna.append(Heartbeat(size=vienna.size))
    vienna.checkpoint()


def write(made: Federation, target: Path) -> None:
    """The four folders as `log-export` would copy them, with the annexes, and without what can be derived."""
    target.parent.mkdir(exist_ok=True)
    with tarfile.open(target, "w:xz", preset=9) as archive:
        files = [(made.root_key, "root.pem")]
        for path in made.folders:
            files += [
                (file, f"{path.name}/{file.relative_to(path)}") for file in sorted(path.rglob("*")) if file.is_file()
            ]
        for file, name in files:
            if file.name not in (".lock", "leaves.bin"):
                about = tarfile.TarInfo(name)
                about.size = file.stat().st_size
                archive.addfile(about, io.BytesIO(file.read_bytes()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write(federation(Path(folder)), ARCHIVE)
