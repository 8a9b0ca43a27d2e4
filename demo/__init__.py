"""cbmir.demo: the runtime in a browser, by Gradio. Nothing leaves the machine that it runs on.

::

    serving.serve        a socket, the server, a folder for uploads that ends with it
      app.build_app      the page and its events
        study            one analysed image in one browser session, and its evidence pictures
        rendering        findings, neighbours and messages as escaped HTML
        examples, theme
"""

import os

from cbmir.errors import require

# Both are read when gradio is imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
require("gradio", "demo")

from cbmir.demo.app import build_app  # noqa: E402 - after the settings above
from cbmir.demo.serving import serve  # noqa: E402

__all__ = ["build_app", "serve"]
