"""Several processes or machines of one hospital that train as one. The first is the agent; the others take its orders.

An order is a round. All processes connect again for it, so that one that has crashed fails that round and, started
again, takes part in the next. Only the agent has keys, talks to the coordinator and writes files; a worker reads images
and receives the rest: settings, model, personal state. The meeting point is that of torchrun, or the first process
itself.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in its __all__

from lazaret.errors import ConfigError, DataError, ToolkitError, WorkerLost
from npr.data.dataset import FederatedDataset, SiteData
from npr.data.sides import EncodedSides, encode_sides
from npr.device import PROCESSOR, Device, open_device, to_host
from npr.distributed import ALONE, Group, gathered
from npr.methods import registry
from npr.methods.base import Method
from npr.methods.site import Site
from npr.recipe import Recipe, check_code, code_digest
from npr.training import LocalReport
from npr.wire_layout import spec_of
from security.identity.manifest import Manifest, PluginFile
from site_agent.config import SiteConfig
from site_agent.trainer.data import open_data
from site_agent.trainer.plugin import load_plugin
from site_agent.trainer.ranks import RankPlace, local_rank

log = logging.getLogger("site-agent")
POLL_SECONDS: Final = 0.1
_OPEN, _OVER, _END = "open", "over", "end"


class WorkerGroup:
    """The first process's view: it gives orders and takes part in them.

    :param terms: what a worker must know beside the round, and must agree to; see `terms_of`.
    """

    def __init__(self, place: RankPlace, terms: Mapping[str, Any], *, seconds: float) -> None:
        self._store, self._size, self._seconds = meet(place, seconds), place.size, seconds
        self._terms = dict(terms)
        atexit.register(self.dismiss)

    def local_round(self, method: Method, site: Site, round_number: int) -> LocalReport:
        """`method.local_round`, by everybody.

        :raises WorkerLost: if a process does not connect, crashes, does not answer or cannot do its part.
        """
        order = self._order(_OPEN)
        memory = save_tensors({name: to_host(tensor).contiguous().clone() for name, tensor in site.memory().items()})
        try:
            with gathered(self._store, order, rank=0, size=self._size, seconds=self._seconds) as site.group:
                site.group.tell(json.dumps({"round": round_number, "seed": site.seed, **self._terms}).encode())
                site.group.tell(memory)
                _all_ready(site.group, ready=True)
                return method.local_round(site, round_number)
        except ToolkitError:
            # Half a round may be in the model and the optimiser by now.
            site.remember(load_tensors(memory))
            raise
        finally:
            site.group = ALONE
            with contextlib.suppress(RuntimeError):
                self._store.set(order, _OVER)

    @classmethod
    def of(
        cls, config: SiteConfig, manifest: Manifest, dataset: FederatedDataset, data: SiteData
    ) -> WorkerGroup | None:
        """The group that the environment names; None in the usual case of one process."""
        place = RankPlace.read()
        if place is None:
            return None
        if manifest.privacy is not None:
            raise ConfigError(
                "differential privacy needs one process: records are clipped, and noise drawn and booked, in one place",
                where="manifest [privacy]",
                hint="start the agent without torchrun",
            )
        return cls(place, terms_of(manifest, dataset, data), seconds=float(config.site.worker_wait))

    def dismiss(self) -> None:
        """Inform the others that there will be no more orders."""
        with contextlib.suppress(WorkerLost):
            self._order(_END)

    def _order(self, state: str) -> str:
        """Publish the next order; returns its name."""
        try:
            name = f"order/{self._store.add('orders', 1)}"
            self._store.set(name, state)
        except RuntimeError as error:
            raise WorkerLost("the first process of this training ended", hint="start all processes again") from error
        return name


def terms_of(manifest: Manifest, dataset: FederatedDataset, data: SiteData) -> dict[str, Any]:
    """All that a worker receives once, as JSON: how to build the same method and site, and what to check of its own."""
    return {
        "method": manifest.training.method,
        "plugin": None if manifest.training.plugin is None else manifest.training.plugin.model_dump(),
        "settings": dict(manifest.training.settings),
        "architecture": manifest.model.architecture,
        "classes": list(manifest.model.classes),
        "site": data.name,
        "code": code_digest(),
        "data": _digest(dataset, data),
        # One letter each; the agent alone has the list or the key by which patients have their sides.
        "sides": encode_sides(dataset.sides),
    }


def work(place: RankPlace, config: SiteConfig) -> None:
    """Take orders until the agent says that there are no more, or has ended."""
    seconds = float(config.site.worker_wait)
    if config.site.threads is not None:
        torch.set_num_threads(config.site.threads)
    device = open_device(config.site.computing, rank=local_rank())
    log.info("computes on %s", device)
    worker, store = Worker(config, device), meet(place, seconds)
    number = max(1, store.add("orders", 0))
    while (order := _next_order(store, number)) is not None:
        number, name = order
        try:
            with gathered(store, name, rank=place.rank, size=place.size, seconds=seconds) as group:
                worker.take_part(group)
        except ToolkitError as error:
            log.warning("%s", error)
        number += 1
    log.info("the agent has ended: no more work")


@dataclass
class Worker:
    """What a worker keeps between orders: its images, and method and site for the terms it received last."""

    config: SiteConfig
    device: Device = PROCESSOR
    terms: dict[str, Any] | None = None
    method: Method | None = None
    site: Site | None = None

    def take_part(self, group: Group) -> None:
        """One order, from the agent's message to the last exchange. The result is the agent's; ours is discarded."""
        order: dict[str, Any] = json.loads(group.tell())
        memory, round_number = load_tensors(group.tell()), order.pop("round")
        try:
            method, site = self._prepare(order)
            site.group = group
            method.check_group(site)
            site.remember(memory)
        except ToolkitError:
            _all_ready(group, ready=False)
            raise
        _all_ready(group, ready=True)
        log.info("round %d: training", round_number)
        method.local_round(site, round_number)

    def _prepare(self, order: dict[str, Any]) -> tuple[Method, Site]:
        if self.method is None or self.site is None or order != self.terms:
            self.method, self.site = _build(self.config, order, self.device)
            self.terms = order
        return self.method, self.site


def _build(config: SiteConfig, order: dict[str, Any], device: Device) -> tuple[Method, Site]:
    check_code(order["code"])
    plugin, table = order["plugin"], config.data
    load_plugin(config, order["method"], None if plugin is None else PluginFile.model_validate(plugin))
    recipe = Recipe.of(order["method"], order["settings"])
    dataset, data = open_data(
        table,
        site=order["site"],
        image_size=recipe.image_size,
        channels=recipe.in_channels,
        classes=order["classes"],
        rule=EncodedSides(order["sides"]),
        labels=recipe.config.labels,
    )
    if _digest(dataset, data) != order["data"]:
        raise DataError(
            "these are not the agent's images", where=table.source, hint="every machine needs the same [data]"
        )
    spec, method = spec_of(order["architecture"], len(order["classes"]), recipe), registry.build(recipe.config)
    model = method.build_model(spec)
    return method, Site.of(data.name, data.train, model, spec, recipe.config, seed=order["seed"], device=device)


def meet(place: RankPlace, seconds: float) -> TCPStore:
    """The meeting point: torchrun's, the first process's own, or a connection to either.

    :raises WorkerLost: if nobody listens there.
    """
    patience = timedelta(seconds=seconds)
    if place.loopback:
        # Else the exchange would listen on whatever address the machine's name has.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if place.rank == 0 and not place.torchrun:
        listening = _listen(place)
        return TCPStore(
            place.host, place.port, None, True, patience, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    try:
        return TCPStore(place.host, place.port, None, False, patience, wait_for_workers=False)
    except RuntimeError as error:
        raise WorkerLost(
            "the first process of this training does not answer",
            where=f"{place.host}:{place.port}",
            hint="start the agent first, with the same MASTER_ADDR and MASTER_PORT",
        ) from error


def _listen(place: RankPlace) -> socket.socket:
    """On the given address alone: what is exchanged here must not be offered to the whole network."""
    try:
        family, *_, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(place.size)
    except OSError as error:
        raise ConfigError(
            "cannot listen for the other processes", where=f"{place.host}:{place.port}", hint="see MASTER_ADDR"
        ) from error
    return listening


def _next_order(store: TCPStore, number: int) -> tuple[int, str] | None:
    """Wait for the first order from `number` on that is open; None when there are no more."""
    while True:
        name = f"order/{number}"
        try:
            state = store.get(name) if store.check([name]) else None
        except RuntimeError:
            return None
        match state:
            case None:
                time.sleep(POLL_SECONDS)
            case b"open":
                return number, name
            case b"over":
                number += 1
            case _:
                return None


def _all_ready(group: Group, *, ready: bool) -> None:
    missing = int(group.sum(torch.tensor([0 if ready else 1])))
    if missing and ready:
        raise WorkerLost(f"{missing} of {group.size} processes cannot take part", hint="their output says why")


def _digest(dataset: FederatedDataset, data: SiteData) -> str:
    described = f"{dataset.fingerprint}\n{data.name}\n{len(data.train)}\n{len(data.test)}"
    return hashlib.sha256(described.encode()).hexdigest()
