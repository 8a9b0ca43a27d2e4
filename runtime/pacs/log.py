"""What the node logs: a short text, and fields that name jobs and AE titles, never patients."""

from __future__ import annotations

import logging
from typing import Any

from cbmir.errors import CbmirError
from cbmir.runtime.logs import error_fields

log = logging.getLogger("cbmir.pacs")


def fields(**about: Any) -> dict[str, dict[str, Any]]:
    """The `extra` of a logging call, as `cbmir.runtime.logs.JsonFormatter` takes it."""
    return {"fields": about}


def what_failed(error: BaseException) -> str:
    """An error of cbmir's in its own words; an unforeseen one, whose words may quote a tag, by its type and place."""
    if isinstance(error, CbmirError):
        return str(error)
    about = error_fields(error)
    return " at ".join([f"unexpected {about['error']}", *about["at"][-1:]])
