"""Logs as JSON on stderr, one line per event: short texts, and fields that name requests and jobs, never patients.

Messages of other libraries may quote an image, so only their place is logged; of exceptions, the type and place.
"""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any

from cbmir.errors import CbmirError

log = logging.getLogger("cbmir.serving")
pacs_log = logging.getLogger("cbmir.pacs")


class JsonFormatter(logging.Formatter):
    """`log.info("text", extra=fields(…))` adds fields to a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if record.name.split(".")[0] in ("cbmir", "uvicorn"):
            line["message"] = record.getMessage()
        else:
            line["message"] = "(not shown: it may quote an image)"
            line["at"] = [f"{record.module}:{record.lineno}"]
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line |= error_fields(record.exc_info[1])
        return json.dumps(line)


def fields(**about: Any) -> dict[str, dict[str, Any]]:
    """The `extra` of a logging call, as `JsonFormatter` takes it."""
    return {"fields": about}


def error_fields(error: BaseException) -> dict[str, Any]:
    """The part of an exception that may be logged: its type, and where it was raised, the place itself last."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    places = [f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": type(error).__name__, "at": places}


def what_failed(error: BaseException) -> str:
    """An error of cbmir's in its own words; another, whose words may quote a tag, by its type and place."""
    if isinstance(error, CbmirError):
        return str(error)
    about = error_fields(error)
    return " at ".join([f"unexpected {about['error']}", *about["at"][-1:]])


def log_as_json() -> None:
    """Let the root logger write lines of JSON, warnings of Python's among them."""
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
