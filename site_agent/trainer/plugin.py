"""A method of one's own in a process that sees images: loaded if manifest and hospital approve the same bytes."""

from __future__ import annotations

import logging

from lazaret.errors import ConfigError
from npr.methods import registry
from npr.plugin import run_plugin
from security.identity.manifest import PluginFile
from security.identity.pinned_files import pinned_plugin
from site_agent.config import SiteConfig

log = logging.getLogger("site-agent")


def load_plugin(config: SiteConfig, method: str, pinned: PluginFile | None) -> str | None:
    """Run the plugin that a manifest pins for its method, if it does; returns its SHA-256. It is read once, here.

    :raises PolicyViolation: if this hospital does not approve it.
    :raises ConfigError: if the file is missing, is another one, fails, or does not have the method.
    """
    if pinned is None:
        if method not in registry.names():
            approved = ", ".join(config.policy.plugins) or "none"
            raise ConfigError(
                f"this package has no method {method!r}, and the manifest pins no plugin (SHA-256: none); "
                f"approved here: {approved}",
                where="manifest [training] plugin",
                hint="the consortium names the method's file in federation.toml",
            )
        return None
    config.policy.check_plugin(pinned)
    loaded = run_plugin(pinned_plugin(config.plugins, pinned), pinned.name)
    if method not in loaded.methods:
        raise ConfigError(
            f"the plugin {pinned.name} registers no method {method!r}",
            where="manifest [training] plugin",
            hint="the consortium names the method's file in federation.toml",
        )
    log.info("the method %s is the plugin %s, SHA-256 %s", method, pinned.name, loaded.sha256)
    return loaded.sha256
