"""In which order a site does things: written down, logged, sent. And that a restart takes nothing out of the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from protos.parse import FROM_SITE
from security.log.schema import Event
from security.secagg import messages
from security.secagg.fields import Wire
from security.secagg.transitions import CoordinatorState
from site_agent.effects import Effect
from site_agent.run import Agent
from tests.support.consortium_world import SITES
from tests.support.site_world import MORE, PLAN, SLOT_SECONDS, SiteWorld

VICTIM = "linz"
FOUR = (*SITES, "steyr")
NO_COLLUDERS = PLAN + MORE + "\n[aggregation]\ncolluders = 0\n"


class Watched(Agent):
    """Notes what reaches the disk and what reaches the network, as it does."""

    done: list[str]

    def watch(self) -> None:
        self.done = []
        append, write = self.log.append, self.wal.append

        def logged(event: Event, **rest: object) -> object:
            self.done.append(f"log {event.type}")
            return append(event, **rest)  # type: ignore[arg-type]

        def persisted(record: Wire) -> None:
            write(record)
            self.done.append(f"persist {type(record).__name__}")

        self.log.append, self.wal.append = logged, persisted  # type: ignore[method-assign,assignment]

    def execute(self, effect: Effect) -> Iterator[bytes]:
        for payload in super().execute(effect):
            self.done.append(f"send {type(FROM_SITE.decode(payload).message).__name__}")
            yield payload


def before(done: list[str], step: str) -> list[str]:
    """What happened since the message before this one."""
    end = done.index(step)
    start = max((place + 1 for place in range(end) if done[place].startswith("send ")), default=0)
    return [found for found in done[start:end] if found != "log receipt" and found != "log checkpoint.seen"]


ORDER = {
    "Advert": ["persist Joined", "log round.invited", "log egress"],
    "Shares": ["persist KeysSeen", "log egress"],
    "UploadHeader": ["persist UploadBound", "log egress"],
    "UploadFrame": ["log egress"],
    "Agree": ["persist Agreed", "log secagg.survivors", "log egress"],
    "Unmask": ["persist AttemptEnded", "log secagg.unmasked", "log egress"],
    "Ack": ["persist ResultAcked", "log egress"],
}


def test_every_step_is_written_down_then_logged_then_sent(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path)
    world.start_all()
    world.kill(VICTIM)
    agent = world.start(VICTIM, Watched)
    assert isinstance(agent, Watched)
    agent.watch()
    world.hub.connect(VICTIM)
    world.run_round()
    for name, steps in ORDER.items():
        done = before(agent.done, f"send {name}")
        if done[0] == "persist ResultAccepted":
            done = done[1:]  # with the last frame of the sum, where no chunk of it is this site's to check
        assert done == steps, name


def test_a_refused_plan_is_logged_before_it_is_refused(tmp_path: Path) -> None:
    world = SiteWorld(tmp_path)
    world.start_all()
    world.kill(VICTIM)
    agent = world.start(VICTIM, Watched)
    assert isinstance(agent, Watched)
    agent.watch()
    world.hub.connect(VICTIM)
    world.hub.order(SITES)
    for site in SITES:
        if site != VICTIM:
            world.work(site)
    world.tick(SLOT_SECONDS * 1000)
    world.hub.aggregate(SITES)  # linz has no update yet
    assert before(agent.done, "send Refusal") == ["log model.received", "log round.declined", "log egress"]


def test_a_site_killed_after_agree_knows_who_had_dropped_out(tmp_path: Path) -> None:
    """From its write-ahead log alone: what the privacy log says is for people, not for the machine."""
    world = SiteWorld(tmp_path, sites=FOUR, plan=NO_COLLUDERS)
    world.start_all()
    world.hub.order(FOUR)
    for site in FOUR:
        world.work(site)
    world.tick(SLOT_SECONDS * 1000)

    def lost(site: str, message: Wire) -> bool:
        if site == "steyr" and isinstance(message, messages.UploadHeader | messages.UploadFrame):
            return False
        return not isinstance(message, messages.Agree)

    world.hub.hook = lost
    attempt = world.hub.plan()
    world.hub.pump()
    world.hub.do(attempt.close_step())
    world.hub.pump()
    assert attempt.state is CoordinatorState.AGREEING
    world.kill(VICTIM)
    world.hub.hook = None
    world.start(VICTIM)
    world.hub.connect(VICTIM)
    for site in FOUR:
        if site != "steyr":
            world.hub.send(site, attempt.survivors)
    world.hub.pump()
    entry = world.entries(VICTIM, "secagg.unmasked")[-1]
    assert entry["mask_key"] == ["steyr"] and entry["self_mask"] == ["graz", "linz", "vienna"]
    assert world.entries(VICTIM, "secagg.survivors")[-1]["dropouts"] == ["steyr"]
