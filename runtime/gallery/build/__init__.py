"""Build a gallery from a manifest, in one piece or in shards that are merged, and add to one."""

from typing import TYPE_CHECKING

from cbmir.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from cbmir.runtime.gallery.build.build import add_to_gallery, build_gallery
    from cbmir.runtime.gallery.build.merge import build_on_ray, merge_galleries
    from cbmir.runtime.gallery.build.work import IndexReport

# Lazy, since `maintenance` imports `build.shard`, and the other modules here import `maintenance`.
__getattr__ = lazy_imports(
    __name__,
    {
        "IndexReport": "cbmir.runtime.gallery.build.work",
        "add_to_gallery": "cbmir.runtime.gallery.build.build",
        "build_gallery": "cbmir.runtime.gallery.build.build",
        "build_on_ray": "cbmir.runtime.gallery.build.merge",
        "merge_galleries": "cbmir.runtime.gallery.build.merge",
    },
)

__all__ = ["IndexReport", "add_to_gallery", "build_gallery", "build_on_ray", "merge_galleries"]
