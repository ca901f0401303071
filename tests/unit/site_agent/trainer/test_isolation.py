"""From inside of a really isolated process nothing gets out; each attempt has a twin without isolation that does."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from lazaret.errors import ConfigError
from site_agent.trainer import isolation
from site_agent.trainer.isolation import LANDLOCK, MECHANISMS, NAMESPACE, SECCOMP, Isolation
from site_agent.trainer.kernel import landlock_version
from tests.support.isolated import ROOT, SENT, Listeners, listening, tried

NETWORK = ["tcp", "udp", "name"]
LOCAL = ["local", "local_by_pair", "abstract"]
NOT_PERMITTED, UNREACHABLE, DENIED = "operation not permitted", "network is unreachable", "permission denied"


@pytest.fixture
def tmp_path(on_disk: Path) -> Path:
    return Path(mkdtemp(dir=on_disk))


@cache
def reason_against(mechanism: str) -> str | None:
    """Why this kernel does not have it. That it was put up and does not hold is a fault, and no reason to skip."""
    found = tried([], {}, [mechanism], child=False)["isolation"]
    why: str | None = found["missing"].get(mechanism)
    assert why is None or not why.startswith("put up"), why
    return why


def need(*mechanisms: str) -> list[str]:
    for name in mechanisms:
        if (why := reason_against(name)) is not None:
            pytest.skip(f"this kernel gives no {name} here: {why}")
    return list(mechanisms)


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[Listeners]:
    folder = tmp_path / "listeners"
    folder.mkdir()
    with listening(folder) as found:
        yield found


@pytest.fixture
def keys(tmp_path: Path, listeners: Listeners) -> Path:
    folder = tmp_path / "site" / "keys"
    folder.mkdir(parents=True)
    for name in ("tls.key", "storage.key"):
        (folder / name).write_bytes(b"secret")
        (folder / name).chmod(0o600)
    listeners.to["key"] = str(folder / "tls.key")
    return folder


def run_code(code: str, *words: str, pass_fds: Sequence[int] = ()) -> str:
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, pass_fds=pass_fds, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def both(found: dict[str, Any]) -> list[dict[str, str]]:
    assert isinstance(found["child"], dict), found["child"]
    return [found["own"], found["child"]]


def test_without_isolation_every_attempt_succeeds(listeners: Listeners, keys: Path) -> None:
    """The twin of all that follows: the listeners listen, and what refuses below is the isolation."""
    names = [*NETWORK, *LOCAL, "key", "pair"]
    for told in both(tried(names, listeners.to, [])):
        assert told == dict.fromkeys(names, "done")
    deadline = time.monotonic() + 10
    while listeners.received.count(SENT) < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    # TCP, UDP, and three local ones, by the process and by its child.
    assert listeners.received.count(SENT) == 10 and len(listeners.received) == 12


def test_an_isolated_process_and_its_child_reach_nobody_and_read_no_key(listeners: Listeners, keys: Path) -> None:
    walls = need(*MECHANISMS)
    names = [*NETWORK, *LOCAL, "key", "namespace", "queue", "trace", "pair"]
    found = tried(names, listeners.to, walls, mode="required", read=[keys.parent], deny=[keys])
    for told in both(found):
        assert told.pop("key") == DENIED and told.pop("pair") == "done"
        assert told == dict.fromkeys(told, NOT_PERMITTED)
    assert listeners.received == []
    assert found["isolation"]["sentence"] == (
        "the process that saw images could not open a connection: "
        "enforced by network namespace, seccomp, Landlock"
    )
    assert found["isolation"]["attempts"]["private keys"] == DENIED and not found["isolation"]["keys_readable"]


def test_the_namespace_alone_leaves_no_route(listeners: Listeners, keys: Path) -> None:
    found = tried([*NETWORK, "abstract", "key"], listeners.to, need(NAMESPACE), deny=[keys])
    for told in both(found):
        assert [told[name] for name in NETWORK] == [UNREACHABLE] * 3
        # Abstract names belong to a network namespace; files do not.
        assert told["abstract"] == "connection refused" and told["key"] == "done"
    assert listeners.received == []
    assert found["isolation"]["keys_readable"] and "was able to read the private keys" in found["isolation"]["sentence"]


# Root becomes nobody, once everything is loaded that nobody may not read; any other user stays. A process that has
# changed its user may not write its own maps until it is declared fit for inspection again (PR_SET_DUMPABLE).
NOBODY = """
import ctypes, encodings.idna, json, os, pathlib, socket, struct, subprocess, sys
from site_agent.trainer import isolation
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0
who = os.getuid(), os.getgid()

