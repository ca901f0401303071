"""Batches of tensors for training and evaluation, augmented, and prepared one step ahead in the background."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from lazaret.errors import ConfigError, DataError
from npr.data.dataset import Samples
from npr.device import PROCESSOR, Device
from npr.distributed import ALONE, Group

# Augmentation of whole batches: flips on bytes, blur as two matrix products, rotation as one resampling.
#
# Every image of a batch draws its own flips, angle and blur. The random numbers come from the caller's generator and
# always in the same order, so that a batch is a function of its seed.


class Draws(Protocol):
    """What is needed of a numpy generator."""

    def random(self, size: int, /) -> NDArray[np.float64]: ...

    def uniform(self, low: float, high: float, size: int) -> NDArray[np.float64]: ...


@dataclass(frozen=True, slots=True)
class PartOfDraws:
    """Draws for a whole batch, of which one part is wanted: what an image meets does not depend on who works on it."""

    whole: np.random.Generator
    count: int
    part: slice

    def random(self, size: int, /) -> NDArray[np.float64]:
        del size
        return self.whole.random(self.count)[self.part]

    def uniform(self, low: float, high: float, size: int) -> NDArray[np.float64]:
        del size
        return self.whole.uniform(low, high, self.count)[self.part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blur:
    """Gaussian blur with a kernel of `width` x `height` pixels and a standard deviation drawn from `sigma`."""

    width: int = 5
    height: int = 9
    sigma: tuple[float, float] = (0.1, 5.0)

    def __post_init__(self) -> None:
        if self.width % 2 == 0 or self.height % 2 == 0 or min(self.width, self.height) < 1:
            raise ConfigError(f"a blur kernel of {self.width} x {self.height} has no centre", hint="use odd sizes")
        if not 0.0 < self.sigma[0] <= self.sigma[1]:
            raise ConfigError(f"blur sigma {self.sigma} is not a range of positive numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """What training images go through; probabilities of flips, degrees of rotation either way.

    :param fill: what rotation brings in at the corners: `zeros` (black, as in the FedNPR release) or `border`.
    """

    flip_horizontal: float = 0.5
    flip_vertical: float = 0.5
    rotation: float = 10.0
    blur: Blur | None = None
    fill: str = "border"

    def __post_init__(self) -> None:
        if self.fill not in ("zeros", "border"):
            raise ConfigError(f"unknown fill {self.fill!r}", hint="zeros or border")

    @classmethod
    def paper(cls) -> Augmentation:
        """The FedNPR release: blur always on (5 x 9, sigma up to 5 pixels), black corners."""
        return cls(blur=Blur(), fill="zeros")


def flip(images: NDArray[np.uint8], augmentation: Augmentation, rng: Draws) -> NDArray[np.uint8]:
    """Mirror some images of an (N, H, W, C) batch, in place; the caller owns the array."""
    for probability, axis in ((augmentation.flip_horizontal, 2), (augmentation.flip_vertical, 1)):
        chosen = np.flatnonzero(rng.random(len(images)) < probability)
        images[chosen] = np.flip(images[chosen], axis=axis)
    return images


def blur(images: torch.Tensor, spec: Blur, rng: Draws) -> torch.Tensor:
    """Separable blur of a float (N, C, H, W) batch, edges reflected, one sigma per image."""
    sigma = torch.from_numpy(rng.uniform(*spec.sigma, size=len(images)).astype(np.float32)).to(images.device)
    rows = blur_matrix(images.shape[2], spec.height, sigma)
    columns = blur_matrix(images.shape[3], spec.width, sigma)
    return torch.matmul(torch.matmul(rows[:, None], images), columns[:, None].transpose(-1, -2))


def blur_matrix(length: int, taps: int, sigma: torch.Tensor) -> torch.Tensor:
    """(N, length, length): multiplying by it blurs one axis, reflection at the edges included."""
    radius = taps // 2
    if radius >= length:
        raise ConfigError(f"a blur of {taps} pixels does not fit an image of {length}")
    offsets = torch.arange(-radius, radius + 1, device=sigma.device)
    weights = torch.exp(-0.5 * (offsets[None] / sigma[:, None]) ** 2)
    weights = weights / weights.sum(dim=1, keepdim=True)
    source = (torch.arange(length, device=sigma.device)[:, None] + offsets[None]).abs()
    source = (length - 1) - ((length - 1) - source).abs()
    # One-hot (length, taps, length), contracted with the taps: where reflection folds two taps they add up.
    return torch.einsum("nt,ltm->nlm", weights, F.one_hot(source, length).float())


def rotate(images: torch.Tensor, augmentation: Augmentation, rng: Draws) -> torch.Tensor:
    """Turn every image about its centre by its own angle, bilinear."""
    angles = rng.uniform(-augmentation.rotation, augmentation.rotation, size=len(images)) * (math.pi / 180.0)
    height, width = images.shape[2:]
    cos, sin = np.cos(angles), np.sin(angles)
    zero = np.zeros_like(cos)
    # The sampling grid runs from -1 to 1 on both axes: the two ratios keep a turn a turn on images that are not square.
    theta = np.stack(
        [np.stack([cos, -sin * height / width, zero], 1), np.stack([sin * width / height, cos, zero], 1)], 1
    )
    turns = torch.from_numpy(theta.astype(np.float32)).to(images.device)
    grid = F.affine_grid(turns, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=augmentation.fill, align_corners=False)


# Draws the rows of one epoch, e.g. class-balanced; it gets the labels and the epoch's own generator.
Sampler = Callable[[NDArray[np.int64], np.random.Generator], NDArray[np.int64]]

AHEAD = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Normalised images (N, C, H, W), labels, and the row of each image in its Samples.

    :ivar whole: how many images the batch has over all processes that share it.
    """

    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor
    whole: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shared(self) -> bool:
        return len(self.labels) < self.whole

    def parts(self, size: int | None) -> list[Batch]:
        """This batch in pieces of at most `size` images and nearly equal length."""
        if size is None or len(self) <= size:
            return [self]
        columns = (self.images, self.labels, self.indices)
        pieces = zip(*(column.tensor_split(-(-len(self) // size)) for column in columns), strict=True)
        return [Batch(images, labels, indices, self.whole) for images, labels, indices in pieces]


class Batches:
    """One pass over `samples`; every iteration of one object yields the same batches.

    :param seed: non-negative integers, e.g. derived from (seed, site, round, epoch). Order and augmentation are a
        function of it alone, whether or not batches are prefetched.
    :param sampler: draws the rows instead of one shuffled pass.
    :param group: the processes that share every batch; this one gets its part of each.
    :param device: where the batches are wanted. Bytes are copied there; everything after flips is computed there.
    :param prefetch: prepare the next batches in a background thread, which takes one core and no more.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augment: Augmentation | None = None,
        seed: tuple[int, ...] = (0,),
        shuffle: bool = False,
        sampler: Sampler | None = None,
        group: Group = ALONE,
        device: Device = PROCESSOR,
        prefetch: bool = True,
        channels_last: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size} holds no image", hint="use 1 or more")
        channels = samples.images.shape[3]
        if len(mean) != channels or len(std) != channels:
            raise ConfigError(f"{len(mean)} means and {len(std)} deviations for {channels}-channel images")
        self.samples = samples
        self.group = group
        self.seconds_waiting = 0.0
        self.device = device
        self._augment = augment
        self._seed = seed
        self._prefetch = prefetch
        self._memory = torch.channels_last if channels_last else torch.contiguous_format
        # (x / 255 - mean) / std as one multiplication and one addition.
        scale = (1.0 / (255.0 * torch.tensor(std, dtype=torch.float64))).float().view(1, -1, 1, 1)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).float().view(1, -1, 1, 1)
        self._scale, self._shift = device.from_host(scale), device.from_host(shift)
        self._parts = _cut(self._order(shuffle, sampler), batch_size)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def sizes(self) -> list[int]:
        """Images of each batch of the pass."""
        return [len(part) for part in self._parts]

    @property
    def indices(self) -> NDArray[np.int64]:
        """The rows of the whole pass, in order, whoever works on them."""
        return np.concatenate(self._parts) if self._parts else np.empty(0, dtype=np.int64)

    def _order(self, shuffle: bool, sampler: Sampler | None) -> NDArray[np.int64]:
        rng = np.random.default_rng([*self._seed, 0])
        if sampler is not None:
            rows = np.asarray(sampler(self.samples.labels, rng), dtype=np.int64)
            if len(rows) and not (rows.min() >= 0 and rows.max() < len(self.samples)):
                raise DataError("the sampler drew rows that do not exist")
            return rows
        return rng.permutation(len(self.samples)) if shuffle else np.arange(len(self.samples))

    def __iter__(self) -> Iterator[Batch]:
        self.seconds_waiting = 0.0
        return self._ahead() if self._prefetch and len(self._parts) > 1 else self._plain()

    def _plain(self) -> Iterator[Batch]:
        for number in range(len(self._parts)):
            started = time.perf_counter()
            batch = self._make(number)
            self.seconds_waiting += time.perf_counter() - started
            yield batch

    def _ahead(self) -> Iterator[Batch]:
        threads, stream = torch.get_num_threads(), self.device.side_stream()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as worker:
            # The worker runs single-threaded, else its thread team would fight the training step for the cores.
            # torch stores the last count set as the default for new threads; ours is put back before anything runs.
            worker.submit(torch.set_num_threads, 1).result()
            torch.set_num_threads(threads)
            waiting: deque[Future[Batch]] = deque()
            try:
                for number in range(len(self._parts)):
                    while len(waiting) <= AHEAD and number + len(waiting) < len(self._parts):
                        waiting.append(worker.submit(self._make, number + len(waiting), stream))
                    started = time.perf_counter()
                    batch = waiting.popleft().result()
                    self.seconds_waiting += time.perf_counter() - started
                    if stream is not None:  # else its memory could be given away while a step still reads it
                        batch.images.record_stream(torch.cuda.current_stream(self.device.place))
                        batch.labels.record_stream(torch.cuda.current_stream(self.device.place))
                    yield batch
            finally:
                for future in waiting:
                    future.cancel()

    def _make(self, number: int, stream: Any = None) -> Batch:
        """Batch `number`; on a card in a queue of its own, so that copying and augmenting overlap with the step."""
        if stream is None:
            return self._prepared(number)
        with torch.cuda.stream(stream):
            batch = self._prepared(number)
        stream.synchronize()
        return batch

    def _prepared(self, number: int) -> Batch:
        whole = self._parts[number]
        part = self.group.share(len(whole))
        rows = whole[part]
        pixels = np.ascontiguousarray(self.samples.images[rows])
        if self._augment is None:
            images = self._float(pixels)
        else:
            rng = PartOfDraws(np.random.default_rng([*self._seed, 1, number]), len(whole), part)
            images = self._float(flip(pixels, self._augment, rng))
            if self._augment.blur is not None:
                images = blur(images, self._augment.blur, rng)
            if self._augment.rotation > 0:
                images = rotate(images, self._augment, rng)
        images = images.mul_(self._scale).add_(self._shift).contiguous(memory_format=self._memory)
        labels = self.device.from_host(self.samples.labels[rows])
        return Batch(images, labels, torch.from_numpy(rows), len(whole))

    def _float(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        return self.device.from_host(pixels).permute(0, 3, 1, 2).float()


def _cut(rows: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Batches in order. A last batch of one image joins the one before: BatchNorm cannot train on a single image."""
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    if len(parts) > 1 and len(parts[-1]) == 1:
        last = parts.pop()
        parts[-1] = np.concatenate([parts[-1], last])
    return parts
