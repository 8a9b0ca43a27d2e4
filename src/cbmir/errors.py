"""Every error that cbmir raises on purpose.

A message says what was expected, what was found, and what to do. A `UserError` is a matter of what was given to cbmir.
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
    """An image that cannot be analysed. `reason` says why in a word that names nothing of the image, for counts."""

    reason = "image"


class NotAnImageError(ImageError):
    """Missing, empty, or no image format that cbmir reads."""

    reason = "no image"


class DamagedImageError(ImageError):
    """The format is known, the content is broken or cut off."""

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

    `reason` is the keyword of the tag that decided, where one did.
    """

    def __init__(self, message: str, reason: str = "not a DICOM radiograph") -> None:
        super().__init__(message)
        self.reason = reason


class ManifestError(UserError):
    """A manifest or dataset table that does not hold what it should."""


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
    """An engine or device that was asked for and is not there."""


class GalleryError(UserError):
    """A gallery that is missing, damaged or of another model."""


class GalleryReplacedError(GalleryError):
    """It was moved, deleted or replaced while it was open: to be opened again."""


class RankError(GalleryError):
    """An order of neighbours that this gallery cannot give. The message names no place, for it goes to clients."""


class PacsError(UserError):
    """An address or certificate of the PACS that does not work."""


class PacsAwayError(PacsError):
    """The PACS cannot be reached, or lets nobody in, now: whatever it is asked for."""


class AnswerSizeError(PacsError):
    """An answer of the PACS that is longer than it may be."""


class QueueError(UserError):
    """The queue's folder is in use, damaged, or cannot be written to."""


class MissingDependencyError(UserError):
    """An optional package is not installed."""


class NotReadyError(CbmirError):
    """Nothing is open that could answer: not yet, or no longer."""


class QueueFullError(CbmirError):
    """No room for one more: to be sent again later."""


class DeliveryError(CbmirError):
    """A result that its receiver did not take."""


class DeliveryAwayError(DeliveryError):
    """The receiver is away, or takes nothing now: whatever is sent."""


class DownloadError(CbmirError):
    """A file that its publisher's server does not give, or gives damaged."""


class WorkerError(CbmirError):
    """A worker process died before it had answered."""


class ParityError(CbmirError):
    """An exported file answers differently from its source."""


class TrainingError(CbmirError):
    """Training ran into NaN or another state that it cannot leave."""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module, or raise `MissingDependencyError` with the exact command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f'{error.name or module} is needed here and is not installed. Install it with: pip install "cbmir[{extra}]"'
        ) from error
