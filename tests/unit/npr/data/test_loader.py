"""Batches: every row once, a function of the seed, the same with and without the background thread."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from lazaret.errors import ConfigError, DataError
from npr.data.loader import Augmentation, Batches

HALF = (0.5, 0.5, 0.5)


def batches(samples, **kwargs):
    settings = {"batch_size": 4, "mean": HALF, "std": HALF, **kwargs}
    return Batches(samples, **settings)


def test_plain_batches_are_the_normalised_images_in_order(make_samples):
    samples = make_samples(rows=10)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 0.2)
    out = list(batches(samples, mean=mean, std=std))
    expected = (samples.images / 255.0 - np.array(mean)) / np.array(std)
    images = torch.cat([b.images for b in out]).permute(0, 2, 3, 1).numpy()
    assert np.allclose(images, expected, atol=1e-5)
    assert torch.cat([b.labels for b in out]).tolist() == samples.labels.tolist()
    assert torch.cat([b.indices for b in out]).tolist() == list(range(10))
    assert [len(b) for b in out] == [4, 4, 2]
    assert out[0].images.is_contiguous(memory_format=torch.channels_last) and out[0].images.dtype == torch.float32


def test_a_last_batch_of_one_joins_the_one_before(make_samples):
    assert [len(b) for b in batches(make_samples(rows=9))] == [4, 5]
    assert [len(b) for b in batches(make_samples(rows=1))] == [1]
    assert list(batches(make_samples(rows=0))) == []
    assert len(batches(make_samples(rows=9))) == 2


@pytest.mark.parametrize("augment", [None, Augmentation(), Augmentation.paper()])
def test_prefetching_changes_nothing(make_samples, augment):
    samples = make_samples(rows=23, size=16)
    ahead = list(batches(samples, augment=augment, shuffle=True, seed=(1, 2)))
    plain = list(batches(samples, augment=augment, shuffle=True, seed=(1, 2), prefetch=False))
    for a, b in zip(ahead, plain, strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.indices, b.indices)


def test_seed_decides_order_and_augmentation(make_samples):
    samples = make_samples(rows=40, size=16)

    def run(seed):
        return torch.cat([b.images for b in batches(samples, augment=Augmentation(), shuffle=True, seed=seed)])

    assert torch.equal(run((7, 1)), run((7, 1)))
    assert not torch.equal(run((7, 1)), run((7, 2)))
    shuffled = batches(samples, shuffle=True, seed=(7, 1))
    assert sorted(shuffled.indices.tolist()) == list(range(40)) != shuffled.indices.tolist()


def test_augmentation_leaves_the_stored_images_alone(make_samples):
    samples = make_samples(rows=12)
    before = samples.images.copy()
    list(batches(samples, augment=Augmentation(), shuffle=True))
    assert np.array_equal(samples.images, before)


def test_sampler_draws_the_rows(make_samples):
    samples = make_samples(rows=10)
    drawn = batches(samples, sampler=lambda labels, rng: np.repeat(np.flatnonzero(labels == labels[0])[:1], 6))
    assert drawn.indices.tolist() == [0] * 6
    with pytest.raises(DataError, match="do not exist"):
        batches(samples, sampler=lambda labels, rng: np.array([10]))


def test_errors_of_the_background_thread_reach_the_caller(make_samples):
    class Broken:
        shape, dtype = (10, 8, 8, 3), np.uint8

        def __getitem__(self, rows):
            raise OSError("disk gone")

    samples = make_samples(rows=10)
    object.__setattr__(samples, "images", Broken())
    with pytest.raises(OSError, match="disk gone"):
        list(batches(samples))


def test_leaving_early_stops_the_thread_and_keeps_the_thread_count(make_samples):
    threads = torch.get_num_threads()
    for _ in batches(make_samples(rows=40)):
        break
    deadline = time.monotonic() + 5
    while any(t.name.startswith("batches") for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name.startswith("batches") for t in threading.enumerate())
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *counts] == [threads, threads]


def test_waiting_is_measured_and_hidden_by_prefetching(make_samples):
    class Slow:
        shape, dtype = (32, 8, 8, 3), np.uint8

        def __init__(self):
            self.reads = threading.Semaphore(0)

        def __getitem__(self, rows):
            time.sleep(0.01)
            self.reads.release()
            return np.zeros((len(rows), 8, 8, 3), np.uint8)

    samples, slow = make_samples(rows=32), Slow()
    object.__setattr__(samples, "images", slow)
    plain, ahead = batches(samples, prefetch=False), batches(samples)
    for count, _ in enumerate(plain):
        # Nothing is read before it is asked for, and what is read is waited for.
        assert slow.reads.acquire(blocking=False) and not slow.reads.acquire(blocking=False), count
    assert plain.seconds_waiting >= 8 * 0.01
    for count, _ in enumerate(ahead):
        # While the consumer is busy with one batch, the next one is made: it comes although nobody asks for it.
        wanted = 2 if count == 0 else int(count + 1 < len(ahead))
        assert all(slow.reads.acquire(timeout=30) for _ in range(wanted)), count
    assert ahead.seconds_waiting > 0.0


def test_settings_are_checked(make_samples):
    with pytest.raises(ConfigError, match="batch_size"):
        batches(make_samples(), batch_size=0)
    with pytest.raises(ConfigError, match="1 means"):
        batches(make_samples(), mean=(0.5,))
