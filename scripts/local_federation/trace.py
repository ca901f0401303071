"""How long the way of one message is: the project files in which code runs when a site takes one `Deliver`.

`Deliver` is the message with the longest way through a site. The site opens the boxes of the others, masks its update,
writes down what it has bound itself to, logs, and sends a header and a vector. The figure counts layers: a file that
only passes things on is on the list like one that does the work.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from lazaret.software import PACKAGES
from protos.parse import FROM_COORDINATOR, Parcel
from security.secagg import messages

ROOT: Final = Path(__file__).resolve().parents[2]


@contextmanager
def traced(touched: set[str]) -> Iterator[None]:
    """Note every project file in which a function is entered."""

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            touched.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        yield
    finally:
        sys.setprofile(before)


def _of_project(name: str) -> str | None:
    path = Path(name)
    if not path.is_absolute() or not path.is_relative_to(ROOT):
        return None
    inside = path.relative_to(ROOT)
    return inside.as_posix() if inside.parts[0] in PACKAGES else None


def files_touched_by_one_deliver() -> list[str]:
    """The files, sorted. A site of the tests' world runs a round; the second `Deliver` is traced, so that nothing is
    counted that runs once in a process only.
    """
    from tests.support.site_world import SITES, SiteWorld

    touched: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        world = SiteWorld(Path(folder))
        world.start_all()
        world.run_round()
        agent = world.agents[SITES[0]]
        agent.received = _watching(agent.received, touched)  # type: ignore[method-assign]
        world.run_round()
    return sorted(found for name in touched if (found := _of_project(name)) is not None)


def _watching(received: Callable[[bytes], Iterator[bytes]], touched: set[str]) -> Callable[[bytes], Iterator[bytes]]:
    def watch(data: bytes) -> Iterator[bytes]:
        parcel: Parcel = FROM_COORDINATOR.decode(data)
        if not isinstance(parcel.message, messages.Deliver):
            yield from received(data)
            return
        with traced(touched):
            sent = list(received(data))
        yield from sent

    return watch


def main() -> None:
    found = files_touched_by_one_deliver()
    print(*found, sep="\n")
    print(f"{len(found)} files")


if __name__ == "__main__":
    main()
