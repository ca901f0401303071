"""`site-agent` as a hospital types it: keys, configuration, joining, checking, and one clear line for each mistake."""

from __future__ import annotations

import io
import json
import re
import shutil
import stat
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from lazaret import terminal
from lazaret.terminal import run_command
from npr.config import TrainConfig
from npr.data.generated import ISIC_CLASSES
from npr.model import ModelSpec
from npr.recipe import Recipe
from npr.wire_layout import export
from scripts.local_federation.known_updates import make_number_learner
from security.clock import SystemClock
from security.consortium.authority import Authority
from security.identity.enrolment_files import EnrolmentRequest
from security.identity.pki import Role
from security.rng import SystemRandomness
from security.secagg import records
from security.secagg.layout import Block, Layout
from security.secagg.site.journal import Journal
from site_agent.assembly import assemble
from site_agent.cli import cli
from site_agent.config import CHECK_NAMES, SiteConfig
from site_agent.state_writer import WriteAheadLog
from tests.support.consortium_world import World

SOURCE = "generated:scale=0.005,sites=3"
RECIPE = Recipe(config=TrainConfig(method="fednpr-per", batch_size=16), image_size=16)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A federation of today, with a real initial model."""
    clock = SystemClock()
    folder = tmp_path_factory.mktemp("federation")
    authority = Authority.create(folder / "consortium", "lesions", passphrase=None, now_ms=clock.now_ms())
    world = World(folder, authority, clock)
    spec = ModelSpec(architecture="test_efficientnet", num_classes=8, image_size=16)
    export(authority.folder / "initial.safetensors", spec, RECIPE, rounds=2, classes=ISIC_CLASSES)
    world.write_plan('run = "run-1"\n[model]\ninitial = "initial.safetensors"\n[training]\nrounds = 2\nsteps = 20\n')
    world.enroll("hub", Role.COORDINATOR, hosts=("localhost",))
    for site in ("linz", "vienna"):
        world.enroll(site)
    return world


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run(*words: str | Path) -> Done:
    """The console script's entry in this process: starting torch anew for each case would take most of the time."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["site-agent", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            # Not `main`, whose commands isolate themselves in a child process (tests/cli/test_isolated_commands.py).
            run_command(cli, "site-agent")
    finally:
        sys.argv = before
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def ok(*words: str | Path) -> str:
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def graz(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hospital that has come all the way from `init` to a manifest."""
    folder = tmp_path_factory.mktemp("graz") / "agent"
    words = ["--federation", "lesions", "--name", "graz", "--address", "localhost:1", "--data", SOURCE]
    model = str(world.authority.folder / "initial.safetensors")
    told = json.loads(ok("init", folder, *words, "--initial-model", model, "--json"))
    request = Path(told["request"])
    world.authority.enroll(world.key, EnrolmentRequest.read(request), now_ms=world.now, days=365)
    world.publish()
    config = folder / "site.toml"
    answer, manifest = world.authority.answer_path("graz"), world.authority.manifest_path
    ok("join", answer, "--root-fingerprint", world.root_fingerprint, "--manifest", manifest, "--config", config)
    config.write_text(
        config.read_text().replace('# site = "graz"', 'site = "bcn" #').replace("# fold = 0", 'fold = "fold" #')
    )
    return config


def test_init_makes_private_keys_and_refuses_to_overwrite(graz: Path) -> None:
    for path in (graz.parent / "identity" / "keys").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    again = run("init", graz.parent, "--federation", "x", "--name", "y", "--address", "h:1", "--data", "generated")
    assert again.returncode == 2 and "already" in again.stderr


def test_check_says_ok_line_by_line_and_takes_the_file_at_either_place(graz: Path) -> None:
    """With torch: the learning code, and a trial round. Nobody listens at the coordinator's address."""
    told = json.loads(ok("check", "--config", graz, "--skip", "coordinator", "--skip", "clock", "--json"))
    verdicts = {line["check"]: line["verdict"] for line in told["checks"]}
    assert {name for name, verdict in verdicts.items() if verdict != "ok"} == {"coordinator", "clock", "processing"}
    time, memory, steps = (line["what"] for line in told["checks"] if line["check"] == "trial")
    told = r"training takes about .* a round, the manifest gives 60 min \(measured on \d+ of \d+ images\)"
    assert re.search(told, time)
    assert re.search(r"a round takes about \d+ MB|a round takes about [\d.]+ GB", memory)
    assert re.search(r"quantisation of this site's update: [\d,]+ steps", steps)
    slow = [word for name in ("coordinator", "clock", "images", "trial") for word in ("--skip", name)]
    said = run("--config", graz, "check", *slow)
    assert said.returncode == 0 and said.stderr.strip().endswith("nothing wrong found in what was checked")


def test_a_machine_that_is_too_slow_or_too_small_for_a_round() -> None:
    from lazaret.checks import memory
    from site_agent.trainer.trial import _time

    assert [_time(seconds, 100, "measured").verdict for seconds in (10, 60, 95)] == ["ok", "warning", "problem"]
    bounds = [memory(available=100, needed=needed, what="a round").verdict for needed in (10, 90, 101)]
    assert bounds == ["ok", "warning", "problem"]


def test_a_site_far_below_the_weight_cap_is_told_so() -> None:
    from site_agent.trainer.trial import _resolution

    block = Block(name="w", shape=(1,), kind="mean", clip_exponent=0, movement_exponent=1)
    layouts = [Layout.of([block], roster_size=10, weight_cap=16_384, ring_bits=bits) for bits in (24, 24, 32)]
    lines = [_resolution(layout, samples) for layout, samples in zip(layouts, (40, 30, 30), strict=True)]
    assert [line.verdict for line in lines] == ["ok", "warning", "ok"]
    assert "2,047 steps" in lines[0].what and "ring_bits = 32" in str(lines[1])


def test_status_before_the_first_round(graz: Path) -> None:
    told = json.loads(ok("status", "--config", graz, "--json"))
    assert (told["site"], told["run"], told["round"], told["stopped"]) == ("graz", "run-1", 0, None)


def test_permit_is_for_a_site_that_waits_and_is_logged(graz: Path, tmp_path: Path) -> None:
    config = copied(graz, tmp_path)
    complains(run("permit", "--reason", "x", "--config", config), 2, "does not wait for its operator")
    state = bytes.fromhex(json.loads(ok("status", "--config", config, "--json"))["model"])
    read = SiteConfig.read(config)
    agent = assemble(read, clock=SystemClock(), rng=SystemRandomness(), make_learner=make_number_learner)
    agent.log.close()
    agent.wal.close()
    wal = WriteAheadLog(config.parent / "state" / "wal")
    for number in range(3):
        update = bytes([number]) * 32
        wal.append(records.UploadBound(ctx=update, deals=update, root=update, state_hash=state, update=update))
    wal.close()
    assert json.loads(ok("status", "--config", config, "--json"))["waits_for_operator"]
    ok("permit", "--reason", "one site was removed", "--config", config)
    assert not json.loads(ok("status", "--config", config, "--json"))["waits_for_operator"]
    entries = b"".join(path.read_bytes() for path in (config.parent / "state" / "log").rglob("*") if path.is_file())
    assert b"permit: one site was removed" in entries
    complains(run("permit", "--reason", "x", "--config", config), 2, "does not wait for its operator")


def test_permit_sets_earlier_sums_on_the_same_model_aside(graz: Path, tmp_path: Path) -> None:
    """A set that isolates one site together with an earlier sum is refused after one update, not after three."""
    config = copied(graz, tmp_path)
    state = bytes.fromhex(json.loads(ok("status", "--config", config, "--json"))["model"])
    agent = assemble(
        SiteConfig.read(config), clock=SystemClock(), rng=SystemRandomness(), make_learner=make_number_learner
    )
    agent.log.close()
    agent.wal.close()
    wal = WriteAheadLog(config.parent / "state" / "wal")
    journal = Journal.replay(wal.records)
    journal.uploaded_on, journal.uploaded = state, {bytes(32)}
    journal.sums = [records.SumSeen(round=1, state_hash=state, sites=("graz", "linz", "wien"))]
    for record in journal.compacted(done_round=0):
        wal.append(record)
    wal.close()
    ok("permit", "--reason", "linz left", "--config", config)
    wal = WriteAheadLog(config.parent / "state" / "wal")
    assert not Journal.replay(wal.records).sums
    wal.close()


def test_evaluate_the_initial_model(graz: Path) -> None:
    told = json.loads(ok("evaluate", "--config", graz, "--json"))
    assert told["round"] == 0 and 0 <= told["test"]["bacc"] <= 1
    none = run("evaluate", "--config", graz, "--model", "best")
    assert none.returncode == 2 and "no round has been evaluated" in none.stderr


# What a starting agent logs before it can fail: its first line at once, and then how its trainer is isolated.
STARTING = re.compile(
    r"(?:[-\d]{10} [:\d]{8}\+0000 version \S+ starts with \S+\n"
    r"(?:[-\d]{10} [:\d]{8}\+0000 (?:warning: )?(?:the process that saw images|data: opened) [^\n]+\n)*)?"
)


def complains(done: Done, code: int, *words: str) -> None:
    """One line for the error and at most one for its hint, behind nothing but the lines of a start."""
    assert done.returncode == code, done.stderr
    started = STARTING.match(done.stderr)
    assert started is not None
    first, *rest = done.stderr[started.end() :].strip().splitlines()
    assert first.startswith("site-agent: error: ") and all(word in first for word in words), done.stderr
    assert len(rest) <= 1 and "Traceback" not in done.stderr


def copied(graz: Path, tmp_path: Path) -> Path:
    shutil.copytree(graz.parent, tmp_path / "agent")
    return tmp_path / "agent" / "site.toml"


def test_a_missing_configuration(tmp_path: Path) -> None:
    complains(run("--config", tmp_path / "none.toml"), 2, "none.toml", "not found")


def test_an_unknown_key(graz: Path, tmp_path: Path) -> None:
    config = copied(graz, tmp_path)
    config.write_text(config.read_text().replace("[policy]", "[policy]\nmost_round = 3"))
    done = run("--config", config)
    complains(done, 2, "policy.most_round", "unknown key")
    assert "did you mean most_rounds?" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('address = "localhost:1"', 'address = "localhost:99999"', "coordinator.address"),
        ('# proxy = "http://proxy.example:3128"', 'proxy = "http://x:abc"', "coordinator.proxy"),
    ],
)
def test_a_port_that_cannot_be(graz: Path, tmp_path: Path, old: str, new: str, key: str) -> None:
    config = copied(graz, tmp_path)
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    for words in ((), ("check",), ("status",)):
        complains(run("--config", config, *words), 2, key, "from 1 to 65535")


