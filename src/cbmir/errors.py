"""Every error that cbmir raises on purpose.

A message says what was expected, what was found, and what to do. A `UserError` concerns what was given to cbmir.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class CbmirError(Exception):
    """Base of all errors that cbmir raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class UserError(CbmirError):
    """Something given to cbmir was not as expected."""

    exit_code = 2


class ImageError(UserError):
    """An image that cannot be analysed. `reason` is a short reason that names nothing of the image, for counts."""

    reason = "image"


class NotAnImageError(ImageError):
    """Missing, empty, or not in an image format that cbmir reads."""

    reason = "no image"


class DamagedImageError(ImageError):
    """The format is known, but the content is damaged or cut off."""

    reason = "damaged"


class ImageSizeError(ImageError):
    """Too many or too few pixels, or an absurd aspect ratio."""

    reason = "size"


class BlankImageError(ImageError):
    """A single grey value everywhere: nothing to analyse."""

    reason = "blank"


class DecodingError(ImageError):
    """Decoding takes more time or memory than any X-ray needs, or crashes the decoder."""

    reason = "decoding"


class DicomImageError(ImageError):
    """A DICOM object that is not one frontal chest radiograph, or whose tags contradict each other.

    `reason` is the keyword of the tag that decided, if one did.
    """

    def __init__(self, message: str, reason: str = "not a DICOM radiograph") -> None:
        super().__init__(message)
        self.reason = reason


class ManifestError(UserError):
    """A manifest or data set table with missing or invalid content."""


class SplitError(UserError):
    """A patient in two splits, or a split that is missing or empty."""


class RunError(UserError):
    """A RUN folder that is missing, unfinished or does not fit."""


class EncoderError(UserError):
    """An unknown encoder, or weights that do not fit it."""


class ModelError(UserError):
    """A model file that is missing or not cbmir's."""


class CardError(ModelError):
    """No model card, a damaged one, or one of a newer schema."""


class EngineError(UserError):
    """An engine or device that was requested and is not available."""


class GalleryError(UserError):
    """A gallery that is missing, damaged or belongs to another model."""


class GalleryReplacedError(GalleryError):
    """The gallery was moved, deleted or replaced while it was open; open it again."""


class RankError(GalleryError):
    """An order of neighbours that this gallery does not support. The message is for clients, so it names no path."""


class PacsError(UserError):
    """An address or certificate of the PACS that does not work."""


class PacsAwayError(PacsError):
    """The PACS cannot be reached, or refuses every request, at this moment."""


class AnswerSizeError(PacsError):
    """An answer of the PACS that exceeds its limit."""


class QueueError(UserError):
    """The queue's folder is in use, damaged, or cannot be written to."""


class MissingDependencyError(UserError):
    """An optional package is not installed."""


class NotReadyError(CbmirError):
    """No model is open: not yet, or no longer."""


class QueueFullError(CbmirError):
    """The queue is full; send again later."""


class DeliveryError(CbmirError):
    """A result that its receiver did not accept."""


class DeliveryAwayError(DeliveryError):
    """The receiver cannot be reached, or accepts nothing at this moment."""


class DownloadError(CbmirError):
    """A file that its publisher's server does not deliver, or delivers damaged."""


class WorkerError(CbmirError):
    """A worker process died before it answered."""


class ParityError(CbmirError):
    """An exported file answers differently from its source."""


class TrainingError(CbmirError):
    """Training reached NaN or another state that it cannot recover from."""


def installing(*extras: str) -> str:
    """How to install one of these extras of cbmir, in words that are right with and without a clone."""
    names = " or ".join(f'"{extra}"' for extra in extras)
    return f"""install cbmir's extra {names} (from a clone: pip install ".[{extras[0]}]")"""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module, or raise `MissingDependencyError` that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{error.name or module} is not installed: {installing(extra)}") from error
