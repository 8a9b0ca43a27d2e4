"""Label agreement: counts and weights, computed by hand."""

from __future__ import annotations

import math

import pytest

from cbmir.runtime.gallery.entry import Entry, Hit
from cbmir.runtime.results import LabelAgreement, agreement, chance


def hit(distance: float, **labels: int | None) -> Hit:
    return Hit(Entry("x", "/x.png", "p", labels=dict(labels)), distance, 1 - distance**2 / 2)


def test_counts_are_over_all_neighbours_and_shares_over_labelled_ones() -> None:
    hits = [hit(0.0, Mass=1, Nodule=0), hit(0.7, Mass=0, Nodule=None), hit(1.4, Mass=-1), hit(0.7, Mass=None, Nodule=0)]
    mass, nodule, hernia = agreement(hits, {"Mass": None, "Nodule": 0.1, "Hernia": 0.5}, sigma=0.7)
    near, middle, far = 1.0, math.exp(-0.5), math.exp(-2.0)  # docs/method.md: exp(-d^2 / 2 sigma^2)
    assert (mass.positive, mass.negative, mass.uncertain, mass.unknown) == (1, 1, 1, 1)
    assert mass.share == pytest.approx((near + far) / (near + middle + far))
    assert nodule == LabelAgreement("Nodule", 0, 2, 0, 2, 0.0, 0.1)
    assert hernia == LabelAgreement("Hernia", 0, 0, 0, 4, None, 0.5)


def test_a_nearer_neighbour_weighs_more() -> None:
    near, far = hit(0.2, Mass=1), hit(1.2, Mass=0)
    (with_near,) = agreement([near, far], {"Mass": None}, sigma=0.7)
    (with_far,) = agreement([hit(0.2, Mass=0), hit(1.2, Mass=1)], {"Mass": None}, sigma=0.7)
    assert with_near.share is not None
    assert with_far.share is not None
    assert with_near.share > 0.5 > with_far.share
    assert with_near.share + with_far.share == pytest.approx(1)


def test_the_farthest_neighbours_still_count() -> None:
    (mass,) = agreement([hit(2.0, Mass=1), hit(2.0, Mass=0)], {"Mass": None}, sigma=0.7)
    assert mass.share == pytest.approx(0.5)


def test_without_neighbours_there_is_no_agreement() -> None:
    assert agreement([], {"Mass": None}, sigma=0.7) == ()


def test_an_entry_without_labels_is_not_counted() -> None:
    (mass,) = agreement([Hit(Entry("x", "/x.png", "p"), 0.1, 0.99)], {"Mass": None}, sigma=0.7)
    assert mass == LabelAgreement("Mass", 0, 0, 0, 1, None)


def test_above_chance_by_hand() -> None:
    """Exact binomial: 2 or more of 3 draws hit with probability 3 * 0.04 * 0.8 + 0.008 = 0.104 if one does with 0.2."""
    assert chance(2, 3, 0.2) == pytest.approx(0.104)
    assert chance(3, 3, 0.2) == pytest.approx(0.008)
    assert chance(0, 3, 0.2) == 1
    assert (chance(1, 3, 0.0), chance(3, 3, 1.0)) == (0, 1)
    assert chance(1100, 2000, 0.5) == pytest.approx(4.3e-6, rel=0.05)  # z = 4.45 with continuity
    two, three = ([hit(0.5, Mass=1)] * n + [hit(0.5, Mass=0)] * (3 - n) + [hit(0.5, Mass=None)] for n in (2, 3))
    assert [one.above_chance for hits in (two, three) for one in agreement(hits, {"Mass": 0.2}, 0.7)] == [False, True]


def test_an_uncertain_neighbour_counts_as_positive() -> None:
    (mass,) = agreement([hit(0.5, Mass=-1)] * 3, {"Mass": 0.2}, 0.7)
    assert (mass.gallery, mass.above_chance) == (0.2, True)
    (mass,) = agreement([hit(0.5, Mass=1)] * 3, {"Mass": None}, 0.7)
    assert not mass.above_chance
