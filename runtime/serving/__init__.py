"""The runtime behind HTTP: `create_app` makes the application, `serve` runs it.

::

    guarding    who is let in: bearer token, host names, security headers
    observing   a request id, a line of log, a line of audit and the metrics for each request
    bodies      how much of a body is taken, and for how long
    gate        how many requests are worked on at once, and how many may wait
    answering   what is done for a request: analyse, search, embed
    cases       other patients' entries under opaque names;  case_index: the way back
    problems    every error as `application/problem+json` (RFC 9457)
    app         the routes;  server: sockets, signals, start and stop

For research, not for diagnosis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports
from cbmir.runtime.serving.settings import SHAREABLE, Settings, load_token

if TYPE_CHECKING:
    from cbmir.runtime.serving.app import create_app
    from cbmir.runtime.serving.server import serve

# Both need FastAPI.
__getattr__ = lazy_imports(
    __name__, {"create_app": "cbmir.runtime.serving.app", "serve": "cbmir.runtime.serving.server"}
)

__all__ = ["SHAREABLE", "Settings", "create_app", "load_token", "serve"]