def test_init_with_a_port_that_cannot_be(tmp_path: Path) -> None:
    words = ["--federation", "x", "--name", "y", "--address", "h:99999", "--data", "generated"]
    complains(run("init", tmp_path / "new", *words), 2, "--address", "host:port")
    assert not (tmp_path / "new").exists()


def test_errors_of_the_configuration_are_json_where_json_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_json_lines", False)
    config = tmp_path / "site.toml"
    config.write_text("[site")
    for words in ((), ("status",), ("check",)):
        done = run("--config", config, "--log-format", "json", *words)
        (line,) = done.stderr.splitlines()
        told = json.loads(line)
        assert done.returncode == 2 and (told["level"], told["code"]) == ("error", "config")
        assert "not toml" in told["message"] and told["hint"]


def test_a_state_that_is_a_file(graz: Path, tmp_path: Path) -> None:
    config = copied(graz, tmp_path)
    shutil.rmtree(config.parent / "state", ignore_errors=True)
    (config.parent / "state").write_text("")
    done = run("--config", config)
    complains(done, 2, "state", "is not a folder")
    assert "[site] state" in done.stderr
    slow = [word for name in CHECK_NAMES if name not in ("manifest", "state") for word in ("--skip", name)]
    told = json.loads(run("--config", config, "check", *slow, "--json").stdout)
    (line,) = [line for line in told["checks"] if line["check"] == "state"]
    assert line["verdict"] == "problem" and "is not a folder" in line["what"]


