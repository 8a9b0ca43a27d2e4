"""The errors that cbmir raises on purpose.

A message says what was expected, what was found, and what to do. A `UserError` is about the user's input.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class CbmirError(Exception):
    """Base of all errors that cbmir raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class UserError(CbmirError):
    """An input, option or environment that is not as expected."""

    exit_code = 2


class ImageError(UserError):
    """An image that cannot be analysed. `reason` is a short category for counts, without data of the image."""

    reason = "image"


class NotAnImageError(ImageError):
    """A file that is missing, empty, or not in an image format that cbmir reads."""

    reason = "no image"


class DamagedImageError(ImageError):
    """An image in a known format whose content is damaged or cut off."""

    reason = "damaged"


class ImageSizeError(ImageError):
    """An image with too many or too few pixels, or an absurd aspect ratio."""

    reason = "size"


class BlankImageError(ImageError):
    """An image with a single grey value."""

    reason = "blank"


class DecodingError(ImageError):
    """An image that takes more time or memory to decode than any X-ray needs, or crashes the decoder."""

    reason = "decoding"


class DicomImageError(ImageError):
    """A DICOM object that is not one frontal chest radiograph, or whose tags contradict each other.

    `reason` is the keyword of the tag that caused the refusal, if there is one.
    """

    def __init__(self, message: str, reason: str = "not a DICOM radiograph") -> None:
        super().__init__(message)
        self.reason = reason


class ManifestError(UserError):
    """A manifest or data set table with missing or invalid content."""


class SplitError(UserError):
    """A patient in two splits, or a split that is missing or empty."""


class RunError(UserError):
    """A RUN folder that is missing, unfinished or unsuitable."""


class EncoderError(UserError):
    """An unknown encoder, or weights that do not fit it."""


class ModelError(UserError):
    """A model file that is missing or not from cbmir."""


class CardError(ModelError):
    """A model card that is missing, damaged or of another schema."""


class EngineError(UserError):
    """A requested engine or device that is not available."""


class GalleryError(UserError):
    """A gallery that is missing, damaged or belongs to another model."""


class GalleryReplacedError(GalleryError):
    """The gallery was moved, deleted or replaced while it was open; open it again."""


class RankError(GalleryError):
    """An order of neighbours that this gallery does not support. The message is for clients, so it names no path."""


class PacsError(UserError):
    """A PACS address or certificate that does not work."""


class PacsAwayError(PacsError):
    """The PACS cannot be reached at the moment, or refuses every request."""


class AnswerSizeError(PacsError):
    """A response of the PACS that is larger than allowed."""


class QueueError(UserError):
    """A queue folder that is in use, damaged or not writable."""


class MissingDependencyError(UserError):
    """An optional package is not installed."""


class NotReadyError(CbmirError):
    """No model is open yet, or it was closed."""


class QueueFullError(CbmirError):
    """The queue is full; send again later."""


class DeliveryError(CbmirError):
    """The receiver did not accept a result."""


class DeliveryAwayError(DeliveryError):
    """The receiver cannot be reached at the moment, or accepts nothing."""


class DownloadError(CbmirError):
    """A publisher's server does not deliver a file, or delivers it damaged."""


class WorkerError(CbmirError):
    """A worker process died before it answered."""


class ParityError(CbmirError):
    """An exported file answers differently from its source."""


class TrainingError(CbmirError):
    """Training reached NaN or another state from which it cannot recover."""


def installing(*extras: str) -> str:
    """Return text that says how to install one of these extras of cbmir, with and without a clone."""
    names = " or ".join(f'"{extra}"' for extra in extras)
    return f"""install cbmir's extra {names} (from a clone: pip install ".[{extras[0]}]")"""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module. Raises MissingDependencyError, which says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{error.name or module} is not installed: {installing(extra)}") from error
