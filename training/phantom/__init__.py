"""Synthetic frontal chest radiographs with findings, reports and a manifest, for learning and tests.

`patients` describes patients and findings, `anatomy` shapes the normal thorax, `findings` changes it, `picture` draws
it, `reports` writes the text, and `files` writes PNG, DICOM and the manifest.
"""

from cbmir.training.phantom.files import generate
from cbmir.training.phantom.patients import PHANTOM_LABELS, Anatomy, Phantom, PhantomFinding, describe
from cbmir.training.phantom.picture import draw
from cbmir.training.phantom.reports import report

__all__ = ["PHANTOM_LABELS", "Anatomy", "Phantom", "PhantomFinding", "describe", "draw", "generate", "report"]
