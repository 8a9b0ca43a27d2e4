"""Losses, one a file. `LOSSES` is where a name of `cbmir train --loss` becomes a class.

A loss is a module called with (head, pooled [N, D], embedding [N, D] of unit length, targets [N, C]); targets are
1, 0 or NaN (unknown or uncertain: no loss). It returns the mean over the batch as a float32 scalar.
"""

from __future__ import annotations

from cbmir.training.losses.bce import BCELoss
from cbmir.training.losses.ml_proxy_nca import MLProxyNCALoss
from cbmir.training.losses.proxy import MultiLabelProxyLoss

LOSSES = {"proxy": MultiLabelProxyLoss, "bce": BCELoss, "ml-proxy-nca": MLProxyNCALoss}

__all__ = ["LOSSES", "BCELoss", "MLProxyNCALoss", "MultiLabelProxyLoss"]
