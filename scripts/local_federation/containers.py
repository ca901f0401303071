"""`scripts/containers`: a coordinator and three hospitals in containers, two rounds, one killed, then a second run that
comes by wire; then the logs.

The base is made of Debian's packages, the images of a release (`scripts/releasing.py`) with deploy/containers. Every
command of the consortium and of the members runs in a container too, as user 65532 and on a read-only root. At a
hospital agent and trainer are two containers, as in deploy/containers/compose.yaml. The images under the results have
no shell, so that nothing can need one.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from lazaret.errors import ConfigError, ToolkitError
from lazaret.terminal import emit, run_command
from scripts.local_federation.demo import ProgressPrinter
from scripts.local_federation.federation import WaitFailed, wait_until
from scripts.local_federation.quickstart import (
    PLAN,
    ROUNDS,
    SITES,
    TypedFederation,
    model_words,
    role_of,
    sboms_as_logged,
    starts,
)
from scripts.releasing import ROOT, SBOM, release
from security.audit.facts import LogHistory
from security.log.reader import LogReader

FILES: Final = ROOT / "deploy" / "containers"
USER: Final = 65532
SUITE, PYTHON = "bookworm", (3, 11)
PACKAGES: Final = "python3,python3-venv,ca-certificates"
HOME: Final = "/var/lib/lazaret"
# What compose.yaml asks for, as options.
CLOSED: Final = (
    "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{USER}:{USER}",
    "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=1024:1024", "--tmpfs", "/tmp:mode=1777,noexec",
    "--tmpfs", "/var/cache/lazaret:mode=1777,noexec",
)  # fmt: skip
# What a trainer's container reads of its hospital's folder, and what it shares.
GIVEN: Final = ("site.toml", "initial.safetensors", "plugins", "state/initial")
SHARED: Final = ("run", "state/memory", "state/models", "state/sides")
NO_SHELL: Final = """\
ARG BASE
FROM ${BASE}
RUN ["/usr/bin/python3", "-c", "import os; [os.unlink('/bin/' + name) for name in ('sh', 'dash', 'bash', 'rbash')]"]
"""


def hindrance(*, base: Path | None) -> str | None:
    """Why it cannot be tried on this machine."""
    needed = ["buildah", "podman", "runc", *([] if base else ["mmdebstrap"])]
    if missing := [name for name in needed if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed here"
    if os.geteuid() != 0:
        return "only root can build and run images in this way"
    if sys.version_info[:2] != PYTHON and base is None:
        return f"the release would be for Python {sys.version_info[0]}.{sys.version_info[1]}, the base has 3.11"
    return None


def run(*words: object, seconds: float = 120) -> str:
    """Run a tool, with a bounded time.

    :raises WaitFailed: with the end of what it said.
    """
    command = [str(word) for word in words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise WaitFailed(f"{' '.join(command[:4])} did not end within {seconds:.0f} s") from None
    if done.returncode:
        raise WaitFailed(f"{' '.join(command)} ended with {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def podman(*words: object, seconds: float = 120) -> str:
    return run("podman", "--runtime", "runc", *words, seconds=seconds)


@dataclass(slots=True)
class Workshop:
    """What is made on this machine and removed again: containers and images, each by its own name or id."""

    folder: Path
    mark: str = field(default_factory=lambda: f"lazaret-{secrets.token_hex(4)}")
    images: list[str] = field(default_factory=list)
    containers: list[str] = field(default_factory=list)

    def base(self, archive: Path) -> str:
        self.images.append(podman("import", "--quiet", archive, f"localhost/{self.mark}-base", seconds=300).strip())
        return f"localhost/{self.mark}-base"

    def build(self, name: str, file: Path, context: Path, *words: str) -> str:
        """:returns: the image's name."""
        image = f"localhost/{self.mark}-{name}"
        listed = self.folder / f"{name}.id"
        run(
            "buildah", "build", "--isolation", "chroot", "--format", "docker", "--layers=false", "--iidfile", listed,
            *words, "--file", file, "--tag", image, context, seconds=1500,
        )  # fmt: skip
        self.images.append(listed.read_text().strip())
        return image

    def once(self, image: str, program: str, *words: object, mounts: Sequence[str]) -> str:
        """A command in a container of its own, without network."""
        name = f"{self.mark}-once"
        return podman(
            "run", "--rm", "--name", name, "--network", "none", "--no-healthcheck", *CLOSED, *_volumes(mounts),
            "--entrypoint", program, image, *words, seconds=240,
        )  # fmt: skip

    def start(self, name: str, image: str, *words: str, mounts: Sequence[str]) -> str:
        """A container that stays. Without --rm: it is started again after it was killed."""
        full = f"{self.mark}-{name}"
        self.containers.append(full)
        podman("run", "--detach", "--name", full, *CLOSED, *_volumes(mounts), *words[:-1], image, *words[-1].split())
        return full

    def clear(self) -> None:
        """Also after a failure; what is gone already is no fault."""
        for name in [*self.containers, f"{self.mark}-once"]:
            self._remove("rm", "--force", "--time", "0", name)
        for image in reversed(self.images):
            self._remove("rmi", "--force", image)

    @staticmethod
    def _remove(*words: str) -> None:
        """One that takes too long does not keep the others."""
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(["podman", *words], capture_output=True, timeout=300, check=False)


