"""The size of every message, from public numbers alone (docs/spec/secure-aggregation.md, section 3).

The egress door refuses a message of any other length, and an auditor recomputes the lengths in a log: what a site may
say has no room for anything else. Sizes are those of `messages.encode`, the privacy-log head included.
"""

from __future__ import annotations

from collections.abc import Sequence

from security.secagg.certificates import BOX_BYTES, SHARE_BYTES
from security.secagg.wire import FRAME_BYTES

_LENGTH = 4
_NUMBER = 8
_DIGEST = _LENGTH + 32
_SIGNATURE = _LENGTH + 64


def _name(site: str) -> int:
    return _LENGTH + len(site.encode())


def _envelope(log_head: int) -> int:
    return 4 + _LENGTH + log_head


def path_length(index: int, size: int) -> int:
    """How many hashes lead from leaf `index` to the root of `size` leaves (RFC 6962, section 2.1.1)."""
    length, start, end = 0, 0, size
    while end - start > 1:
        middle = start + (1 << ((end - start - 1).bit_length() - 1))
        start, end = (start, middle) if index < middle else (middle, end)
        length += 1
    return length


# From a site.


def hello(site: str, *, log_head: int = 0) -> int:
    return _envelope(log_head) + _name(site) + 2 * _DIGEST + _NUMBER


def ready(site: str, *, log_head: int = 0) -> int:
    return _envelope(log_head) + _name(site) + _NUMBER


def refusal(site: str, *, log_head: int = 0) -> int:
    return _envelope(log_head) + _name(site) + _DIGEST


def _advert_fields(site: str) -> int:
    return _name(site) + 6 * _DIGEST + 2 * _NUMBER + _SIGNATURE


def advert(site: str, *, log_head: int = 0) -> int:
    return _envelope(log_head) + _advert_fields(site)


def shares(site: str, *, n: int, log_head: int = 0) -> int:
    lines = n * (2 * _DIGEST + _LENGTH) + (n - 1) * BOX_BYTES
    return _envelope(log_head) + _name(site) + _DIGEST + _LENGTH + lines + _SIGNATURE


def accusation(site: str, dealer: str, *, log_head: int = 0) -> int:
    return _envelope(log_head) + _name(site) + _DIGEST + _name(dealer) + _SIGNATURE


def upload_header(site: str, *, log_head: int = 0) -> int:
    return _envelope(log_head) + _name(site) + 3 * _DIGEST + _NUMBER + _SIGNATURE


def frame(index: int, *, vector_bytes: int, log_head: int = 0) -> int:
    """A frame of an upload or of a sum."""
    data = min(FRAME_BYTES, vector_bytes - index * FRAME_BYTES)
    return _envelope(log_head) + _DIGEST + _NUMBER + _LENGTH + data


def upload(site: str, *, vector_bytes: int) -> int:
    """A whole upload: header and frames, without log heads."""
    frames = -(-vector_bytes // FRAME_BYTES)
    return upload_header(site) + sum(frame(index, vector_bytes=vector_bytes) for index in range(frames))


def agree(site: str, *, log_head: int = 0) -> int:
    return _envelope(log_head) + _name(site) + 2 * _DIGEST + _SIGNATURE


def unmask(site: str, *, n: int, log_head: int = 0) -> int:
    return _envelope(log_head) + _name(site) + 2 * _DIGEST + _LENGTH + n * (_LENGTH + SHARE_BYTES) + _SIGNATURE


def abort(site: str, *, log_head: int = 0) -> int:
    return _envelope(log_head) + _name(site) + _DIGEST + _NUMBER + _SIGNATURE


def rollback(peer: str, *, log_head: int = 0) -> int:
    return _envelope(log_head) + _advert_fields(peer)


def chunk_request(site: str, *, log_head: int = 0) -> int:
    return _envelope(log_head) + _name(site) + _DIGEST + _NUMBER


def ack(site: str, *, chunks: int, log_head: int = 0) -> int:
    return _envelope(log_head) + _name(site) + 2 * _DIGEST + _LENGTH + -(-chunks // 8) + _SIGNATURE


# From the coordinator.


def context(sites: Sequence[str], *, federation: str, run: str, repeats: int = 0) -> int:
    members = _LENGTH + sum(_name(site) + _DIGEST for site in sites)
    numbers = 8 * _NUMBER
    return numbers + _name(federation) + _name(run) + members + 6 * _DIGEST + _LENGTH + repeats * 2 * _DIGEST


def abort_request(sites: Sequence[str], *, federation: str, run: str, repeats: int = 0, log_head: int = 0) -> int:
    return _envelope(log_head) + context(sites, federation=federation, run=run, repeats=repeats) + _SIGNATURE


def adverts(sites: Sequence[str], *, log_head: int = 0) -> int:
    return _envelope(log_head) + _DIGEST + _LENGTH + sum(_advert_fields(site) for site in sites)


def _signed_roots(sites: Sequence[str]) -> int:
    return _LENGTH + sum(_name(site) + _DIGEST + _SIGNATURE for site in sites)


def deliver(sites: Sequence[str], holder: str, *, log_head: int = 0) -> int:
    path = _LENGTH + path_length(list(sites).index(holder), len(sites)) * _DIGEST
    box = 2 * _DIGEST + _LENGTH + BOX_BYTES
    boxes = sum(_name(site) + box + path for site in sites if site != holder)
    return _envelope(log_head) + _DIGEST + _signed_roots(sites) + _LENGTH + boxes


def survivors(sites: Sequence[str], *, log_head: int = 0) -> int:
    return _envelope(log_head) + _DIGEST + _signed_roots(sites)


def _signed(sites: Sequence[str]) -> int:
    return _LENGTH + sum(_name(site) + _SIGNATURE for site in sites)


def quorum(agreeing: Sequence[str], *, log_head: int = 0) -> int:
    return _envelope(log_head) + 2 * _DIGEST + _signed(agreeing)


def result(
    sites: Sequence[str],
    *,
    alive: Sequence[str],
    agreeing: Sequence[str],
    federation: str,
    run: str,
    repeats: int = 0,
    log_head: int = 0,
) -> int:
    header = context(sites, federation=federation, run=run, repeats=repeats)
    told = _LENGTH + sum(_advert_fields(site) for site in sites) + _LENGTH + sum(_name(s) + _DIGEST for s in alive)
    opened = 2 * _LENGTH + len(sites) * _DIGEST
    fixed = 3 * _DIGEST + _NUMBER + _SIGNATURE
    return _envelope(log_head) + header + told + _signed(agreeing) + opened + fixed


def chunk_piece(site: str, chunk: int, *, vector_bytes: int, log_head: int = 0) -> int:
    chunks = -(-vector_bytes // FRAME_BYTES)
    data = min(FRAME_BYTES, vector_bytes - chunk * FRAME_BYTES)
    path = _LENGTH + path_length(chunk, chunks) * _DIGEST
    return _envelope(log_head) + _DIGEST + _NUMBER + _name(site) + _LENGTH + data + path
