"""cbmir.demo: the runtime in a browser, by Gradio. Nothing leaves the machine that it runs on.

`server.serve` runs `asgi.create_app`, which bounds what visitors send and mounts the page (`app`, `page`, `static/`).
The page asks `backend.Backend`, which keeps `sessions` and answers with parts of the page as escaped HTML.
"""

import os

from cbmir.errors import require

# Both are read when gradio is imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
require("gradio", "demo")

from cbmir.demo.app import build_app  # noqa: E402 - after the settings above
from cbmir.demo.server import load_login, serve  # noqa: E402

__all__ = ["build_app", "load_login", "serve"]
