"""Secrets of the archive: from private files of one line, into one header, into nothing else."""

from __future__ import annotations

import ssl
from base64 import b64decode
from pathlib import Path

import pytest

from lazaret.errors import ArchiveError, ConfigError
from site_agent.archive.access import ArchiveAccess, access_files, open_access
from site_agent.archive.dicomweb import ArchiveClient
from site_agent.config import SiteConfig
from tests.support.archive import Gate
from tests.support.web_server import Answer, WebServer

SITE = '[site]\ninitial_model = "m"\n[coordinator]\naddress = "hub:1"\n[data]\nsource = "generated"\n[archive]\n'


HOSTS = 'hosts = ["pacs.example:443", "127.0.0.1:8042"]\n'


def configured(folder: Path, lines: str) -> SiteConfig:
    (folder / "site.toml").write_text(SITE + lines)
    return SiteConfig.read(folder / "site.toml")


def secret(path: Path, content: str, mode: int = 0o600) -> None:
    path.touch()
    path.chmod(mode)
    path.write_text(content)


def test_a_token_or_a_login(tmp_path: Path) -> None:
    secret(tmp_path / "token", "s3cret\n")
    access = open_access(configured(tmp_path, f'{HOSTS}token_file = "token"'), "https://pacs.example/dicom-web")
    assert (access.authorization, access.host, access.port, access.root) == (
        "Bearer s3cret", "pacs.example", 443, "/dicom-web"
    )  # fmt: skip
    assert "s3cret" not in repr(access)
    secret(tmp_path / "login", "anna:pass word ä\n")
    found = open_access(configured(tmp_path, f'{HOSTS}login_file = "login"'), "http://127.0.0.1:8042/")
    assert found.port == 8042 and found.tls is None
    assert b64decode(found.authorization.removeprefix("Basic ")).decode() == "anna:pass word ä"


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("s3cret", 0o640, "open to others"),
        ("s3cret\r\nX-Evil: 1", 0o600, "one line of text"),
        ("s3cret and more", 0o600, "one line of text"),
        ("", 0o600, "one line of text"),
        ("s3cretä", 0o600, "one line of text"),
    ],
)
def test_tokens_that_are_refused(content: str, mode: int, message: str, tmp_path: Path) -> None:
    secret(tmp_path / "token", content, mode)
    with pytest.raises(ConfigError, match=message) as caught:
        open_access(configured(tmp_path, f'{HOSTS}token_file = "token"'), "https://pacs.example/")
    assert "s3cret" not in f"{caught.value} {caught.value.hint}"


def test_what_does_not_fit_together(tmp_path: Path) -> None:
    secret(tmp_path / "login", "no colon")
    for lines, message in (
        ('token_file = "a"\nlogin_file = "b"', "both a token and a login"),
        ('login_file = "login"', "user:password"),
        ('ca = "login"', "holds no certificates"),
        ('certificate = "login"', "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_access(configured(tmp_path, HOSTS + lines), "https://pacs.example/")


def search(access: ArchiveAccess) -> list[object]:
    return list(ArchiveClient(access, sleep=lambda seconds: None).search("/studies", {}))


def test_tls_is_checked_on_both_sides(tmp_path: Path) -> None:
    server = WebServer(lambda asked: Answer(b"[]"))
    gate = Gate(tmp_path / "gate", server.port)
    port = gate.url.split("/")[2].partition(":")[2]
    hosts = f'hosts = ["127.0.0.1:{port}", "localhost:{port}"]\n'
    ca, mine = f'ca = "{tmp_path}/gate/ca.pem"', f'certificate = "{tmp_path}/gate/client.pem"'
    try:
        good = configured(tmp_path, f"{hosts}{ca}\n{mine}")
        assert access_files(good) == [tmp_path / "gate" / "ca.pem", tmp_path / "gate" / "client.pem"]
        assert search(open_access(good, gate.url)) == []
        with pytest.raises(ArchiveError, match="certificate is not trusted"):
            search(open_access(configured(tmp_path, hosts + mine), gate.url))
        with pytest.raises(ArchiveError, match="certificate is not trusted"):
            search(open_access(good, gate.url.replace("127.0.0.1", "localhost")))
        with pytest.raises(ArchiveError, match="does not answer"):
            search(open_access(configured(tmp_path, ca), gate.url))
        (tmp_path / "gate" / "client.pem").chmod(0o644)
        with pytest.raises(ConfigError, match="open to others"):
            open_access(good, gate.url)
    finally:
        gate.stop()
        server.stop()


def test_without_the_check_a_forged_archive_would_be_believed(tmp_path: Path) -> None:
    """The twin of the test above: the same connection, with verification switched off."""
    server = WebServer(lambda asked: Answer(b"[]"))
    gate = Gate(tmp_path / "gate", server.port)
    try:
        hosts = f'hosts = ["{gate.url.split("/")[2]}"]\n'
        access = open_access(configured(tmp_path, f'{hosts}certificate = "{tmp_path}/gate/client.pem"'), gate.url)
        assert access.tls is not None
        access.tls.check_hostname, access.tls.verify_mode = False, ssl.CERT_NONE
        assert search(access) == []
    finally:
        gate.stop()
        server.stop()


@pytest.mark.parametrize("url", ["https://pacs.example.evil/", "https://pacs.example:8443/", "http://127.0.0.1/"])
def test_a_secret_goes_to_no_host_that_the_file_does_not_name(url: str, tmp_path: Path) -> None:
    secret(tmp_path / "token", "s3cret")
    config = configured(tmp_path, f'{HOSTS}token_file = "token"')
    with pytest.raises(ConfigError, match="not shown to it") as caught:
        open_access(config, url)
    assert caught.value.hint is not None and "hosts = [" in caught.value.hint
    # The twin: named, it goes there. And where there is no secret, any archive may be asked.
    place = url.split("/")[2]
    place = place if ":" in place else f"{place}:{443 if url.startswith('https') else 80}"
    assert open_access(configured(tmp_path, f'hosts = ["{place}"]\ntoken_file = "token"'), url).authorization
    assert not open_access(configured(tmp_path, ""), url).authorization


def test_the_archive_of_the_training_data_is_named_already(tmp_path: Path) -> None:
    secret(tmp_path / "token", "s3cret")
    config = configured(tmp_path, 'token_file = "token"')
    text = config.path.read_text().replace('"generated"', '"dicomweb:https://pacs.example/dicom-web?labels=t.csv"')
    config.path.write_text(text)
    assert open_access(SiteConfig.read(config.path), "https://pacs.example/other").authorization