def made(to):
    assert (os.getuid(), os.getgid()) == who
    open(to["made"], "x").close()
"""


def test_the_namespace_needs_no_privilege_and_keeps_the_owner_of_files(listeners: Listeners) -> None:
    need(NAMESPACE)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # which anybody may enter
        os.chmod(name, 0o777)
        listeners.to["made"] = f"{name}/file"
        found = tried([*NETWORK, "made"], listeners.to, [NAMESPACE], before=NOBODY, child=False)
        if NAMESPACE in found["isolation"]["missing"]:
            pytest.skip(f"no namespace without privilege here: {found['isolation']['missing'][NAMESPACE]}")
        assert found["own"] == {**dict.fromkeys(NETWORK, UNREACHABLE), "made": "done"}
        assert os.stat(listeners.to["made"]).st_uid == (os.getuid() or 65534)


POWERS = """
def powers(to):
    # Of the namespaces, of other processes, of the network; what is left of root reaches files alone.
    held = int(next(line for line in open("/proc/self/status") if line.startswith("CapEff")).split()[1], 16)
    if held & ~0b11111:
        raise OSError(1, "powers are left")

def back(to):
    with open(f"/proc/{to['outside']}/ns/net") as outside:
        if ctypes.CDLL(None, use_errno=True).setns(outside.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
"""


def test_nobody_goes_back_from_the_namespace(listeners: Listeners) -> None:
    """By the namespace alone: a new one comes with all powers, and root could return to its own."""
    walls, listeners.to["outside"] = need(NAMESPACE), os.getpid()
    told = tried(["powers", "back", "tcp"], listeners.to, walls, before=POWERS, child=False)["own"]
    assert told["powers"] == "done" and told["back"] in (NOT_PERMITTED, DENIED) and told["tcp"] == UNREACHABLE
    if os.getuid() == 0:
        assert tried(["back"], listeners.to, [], before=POWERS, child=False)["own"] == {"back": "done"}, "the twin"


def test_the_filter_alone_refuses_every_socket(listeners: Listeners, keys: Path) -> None:
    names = [*NETWORK, *LOCAL, "namespace", "queue", "trace"]
    found = tried([*names, "pair", "key"], listeners.to, need(SECCOMP), deny=[keys])
    for told in both(found):
        assert [told[name] for name in names] == [NOT_PERMITTED] * len(names)
        assert told["pair"] == "done" and told["key"] == "done"
    assert listeners.received == []


def test_landlock_alone_closes_files_and_is_not_taken_for_a_closed_network(listeners: Listeners, keys: Path) -> None:
    walls = need(LANDLOCK)
    found = tried(["key", "tcp", "udp"], listeners.to, walls, read=[keys.parent], deny=[keys])
    for told in both(found):
        assert told["key"] == DENIED and told["udp"] == "done"
    assert found["isolation"]["landlock"] and found["isolation"]["connection_possible"]
    assert "was able to open a connection" in found["isolation"]["sentence"]


def test_landlock_refuses_tcp_from_version_four_on(listeners: Listeners) -> None:
    need(LANDLOCK)
    if landlock_version() < 4:
        pytest.skip(f"Landlock is of version {landlock_version()} here, which knows no TCP")
    for told in both(tried(["tcp"], listeners.to, [LANDLOCK])):
        assert told == {"tcp": DENIED}
    assert listeners.received == []


def test_landlock_refuses_abstract_sockets_from_version_six_on(listeners: Listeners) -> None:
    need(LANDLOCK)
    if landlock_version() < 6:
        pytest.skip(f"Landlock is of version {landlock_version()} here, which knows no scopes")
    for told in both(tried(["abstract"], listeners.to, [LANDLOCK])):
        assert told == {"abstract": NOT_PERMITTED}


SIGNAL = """
def signalled(to):
    os.kill(to["outside"], 0)
"""


@pytest.mark.parametrize("walls", [[LANDLOCK], []], ids=["landlock", "twin"])
def test_no_signal_reaches_the_agent_from_version_six_of_landlock_on(walls: list[str]) -> None:
    need(*walls)
    if landlock_version() < 6:
        pytest.skip(f"Landlock is of version {landlock_version()} here, which knows no scopes")
    told = tried(["signalled"], {"outside": os.getpid()}, walls, before=SIGNAL, child=False)["own"]
    assert told == {"signalled": NOT_PERMITTED if walls else "done"}


FILES = """
def opened(path, mode):
    with open(path, mode) as file:
        return file.read() if mode == "rb" else file.write(b"x")

def listed(to): opened(to["listed"], "rb")
def exception(to): opened(to["exception"], "rb")
def elsewhere(to): opened(to["elsewhere"], "rb")
def through_link(to): opened(to["through_link"], "rb")
def through_proc(to): opened("/proc/self/root" + to["key"], "rb")
def written(to): opened(to["written"], "xb")
def written_beside(to): opened(to["written_beside"], "xb")
def overwritten(to): opened(to["key"], "r+b")
def changed(to): opened(to["listed"], "r+b")
def cut(to): os.truncate(to["listed"], 0)
"""


@pytest.mark.parametrize("walls", [[LANDLOCK], []], ids=["landlock", "twin"])
def test_files_are_those_that_were_listed(walls: list[str], listeners: Listeners, keys: Path, tmp_path: Path) -> None:
    """The key folder lies inside of what may be read, and one file in it is meant to be read all the same."""
    need(*walls)
    site, out, other = keys.parent, tmp_path / "out", tmp_path / "other"
    out.mkdir()
    other.mkdir()
    (site / "model").write_text("x")
    (other / "file").write_text("x")
    (site / "link").symlink_to(keys / "tls.key")
    listeners.to |= {
        "listed": str(site / "model"),
        "exception": str(keys / "storage.key"),
        "elsewhere": str(other / "file"),
        "through_link": str(site / "link"),
        "written": str(out / "new"),
        "written_beside": str(site / "new"),
    }
    allowed = ["listed", "exception", "written"]
    refused = ["elsewhere", "through_link", "through_proc", "written_beside", "overwritten", "changed"]
    refused += ["cut"] if not walls or landlock_version() >= 3 else []
    read, deny = [site, keys / "storage.key"], [keys]
    names = [*allowed, *refused]
    told = tried(names, listeners.to, walls, before=FILES, child=False, read=read, write=[out], deny=deny)
    assert {name: told["own"][name] for name in allowed} == dict.fromkeys(allowed, "done")
    assert {name: told["own"][name] for name in refused} == dict.fromkeys(refused, DENIED if walls else "done")


EVIL = """
import socket

def send(port):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
        link.sendall(b"an image")

try:
    import sys
    send(int(sys.argv[2]))
    told = "sent"
except OSError as error:
    told = str(error)
"""


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "twin"])
def test_a_module_that_is_imported_afterwards_cannot_send(
    isolated: bool, listeners: Listeners, tmp_path: Path
) -> None:
    if isolated:
        need(*MECHANISMS)
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "evil.py").write_text(EVIL)
    lines = [
        "import sys",
        "from pathlib import Path",
        "from site_agent.trainer import isolation",
        "isolation.enter('required', read=[Path(sys.argv[1])])" if isolated else "",
        "sys.path.insert(0, sys.argv[1])",
        "import evil",
        "print(evil.told)",
    ]
    told = run_code("\n".join(lines), str(tmp_path / "plugin"), str(listeners.to["tcp"]))
    assert ("sent" in told) is not isolated
    if isolated:
        assert "[Errno 1]" in told and listeners.received == []


WRITE_TO = """
try:
    os.write(int(sys.argv[1]), b"x")
    print("sent")
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "twin"])
def test_a_socket_that_was_open_before_is_closed(isolated: bool, listeners: Listeners) -> None:
    """Started with a connection, as by a service manager: no wall would stop what is connected already."""
    enter = "isolation.enter('best', mechanisms=['seccomp'])" if isolated else ""
    code = f"import os, sys\nfrom site_agent.trainer import isolation\n{enter}\n{WRITE_TO}"
    with socket.create_connection(("127.0.0.1", listeners.to["tcp"])) as link:
        told = run_code(code, str(link.fileno()), pass_fds=[link.fileno()])
    assert told.strip() == ("[Errno 9] Bad file descriptor" if isolated else "sent")


