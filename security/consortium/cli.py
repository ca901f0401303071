"""The command `consortium`: root key, members' certificates and the signed manifest, on a machine without a network.

Its commands are imported when they are run (`commands`), so that help answers at once.
"""

from __future__ import annotations

import click

from lazaret.terminal import late_group, run_command

Group = late_group(
    {
        "security.consortium.commands": {
            "init": "Make the root key and a commented federation.toml.",
            "enroll": "Issue certificates to the member who made a request.",
            "renew": "Issue new certificates to a member, also during a run.",
            "revoke": "Revoke a member's certificates.",
            "publish": "Sign the next version of the manifest.",
            "kit": "Write one file for each member with all that it needs.",
            "show": "Show the consortium's folder, or a manifest.",
        },
        "security.consortium.backup": {
            "backup": "Write the whole folder to a file.",
            "restore": "Restore a backup, if no manifest was signed after it.",
        },
    }
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Certificate authority and manifest signer of a federation."""


def main() -> None:
    run_command(cli, "consortium")


if __name__ == "__main__":
    main()
