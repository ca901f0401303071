"""Files: the write-ahead log survives a torn tail and nothing else, the spool resumes, a journal is compacted."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from lazaret.errors import (
    OTHER_VERSION,
    ConfigError,
    DataError,
    LocalProtocolError,
    RemoteProtocolError,
    VerificationFailed,
)
from protos.loopback import Drop
from security.crypto import masking
from security.crypto.ring import FRAME_BYTES
from security.secagg import messages, records
from security.secagg.coordinator.spool import FileSpool, Gone, MemorySpool, Spool
from security.secagg.coordinator.uploads import Uploads
from security.secagg.fields import Wire
from security.secagg.site.journal import Journal
from site_agent.state_writer import MAGIC, WriteAheadLog, read_records
from tests.support.secagg_world import federation, random_updates, small_layout

RECORDS: list[Wire] = [records.ResultCertified(result=bytes([number]) * 32) for number in range(5)]


def written(path: Path, *told: Wire) -> bytes:
    log = WriteAheadLog(path)
    for record in told:
        log.append(record)
    log.close()
    return path.read_bytes()


def reread(path: Path) -> tuple[Wire, ...]:
    log = WriteAheadLog(path)
    log.close()
    return log.records


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "site.wal"
    written(path, *RECORDS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert reread(path) == tuple(RECORDS)


def test_a_tail_torn_at_any_byte_is_cut_away(tmp_path: Path) -> None:
    path = tmp_path / "site.wal"
    whole = written(path, *RECORDS[:2])
    before = written(tmp_path / "one.wal", RECORDS[0])
    for length in range(len(before), len(whole)):
        for tail in (b"", b"\0" * 7):
            path.write_bytes(whole[:length] + tail)
            assert reread(path) == (RECORDS[0],), length
    for length in range(len(MAGIC)):
        path.write_bytes(whole[:length])
        assert reread(path) == ()


def test_damage_before_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "site.wal"
    whole = written(path, *RECORDS)
    one = len(written(tmp_path / "one.wal", RECORDS[0]))
    for at in range(len(MAGIC), one):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            WriteAheadLog(path)
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match="not a write-ahead log"):
        WriteAheadLog(path)


def test_a_log_of_an_older_version_is_refused_in_one_line_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "site.wal"
    old = written(path, *RECORDS).replace(MAGIC, b"lazaret write-ahead log 1\n")
    path.write_bytes(old)
    for ask in (WriteAheadLog, read_records):
        with pytest.raises(DataError, match=r"not a write-ahead log of this version$") as raised:
            ask(path)
        assert raised.value.hint == OTHER_VERSION and path.read_bytes() == old


def test_one_writer(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path / "site.wal")
    with pytest.raises(ConfigError, match="another process"):
        WriteAheadLog(tmp_path / "site.wal")
    log.close()
    WriteAheadLog(tmp_path / "site.wal").close()


def test_compaction_forgets_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "site.wal"
    log = WriteAheadLog(path)
    secret = bytes(range(60))
    log.append(records.Agreed(ctx=bytes(32), survivors=bytes(32), sites=(), sealed=secret, expires_ms=1))
    assert secret in path.read_bytes()
    log.compact(RECORDS[:1])
    assert secret not in path.read_bytes()
    log.append(RECORDS[1])
    log.close()
    assert reread(path) == tuple(RECORDS[:2])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "site.wal"
    log = WriteAheadLog(path)
    log.append(RECORDS[0])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            log.append(RECORDS[1])
    log.append(RECORDS[2])
    log.close()
    assert reread(path) == (RECORDS[0], RECORDS[2])


def test_a_compacted_journal_remembers_what_it_must() -> None:
    """After two rounds and an open third: same marks, same head, same open attempt, fewer records."""
    run = federation(4)
    for number in range(2):
        run.run_round(random_updates(run.policy.layout, run.sites, number))
    run.hook = lambda s, r, m: [] if r == "site-00" and isinstance(m, messages.Result | messages.SumFrame) else [m]
    run.run_round(random_updates(run.policy.layout, run.sites, 2))
    journal = run.sites["site-00"].machine.core.journal
    again = Journal.replay(journal.compacted(done_round=2))
    assert again.head(run.policy) == journal.head(run.policy)
    for field in ("sequence", "high_water", "released", "peers", "uploaded", "uploaded_on", "acked_round", "update"):
        assert getattr(again, field) == getattr(journal, field), field
    assert again.attempts == journal.attempts and len(again.attempts) == 1
    with pytest.raises(LocalProtocolError, match="not a site's record"):
        journal.apply(records.Planned(plan=run.planned.attempts[0].plan))


def test_the_log_of_a_site_stays_short_over_many_rounds() -> None:
    run = federation(4)
    lengths = []
    for number in range(4):
        run.run_round(random_updates(run.policy.layout, run.sites, number))
        lengths.append(len(run.sites["site-00"].wal))
    assert lengths[-1] == lengths[1]


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_a_spool_keeps_frames_in_place(kind: str, tmp_path: Path) -> None:
    spool: Spool = MemorySpool() if kind == "memory" else FileSpool(tmp_path / "spool")
    key = bytes(32)
    assert spool.frames(key) == 0
    spool.write(key, 0, b"a" * FRAME_BYTES)
    spool.write(key, 1, b"b" * FRAME_BYTES)
    spool.write(key, 1, b"c" * FRAME_BYTES)
    assert spool.frames(key) == 2
    spool.write(key, 2, b"tail")
    spool.seal(key)
    assert spool.read(key, 1) == b"c" * FRAME_BYTES and spool.read(key, 2) == b"tail"
    with pytest.raises(Gone):
        spool.read(key, 3)
    spool.remove(key)
    spool.remove(key)
    with pytest.raises(Gone):
        spool.read(key, 0)


def test_spool_files_are_private_and_named_by_digest(tmp_path: Path) -> None:
    spool = FileSpool(tmp_path / "spool")
    spool.write(bytes(32), 0, b"x")
    (file,) = (tmp_path / "spool").iterdir()
    assert file.name == "00" * 32 and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == 0o700
    with pytest.raises(LocalProtocolError, match="32 bytes"):
        spool.write(b"../../etc/passwd", 0, b"x")


def header(root: bytes, site: str = "a") -> messages.UploadHeader:
    return messages.UploadHeader(site=site, kx=bytes(32), deals=bytes(32), length=0, root=root, signature=bytes(64))


def test_uploads_resume_from_the_spool_and_bad_ones_leave_no_trace(tmp_path: Path) -> None:
    layout = small_layout(3, words=200_000, ring_bits=32)
    generator = np.random.default_rng(1)
    vector = generator.integers(0, 2**32, layout.words, dtype=np.uint32)
    data = vector.tobytes()
    frames = [
        messages.UploadFrame(kx=bytes(32), index=at // FRAME_BYTES, data=data[at : at + FRAME_BYTES])
        for at in range(0, len(data), FRAME_BYTES)
    ]
    told = header(masking.vector_root(vector.view(np.uint8)))
    spool, policy = FileSpool(tmp_path), federation(3, layout=layout).policy
    first = Uploads(policy, spool)
    assert first.begin(told) == 0
    for frame in frames[:2]:
        assert first.take("a", frame) is None
    second = Uploads(policy, spool)
    assert second.begin(told) == 2 and second.next_frame("a") == 2
    assert second.take("a", frames[0]) is None, "sent again: dropped"
    with pytest.raises(RemoteProtocolError, match="not the next one"):
        second.take("a", frames[3])
    with pytest.raises(RemoteProtocolError, match="wrong length"):
        second.take("a", messages.UploadFrame(kx=bytes(32), index=2, data=b"1234"))
    for frame in frames[2:]:
        done = second.take("a", frame)
    assert done == told
    assert np.array_equal(second.total(), vector)

    lying = header(bytes(32), "b")
    second.begin(lying)
    for frame in frames[:-1]:
        second.take("b", frame)
    with pytest.raises(VerificationFailed, match="root its site signed"):
        second.take("b", frames[-1])
    second.begin(header(bytes(32), "c"))
    second.take("c", frames[0])
    second.drop("c")
    assert np.array_equal(second.total(), vector), "taken out again"
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(RemoteProtocolError, match="not the next one"):
        second.take("c", frames[0])

    third = Uploads(policy, spool)
    third.restore(told)
    assert np.array_equal(third.total(), vector)
    (key,) = third.discard().keys
    for index, data in enumerate([bytes(FRAME_BYTES), *(frame.data for frame in frames[1:])]):
        spool.write(key, index, data)
    with pytest.raises(VerificationFailed, match="spooled upload"):
        Uploads(policy, spool).restore(told)
    spool.write(key, 1, frames[1].data[:-1])
    spool.write(key, 0, frames[0].data[:-5])
    with pytest.raises(VerificationFailed, match="spooled upload"):
        Uploads(policy, spool).restore(told)


def test_a_federation_runs_on_files(tmp_path: Path) -> None:
    run = federation(4, layout=small_layout(4, words=100_000), spool=FileSpool(tmp_path))
    outcome = run.run_round(
        random_updates(run.policy.layout, run.sites, 1), drops={"site-03": Drop(messages.UploadFrame, after=1)}
    )
    assert outcome.total is not None and outcome.survivors == ("site-00", "site-01", "site-02")
    left = {file.name for file in tmp_path.iterdir()}
    publication = run.planned.attempts[0].publication
    assert publication is not None and left == {publication.result.sum_root.hex()}, "only the sum is kept"
