"""Synthetic frontal chest radiographs with findings, reports and a manifest: a teaching set, not patients.

`patients` describes who is imaged and what is found, `anatomy` and `structures` shape the normal thorax, `findings`
changes it, `drawing` makes the picture, `reports` the words, and `writing` and `dicom` the files.
"""

from cbmir.training.phantom.drawing import draw
from cbmir.training.phantom.patients import PHANTOM_LABELS, Anatomy, Finding, Phantom, describe
from cbmir.training.phantom.reports import report
from cbmir.training.phantom.writing import generate

__all__ = ["PHANTOM_LABELS", "Anatomy", "Finding", "Phantom", "describe", "draw", "generate", "report"]
