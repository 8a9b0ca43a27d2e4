"""cbmir.demo: the runtime in a browser, built with Gradio. Nothing leaves the machine that serves it.

`build(finder)` returns the page as Gradio blocks that can be launched anywhere; `serve` runs them in a server that
never contacts other machines. `desk` holds the actions, `page` the components, and `app` connects them.
"""

import os
from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from cbmir.demo.app import build
    from cbmir.demo.server import load_login, serve

# Gradio reads all of these when it is imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(2**62)  # it would summarise all response times after each answer

# Lazy, because `cbmir query --report` imports `cbmir.demo.report` without Gradio.
__getattr__ = lazy_imports(
    __name__,
    {"build": "cbmir.demo.app", "load_login": "cbmir.demo.server", "serve": "cbmir.demo.server"},
    needs=("gradio", "demo"),
)

__all__ = ["build", "load_login", "serve"]
