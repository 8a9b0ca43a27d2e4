"""Logs as JSON on stderr, one line per event: a short text, and fields that name requests and jobs, never patients.

Messages from other libraries may quote an image, so only their place is logged; for exceptions also the type.
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
    """A formatter that writes each record as a line of JSON; `log.info("text", extra=fields(…))` adds fields to it."""

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
    """Make the `extra` of a logging call for `JsonFormatter`."""
    return {"fields": about}


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return the parts of an exception that may be logged: its type, and where it was raised, innermost frame last."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    places = [f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": type(error).__name__, "at": places}


def what_failed(error: BaseException) -> str:
    """Describe an error: cbmir's by its message, any other by type and place, because its message may quote a tag."""
    if isinstance(error, CbmirError):
        return str(error)
    about = error_fields(error)
    return " at ".join([f"unexpected {about['error']}", *about["at"][-1:]])


def log_as_json() -> None:
    """Let the root logger write lines of JSON, including Python's warnings."""
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
