"""`scripts/six-months`: half a year of ten hospitals in compressed time, with what half a year brings.

The coordinator and the agents are those that ship, with their files; only sockets are left out, and the clock is moved
by hand (`tests/support/whole_federation.py`). Each week has some rounds and then rests, paused by the operator, with a
heartbeat in every log each quarter of an hour. In between one certificate ends and is renewed, one hospital leaves, one
joins, the disk of one is full, and the coordinator is lost and replaced. At the end every log is audited.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Final

import click

from coordinator.backup import take_up
from coordinator.phases import RunPhase
from lazaret.checks import used_bytes
from lazaret.terminal import emit, run_command, say
from security.audit.agreement import keys_of
from security.audit.compare import cross
from security.audit.findings import Finding, exit_code
from security.identity.pki import Role
from security.log.machine import HEARTBEAT_MS
from site_agent.run import Agent
from site_agent.state_commands import write_handover
from tests.support.whole_federation import WholeFederation

DAY_MS: Final = 86_400_000
ENDS: Final = 0.25  # of the time is over when one certificate has ended
SHORT_LIVED, LEAVER, JOINER, FULL = "site1", "site2", "site-new", "site3"
LOST: Final = "hub"  # the coordinator whose machine is lost, with its log


class HalfYear:
    """The federation, its calendar, and what is counted.

    :param beat_ms: how often logs get a heartbeat while the run rests.
    :param week_days: how long a week is: half a year of short weeks is over sooner.
    """

    def __init__(
        self, folder: Path, *, sites: int, rounds: int, weeks: int, beat_ms: int = HEARTBEAT_MS, week_days: int = 7
    ) -> None:
        names = tuple(f"site{number}" for number in range(sites))
        self.federation = WholeFederation(folder, sites=names, rounds=rounds)
        self.federation.heartbeats = True
        self.rounds, self.weeks, self.beat_ms, self.week_days = rounds, weeks, beat_ms, week_days
        self.events: list[str] = []
        self.growth: list[int] = []

    @property
    def done(self) -> int:
        return int(self.federation.engine.completed)

    # What happens in a week.

    def calendar(self) -> dict[int, list[Callable[[], None]]]:
        """By week; the same order however many weeks there are."""
        events = (
            (ENDS, self.certificate_ends), (0.32, self.certificate_renewed), (0.45, self.hospital_leaves),
            (0.55, self.hospital_joins), (0.65, self.disk_is_full), (0.78, self.coordinator_lost),
        )  # fmt: skip
        found: dict[int, list[Callable[[], None]]] = {}
        for share, event in events:
            found.setdefault(self._week(share), []).append(event)
        return found

    def _week(self, share: float) -> int:
        return max(2, round(share * self.weeks))

    def live(self) -> None:
        self._short_lived()
        self.federation.start_all()
        calendar = self.calendar()
        for week in range(self.weeks):
            begun = self.federation.clock.now_ms()
            for event in calendar.get(week, ()):
                event()
            self._work(round((week + 1) * self.rounds / self.weeks) - self.done)
            self._rest(begun + self.week_days * DAY_MS)
            self.growth.append(used_bytes(self.federation.folder))

    def _short_lived(self) -> None:
        """One site's certificates end the day before the week in which that is looked at."""
        world, federation = self.federation.world, self.federation
        days = self._week(ENDS) * self.week_days - 1
        world.authority.renew(world.key, SHORT_LIVED, None, now_ms=world.now, days=days)
        world.install(SHORT_LIVED)
        federation.manifest = world.publish()
        for member in ("hub", *federation.manifest.sites):
            federation.give_manifest(member)

    def _work(self, count: int) -> None:
        if count > 0:
            self.federation.run_rounds(count)

    def _rest(self, until_ms: int) -> None:
        """The operator pauses the run; the machines stay on."""
        federation = self.federation
        assert federation.shell is not None
        federation.shell.pause.set("the week is over", now_ms=federation.clock.now_ms())
        if federation.engine.phase is not RunPhase.DONE:
            federation.run(lambda: federation.engine.phase is RunPhase.WAITING)
        while federation.clock.now_ms() < until_ms:
            federation.clock.advance(min(self.beat_ms, until_ms - federation.clock.now_ms()))
            for agent in federation.agents.values():
                agent.heartbeat()
            federation.count()
            federation.shell.tick()
        federation.shell.pause.clear()
        federation.step()

    # What half a year brings.

    def certificate_ends(self) -> None:
        federation = self.federation
        self._work(1)
        assert SHORT_LIVED not in federation.survivors()[-1], "its certificate has ended"
        self.events.append(f"the certificate of {SHORT_LIVED} has ended; the others go on")

    def certificate_renewed(self) -> None:
        federation, world = self.federation, self.federation.world
        world.authority.renew(world.key, SHORT_LIVED, None, now_ms=world.now, days=365)
        world.install(SHORT_LIVED)
        federation.manifest = world.publish()
        federation.adopt_at_hub()
        self._work(2)
        assert SHORT_LIVED in federation.survivors()[-1], "it is back"
        self.events.append(f"{SHORT_LIVED} is renewed and back")

    def hospital_leaves(self) -> None:
        federation, world = self.federation, self.federation.world
        world.authority.revoke(LEAVER, "has left", now_ms=world.now)
        federation.manifest = world.publish()
        federation.stop(LEAVER)
        federation.adopt_at_hub()
        self._work(1)
        assert LEAVER not in federation.survivors()[-1]
        self.events.append(f"{LEAVER} has left")

    def hospital_joins(self) -> None:
        federation, world = self.federation, self.federation.world
        world.enroll(JOINER)
        federation.manifest = world.publish()
        federation.give_manifest(JOINER)
        federation.adopt_at_hub()
        federation.start(JOINER)
        self._work(2)
        assert JOINER in federation.survivors()[-1], "it has caught up and takes part"
        self.events.append(f"{JOINER} has joined")

    def disk_is_full(self) -> None:
        """A write of one agent is refused: it ends without having said what is not on disk, and is started again."""
        federation = self.federation
        with full_disk(federation.agents[FULL]) as refused:
            try:
                self._work(1)
            except OSError:
                federation.kill(FULL)
        assert refused, "the disk was not asked"
        self._work(1)
        federation.start(FULL)
        self._work(2)
        assert FULL in federation.survivors()[-1], "it is back"
        self.events.append(f"the disk of {FULL} was full; it went on when there was room")

    def coordinator_lost(self) -> None:
        """Its machine is gone. Another one is enrolled, and takes the run up from what one hospital hands over."""
        federation, world = self.federation, self.federation.world
        giver = federation.agents[FULL]
        federation.run(lambda: newest_covered(giver) == federation.engine.chain.head.round)
        before = self.done
        federation.kill_hub()
        shutil.rmtree(federation.folder / "hub-state")
        world.authority.revoke(LOST, "its machine is lost", now_ms=world.now)
        world.enroll("hub-2", Role.COORDINATOR, hosts=("localhost", "127.0.0.1"))
        federation.manifest, federation.hub = world.publish(), "hub-2"
        federation.give_manifest("hub-2")
        handed = federation.folder / "handover.safetensors"
        write_handover(giver.state_dir, giver.manifest, handed)
        config = federation.folder / "coordinator.toml"
        model = f'initial_model = "{federation.model_path}"'
        config.write_text(f'identity = "hub-2"\nstate = "hub-state"\nlisten = "127.0.0.1:1"\n{model}\n')
        take_up(config, handed, completed=before, clock=federation.clock)
        federation.start_hub()
        self._work(1)
        assert federation.engine.completed == before + 1
        self.events.append("the coordinator was lost and replaced")

    # What came of it.

    def report(self) -> dict[str, Any]:
        federation = self.federation
        completed = federation.engine.completed
        lost = [row.outcome for row in federation.rounds if row.outcome not in ("published", "recovered", None)]
        folders = {site: federation.folder / f"{site}-agent" / "state" / "log" for site in federation.configs}
        folders[federation.hub] = federation.folder / "hub-state" / "log"
        federation.stop_all()
        logs, between = audited(folders, federation.world.authority.folder / "root.pem", lost=LOST)
        return {
            "sites": len(federation.configs),
            "weeks": self.weeks,
            "rounds_planned": self.rounds,
            "rounds_completed": completed,
            "rounds_not_completed": Counter(lost),
            "events": self.events,
            "bytes_after_each_week": self.growth,
            "logs": logs,
            "between_the_logs": between,
            "clean_logs": sum(log["clean"] for log in logs.values()),
            "clean": between["clean"] and all(log["clean"] for log in logs.values()),
        }


