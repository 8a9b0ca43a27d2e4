"""cbmir.demo: the runtime in a browser, by Gradio. Nothing leaves the machine that it runs on.

`server.serve` runs `asgi.create_app`, which bounds what visitors send and mounts the page (`app`, `page`, `static/`).
The page asks `backend.Backend`, which keeps `sessions` and answers with parts of the page as escaped HTML.
"""

import os
from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from cbmir.demo.app import build_app
    from cbmir.demo.server import load_login, serve

# Both are read when gradio is imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# `cbmir query --report` takes `report` from here, without gradio.
__getattr__ = lazy_imports(
    __name__,
    {"build_app": "cbmir.demo.app", "load_login": "cbmir.demo.server", "serve": "cbmir.demo.server"},
    needs=("gradio", "demo"),
)

__all__ = ["build_app", "load_login", "serve"]
