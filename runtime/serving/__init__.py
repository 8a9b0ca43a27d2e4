"""The runtime behind HTTP: `create_app` makes the application, `serve` runs it.

Every request passes, from the outside in, `security.SecurityHeaders`, `telemetry.Observer`, `security.Guard`, a slot of
`limits.RequestLimiter`, and `service.FinderService`, which answers it in a thread. For research, not for diagnosis.
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
