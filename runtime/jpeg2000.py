"""A JPEG 2000 image at a lower resolution: the low-pass band of its wavelet, for which little of it is decoded."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile

from cbmir.preprocessing import PreprocessSpec

#: Pixels of a side that stay for each one of the resized square, and how often at most it is halved. So the model's
#: input is that of the full image within one grey level, but for up to 0.3% of it (sharp edges) in real DICOM files;
#: with two pixels left it was up to 0.9%, with a third halving 1.1%.
_LEFT, _MOST = 3, 2
_SIZ = b"\xff\x4f\xff\x51"  # start of codestream, then the size segment (ISO/IEC 15444-1, A.5.1)
# What Pillow raises on a damaged codestream, on fewer resolutions than are asked for, and where it is built without.
_ERRORS = (OSError, SyntaxError, ValueError, TypeError, LookupError, MemoryError, struct.error)


def halvings(shape: tuple[int, int], spec: PreprocessSpec) -> int:
    """How often an image [H,W] may be halved for `spec`: 0, 1 or 2 times.

    Not at all where the crop reaches the border, beyond which a reduced image would have to be continued.
    """
    if spec.resize - spec.crop < 2:
        return 0
    return min(_MOST, max(0, (min(shape) // (_LEFT * spec.resize)).bit_length() - 1))


def decode_halved(codestream: bytes, shape: tuple[int, int], times: int) -> NDArray[Any] | None:
    """Unsigned grey values of an image [H,W] that is halved so many times, uint8 or uint16, sides rounded up.

    The wavelet may overshoot what the full image holds. None where the codestream is another image than this, has no
    such resolution or is damaged: the full decoder then has to decide.
    """
    if not codestream.startswith(_SIZ) or len(codestream) < 45:
        return None
    width, height, left, top = struct.unpack_from(">4I", codestream, 8)
    components, depth, *spacing = struct.unpack_from(">H3B", codestream, 40)
    # A pixel of the low-pass band lies on the first of those that it stands for, counted from the canvas's origin.
    if (height, width) != shape or (left, top) != (0, 0) or components != 1 or spacing != [1, 1] or depth > 15:
        return None
    step = 2**times
    try:
        image = Jpeg2KImageFile(io.BytesIO(codestream))
        # Pillow rounds sides to the nearest, the codec up, and then they do not fit: multiples are the same by both.
        image._size = -(-width // step) * step, -(-height // step) * step
        image.reduce = times
        image.load()
    except _ERRORS:
        return None
    values = np.asarray(image)
    if values.shape != (-(-height // step), -(-width // step)) or values.dtype.kind != "u":
        return None
    shifted: NDArray[Any] = values >> (8 * values.itemsize - (depth + 1))  # Pillow shifts them up to 8 or 16 bits
    return shifted
