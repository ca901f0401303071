"""The command `site-agent`: joins a federation and trains; around it what comes before and what comes of it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import click

from lazaret import software
from lazaret.errors import ConfigError
from lazaret.process import ServiceManager, ending_well, stop_on_signals
from lazaret.terminal import late_group, log_option, log_to_stderr, run_command
from site_agent.options import own_process, with_config

Group = late_group(
    {
        "site_agent.setup_commands": {
            "init": "Make keys, a request for the consortium and a site.toml.",
            "join": "Install the consortium's answer and its manifest.",
            "renew": "Make new keys and a request for the consortium.",
            "draw": "Print this site's secret for the draw of groups.",
            "status": "Show whether the agent runs, and what this site has done.",
        },
        "site_agent.checks.command": {"check": "Check everything that a start needs, and say what to do."},
        "site_agent.state_commands": {
            "accept": "Begin the run that was offered and waits for a person.",
            "pause": "Decline training until `resume`.",
            "resume": "End the pause.",
            "permit": "Permit further updates on a model that did not change.",
            "ledger": "Show or create the privacy ledger of this site's patients.",
            "runs": "List, archive or remove the files of finished runs.",
            "step-back": "Give up a result that was never verified.",
            "handover": "Write the shared model and the signatures on it to a file.",
            "log-export": "Copy the privacy log for an auditor.",
            "log-note": "Record an action of yours in the privacy log.",
            "log-erase": "Erase private annexes of entries of the privacy log.",
            "log-archive": "Move older segments of the privacy log to another folder.",
        },
        "site_agent.backup": {
            "backup": "Write a copy of this site to a file, or move it to another machine.",
            "restore": "Restore a backup, or a moved one, into a new folder.",
            "state": "List this site's files, and which of them may be copied.",
        },
        "site_agent.model_commands": {
            "evaluate": "Evaluate this site's model on its own held-out images.",
            "predict": "Predict a folder, a file, or the images of a CSV table.",
            "curves": "Write this site's figures as files for TensorBoard or MLflow.",
            "export": "Write this site's model and its card into a folder.",
            "worker": "Train with the agent on another machine of this hospital.",
        },
        "site_agent.archive.commands": {
            "archive-fetch": "Fetch images from the hospital's archive (PACS).",
            "archive-send": "Store reports of predictions in the archive.",
            "archive-erase": "Erase the images that were fetched.",
        },
    }
)


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@with_config
@log_option
@click.pass_context
def cli(context: click.Context, config_path: Path, log_format: str | None) -> None:
    """Join the federation and train, until it is stopped (SIGTERM, SIGHUP or Ctrl-C)."""
    context.obj = config_path
    if log_format is not None:
        # At once: errors in the configuration are logged in the requested format too.
        log_to_stderr("site-agent", log_format, json_lines=False)
    if context.invoked_subcommand is None:
        run(config_path, log_format=log_format)


def run(config_path: Path, agent_type: type[Any] | None = None, *, log_format: str | None = None) -> None:
    """Assemble and serve.

    :param agent_type: the class that carries out effects; `Agent` if not given.
    :param log_format: `text` or `json`; the configuration's if not given.
    """
    with ending_well():
        _serve(config_path, agent_type, log_format)


def _serve(config_path: Path, agent_type: type[Any] | None, log_format: str | None) -> None:
    from site_agent.config import NO_ADDRESS, SiteConfig

    config = SiteConfig.read(config_path)
    log_to_stderr("site-agent", log_format, json_lines=config.logging.json_lines)
    if config.coordinator.address == NO_ADDRESS:
        raise ConfigError(
            "the coordinator's address is not known yet",
            where=f"{config_path} [coordinator] address",
            hint="`site-agent join KIT` brings it, or write host:port there",
        )
    logging.getLogger("site-agent").info("version %s starts with %s", software.version(), config_path)
    # Behind the first line: these take seconds.
    import asyncio

    from lazaret.control import final_message
    from security.clock import SystemClock
    from security.rng import SystemRandomness
    from site_agent.assembly import assemble
    from site_agent.client import meter_for, serve
    from site_agent.metrics import open_metrics
    from site_agent.model_commands import help_agent
    from site_agent.run import Agent
    from site_agent.status import AgentPresence
    from site_agent.trainer.ranks import RankPlace
    from site_agent.trainer_start import start_trainer

    place = RankPlace.read()
    if place is not None and place.rank > 0:
        help_agent(config, place)
        return
    with final_message(config.state):
        again, manager, counted = True, ServiceManager(), meter_for(config.coordinator)
        while again:  # for every run
            agent = assemble(
                config,
                clock=SystemClock(),
                rng=SystemRandomness(),
                make_learner=partial(start_trainer, log_format=log_format),
                agent_type=agent_type or Agent,
            )
            seen = AgentPresence(config, agent)

            def watch(seen: AgentPresence = seen) -> None:
                seen.look()
                manager.alive()

            with open_metrics(config, agent):
                again = asyncio.run(
                    serve(
                        agent,
                        config.coordinator,
                        counted=counted,
                        until=lambda stopped: stop_on_signals(stopped.set),
                        watch=watch,
                        ended=seen.stop,
                    )
                )


def main() -> None:
    """The console script: a process of its own, in which commands that see images isolate themselves."""
    with own_process():
        run_command(cli, "site-agent")


if __name__ == "__main__":
    main()
