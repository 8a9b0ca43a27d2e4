"""Losses. `LOSSES` maps the names in `cbmir train --loss` and in the benchmark's methods to classes.

A loss is a module called with (head, pooled [N, D], embedding [N, D] of unit length, targets [N, C]); targets are
1, 0 or NaN (unknown or uncertain, which adds no loss). It returns the mean over the batch as a float32 scalar.
"""

from __future__ import annotations

from cbmir.choices import TRAINING_LOSSES
from cbmir.training.losses.binary_codes import DSHLoss, OSDHLoss, SDHLoss
from cbmir.training.losses.proxy import BCELoss, MLProxyNCALoss, MultiLabelProxyLoss, ProxyAnchorLoss
from cbmir.training.losses.soft_ndcg import SoftNDCGLoss

LOSSES = {
    "proxy": MultiLabelProxyLoss,
    "bce": BCELoss,
    "ml-proxy-nca": MLProxyNCALoss,
    "proxy-anchor": ProxyAnchorLoss,
    "soft-ndcg": SoftNDCGLoss,
    "osdh": OSDHLoss,
    "sdh": SDHLoss,
    "dsh": DSHLoss,
}
#: Losses for binary codes, which only the benchmark uses; such models cannot be exported.
HASHING_LOSSES = ("osdh", "sdh", "dsh")
#: Losses with a fixed number of proxies per class: one, or none.
ONE_PROXY_LOSSES = tuple(name for name, unused in TRAINING_LOSSES.items() if "proxies_per_class" in unused)
#: Losses with the paper's class weights, which make rare findings count as much as common ones.
WEIGHTED_LOSSES = ("proxy", "soft-ndcg")

__all__ = [
    "HASHING_LOSSES", "LOSSES", "ONE_PROXY_LOSSES", "WEIGHTED_LOSSES", "BCELoss", "DSHLoss", "MLProxyNCALoss",
    "MultiLabelProxyLoss", "OSDHLoss", "ProxyAnchorLoss", "SDHLoss", "SoftNDCGLoss",
]  # fmt: skip
