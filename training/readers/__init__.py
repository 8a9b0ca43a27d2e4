"""One reader per data set. Each returns a Manifest, so other code does not depend on the data set."""

from cbmir.training.readers.chexpert import read_brax, read_chexpert
from cbmir.training.readers.covid import read_covid, read_ralo
from cbmir.training.readers.dicom import LeftOut, read_dicom_studies, write_left_out
from cbmir.training.readers.mimic import read_mimic
from cbmir.training.readers.nih import read_entries, read_nih
from cbmir.training.readers.object_cxr import read_object_cxr
from cbmir.training.readers.openi import read_openi
from cbmir.training.readers.padchest import read_padchest
from cbmir.training.readers.rsna import read_rsna
from cbmir.training.readers.siim import read_siim
from cbmir.training.readers.table import ColumnMapping, LabelCells, read_own_table
from cbmir.training.readers.tuberculosis import read_nlm_tuberculosis, read_tbx11k
from cbmir.training.readers.vindr import read_vindr

__all__ = [
    "ColumnMapping", "LabelCells", "LeftOut", "read_brax", "read_chexpert", "read_covid", "read_dicom_studies",
    "read_entries", "read_mimic", "read_nih", "read_nlm_tuberculosis", "read_object_cxr", "read_openi",
    "read_own_table", "read_padchest", "read_ralo", "read_rsna", "read_siim", "read_tbx11k", "read_vindr",
    "write_left_out",
]  # fmt: skip
