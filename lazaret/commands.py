"""The five commands, as they are installed. Each role has an extra; a command without its extra says so in one line.

Names of modules are text here: this package is below all others and imports none of them.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

OURS = ("coordinator", "lazaret", "npr", "protos", "security", "site_agent")


def _run(module: str, command: str, extra: str) -> None:
    # Nobody's plugin of pydantic sees our settings and messages, and none is looked for at every start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        main = import_module(module).main
        main()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in OURS:
            raise
        print(f"{command}: error: {error.name} is not installed", file=sys.stderr)
        print(f"hint: this command needs an extra: pip install 'lazaret[{extra}]'", file=sys.stderr)
        sys.exit(2)


def coordinator() -> None:
    _run("coordinator.cli", "coordinator", "coordinator")


def site_agent() -> None:
    _run("site_agent.cli", "site-agent", "site")


def consortium() -> None:
    _run("security.consortium.cli", "consortium", "consortium")


def npr_lab() -> None:
    _run("npr.lab.cli", "npr-lab", "lab")


def privacy_audit() -> None:
    _run("security.audit.cli", "privacy-audit", "audit")
