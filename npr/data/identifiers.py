"""Names that whoever fills a folder of DICOM files and whoever reads it agree on. Nothing is imported here: who fills
the folder decodes no image."""

from __future__ import annotations

from typing import Final

# Columns of a table that may stand in place of `image`, from the narrowest to the widest: each row then names a file,
# a series, a study or an order, and labels all files of it.
IDENTIFIERS: Final = ("SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "AccessionNumber")
# In a folder that is filled from an archive: the files that are complete and belong to the data set, one a line.
LISTING: Final = ".fetched"
