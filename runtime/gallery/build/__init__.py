"""Building a gallery: from a manifest, whole or in shards that are merged, and adding to one."""

from cbmir.runtime.gallery.build.build import add_to_gallery, build_gallery
from cbmir.runtime.gallery.build.merge import build_on_ray, merge_galleries
from cbmir.runtime.gallery.build.work import IndexReport

__all__ = ["IndexReport", "add_to_gallery", "build_gallery", "build_on_ray", "merge_galleries"]
