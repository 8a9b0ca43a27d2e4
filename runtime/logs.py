"""Logs as JSON, a line an event, on stderr.

Only cbmir's and uvicorn's own messages are known to quote nothing of an image: of other libraries' a line says where it
was logged, not what. An exception is logged by its type and place, since its message may quote a tag.
"""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("cbmir.serving")

_KNOWN = ("cbmir", "uvicorn")


class JsonFormatter(logging.Formatter):
    """`log.info("text", extra={"fields": {…}})` adds fields to a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if record.name.split(".")[0] in _KNOWN:
            line["message"] = record.getMessage()
        else:
            line["message"] = "(not shown: it may quote an image)"
            line["at"] = [f"{record.module}:{record.lineno}"]
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line |= error_fields(record.exc_info[1])
        return json.dumps(line)


def error_fields(error: BaseException) -> dict[str, Any]:
    """The part of an exception that may be logged: its type, and where it was raised, the place itself last."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    places = [f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": type(error).__name__, "at": places}


def log_as_json() -> None:
    """Let the root logger write lines of JSON, warnings of Python's among them."""
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter())
