"""cbmir.demo: the runtime in a browser, by Gradio. Nothing leaves the machine that it runs on.

`build(finder)` gives the page as Gradio blocks, to launch anywhere; `serve` runs them in a server that keeps them to
this machine. `desk` is what can be done, `page` how it looks, and `app` wires them.
"""

import os
from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from cbmir.demo.app import build
    from cbmir.demo.server import load_login, serve

# All are read when gradio is imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(2**62)  # after each answer it would sum up all times

# `cbmir query --report` takes `report` from here, without gradio.
__getattr__ = lazy_imports(
    __name__,
    {"build": "cbmir.demo.app", "load_login": "cbmir.demo.server", "serve": "cbmir.demo.server"},
    needs=("gradio", "demo"),
)

__all__ = ["build", "load_login", "serve"]