def newest_covered(agent: Agent) -> int:
    covered = agent.state_dir.read_covered()
    return covered.result.context.round if covered is not None else 0


@contextmanager
def full_disk(agent: Agent) -> Iterator[list[int]]:
    """The next record of this agent finds no room."""
    append, refused = agent.wal.append, []

    def refuse(_: Any) -> None:
        refused.append(1)
        raise OSError(errno.ENOSPC, "no space left on device", str(agent.state_dir.wal))

    agent.wal.append = refuse  # type: ignore[method-assign]
    try:
        yield refused
    finally:
        agent.wal.append = append  # type: ignore[method-assign]


def audited(folders: dict[str, Path], root: Path, *, lost: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `privacy-audit cross --lost` says of each log, and between them. Clean is what it ends with 0 for."""
    keys = keys_of([*folders.values()], root)
    crossed = cross(list(folders.values()), keys, lost=(lost,))
    logs = {
        name: {"entries": log.size, "bytes": used_bytes(log.folder), **finding_codes(log.findings)}
        for name, log in zip(folders, crossed.logs, strict=True)
    }
    matched = {"messages_matched": crossed.matched, "receipts_fitting": crossed.receipts, "log_lost": lost}
    return logs, matched | finding_codes(crossed.joint)


def finding_codes(findings: Sequence[Finding]) -> dict[str, Any]:
    codes = Counter(f"{finding.severity.value}:{finding.code}" for finding in findings)
    return {"clean": exit_code(findings) == 0, "findings": dict(codes)}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sites", type=click.IntRange(5), default=10, show_default=True)
@click.option("--rounds", type=click.IntRange(24), default=200, show_default=True)
@click.option("--weeks", type=click.IntRange(6), default=26, show_default=True)
@click.option("--beat", type=click.IntRange(1), default=HEARTBEAT_MS // 60_000, show_default=True, help="Minutes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(sites: int, rounds: int, weeks: int, beat: int, as_json: bool) -> None:
    """Half a year of a federation in compressed time."""
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="lazaret-half-year-") as folder:
        half = HalfYear(Path(folder), sites=sites, rounds=rounds, weeks=weeks, beat_ms=60_000 * beat)
        half.live()
        seen = half.report() | {"seconds": round(monotonic() - began)}
    if as_json:
        emit(seen)
        return
    say(json.dumps({name: value for name, value in seen.items() if name != "logs"}, indent=1))


if __name__ == "__main__":
    run_command(main, "six-months")
