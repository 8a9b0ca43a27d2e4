"""Taking a request's body: so many bytes of it, for so many seconds, and never more in memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from cbmir.runtime.serving.problems import Problem

_FORMS = ("multipart/", "application/json")
_HOW = "send the file itself as the body: curl --data-binary @chest.dcm -H 'Content-Type: application/dicom'"


async def read_upload(request: Request, most: int, timeout_s: float) -> bytes:
    """The whole body: a file. What kind of file it is, its content says, not its Content-Type.

    Raises Problem: 413 for more than `most` bytes, 408 where it is not here within `timeout_s`, 400 for none or one
    that is cut off, 415 for a form, JSON or an encoded body.
    """
    kind = request.headers.get("content-type", "").lower()
    if kind.startswith(_FORMS):
        raise Problem(415, "media-type", f"Expected an image file, found a form or JSON; {_HOW}")
    body = await read_body(request, most, timeout_s)
    if not body:
        raise Problem(400, "empty", f"Expected an image file as the body, found none; {_HOW}")
    return body


async def read_body(request: Request, most: int, timeout_s: float) -> bytes:
    """The whole body. Raises Problem as `read_upload` does."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "encoding", "Expected a body without Content-Encoding, found one; send it as it is.")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise _too_large(most)
    whole = io.BytesIO()  # whose value is no copy
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in _chunks(request):
                if whole.tell() + len(chunk) > most:
                    raise _too_large(most)
                whole.write(chunk)
    except TimeoutError:
        raise Problem(
            408, "slow", f"Expected the whole body within {timeout_s:g} s, found {whole.tell():,} bytes of it.",
            headers={"Connection": "close"},
        ) from None  # fmt: skip
    if announced.isdecimal() and whole.tell() != int(announced):
        raise _cut_off()
    return whole.getvalue()


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect:
        raise _cut_off() from None


def _cut_off() -> Problem:
    return Problem(400, "cut-off", "Expected the whole body, found it cut off.", headers={"Connection": "close"})


def _too_large(most: int) -> Problem:
    return Problem(413, "too-large", f"Expected a body of at most {most:,} bytes, found more.")
