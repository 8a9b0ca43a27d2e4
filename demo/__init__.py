"""cbmir.demo: the runtime in a browser, by Gradio. Nothing leaves the machine that it runs on.

::

    serving.serve          a socket, the server, a folder for uploads that ends with it
      login                an optional name and password before everything
      files                scripts, thumbnails by id, the map
      app.build_app        a shell of our own, and a channel on which it asks and is answered
        page               what the shell shows before anything is asked; static/ has its markup, scripts and styles
        room.Room          what is asked, and what is answered
          uploads, study, sessions, controls
          messages, findings, wall, report, card_page     parts of answers, as escaped HTML
"""

import os

from cbmir.errors import require

# Both are read when gradio is imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
require("gradio", "demo")

from cbmir.demo.app import build_app  # noqa: E402 - after the settings above
from cbmir.demo.security import Login  # noqa: E402
from cbmir.demo.serving import serve  # noqa: E402

__all__ = ["Login", "build_app", "serve"]
