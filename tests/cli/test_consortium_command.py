"""The command `consortium` as its users type it: what it prints, what it leaves on disk, how it exits."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from security.consortium import cli as consortium_cli
from security.consortium import commands
from security.identity import pki
from security.identity.enrolment import Identity
from security.identity.enrolment_files import EnrolmentAnswer, EnrolmentRequest
from security.identity.pki import Role, phrase
from tests.support.consortium_world import DAY, PLAN, PRIVACY, subject, write_initial_model


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The console script's own entry, in this process."""

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["consortium", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            consortium_cli.main()
        printed = capfd.readouterr()
        return Outcome(int(stopped.value.code or 0), printed.out, printed.err)

    return call


def member(folder: Path, name: str, role: Role = Role.SITE) -> EnrolmentRequest:
    hosts = ("localhost",) if role is Role.COORDINATOR else ()
    return Identity(folder=folder / name).create(subject(name, role), hosts=hosts)


@pytest.fixture
def home(tmp_path: Path, run: Run) -> Path:
    """A consortium with a coordinator and three sites, made by the command."""
    folder = tmp_path / "consortium"
    assert run("init", "lesions", "--dir", folder, "--no-passphrase").code == 0
    (folder / "federation.toml").write_text(PLAN)
    write_initial_model(folder / "initial.safetensors")
    for name in ("hub", "graz", "linz", "vienna"):
        member(tmp_path, name, Role.COORDINATOR if name == "hub" else Role.SITE)
        enrolled = run("enroll", tmp_path / name / "request.json", "--yes", "--dir", folder, "--no-passphrase")
        assert enrolled.code == 0, enrolled.err
    return folder


def now() -> int:
    return time.time_ns() // 1_000_000


def install(folder: Path, home: Path, name: str) -> Identity:
    identity = Identity(folder=folder / name)
    root = pki.read_certificate((home / "root.pem").read_bytes())
    answer = EnrolmentAnswer.read(home / "answers" / f"{name}.json")
    identity.install(answer, root_fingerprint=pki.fingerprint(root), now_ms=now())
    return identity


def test_the_ceremony_with_real_processes(tmp_path: Path) -> None:
    """init, enroll with a read-out fingerprint, publish and show, each in a process of its own, with a passphrase."""
    secret = tmp_path / "passphrase"
    secret.write_text("correct horse battery staple\n")
    secret.chmod(0o600)
    folder = tmp_path / "consortium"

    def command(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "security.consortium.cli", *map(str, arguments), "--dir", str(folder)],
            capture_output=True,
            text=True,
            timeout=120,
            env={key: value for key, value in os.environ.items() if key != commands.PASSPHRASE_VARIABLE},
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == expect, done.stderr
        return done

    made = json.loads(command("init", "lesions", "--passphrase-file", secret, "--json").stdout)
    assert "ENCRYPTED" in (folder / "root.key").read_text()
    (folder / "federation.toml").write_text(PLAN)
    write_initial_model(folder / "initial.safetensors")
    for name in ("hub", "graz", "linz", "vienna"):
        request = member(tmp_path, name, Role.COORDINATOR if name == "hub" else Role.SITE)
        path = tmp_path / name / "request.json"
        command("enroll", path, "--fingerprint", request.fingerprint, "--passphrase-file", secret)
    refused = command("publish", expect=2).stderr.splitlines()  # nobody is there to type the passphrase
    assert len(refused) == 2
    assert refused[0].endswith("no passphrase for the root key was given, and this is not a terminal")
    published = json.loads(command("publish", "--passphrase-file", secret, "--json").stdout)
    assert published["version"] == 1 and published["audit"] == "covered"
    shown = command("show")
    assert made["root_fingerprint"][:4] in shown.stdout and "\x1b" not in shown.stdout
    identity = Identity(folder=tmp_path / "graz")
    answer = EnrolmentAnswer.read(folder / "answers" / "graz.json")
    identity.install(answer, root_fingerprint=made["root_fingerprint"], now_ms=now())
    assert identity.install_manifest((folder / "manifest.json").read_bytes(), now_ms=now()).version == 1


def test_no_passphrase_is_warned_of_every_time(home: Path, run: Run) -> None:
    assert "For demos only" in run("publish", "--dir", home, "--no-passphrase").err
    assert "For demos only" in run("publish", "--dir", home).err


def test_the_environment_may_hold_the_passphrase(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(commands.PASSPHRASE_VARIABLE, "words")
    assert run("init", "lesions", "--dir", tmp_path / "c").code == 0
    monkeypatch.setenv(commands.PASSPHRASE_VARIABLE, "other words")
    member(tmp_path, "graz")
    wrong = run("enroll", tmp_path / "graz" / "request.json", "--yes", "--dir", tmp_path / "c")
    assert wrong.code == 2 and "does not open" in wrong.err and "words" not in wrong.err
    monkeypatch.setenv(commands.PASSPHRASE_VARIABLE, "")
    assert run("init", "lesions", "--dir", tmp_path / "d").code == 2
    assert not (tmp_path / "d").exists()


def test_the_passphrase_is_asked_for_otherwise(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(commands.PASSPHRASE_VARIABLE, raising=False)
    asked: list[dict[str, Any]] = []

    def prompt(question: str, **options: Any) -> str:
        asked.append(options)
        return "typed words"

    monkeypatch.setattr(commands.click, "prompt", prompt)
    monkeypatch.setattr(commands, "can_ask", lambda: True)
    made = run("init", "lesions", "--dir", tmp_path / "c")
    assert made.code == 0 and "root fingerprint" in made.out
    assert asked[0]["hide_input"] and asked[0]["confirmation_prompt"]
    shown = run("show", "--dir", tmp_path / "c")
    assert "no manifest published yet" in shown.out


def test_without_a_terminal_a_script_is_told_what_to_give(
    tmp_path: Path, home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prompt that nobody sees, and no warning of a library about it."""
    monkeypatch.delenv(commands.PASSPHRASE_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    made = run("init", "lesions", "--dir", tmp_path / "c")
    assert made.code == 2 and not (tmp_path / "c").exists()
    first, hint = made.err.splitlines()
    assert first == "consortium: error: no passphrase for the root key was given, and this is not a terminal"
    assert all(word in hint for word in ("--passphrase-file", f"${commands.PASSPHRASE_VARIABLE}", "demos only"))
    request = member(tmp_path, "salzburg")
    enrolled = run("enroll", tmp_path / "salzburg" / "request.json", "--dir", home, "--no-passphrase")
    words, digits, first, hint = enrolled.err.splitlines()
    assert enrolled.code == 2 and request.fingerprint in digits and phrase(request.fingerprint) in words
    assert "--fingerprint" in hint
    assert "the fingerprint cannot be confirmed" in first
    assert not (home / "answers" / "salzburg.json").exists()


def test_a_passphrase_file_open_to_others_is_refused(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "passphrase"
    path.write_text("words")
    path.chmod(0o644)
    refused = run("init", "lesions", "--dir", tmp_path / "c", "--passphrase-file", path)
    assert refused.code == 2 and "open to others" in refused.err and "chmod 600" in refused.err
    both = run("init", "lesions", "--dir", tmp_path / "c", "--passphrase-file", path, "--no-passphrase")
    assert both.code == 2


def test_a_root_key_open_to_others_is_refused(home: Path, run: Run) -> None:
    (home / "root.key").chmod(0o640)
    refused = run("publish", "--dir", home, "--no-passphrase")
    assert refused.code == 2
    assert re.search(r"^consortium: error: .*root\.key: key file is open to others \(mode 0640\)$", refused.err, re.M)
    assert "hint: chmod 600" in refused.err
    assert not (home / "manifest.json").exists()


def test_a_wrong_fingerprint_stops_enrolment(tmp_path: Path, home: Path, run: Run) -> None:
    member(tmp_path, "salzburg")
    path = tmp_path / "salzburg" / "request.json"
    refused = run("enroll", path, "--fingerprint", "0000 " * 16, "--dir", home, "--no-passphrase")
    assert refused.code == 1 and "not this request's" in refused.err
    assert not (home / "answers" / "salzburg.json").exists()


def test_without_a_fingerprint_somebody_must_say_yes(
    tmp_path: Path, home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = member(tmp_path, "salzburg")
    asked: list[str] = []

    def confirm(question: str, **_: Any) -> bool:
        asked.append(question)
        return True

    monkeypatch.setattr(commands.click, "confirm", confirm)
    monkeypatch.setattr(commands, "can_ask", lambda: True)
    done = run("enroll", tmp_path / "salzburg" / "request.json", "--dir", home, "--no-passphrase")
    assert done.code == 0 and asked and request.fingerprint in done.err


def test_renewal_in_mid_run(tmp_path: Path, home: Path, run: Run) -> None:
    run("publish", "--dir", home, "--no-passphrase")
    graz = install(tmp_path, home, "graz")
    before = graz.install_manifest((home / "manifest.json").read_bytes(), now_ms=now())
    graz.renew(subject("graz"))
    wrong = ["--fingerprint", "00" * 32]
    assert run("renew", "graz", "--request", graz.request_path, *wrong, "--dir", home, "--no-passphrase").code == 1
    renewed = run("renew", "graz", "--request", graz.request_path, "--dir", home, "--no-passphrase", "--json")
    assert renewed.code == 0, renewed.err
    assert len(renewed.json["signing_certificates"]) == 2
    assert run("publish", "--dir", home, "--no-passphrase").code == 0
    after = graz.install_manifest((home / "manifest.json").read_bytes(), now_ms=now())
    assert (after.version, after.run) == (2, before.run)
    assert after.site("graz").signing_sha256 != before.site("graz").signing_sha256
    assert len(after.site("graz").tls_keys) == 2
    install(tmp_path, home, "graz")
    assert graz.signing_key(after.site("graz").certificate)


def test_revocation_and_show(tmp_path: Path, home: Path, run: Run) -> None:
    member(tmp_path, "salzburg")
    run("enroll", tmp_path / "salzburg" / "request.json", "--yes", "--dir", home, "--no-passphrase")
    revoked = run("revoke", "graz", "--reason", "stolen server", "--dir", home)
    assert revoked.code == 0 and "publish" in revoked.out
    assert run("publish", "--dir", home, "--no-passphrase").code == 0
    shown = run("show", "--dir", home, "--json").json
    assert [site["id"] for site in shown["manifest"]["sites"]] == ["linz", "salzburg", "vienna"]
    assert {entry["reason"] for entry in shown["manifest"]["revoked"]} == {"stolen server"}
    state = {entry["id"]: entry["state"] for entry in shown["members"]}
    assert state["graz"] == "revoked" and state["linz"] == "enrolled"
    text = run("show", "--dir", home).out
    assert "stolen server" in text and "salzburg" in text
    again = run("revoke", "graz", "--reason", "x", "--dir", home, "--json")
    assert again.code == 2
    one = shown["members"][1]["tls_certificates"][0]["sha256"]
    assert run("revoke", "hub", "--reason", "x", "--certificate", one, "--dir", home, "--json").json["id"] == "hub"


def test_show_prints_a_manifest_for_people(tmp_path: Path, home: Path, run: Run) -> None:
    run("publish", "--dir", home, "--no-passphrase")
    alone = tmp_path / "auditor"
    alone.mkdir()
    for name in ("manifest.json", "root.pem"):
        (alone / name).write_bytes((home / name).read_bytes())
    shown = run("show", alone / "manifest.json", "--root", alone / "root.pem", "--tensors")
    assert shown.code == 0
    assert re.search(r"^conv\.weight +2x3x2x2 +mean +2\^-1", shown.out, re.M)
    assert "fednpr-per on tiny, 5 rounds" in shown.out and "\x1b" not in shown.out
    as_json = run("show", alone / "manifest.json", "--root", alone / "root.pem", "--tensors", "--json").json
    assert as_json["tensors"][0]["name"] == "bn.running_mean"
    assert as_json["least_cohort"] == 3


def test_certificates_that_end_soon_are_named(home: Path, run: Run) -> None:
    run("renew", "graz", "--days", 20, "--dir", home, "--no-passphrase")
    published = run("publish", "--dir", home, "--no-passphrase")
    assert published.code == 0
    assert re.search(r"^note: the signing certificate of graz expires in (19|20) days", published.err, re.M)
    assert "linz" not in published.err


def test_a_tampered_manifest_is_not_shown(home: Path, run: Run) -> None:
    run("publish", "--dir", home, "--no-passphrase")
    path = home / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"colluders":1', b'"colluders":0'))
    for arguments in (["show", "--dir", home], ["show", path, "--dir", home], ["publish", "--dir", home]):
        refused = run(*arguments)
        assert refused.code == 1 and "signature is not this consortium's" in refused.err
        assert refused.out == ""


def test_an_unknown_key_in_a_manifest_is_named(home: Path, run: Run) -> None:
    run("publish", "--dir", home, "--no-passphrase")
    path = home / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"audit":{', b'"audit":{"a_new_rule":1,', 1))
    refused = run("show", path, "--dir", home)
    assert refused.code == 1 and "audit.a_new_rule: unknown key" in refused.err


def test_two_sites_are_refused(tmp_path: Path, home: Path, run: Run) -> None:
    run("revoke", "graz", "--reason", "left", "--dir", home)
    refused = run("publish", "--dir", home, "--no-passphrase")
    assert refused.code == 1 and "two sites" in refused.err and "hint: with two sites each learns" in refused.err
    (home / "federation.toml").write_text(PLAN + "[aggregation]\nallow_two_sites = true\n" + PRIVACY)
    allowed = run("publish", "--dir", home, "--no-passphrase")
    assert allowed.code == 0 and "learns the other's noisy update" in allowed.err
    assert "epsilon 8, delta 0.00001 for each patient" in run("show", "--dir", home).out


def test_sampled_audit_is_spelled_out(home: Path, run: Run) -> None:
    (home / "federation.toml").write_text(PLAN + '[audit]\nmode = "sampled"\n')
    published = run("publish", "--dir", home, "--no-passphrase", "--json")
    assert published.code == 0
    assert "Only audit = covered stops a dishonest coordinator" in published.err
    assert published.json["audit"] == "sampled" and len(published.json["warnings"]) == 2


@pytest.mark.parametrize(("days", "words"), [(-3, "set this machine's clock"), (4000, "expired")])
def test_a_clock_that_is_wrong_by_days_is_told(
    home: Path, run: Run, monkeypatch: pytest.MonkeyPatch, days: int, words: str
) -> None:
    run("publish", "--dir", home, "--no-passphrase")
    wrong = now() + days * DAY
    monkeypatch.setattr(commands, "_now", lambda: wrong)
    refused = run("publish", "--dir", home, "--no-passphrase")
    assert refused.code == 1 and words in refused.err
    assert len(list((home / "history").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["init", "Lesions!"], "not allowed"),
        (["init"], "Missing argument"),
        (["enroll", "nowhere.json", "--yes"], "no consortium here"),
        (["renew", "graz"], "no consortium here"),
        (["dance"], "No such command"),
        (["show", "nowhere.json"], "file not found"),
    ],
)
def test_bad_usage_exits_with_2(tmp_path: Path, run: Run, arguments: list[str], words: str) -> None:
    extra = [] if arguments[0] == "dance" else ["--dir", str(tmp_path / "empty")]
    refused = run(*arguments, *extra)
    assert refused.code == 2 and words in refused.err and refused.out == ""
    assert "Traceback" not in refused.err


def test_a_full_disk_is_one_line_and_loses_nothing(home: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("publish", "--dir", home, "--no-passphrase")
    before = (home / "manifest.json").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        failed = run("publish", "--dir", home, "--no-passphrase")
    assert failed.code == 1 and "no space left" in failed.err and "Traceback" not in failed.err
    assert (home / "manifest.json").read_bytes() == before
    assert run("publish", "--dir", home, "--no-passphrase", "--json").json["version"] == 2