@pytest.mark.parametrize("content", ["", "many"])
def test_a_damaged_count_of_rounds(graz: Path, tmp_path: Path, content: str) -> None:
    config = copied(graz, tmp_path)
    (config.parent / "state").mkdir(exist_ok=True)
    (config.parent / "state" / "rounds").write_text(content)
    complains(run("--config", config), 2, "rounds", "damaged")
    assert not processes_of(config), "a trainer outlives a start that failed"


def processes_of(config: Path) -> list[int]:
    """The processes that were started with a configuration."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(config).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("name", ["tls.pem", "root.pem"])
def test_no_certificate_yet(graz: Path, tmp_path: Path, name: str) -> None:
    config = copied(graz, tmp_path)
    (config.parent / "identity" / name).unlink()
    done = run("--config", config)
    complains(done, 2, name, "file not found")
    assert "hint: `join` installs it" in done.stderr
    shutil.rmtree(config.parent / "identity")
    done = run("--config", config)
    complains(done, 2, "file not found")
    assert "`init` makes keys, `join` installs" in done.stderr


def test_the_certificate_of_another_site(world: World, graz: Path, tmp_path: Path) -> None:
    config = copied(graz, tmp_path)
    shutil.copy(world.identity("linz").tls_path, config.parent / "identity" / "tls.pem")
    done = run("--config", config)
    complains(done, 1, "tls.pem", "certificate of linz", "key that is not in this folder")
    assert "another site's" in done.stderr


def test_a_wrong_fingerprint_stops_joining_again(world: World, graz: Path) -> None:
    answer, manifest = world.authority.answer_path("graz"), world.authority.manifest_path
    for words in ((answer,), ("--manifest", manifest)):
        done = run("join", *words, "--root-fingerprint", "00" * 32, "--config", graz)
        complains(done, 1, "not the one that was announced")


def test_another_initial_model(graz: Path, tmp_path: Path) -> None:
    config = copied(graz, tmp_path)
    other = tmp_path / "other.safetensors"
    shutil.copy(graz.parent / "site.toml", other)
    text = config.read_text().splitlines()
    config.write_text(
        "\n".join(f'initial_model = "{other}"' if line.startswith("initial_model") else line for line in text)
    )
    done = run("--config", config)
    complains(done, 2, "other.safetensors", "not a safetensors file")
    assert "hint: is it complete?" in done.stderr
    ended = json.loads(ok("status", "--config", config, "--json"))["agent"]["stopped"]
    assert "not a safetensors file" in ended and "is it complete?" in ended, "status says why it does not run"


def test_no_manifest_yet(graz: Path, tmp_path: Path) -> None:
    config = copied(graz, tmp_path)
    (config.parent / "identity" / "manifest.json").unlink()
    complains(run("--config", config), 2, "there is no manifest yet")


def test_a_manifest_with_a_changed_byte(graz: Path, tmp_path: Path) -> None:
    config = copied(graz, tmp_path)
    path = config.parent / "identity" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"rounds":2', b'"rounds":9'))
    complains(run("--config", config), 1, "manifest")


def test_key_files_open_to_others(graz: Path, tmp_path: Path) -> None:
    config = copied(graz, tmp_path)
    (config.parent / "identity" / "keys" / "sealing.key").chmod(0o644)
    complains(run("--config", config), 2, "open to others")


def test_a_site_that_is_not_in_the_roster(world: World, graz: Path, tmp_path: Path) -> None:
    config = copied(graz, tmp_path)
    old = world.authority.folder / "history"
    world.enroll("newcomer")
    shutil.rmtree(config.parent / "identity")
    shutil.copytree(world.identity("newcomer").folder, config.parent / "identity")
    newest = sorted(old.iterdir())[-1]
    shutil.copy(newest, config.parent / "identity" / "manifest.json")
    complains(run("--config", config), 1, "newcomer", "not in the roster")


def test_two_agents_on_one_state_directory(graz: Path, tmp_path: Path) -> None:
    config = copied(graz, tmp_path)
    state = config.parent / "state"
    state.mkdir(exist_ok=True)
    held = WriteAheadLog(state / "wal")
    try:
        complains(run("--config", config), 2, "another process uses this state folder")
    finally:
        held.close()
