"""Descriptions of patients, their studies and findings. Nothing is drawn, so there are thousands per second.

Findings depend on each other through a noisy-or network (Pearl 1988), the table `CAUSES`. A finding is present if its
own cause or that of a present parent acts: `P = 1 - (1 - alone) * prod(1 - given[parent])`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from cbmir.labels import NIH_14

RIGHT, LEFT, BOTH = "right", "left", "both"
UPPER, MIDDLE, LOWER = "upper", "middle", "lower"


@dataclass(frozen=True)
class Cause:
    """The cause of a finding: its own probability, added ones given other findings, and whether it is chronic."""

    label: str
    alone: float
    given: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    chronic: bool = False
    sides: tuple[str, ...] = (RIGHT, LEFT)
    zones: tuple[str, ...] = ("",)


# Parents come before their children, and chronic findings before acute ones, so that redrawing the acute ones given the
# chronic ones keeps every prevalence for any number of studies.
CAUSES = (
    Cause("Cardiomegaly", 0.125, chronic=True, sides=(BOTH,)),
    Cause("Emphysema", 0.085, chronic=True, sides=(BOTH,)),
    Cause("Mass", 0.075, {"Emphysema": 0.15}, chronic=True, zones=(UPPER, MIDDLE, LOWER)),
    Cause("Nodule", 0.09, {"Mass": 0.25}, chronic=True, zones=(UPPER, MIDDLE, LOWER)),
    Cause("Pleural_Thickening", 0.075, {"Emphysema": 0.10}, chronic=True, zones=(UPPER, MIDDLE)),
    Cause("Edema", 0.03, {"Cardiomegaly": 0.45}, sides=(BOTH,)),
    Cause("Effusion", 0.055, {"Cardiomegaly": 0.20, "Edema": 0.40, "Mass": 0.15}, sides=(RIGHT, LEFT, BOTH)),
    Cause("Pneumothorax", 0.065, {"Emphysema": 0.15}),
    Cause("Consolidation", 0.08, {"Effusion": 0.12}, zones=(UPPER, MIDDLE, LOWER, LOWER)),
    Cause("Atelectasis", 0.07, {"Effusion": 0.30, "Pneumothorax": 0.15, "Mass": 0.10}, zones=(LOWER,)),
)  # fmt: skip

#: The findings that phantoms show, in the order of NIH ChestX-ray14.
PHANTOM_LABELS = tuple(name for name in NIH_14 if name in {cause.label for cause in CAUSES})

# Finding -> (other finding, whether it is on the same side). Fluid compresses the lung beside it, air and fluid in the
# same pleural space would be another finding, and a mass would hide a nodule.
_BESIDE = {"Atelectasis": ("Effusion", True), "Pneumothorax": ("Effusion", False), "Nodule": ("Mass", False)}
_OTHER = {RIGHT: LEFT, LEFT: RIGHT}

_IMAGES_A_PATIENT = (0.40, 0.25, 0.15, 0.12, 0.08)  # 1 to 5
_ACUTE_STAYS = 0.6  # probability that acute findings are still present in the next study


@dataclass(frozen=True)
class PhantomFinding:
    """One finding. `severity` is in [0, 1]; `seed` keeps position and shape the same in every study."""

    label: str
    side: str
    zone: str
    severity: float
    seed: int
    change: str = ""  # since the previous study: "", "new", "larger", "smaller" or "unchanged"

    def on_side(self, side: str) -> bool:
        return self.side in (side, BOTH)

    @property
    def diameter_cm(self) -> float:
        """Diameter of a nodule (at most 3 cm) or a mass (more than 3 cm). Raises KeyError for other findings."""
        low, high = {"Nodule": (1.7, 2.9), "Mass": (3.6, 7.0)}[self.label]
        return low + (high - low) * self.severity


Findings = tuple[PhantomFinding, ...]


@dataclass(frozen=True)
class Anatomy:
    """The anatomy of a patient, the same in every study. Lengths are in image widths (about 40 cm)."""

    width: float  # of the widest lung, from the midline
    asymmetry: float  # right half minus left half
    apex: float  # y of the lung tips, from the upper edge
    base: float  # y of the right costophrenic angle
    dome: float  # rise of the diaphragm above the angle
    heart_ratio: float  # cardiothoracic ratio without disease, < 0.48
    aortic_knob: float
    fat: float  # chest wall beside the ribs
    breasts: float  # 0 = none
    bone: float  # mineral content
    ribs: float  # distance between ribs
    rib_slope: float
    stomach: float  # radius of the gas bubble, 0 = none
    seed: int  # of vessels and texture


@dataclass(frozen=True)
class Phantom:
    """The complete description of a synthetic radiograph; `draw` needs nothing else."""

    patient_id: str
    study: int
    anatomy: Anatomy
    findings: Findings
    view: str  # PA or AP
    breath: float  # 0 = shallow, 1 = deep
    rotation: float  # degrees
    shift: tuple[float, float]  # image widths
    scale: float
    gain: float
    offset: float
    gamma: float
    noise: float  # standard deviation, full scale 1
    collimation: float  # black border in image widths, 0 = none
    marker: str  # "L", "R" or ""
    seed: int  # of the noise

    @property
    def labels(self) -> tuple[int, ...]:
        """1 or 0 for each of PHANTOM_LABELS."""
        present = {finding.label for finding in self.findings}
        return tuple(int(name in present) for name in PHANTOM_LABELS)

    def finding(self, label: str) -> PhantomFinding | None:
        return next((finding for finding in self.findings if finding.label == label), None)


def describe(count: int, seed: int = 0) -> Iterator[Phantom]:
    """Return the first `count` phantoms of a seed, patient by patient; the n-th is the same for every count."""
    patients = (describe_patient(seed, patient) for patient in itertools.count())
    return itertools.islice(itertools.chain.from_iterable(patients), count)


def describe_patient(seed: int, patient: int) -> tuple[Phantom, ...]:
    """Return all studies of one patient (1 to 5) in chronological order: one anatomy, and findings that develop."""
    rng = np.random.default_rng([seed, patient])
    anatomy = _anatomy(rng)
    findings: Findings = ()
    studies = []
    for study in range(1 + int(rng.choice(len(_IMAGES_A_PATIENT), p=_IMAGES_A_PATIENT))):
        findings = _develop(rng, findings) if study else _sample(rng, CAUSES, ())
        studies.append(_study(rng, f"phantom-{patient:05d}", study, anatomy, findings))
    return tuple(studies)


def _anatomy(rng: np.random.Generator) -> Anatomy:
    female = rng.random() < 0.5
    habitus = rng.normal()
    return Anatomy(
        width=rng.uniform(0.335, 0.375) - 0.012 * female,
        asymmetry=rng.uniform(-0.012, 0.02),
        apex=rng.uniform(0.06, 0.10),
        base=rng.uniform(0.80, 0.86),
        dome=rng.uniform(0.075, 0.11),
        heart_ratio=rng.uniform(0.39, 0.455),
        aortic_knob=rng.uniform(0.066, 0.088),
        fat=float(np.clip(0.05 + 0.02 * habitus, 0.02, 0.10)),
        breasts=rng.uniform(0.4, 1.0) if female else 0.0,
        bone=rng.uniform(0.75, 1.2),
        ribs=rng.uniform(0.066, 0.072),
        rib_slope=rng.uniform(0.8, 1.25),
        stomach=rng.uniform(0.03, 0.06) if rng.random() < 0.7 else 0.0,
        seed=_seed(rng),
    )


def _study(rng: np.random.Generator, patient_id: str, study: int, anatomy: Anatomy, findings: Findings) -> Phantom:
    supine = rng.random() < (0.35 if any(not _CAUSE[finding.label].chronic for finding in findings) else 0.12)
    return Phantom(
        patient_id=patient_id,
        study=study,
        anatomy=anatomy,
        findings=findings,
        view="AP" if supine else "PA",
        breath=rng.uniform(0.0, 0.6) if supine else rng.uniform(0.4, 1.0),
        rotation=float(np.clip(rng.normal(0, 1.2), -3, 3)),
        shift=(rng.uniform(-0.015, 0.015), rng.uniform(-0.015, 0.015)),
        scale=rng.uniform(0.95, 1.05),
        gain=rng.uniform(0.9, 1.12),
        offset=rng.uniform(-0.03, 0.04),
        gamma=rng.uniform(0.85, 1.2),
        noise=rng.uniform(0.008, 0.022),
        collimation=rng.uniform(0.015, 0.045) if rng.random() < 0.15 else 0.0,
        marker=str(rng.choice(["L", "R", ""], p=[0.4, 0.3, 0.3])),
        seed=_seed(rng),
    )


def _sample(rng: np.random.Generator, causes: Iterable[Cause], known: Findings) -> Findings:
    """Draw findings from the causes, in order, given the known findings."""
    present = {finding.label: finding for finding in known}
    for cause in causes:
        absent = 1 - cause.alone
        for parent, probability in cause.given.items():
            absent *= 1 - probability if parent in present else 1
        if rng.random() >= absent:
            present[cause.label] = _new_finding(rng, cause, present)
    return tuple(present.values())


def _new_finding(rng: np.random.Generator, cause: Cause, present: Mapping[str, PhantomFinding]) -> PhantomFinding:
    side, zone = str(rng.choice(cause.sides)), str(rng.choice(cause.zones))
    neighbour, same_side = _BESIDE.get(cause.label, ("", True))
    if neighbour in present and present[neighbour].side != BOTH:
        side = present[neighbour].side if same_side else _OTHER[present[neighbour].side]
    return PhantomFinding(cause.label, side, zone, rng.uniform(), _seed(rng))


def _develop(rng: np.random.Generator, before: Findings) -> Findings:
    """Return the findings of the next study: chronic ones stay; acute ones all stay, or are all drawn again."""
    chronic = tuple(finding for finding in before if _CAUSE[finding.label].chronic)
    after = before if rng.random() < _ACUTE_STAYS else _sample(rng, _ACUTE, chronic)
    known = {finding.label: finding for finding in before}
    return tuple(_changed(rng, finding, known.get(finding.label)) for finding in after)


def _changed(rng: np.random.Generator, finding: PhantomFinding, before: PhantomFinding | None) -> PhantomFinding:
    if before is None:
        return replace(finding, change="new")
    step = rng.normal(0, 0.05 if _CAUSE[finding.label].chronic else 0.2)
    severity = float(np.clip(before.severity + step, 0, 1))
    moved = severity - before.severity
    change = "unchanged" if abs(moved) < 0.05 else "larger" if moved > 0 else "smaller"
    return replace(before, severity=severity, change=change)


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))


_CAUSE = {cause.label: cause for cause in CAUSES}
_ACUTE = tuple(cause for cause in CAUSES if not cause.chronic)
