"""A short report for each phantom, worded like a radiologist's; sides are the patient's."""

from __future__ import annotations

import numpy as np

from cbmir.training.phantom.patients import BOTH, UPPER, Phantom, PhantomFinding

NORMAL = "No acute cardiopulmonary abnormality."

# Equivalent sentences for FINDINGS, and phrases for IMPRESSION.
_SENTENCES: dict[str, tuple[str, ...]] = {
    "Atelectasis": ("{Degree} atelectasis at the {side} base with a raised hemidiaphragm.",
                    "Plate-like opacities of {degree} {side} lower zone atelectasis, with volume loss."),
    "Cardiomegaly": ("The heart is enlarged ({degree} cardiomegaly), the cardiothoracic ratio is above 0.5.",
                     "{Degree} cardiomegaly."),
    "Effusion": ("{Amount} {side} pleural effusion with a meniscus{reach}.",
                 "There is a {amount} {side} pleural effusion{reach}."),
    "Mass": ("{cm} cm mass in the {side} {zone} zone.", "A mass of {cm} cm projects over the {side} {zone} zone."),
    "Nodule": ("{mm} mm nodule in the {side} {zone} zone.",
               "A round nodule of {mm} mm lies in the {side} {zone} zone."),
    "Pneumothorax": ("{Amount} {side} pneumothorax with a visible pleural line.",
                     "There is a {amount} {side} apical and lateral pneumothorax."),
    "Consolidation": ("{Degree} consolidation in the {side} {zone} zone with air bronchograms.",
                      "Patchy {degree} consolidation of the {side} {zone} zone."),
    "Edema": ("{Degree} bilateral perihilar haze with septal lines: pulmonary edema.",
              "{Degree} pulmonary edema, perihilar on both sides."),
    "Emphysema": ("Hyperlucent lungs with flattened diaphragms: {degree} emphysema.",
                  "{Degree} emphysema with hyperinflation and few peripheral vessels."),
    "Pleural_Thickening": ("{Degree} {side} pleural thickening {where}.",
                           "There is {degree} pleural thickening on the {side}, {where}."),
}  # fmt: skip
_IMPRESSIONS = {
    "Atelectasis": "{Side} basal atelectasis", "Cardiomegaly": "Cardiomegaly", "Effusion": "{Side} pleural effusion",
    "Mass": "{Side} lung mass, further work-up advised", "Nodule": "{Side} lung nodule",
    "Pneumothorax": "{Side} pneumothorax", "Consolidation": "{Side} {zone} zone consolidation",
    "Edema": "Pulmonary edema", "Emphysema": "Emphysema", "Pleural_Thickening": "{Side} pleural thickening",
}  # fmt: skip
_CHANGES = {
    "new": "New since the previous study.", "larger": "More marked than in the previous study.",
    "smaller": "Less marked than in the previous study.", "unchanged": "Unchanged since the previous study.",
}  # fmt: skip
_CLEAR = (
    "The lungs are clear. Heart size is normal. The costophrenic angles are sharp.",
    "Clear lungs. Normal heart and mediastinum. Both costophrenic angles are free.",
    "Heart and mediastinum are of normal size and shape. No focal opacity in the lungs. Normal bones.",
)


def report(phantom: Phantom) -> str:
    """Return `FINDINGS: … IMPRESSION: …`, which names exactly the findings that are present."""
    rng = np.random.default_rng([phantom.seed, 1])
    if not phantom.findings:
        return f"FINDINGS: {rng.choice(_CLEAR)} IMPRESSION: {NORMAL}"
    sentences, impressions = [], []
    for finding in phantom.findings:
        words = _words(finding)
        sentences.append(str(rng.choice(_SENTENCES[finding.label])).format(**words))
        if finding.change:
            sentences.append(_CHANGES[finding.change])
        impressions.append(_IMPRESSIONS[finding.label].format(**words) + ".")
    return f"FINDINGS: {' '.join(sentences)} IMPRESSION: {' '.join(impressions)}"


def _words(finding: PhantomFinding) -> dict[str, str]:
    side = "bilateral" if finding.side == BOTH else finding.side
    step = min(int(finding.severity * 3), 2)
    degree, amount = ("mild", "moderate", "severe")[step], ("small", "moderate", "large")[step]
    words = {"side": side, "zone": finding.zone, "degree": degree, "amount": amount}
    words["reach"] = (" blunting the costophrenic angle", "", " reaching the middle zone")[step]
    words["where"] = "at the apex" if finding.zone == UPPER else "along the lateral wall"
    if finding.label in ("Mass", "Nodule"):
        words |= {"cm": f"{finding.diameter_cm:.1f}", "mm": f"{finding.diameter_cm * 10:.0f}"}
    return words | {word.capitalize(): text.capitalize() for word, text in words.items() if word not in ("cm", "mm")}