REDIRECT = """
import socket, sys
from site_agent.trainer import isolation
if sys.argv[2] == "True":
    isolation.enter("best", mechanisms=["seccomp"])
link = socket.socket(fileno=0)
try:
    link.connect(("127.0.0.1", int(sys.argv[1])))
    print(link.send(b"an image"))
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "twin"])
def test_a_standard_stream_that_is_a_socket_cannot_be_pointed_at_somebody(isolated: bool, listeners: Listeners) -> None:
    """It was made outside of the namespace, and its route leads where the machine's do."""
    if isolated:
        need(SECCOMP)
    words = [sys.executable, "-c", REDIRECT, str(listeners.to["tcp"]), str(isolated)]
    with socket.socket() as stream:
        done = subprocess.run(words, stdin=stream, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert done.stdout.strip() == ("[Errno 1] Operation not permitted" if isolated else "8")


TYPE = """
import fcntl, os, sys, termios
from site_agent.trainer import isolation
terminal = os.open(sys.argv[1], os.O_RDWR)  # the first that a session opens is its own
if sys.argv[2] == "True":
    isolation.enter("best", mechanisms=["seccomp"])
try:
    for letter in b"curl evil\\n":
        fcntl.ioctl(terminal, termios.TIOCSTI, bytes([letter]))
    print("typed")
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "twin"])
def test_nothing_is_typed_at_the_terminal_that_a_command_was_started_from(isolated: bool) -> None:
    """What is typed there, the shell carries out when the command has ended: with the network."""
    if isolated:
        need(SECCOMP)
    ours, theirs = os.openpty()
    words = [sys.executable, "-c", TYPE, os.ttyname(theirs), str(isolated)]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True, start_new_session=True
    )
    os.set_blocking(theirs, False)
    if not isolated and done.stdout.strip() == str(errno.EIO):
        pytest.skip("this kernel lets nobody type (dev.tty.legacy_tiocsti)")
    assert done.stdout.strip() == (str(errno.EPERM) if isolated else "typed")
    if isolated:
        with pytest.raises(BlockingIOError):
            os.read(theirs, 100)
    else:
        assert os.read(theirs, 100) == b"curl evil\n", "what the shell would read"
    os.close(ours)
    os.close(theirs)


ASK_KEY = """
import ctypes, os, sys
from site_agent.trainer import isolation, kernel
if sys.argv[1] == "True":
    isolation.enter("best", mechanisms=["seccomp"])
library = ctypes.CDLL(None, use_errno=True)
found = library.syscall(kernel.system_calls().keys[1], b"user", b"lazaret:none", None, 0)
print(found, ctypes.get_errno())
"""


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "twin"])
def test_the_kernels_keyring_is_not_asked(isolated: bool) -> None:
    """With a key of type dns_resolver the kernel would have a program outside ask a name server, by any name."""
    if isolated:
        need(SECCOMP)
    told = run_code(ASK_KEY, str(isolated)).strip()
    if not isolated and told == f"-1 {errno.EPERM}":
        pytest.skip("a container around these tests refuses it already")
    assert told == f"-1 {errno.EPERM if isolated else errno.ENOKEY}"


def test_a_second_thread_would_stay_outside_and_it_says_so() -> None:
    before = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    found = tried([], {}, list(MECHANISMS), before=before, child=False)["isolation"]
    assert not found["network_namespace"] and not found["landlock"]
    assert found["missing"][NAMESPACE] == found["missing"][LANDLOCK] == "this process has more than one thread"


def test_the_filter_holds_for_a_thread_that_was_there_before() -> None:
    """A library may have started one; a filter for the calling thread alone would leave it a way out."""
    need(SECCOMP)
    code = """
import socket, threading
from site_agent.trainer import kernel
go, told = threading.Event(), []
def later():
    go.wait()
    try:
        socket.socket().close()
        told.append("opened")
    except PermissionError:
        told.append("refused")
thread = threading.Thread(target=later)
thread.start()
kernel.enter_seccomp()
go.set()
thread.join()
print(told[0])
"""
    assert run_code(code).strip() == "refused"
    assert run_code(code.replace("kernel.enter_seccomp()", "")).strip() == "opened", "the twin"


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "the twin"])
def test_a_crash_leaves_no_memory_on_disk(isolated: bool, tmp_path: Path) -> None:
    """Also of a child, and also where the system has a program for crashes: it is given nothing."""
    code = """
import os, resource, subprocess, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
if sys.argv[1] == "True":
    from site_agent.trainer import isolation
    isolation.enter("best", write=[Path(sys.argv[2])])
os.chdir(sys.argv[2])
print(*resource.getrlimit(resource.RLIMIT_CORE), flush=True)
subprocess.run([sys.executable, "-c", "import os; os.abort()"], check=False)
os.abort()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(isolated), str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGABRT, done.stderr
    limits = {int(word) for word in done.stdout.split()}
    if not isolated:
        if limits == {0} or not Path("/proc/sys/kernel/core_pattern").read_text().startswith("core"):
            pytest.skip("this machine writes no memory of a crash into a folder")
        assert list(tmp_path.iterdir())
        return
    assert limits <= {0, 1} and not list(tmp_path.iterdir())


def test_required_is_an_error_where_a_private_key_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "tls.key").write_text("key")
    walls = need(NAMESPACE, SECCOMP)
    code = (
        "import sys\nfrom pathlib import Path\nfrom lazaret.errors import ConfigError\n"
        "from site_agent.trainer import isolation\n"
        f"try:\n    isolation.enter(sys.argv[1], deny=[Path(sys.argv[2])], mechanisms={walls!r})\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    for mode, refused in (("required", True), ("best", False)):
        words = [sys.executable, "-c", code, mode, str(tmp_path)]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert ("isolation is required" in told and "can read any file" in told) is refused, (mode, told)


def test_required_is_an_error_where_a_connection_is_possible() -> None:
    code = (
        "from site_agent.trainer import isolation\n"
        "from lazaret.errors import ConfigError\n"
        "try:\n    isolation.enter('required', mechanisms=['Landlock'])\n"
        "except ConfigError as error:\n    print(error, '|', error.hint)\n"
    )
    told, _, hint = run_code(code).partition("|")
    assert told.startswith("site.toml [site] isolation: isolation is required") and "best" in hint


def test_another_system_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which must stay as it is: on a system that is not Linux nothing is put up."""
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr(isolation, "close_sockets", lambda keep: None)
    monkeypatch.setattr(isolation.kernel, "no_core_dumps", lambda: None)
    found = isolation.enter("best")
    assert found.in_force == () and set(found.missing) == set(MECHANISMS)
    assert "this system is darwin, isolation needs linux" in found.sentence
    with pytest.raises(ConfigError, match="can open a connection"):
        isolation.enter("required")


@pytest.mark.parametrize("name", list(MECHANISMS))
def test_a_wall_that_does_not_hold_is_not_in_force(name: str) -> None:
    """The kernel says yes, and refuses nothing: what was tried counts."""
    code = """
import sys
from site_agent.trainer import isolation, kernel
for name in ("enter_network_namespace", "enter_landlock", "enter_seccomp"):
    setattr(kernel, name, lambda *given, **more: None)
found = isolation.enter("best", mechanisms=[sys.argv[1]])
print(found.in_force, found.missing[sys.argv[1]])
"""
    assert run_code(code, name).strip() == "() enforced, but what it should refuse was not refused"


def test_what_came_of_an_attempt() -> None:
    """No answer is no refusal, and one key that opens is enough."""

    def tried_with(error: Exception) -> str:
        def attempt() -> None:
            raise error

        return isolation._tried(attempt)

    assert tried_with(TimeoutError()) == tried_with(OSError("no number")) == "opened"
    assert tried_with(ConnectionRefusedError(errno.ECONNREFUSED, "somebody answered")) == "opened"
    assert tried_with(OSError(errno.ENETUNREACH, "")) == "network is unreachable"
    denied = [Path("/nowhere/key"), Path(__file__)]
    assert isolation.probe(denied=denied)["private keys"] == "opened"
    assert isolation.probe(denied=denied[:1])["private keys"] == "no such file or directory"


def test_with_a_network_on_purpose_files_have_to_be_closed() -> None:
    attempts = {"TCP connection": "opened"}
    isolation.require("required", Isolation(landlock=True, attempts=attempts, exception="several processes"))
    with pytest.raises(ConfigError, match="can read any file"):
        isolation.require("required", Isolation(attempts=attempts, exception="several processes"))


def test_what_was_not_tried_is_not_claimed() -> None:
    assert Isolation().connected and not Isolation().complete and "was not isolated" in Isolation().sentence


def test_an_answer_that_nobody_listens_counts_as_reached() -> None:
    """The probe in this process, which is not isolated."""
    told = isolation.probe()
    assert told["TCP connection"] == told["UDP datagram"] == told["internet socket"] == "opened"


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "the twin"])
def test_the_folder_that_a_trainer_is_started_in_stays_closed(isolated: bool, tmp_path: Path) -> None:
    """`python -m` has it on its path, and with it often a hospital's state and log."""
    (tmp_path / "wal").write_text("records")
    walls = need(LANDLOCK) if isolated else []
    code = f"""
from site_agent.trainer import isolation
isolation.enter("best", mechanisms={walls})
open("wal").close()
"""
    (tmp_path / "entry.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "entry"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ("PermissionError" in done.stderr, done.returncode) == ((True, 1) if isolated else (False, 0)), done.stderr


SECRETS = """
import json, sys
from pathlib import Path
from site_agent.config import SiteConfig
from site_agent.trainer.__main__ import isolate

home, named = Path(sys.argv[1]), sys.argv[2] == "named"
config = SiteConfig.read(home / "site.toml")
found = isolate(config, None, home / "scratch", closed=[home / "images" / "pin"] if named else [])
told = {"keys": found.keys_read}
for path in sorted((home / "images").iterdir()):
    try:
        told[path.name] = bool(path.read_bytes())
    except PermissionError:
        told[path.name] = False
print(json.dumps(told))
"""
SITE_WITH_ARCHIVE = """
[site]
initial_model = "m"
[coordinator]
address = "hub:1"
[data]
source = "folders:images"
[archive]
token_file = "images/pacs.token"
certificate = "images/client.pem"
"""


def test_the_trainer_reads_no_secret_of_the_archive_and_no_pin(tmp_path: Path) -> None:
    """They lie where it may read: here beside images, at a hospital often in /etc. The twin: nobody has named them."""
    need(LANDLOCK)
    for name in ("images", "scratch", "identity"):
        (tmp_path / name).mkdir()
    for name in ("1.png", "client.pem", "pacs.token", "pin"):
        (tmp_path / "images" / name).write_text("content")
    (tmp_path / "site.toml").write_text(SITE_WITH_ARCHIVE)
    told = json.loads(run_code(SECRETS, str(tmp_path), "named"))
    assert told == {"keys": False, "1.png": True, "client.pem": False, "pacs.token": False, "pin": False}
    (tmp_path / "site.toml").write_text(SITE_WITH_ARCHIVE.partition("[archive]")[0])
    told = json.loads(run_code(SECRETS, str(tmp_path), "not named"))
    assert all(told[name] for name in ("1.png", "client.pem", "pacs.token", "pin"))