def _volumes(mounts: Sequence[str]) -> Iterator[str]:
    for mount in mounts:
        yield from ("--volume", mount)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """One built image."""

    name: str
    digest: str
    megabytes: float

    @classmethod
    def of(cls, name: str) -> ImageFacts:
        (described,) = json.loads(podman("image", "inspect", name))
        return cls(name=name, digest=described["Digest"], megabytes=round(described["Size"] / 1e6, 1))


class ContainerFederation(TypedFederation):
    """The folders and containers of one federation."""

    def __init__(self, workshop: Workshop, folder: Path, images: dict[str, ImageFacts], tell: ProgressPrinter) -> None:
        super().__init__(folder)
        self.workshop, self.images, self.tell = workshop, images, tell
        self.running: dict[str, str] = {}

    def typed(self, role: str, program: str, *words: object) -> str:
        return self.workshop.once(self.images[role].name, program, *words, mounts=[f"{self.folder}:{HOME}"])

    def source(self, site: str) -> str:
        del site  # each has its own images under this name
        return "folders:/images"

    def give(self, folder: Path) -> None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, USER, USER, follow_symlinks=False)

    def set_up(self, config: Path, lines: str = "") -> None:
        """Agent and trainer are two services."""
        super().set_up(config, 'trainer_socket = "run/trainer.sock"\nisolation = "required"\n' + lines)
        config.write_text(config.read_text().replace('# accept_runs = "ask"', 'accept_runs = "within_policy"'))
        for name in ("run", "plugins", "state", "state/initial", "state/memory", "state/models", "state/sides"):
            (config.parent / name).mkdir(mode=0o700, exist_ok=True)
        self.give(config.parent)

    def start(self) -> None:
        """The coordinator, then agent and trainer of each hospital."""
        digest = {role: ("--env", f"LAZARET_IMAGE={image.digest}") for role, image in self.images.items()}
        hub = [f"{self.folder / 'hub'}:{HOME}"]
        where = ("--network", "host")
        self._start("coordinator", "coordinator", *where, *digest["coordinator"], "", mounts=hub)
        self.wait("coordinator", "listening")
        trainer = ("--restart", "always", "--network", "none", "--no-healthcheck", "--entrypoint", "python")
        for site in SITES:
            home = self.folder / site
            self._start(f"{site}-agent", "site", *where, *digest["site"], "", mounts=[f"{home}:{HOME}"])
            mounts = [f"{home / name}:{HOME}/{name}:ro" for name in GIVEN]
            mounts += [f"{home / name}:{HOME}/{name}" for name in SHARED]
            mounts.append(f"{self.folder / 'images' / site}:/images:ro")
            command = "-P -m site_agent.trainer --config site.toml --required"
            self._start(f"{site}-trainer", "site", *trainer, command, mounts=mounts)

    def _start(self, name: str, role: str, *words: str, mounts: Sequence[str]) -> None:
        self.running[name] = self.workshop.start(name, self.images[role].name, *words, mounts=mounts)

    def output_of(self, name: str) -> str:
        done = subprocess.run(
            ["podman", "logs", self.running[name]], capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def wait(self, name: str, words: str, *, seconds: float = 400) -> None:
        output = self.workshop.folder / f"{name}.log"

        def look() -> bool:
            output.write_text(self.output_of(name))
            time.sleep(1.0)  # each look starts a process
            return words in output.read_text()

        wait_until(look, f"{name}: {words!r}", seconds=seconds, output=output)

    def play(self) -> tuple[str, int]:
        """Two rounds. An agent is killed while its site trains the second one, and started again.

        :returns: which, and how many rounds were completed then.
        """
        victim = f"{SITES[1]}-agent"
        self.wait(victim, "round 2: training")
        podman("kill", "--signal", "KILL", self.running[victim])
        self.tell(f"{victim} was killed while its site trained round 2")
        completed = int(self._status()["completed"])
        podman("start", self.running[victim])
        wait_until(lambda: self._over(ROUNDS), "the end of the run", seconds=600)
        return victim, completed

    def play_second(self) -> bool:
        """A run of one round with another model. Both are given to the operator alone; nothing is copied or started.

        :returns: whether every hospital has fetched the model and begun the run by its own policy, agents and
            coordinator are the processes that they were, and no trainer has taken up the old run's personal state.
        """
        stay = [self.running[name] for name in ("coordinator", *(f"{site}-agent" for site in SITES))]
        before = podman("inspect", "--format", "{{.State.StartedAt}}", *stay)
        self.typed(*model_words(1, seed=1, out="consortium/second.safetensors"))
        plan = PLAN.replace('"containers"', '"second"').replace("initial.safe", "second.safe")
        self.publish(plan.replace(f"rounds = {ROUNDS}", "rounds = 1"))
        for name in ("manifest.json", "second.safetensors"):
            shutil.copyfile(self.folder / "consortium" / name, self.folder / "hub" / name)
        self.give(self.folder / "hub")
        podman("exec", stay[0], "coordinator", "queue", "manifest.json", "second.safetensors")
        wait_until(lambda: self._over(1, "second"), "the end of the second run", seconds=600)
        same = before == podman("inspect", "--format", "{{.State.StartedAt}}", *stay)
        return same and all(self._began_second(self.folder / site / "state") for site in SITES)

    @staticmethod
    def _began_second(state: Path) -> bool:
        found = LogReader(state / "log").checked("run.accepted")
        accepted = [(one.run, one.body["by"], one.body["fetched"]) for one in found]
        kept = [path.name for path in (state / "memory").iterdir()]
        return accepted == [("second", "policy", True)] and kept == ["1.safetensors"]

    def _status(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(
            podman("exec", self.running["coordinator"], "coordinator", "status", "--json")
        )
        return described

    def _over(self, rounds: int, run: str = "containers") -> bool:
        """All rounds are published and the last sum is checked."""
        time.sleep(2.0)
        described = self._status()
        return described["run"] == run and described["completed"] >= rounds and described["unchecked"] is None

    def healthy(self) -> int:
        """How many of the four that have a health check pass it."""
        for name in (names := ["coordinator", *(f"{site}-agent" for site in SITES)]):
            podman("healthcheck", "run", self.running[name])
        return len(names)

    def end(self) -> None:
        """All agents at once, then the coordinator: each log's end is witnessed by those that are still there."""
        agents, trainers = ([f"{site}-{part}" for site in SITES] for part in ("agent", "trainer"))
        for names, patience in ((agents, 60), (["coordinator"], 60), (trainers, 5)):
            podman("stop", "--time", patience, *(self.running[name] for name in names), seconds=240)
        for name in self.running:
            (self.workshop.folder / f"{name}.log").write_text(self.output_of(name))


def compared(federation: ContainerFederation, releases: Path) -> dict[str, Any]:
    """What the logs say of images, bills of materials and isolation, beside what is known here; and the audit."""
    histories = federation.histories()
    images = isolated = True
    for name, history in histories.items():
        digest = federation.images[role_of(name)].digest[-64:]
        images &= {body["image"] for body in starts(history)} == {digest}
        isolated &= name == "hub" or _isolated(history)
    audit = [sys.executable, "-c", "from security.audit.cli import main; main()", "cross"]
    words = [*audit, *map(str, federation.logs.values()), "--root-key", str(federation.root_key), "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    return {
        "image_as_logged": images,
        "sbom_as_logged": sboms_as_logged(histories, {role: releases / role / SBOM for role in federation.images}),
        "trainers_isolated": isolated,
        "audit_clean": done.returncode == 0,
        "verdict": json.loads(done.stdout)["verdict"] if done.stdout else done.stderr[-500:],
    }


def _isolated(history: LogHistory) -> bool:
    """No trainer of this site could open a connection or read a key."""
    found = [record.body for record in history.of("trainer.isolated")]
    return bool(found) and not any(body["connection"] or body["keys"] for body in found)


@contextmanager
def workplace(out: Path | None) -> Iterator[Workshop]:
    """A folder, removed at the end unless it was asked for; containers and images go in any case."""
    folder = out or Path(tempfile.mkdtemp(prefix="lazaret-containers-"))
    folder.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(folder)
    try:
        yield workshop
    finally:
        workshop.clear()
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)


def whole(workshop: Workshop, base: Path | None, releases: Path | None, tell: ProgressPrinter) -> dict[str, Any]:
    """From packages to the audit."""
    if base is None:
        base = workshop.folder / "base.tar"
        tell(f"a base of Debian's packages: {PACKAGES}")
        run("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, base, seconds=900)
    if releases is None:
        releases = workshop.folder / "release"
        tell("a release of coordinator and site from what is committed")
        release(releases, ("coordinator", "site"), None, install=False)
    system = workshop.base(base)
    (workshop.folder / "no-shell").write_text(NO_SHELL)
    empty = workshop.folder / "empty"
    empty.mkdir()
    runtime = workshop.build("runtime", workshop.folder / "no-shell", empty, "--build-arg", f"BASE={system}")
    images = {}
    for role in ("coordinator", "site"):
        tell(f"the image {role}")
        words = ("--target", role, "--build-arg", f"BASE={system}", "--build-arg", f"RUNTIME={runtime}")
        images[role] = ImageFacts.of(workshop.build(role, FILES / "Containerfile", releases, *words))
    built = tell.seconds
    federation = ContainerFederation(workshop, workshop.folder / "federation", images, tell)
    tell("keys, manifest and kits, by commands in containers")
    federation.prepare()
    tell("seven containers start")
    federation.start()
    victim, completed = federation.play()
    tell("a second run, by wire")
    second = federation.play_second()
    healthy = federation.healthy()
    federation.end()
    found = compared(federation, releases)
    found["second_run_by_wire"] = second
    checks = ("second_run_by_wire", "image_as_logged", "sbom_as_logged", "trainers_isolated", "audit_clean")
    return {
        "ok": all(found[name] for name in checks) and healthy == 1 + len(SITES) and completed < ROUNDS,
        "rounds": ROUNDS,
        "killed": victim,
        "rounds_completed_when_killed": completed,
        "healthy": healthy,
        "megabytes": {role: image.megabytes for role, image in images.items()},
        "seconds_to_build": round(built, 1),
        "seconds": round(tell.seconds, 1),
        **found,
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Keep logs and folders here.")
@click.option("--base", type=click.Path(path_type=Path, exists=True), help="A base system (tar), not a new one.")
@click.option("--release", "releases", type=click.Path(path_type=Path, exists=True), help="A release, not a new one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(out: Path | None, base: Path | None, releases: Path | None, as_json: bool) -> None:
    """Run a federation in containers on this machine, and check what its logs say."""
    if reason := hindrance(base=base):
        emit({"skipped": reason}) if as_json else click.echo(f"skipped: {reason}")
        return
    if out is not None and out.exists() and any(out.iterdir()):
        raise ConfigError("is not empty", where=str(out), hint="choose a new folder")
    try:
        with workplace(out) as workshop:
            found = whole(workshop, base, releases, ProgressPrinter())
    except WaitFailed as error:
        raise ToolkitError(str(error), where="containers") from error
    emit(found) if as_json else click.echo("\n".join(f"{key}: {value}" for key, value in found.items()))
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    run_command(main, "containers")
