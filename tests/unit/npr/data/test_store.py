"""The pool of decoded images: bounded memory, private files, all or nothing."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from lazaret.errors import DataError
from npr.data.store import ImageStorage, digest_of, pool, user_cache_dir

SHAPE = (4, 4, 3)


def counted():
    calls: list[int] = []

    def decode(row: int):
        calls.append(row)
        return np.full(SHAPE, row, dtype=np.uint8)

    return decode, calls


def test_small_pools_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decode, calls = counted()
    images = pool(decode, 100, SHAPE, key="k", storage=ImageStorage())
    assert not isinstance(images, np.memmap) and images[:, 0, 0, 0].tolist() == list(range(100))
    assert sorted(calls) == list(range(100)) and list(tmp_path.iterdir()) == []


def test_beyond_the_bound_the_pool_is_mapped_from_a_private_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decode, _ = counted()
    images = pool(decode, 100, SHAPE, key="k", storage=ImageStorage(memory_limit=1000))
    assert isinstance(images, np.memmap) and images[:, 0, 0, 0].tolist() == list(range(100))
    assert not images.flags.writeable
    file = next(user_cache_dir().iterdir())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(user_cache_dir().stat().st_mode) == 0o700


def test_a_cache_is_decoded_once_and_keyed(tmp_path):
    storage = ImageStorage(cache_dir=tmp_path)
    decode, calls = counted()
    first = pool(decode, 5, SHAPE, key="a", storage=storage)
    second = pool(decode, 5, SHAPE, key="a", storage=storage)
    assert len(calls) == 5 and np.array_equal(first, second)
    pool(decode, 5, SHAPE, key="b", storage=storage)
    assert len(calls) == 10


def test_a_failure_leaves_nothing_behind(tmp_path):
    def decode(row: int):
        if row >= 70:
            raise DataError("broken", where=f"row {row}")
        return np.zeros(SHAPE, dtype=np.uint8)

    with pytest.raises(DataError) as caught:
        pool(decode, 100, SHAPE, key="a", storage=ImageStorage(cache_dir=tmp_path))
    assert caught.value.where == "row 70" and list(tmp_path.iterdir()) == []


def test_a_damaged_cache_says_which_file_to_delete(tmp_path):
    decode, _ = counted()
    pool(decode, 5, SHAPE, key="a", storage=ImageStorage(cache_dir=tmp_path))
    with pytest.raises(DataError, match="not \\(6, 4, 4, 3\\)") as caught:
        pool(decode, 6, SHAPE, key="a", storage=ImageStorage(cache_dir=tmp_path))
    assert caught.value.hint == "delete this file"
    (tmp_path / "images-a.npy").write_bytes(b"cut off")
    with pytest.raises(DataError, match="cannot be read") as caught:
        pool(decode, 5, SHAPE, key="a", storage=ImageStorage(cache_dir=tmp_path))
    assert caught.value.where == str(tmp_path / "images-a.npy")


def test_the_environment_chooses_the_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("LAZARET_CACHE", raising=False)
    assert ImageStorage.from_environment().cache_dir is None
    monkeypatch.setenv("LAZARET_CACHE", str(tmp_path))
    assert ImageStorage.from_environment().cache_dir == tmp_path
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_dir() == Path.home() / ".cache" / "lazaret"


def test_digests_do_not_run_together():
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"]) != digest_of(["a", "bc", ""])
