"""Encoders, which map a grey image to a feature map: those of torchvision and timm, and published ones for X-rays."""

from cbmir.training.encoders.encoder import build_encoder, encoder_of, grey_range_of, own_input
from cbmir.training.encoders.grey_range import GreyRange
from cbmir.training.encoders.weights import load_weights

__all__ = ["GreyRange", "build_encoder", "encoder_of", "grey_range_of", "load_weights", "own_input"]
