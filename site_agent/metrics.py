"""`/metrics` of an agent, for a Prometheus on the hospital's own machine.

Nothing about patients, images or classes, and no training time: it would reveal how many images there are. A test
holds the output against the names and labels that are listed in the operators' page.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lazaret import software
from lazaret.checks import free_bytes
from lazaret.errors import ConfigError, ToolkitError
from lazaret.web.access import Guard, require_loopback
from lazaret.web.server import Pages, WebServer, exposition
from site_agent.config import SiteConfig
from site_agent.privacy import ledger_files
from site_agent.run import Agent
from site_agent.session import SessionPhase
from site_agent.status import certificate_end

log = logging.getLogger("site-agent")


class AgentCollector(Collector):
    """Looks at a running agent from another thread: single numbers and copies, never a change."""

    def __init__(self, agent: Agent, config: SiteConfig) -> None:
        self._agent = agent
        self._config = config

    def collect(self) -> Iterator[Metric]:
        agent, session = self._agent, self._agent.session
        phase = GaugeMetricFamily("lazaret_agent_phase", "1 for the phase of the connection.", labels=("phase",))
        for known in SessionPhase:
            phase.add_metric((known,), session.phase is known)
        yield phase
        yield GaugeMetricFamily("lazaret_agent_training", "1 while this site trains.", session.training is not None)
        yield GaugeMetricFamily("lazaret_agent_round", "Newest round whose sum was accepted.", agent.newest)
        yield CounterMetricFamily("lazaret_agent_rounds", "Rounds trained in this run.", session.rounds_done)
        sent = CounterMetricFamily("lazaret_agent_bytes", "Bytes sent since this start.", labels=("message",))
        for message, size in dict(agent.outbox.sent).items():
            sent.add_metric((message,), size)
        yield sent
        blocked = agent.outbox.blocked
        yield CounterMetricFamily("lazaret_agent_blocked", "Messages blocked by the egress filter.", blocked)
        yield GaugeMetricFamily("lazaret_agent_log_entries", "Entries in this site's privacy log.", agent.log.size)
        certificate = agent.manifest.site(session.site).certificate
        ends = certificate_end(agent.identity, certificate) / 1000
        yield GaugeMetricFamily("lazaret_agent_certificate_end_timestamp_seconds", "When the certificates end.", ends)
        ends = agent.manifest.expires_at_ms / 1000
        yield GaugeMetricFamily("lazaret_agent_manifest_end_timestamp_seconds", "When the manifest ends.", ends)
        free = free_bytes(self._config.state)
        yield GaugeMetricFamily("lazaret_agent_disk_free_bytes", "What may still be written to the state folder.", free)
        declined = session.declined is not None
        yield GaugeMetricFamily("lazaret_agent_declined", "1 after an order was declined.", declined)
        yield from self._privacy()
        build = GaugeMetricFamily("lazaret_agent_build_info", "The version that runs.", labels=("version",))
        build.add_metric((software.version(),), 1)
        yield build

    def _privacy(self) -> Iterator[Metric]:
        try:
            state = ledger_files(self._config).peek()
        except ToolkitError:
            return  # the page and the agent say what is wrong with it
        if state is not None:
            yield GaugeMetricFamily("lazaret_agent_epsilon", "Privacy spent, by the ledger.", state.epsilon)
            yield GaugeMetricFamily("lazaret_agent_epsilon_cap", "Where the ledger stops.", state.terms.cap)


@contextmanager
def open_metrics(config: SiteConfig, agent: Agent) -> Iterator[None]:
    """Serve the figures while the agent runs, if the hospital asks for it.

    :raises ConfigError: if another machine could reach them.
    """
    if config.metrics.listen is None:
        yield
        return
    address = require_loopback(config.metrics.listen, where="site.toml: metrics.listen")
    collector = AgentCollector(agent, config)
    server = WebServer(Pages({"/metrics": lambda: exposition(collector)}, Guard()).answer, address)
    try:
        server.start()
        log.info("metrics on %smetrics", server.url)
    except ConfigError as error:
        log.warning("no metrics: %s", error)
    try:
        yield
    finally:
        server.stop()
