"""Pictures of the auditor's report: `scripts/screenshots --reports`.

Three federations whose logs are really written and really audited: one that kept its rules, one in which a hospital
changed an entry afterwards, and one in which a hospital opened data for another purpose. Each at a desk, on a telephone
and on paper; long pages are folded into columns, so that a picture shows all of its report.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pypdfium2
from click.testing import CliRunner
from PIL import Image

from lazaret.errors import ConfigError
from security.audit.cli import main as audit
from tests.support.audit_attacks import Tampering, copied
from tests.support.audit_logs import Federation, data_opened

# Ink and its soft edges, and what the report says in colour.
COLOURS: Final = (
    *((level, level, level) for level in (255, 243, 226, 205, 180, 150, 118, 84, 40)),
    *((146, 32, 38), (200, 130, 132), (32, 92, 58), (130, 170, 150), (28, 58, 98), (130, 148, 172), (140, 90, 10)),
)
BLANK: Final = 200
GAP: Final = 16
GREY: Final = (190, 190, 190)
WIDTHS: Final = {"": (1180, 3), "-phone": (390, 7)}  # how wide, and into how many columns it is folded
PAPER_SCALE: Final = 1.0
PAPER_COLUMNS: Final = 4


def federations(folder: Path) -> Iterator[tuple[str, Path, list[Path]]]:
    """Three federations: the name of their pictures, the consortium's root certificate, and the logs."""
    clean = Federation.make(folder / "clean")
    clean.play(4)
    clean.stop()
    yield "clean", clean.root_key, clean.folders

    changed = copied(clean.members["graz"].folder, folder / "tampered" / "graz")
    tampering = Tampering(changed)
    place = next(at for at, line in enumerate(tampering.lines) if b'"UploadFrame"' in line)
    tampering.edit(place, lambda entry: entry["body"].update(sha256="be" * 32))
    yield "tampered", clean.root_key, [changed if path.name == "graz" else path for path in clean.folders]

    lax = Federation.make(folder / "non-compliant")
    told = dataclasses.replace(data_opened("vienna"), purpose="marketing", legal_basis="not stated")
    lax.members["vienna"].log.append(told, run=lax.run)
    lax.play(4)
    lax.stop()
    yield "non-compliant", lax.root_key, lax.folders


def _report(target: Path, root: Path, folders: list[Path]) -> str:
    """The page that an auditor gets, at its address."""
    arguments = ["report", *map(str, folders), "--root-key", str(root), "-o", str(target)]
    done = CliRunner().invoke(audit, arguments)
    if not target.exists():
        raise ConfigError("no report was made", where=str(target), hint=done.output[-300:])
    return target.as_uri()


def _keep(image: Image.Image, path: Path, tell: Callable[[str], None]) -> None:
    """Sixteen colours are enough for a report, and make a small file."""
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in COLOURS for part in colour])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True, bits=4)
    tell(f"{path.name}: {image.width} x {image.height}, {path.stat().st_size // 1024} kB")


def _sheet(parts: list[Image.Image], columns: int) -> Image.Image:
    width, height = max(part.width for part in parts), max(part.height for part in parts)
    rows = -(-len(parts) // columns)
    sheet = Image.new("RGB", (columns * (width + GAP) - GAP, rows * (height + GAP) - GAP), GREY)
    for number, part in enumerate(parts):
        row, column = divmod(number, columns)
        sheet.paste(part, (column * (width + GAP), row * (height + GAP)))
    return sheet


def _folded(image: Image.Image, columns: int) -> Image.Image:
    """A long page as columns of one height, cut between lines of text where there is white."""
    cuts, grey = [0], image.convert("L")
    for left in range(columns, 1, -1):
        height = -(-(image.height - cuts[-1]) // left)
        lowest = cuts[-1] + height
        rows = range(lowest, lowest - height // 4, -1)
        blank = (at for at in rows if grey.crop((0, at, image.width, at + 1)).getextrema()[0] > BLANK)
        cuts.append(next(blank, lowest))
    ends = [*cuts[1:], image.height]
    return _sheet([image.crop((0, top, image.width, end)) for top, end in zip(cuts, ends, strict=True)], len(cuts))


def take_reports(browser: Any, out: Path, folder: Path, tell: Callable[[str], None]) -> None:
    """All nine pictures."""
    out.mkdir(parents=True, exist_ok=True)
    for name, root, folders in federations(folder):
        address = _report(folder / f"{name}.html", root, folders)
        for suffix, (width, columns) in WIDTHS.items():
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(address)
            shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
            _keep(_folded(shot, columns), out / f"report-{name}{suffix}.png", tell)
            page.close()
        page = browser.new_page()
        page.goto(address)
        with pypdfium2.PdfDocument(page.pdf(format="A4", prefer_css_page_size=True)) as paper:
            sheets = [sheet.render(scale=PAPER_SCALE).to_pil().convert("RGB") for sheet in paper]
        _keep(_sheet(sheets, PAPER_COLUMNS), out / f"report-{name}-print.png", tell)
        page.close()
