"""One reader per data set; each makes a Manifest, and nothing after them knows where the images came from."""

from cbmir.training.readers.chexpert import read_chexpert
from cbmir.training.readers.dicom import LeftOut, read_dicom_studies, write_left_out
from cbmir.training.readers.nih import read_entries, read_nih
from cbmir.training.readers.table import ColumnMapping, read_own_table

__all__ = [
    "ColumnMapping", "LeftOut", "read_chexpert", "read_dicom_studies", "read_entries", "read_nih", "read_own_table",
    "write_left_out",
]  # fmt: skip
