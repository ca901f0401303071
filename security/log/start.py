"""What a party writes about its own software when it starts: the same entries at a site and at the coordinator."""

from __future__ import annotations

from lazaret import software
from security.log.events import AgentStart, SoftwareDiffers
from security.log.schema import MAX_TEXTS, Event


def start_entries(*, config: str, proto: str) -> tuple[Event, ...]:
    """`agent.start`, and a warning where the environment is not the one that its bill of materials lists.

    :param config: SHA-256 of the configuration in force. `proto` likewise, of the wire schema.
    """
    started = AgentStart(
        version=software.version(),
        package=software.package_digest(),
        dependencies=software.dependencies_digest(),
        sbom=software.sbom_digest(),
        proto=proto,
        image=software.image_digest(),
        config=config,
        insecure=(),
    )
    differences = software.differences()
    if not differences:
        return (started,)
    return started, SoftwareDiffers(count=len(differences), packages=differences[:MAX_TEXTS])
