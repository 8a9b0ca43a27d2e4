"""Hostile input: small files that are expensive to decode, and bytes that are not files."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
from PIL import Image
from pydicom.uid import DeflatedExplicitVRLittleEndian, JPEGBaseline8Bit

from dicom_files import SIDE, make_dicom

SMALL = np.zeros((SIDE, SIDE), np.uint8)


@cache
def scan_bomb(side: int = 7000, scans: int = 3000) -> bytes:
    """A blank progressive JPEG whose last scan is repeated: by default 417 KB that take 90 s."""
    stream = io.BytesIO()
    Image.new("L", (side, side)).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * scans + data[end:]


def dicom_scan_bomb(side: int = 7000, scans: int = 3000, syntax: str = JPEGBaseline8Bit, **tags: object) -> bytes:
    """A chest radiograph with such a JPEG as its frame."""
    return make_dicom(SMALL, syntax=syntax, frame=scan_bomb(side, scans), Rows=side, Columns=side, **tags)


@cache
def tiff_bomb(side: int = 20_000) -> bytes:
    """A blank TIFF of 400 megapixels, deflated to half a megabyte."""
    stream = io.BytesIO()
    Image.new("L", (side, side)).save(stream, "TIFF", compression="tiff_adobe_deflate")
    return stream.getvalue()


@cache
def deflate_bomb(megabytes: int = 300) -> bytes:
    """A deflated DICOM file that inflates to this many megabytes."""
    data = make_dicom(syntax=DeflatedExplicitVRLittleEndian)
    deflater = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    zeros = b"".join(deflater.compress(bytes(2**20)) for _ in range(megabytes))
    return data[: data.index(b"1.2.840.10008.1.2.1.99") + 22] + zeros + deflater.flush()


def png_bomb(side: int = 100_000) -> bytes:
    """A PNG whose header claims `side` x `side` pixels."""
    stream = io.BytesIO()
    Image.fromarray(SMALL).save(stream, "PNG")
    png = stream.getvalue()
    header = b"IHDR" + side.to_bytes(4) * 2 + b"\x08\x00\x00\x00\x00"
    return png[:12] + header + zlib.crc32(header).to_bytes(4) + png[33:]


def text_bomb(megabytes: int = 200) -> bytes:
    """A PNG with a compressed text of this many megabytes."""
    stream = io.BytesIO()
    Image.fromarray(SMALL).save(stream, "PNG")
    png = stream.getvalue()
    chunk = b"zTXtk\0\0" + zlib.compress(bytes(megabytes * 2**20), 9)
    return png[:33] + (len(chunk) - 4).to_bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4) + png[33:]


def gzip_bomb(start: bytes, megabytes: int) -> bytes:
    """`start` and this many megabytes of zeros, gzipped."""
    stream = io.BytesIO()
    with gzip.open(stream, "wb", 9) as packed:
        packed.write(start)
        for _ in range(megabytes):
            packed.write(bytes(2**20))
    return stream.getvalue()


def deep_json(depth: int = 200_000) -> bytes:
    """`depth` nested brackets."""
    return b"[" * depth + b"]" * depth


#: Description -> a small image that is expensive to decode.
BOMBS: dict[str, Callable[[], bytes]] = {
    "JPEG of 3,000 scans": scan_bomb,
    "DICOM of 3,000 scans": dicom_scan_bomb,
    "JPEG of 100,000 small scans": lambda: scan_bomb(512, 100_000),
    "TIFF of 400 megapixels": tiff_bomb,
    "deflated DICOM of 300 MB": deflate_bomb,
    "PNG of 10,000 megapixels": png_bomb,
    "PNG with 200 MB of text": text_bomb,
}
