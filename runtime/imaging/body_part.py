"""Recognition of the chest and of other body parts in free text, in the languages that devices are set to.

BodyPartExamined should hold one of DICOM's defined terms (PS3.16 annex L), but it holds what a technician or a vendor
wrote: other languages, letters damaged by a wrong character set, a side or a view before or after the word.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Literal

Part = Literal["chest", "other"]

_CHEST = """
    CHEST THORAX LUNG CXR PULMO
    TORAX PECHO PULMON PULMONES PEITO PULMAO PULMOES TORACE PETTO POLMONE POLMONI POITRINE POUMON
    BRUST BRUSTKORB LUNGE LUNGEN BORST BORSTKAS LONGEN BRÖSTKORG LUNGOR BRYST BRYSTKASSE KEUHKOT
    KLATKA PŁUCA HRUDNÍK TORAKS GÖĞÜS AKCIĞER ГРУДНАЯ ГРУДЬ ЛЕГКИЕ 胸部 흉부
"""
#: English and DICOM's own terms, Spanish, Portuguese, Italian, French, German, Dutch, Japanese. Heart, mediastinum,
#: pleura and ribs are left out: their codes count as the chest, so the words are only a reason to warn.
#: COU is left out because it is a neck in French, but a ward in English. A plural -s is an affix.
_OTHER = """
    HEAD SKULL CRANIUM BRAIN FACE FACIAL SINUS SINUSES ORBIT EYE EAR NOSE NASAL MANDIBLE MAXILLA JAW TEETH TOOTH DENTAL
    PANORAMIC PANORÁMICA PANORAMIQUE ORTHOPANTOMOGRAM OPG TMJ TMJOINT MASTOID ZYGOMA CAVUM
    CABEZA CRÁNEO CARA SENOS OJO OÍDO NARIZ MANDÍBULA MAXILAR DIENTE DENTE CABEÇA CRÂNIO SEIOS OLHO OUVIDO
    TESTA VISO NASO DENTI MASCELLA MANDIBOLA TÊTE CRÂNE VISAGE NEZ MÂCHOIRE DENT OREILLE
    KOPF SCHÄDEL SCHAEDEL GESICHT NASE KIEFER ZAHN ZÄHNE ZAEHNE AUGE NNH NASENNEBENHÖHLEN HOOFD SCHEDEL KAAK GEBIT
    NECK LARYNX THYROID CUELLO PESCOÇO COLLO HALS NEK
    SPINE CSPINE TSPINE LSPINE SSPINE TLSPINE LSSPINE CTSPINE VERTEBRA VERTEBRAE CERVICAL LUMBAR SACRUM SACRAL COCCYX
    LUMBOSACRAL THORACOLUMBAR CERVICOTHORACIC
    COLUMNA COLUNA SACRO COCCIX CÓCCIX COLONNA RACHIDE LOMBARE CERVICALE RACHIS COLONNE LOMBAIRE
    WIRBELSÄULE WIRBELSAEULE WIRBEL HWS BWS LWS KREUZBEIN STEISSBEIN WERVELKOLOM
    ABDOMEN ABDOMINAL ABD KUB STOMACH COLON BOWEL LIVER KIDNEY BLADDER URETER URETHRA PANCREAS GALLBLADDER ESOPHAGUS
    OESOPHAGUS DUODENUM RECTUM
    ABDOME VIENTRE BARRIGA ESTÓMAGO HÍGADO RIÑÓN RIÑONES VEJIGA ESTÔMAGO FÍGADO ADDOME STOMACO FEGATO RENE RENI
    VENTRE ESTOMAC FOIE REIN VESSIE BAUCH BAUCHRAUM MAGEN LEBER NIERE NIEREN BLASE BUIK
    PELVIS PELVIC PELV HIP CADERA QUADRIL BACIA PELVE BACINO ANCA ANCHE BASSIN HANCHE
    BECKEN HÜFTE HUEFTE HÜFTGELENK HUEFTGELENK BEKKEN HEUP
    SHOULDER CLAVICLE SCAPULA STERNUM ACJOINT HOMBRO CLAVÍCULA ESCÁPULA OMÓPLATO ESTERNÓN OMBRO OMOPLATA ESTERNO
    SPALLA SPALLE CLAVICOLA SCAPOLA STERNO ÉPAULE CLAVICULE OMOPLATE
    SCHULTER SCHLÜSSELBEIN SCHLUESSELBEIN SCHULTERBLATT SCHOUDER SLEUTELBEEN
    ARM UPPERARM FOREARM HUMERUS ELBOW RADIUS ULNA WRIST HAND FINGER THUMB CARPAL SCAPHOID EXTREMITY EXTREMITIES
    EXM JOINT BONE SKELETON
    BRAZO ANTEBRAZO HÚMERO CODO MUÑECA MANO DEDO PULGAR EXTREMIDAD BRAÇO ANTEBRAÇO ÚMERO COTOVELO PUNHO MÃO POLEGAR
    BRACCIO AVAMBRACCIO OMERO GOMITO POLSO MANI DITO DITA POLLICE BRAS AVANTBRAS COUDE POIGNET MAIN DOIGT POUCE
    OBERARM UNTERARM ELLENBOGEN HÄNDE HAENDE HANDGELENK DAUMEN EXTREMITÄT ELLEBOOG POLS VINGER DUIM
    LEG THIGH FEMUR KNEE PATELLA TIBIA FIBULA ANKLE FOOT FEET TOE HEEL CALCANEUS
    PIERNA MUSLO RODILLA RÓTULA TOBILLO PIE TALÓN CALCÁNEO PERNA COXA JOELHO TORNOZELO
    GAMBA FEMORE COSCIA GINOCCHIO GINOCCHIA CAVIGLIA PIEDE PIEDI JAMBE CUISSE GENOU GENOUX CHEVILLE PIED ORTEIL
    BEIN OBERSCHENKEL UNTERSCHENKEL KNIE KNIEGELENK FUSS FÜSSE FUESSE SPRUNGGELENK ZEH ZEHE ZEHEN FERSE VOET ENKEL
    BREAST MAMA MAMMA MAMMELLA SENO SEIN WHOLEBODY PHANTOM 腹部 骨盤
"""
#: Other body parts only with the accent: PE is a pulmonary embolism in English.
_ACCENTED = ("PÉ", "PÉS")
#: Affixes joined to a word without a space: sides, views, devices, the plural.
_AFFIXES = "L R LT RT LEFT RIGHT BI BILAT BOTH DX SX LI RE PA AP LAT RX XR CR PORT PORTABLE S"
_MOST = 64  # characters of the longest text that is examined; a valid value has at most 16
_FEWEST = 3  # intact letters that a damaged word needs
_LETTERS = str.maketrans({"Ł": "L", "Ø": "O", "Æ": "AE", "Œ": "OE"})  # have no accent to remove
_DAMAGE = re.compile(r"[?0-9#_*]|[^\x00-\x7f]")
_WORD = re.compile(r"(?:[A-Z?]|[^\x00-\x7f])+")
_JOINED = re.compile(rf"{_WORD.pattern}(?:[0-9#_*]+{_WORD.pattern})*")  # by separators or damaged letters


def _plain(text: str) -> str:
    """Return a text in capitals, without accents."""
    parted = unicodedata.normalize("NFKD", text.upper().translate(_LETTERS))
    return "".join(letter for letter in parted if not unicodedata.combining(letter))


_PARTS: dict[str, Part] = {
    **{_plain(word): "other" for word in _OTHER.split()},
    **{_plain(word): "chest" for word in _CHEST.split()},
}
_MEMBERS = sorted([*_PARTS, *_AFFIXES.split()], key=len, reverse=True)


@lru_cache(maxsize=1024)
def named_parts(text: str) -> frozenset[Part]:
    """Return what a text names: the chest, another part, both, or nothing known (empty)."""
    if len(text) > _MOST:
        return frozenset()
    named = set[Part]()
    for joined in _JOINED.findall(_decoded(text).upper()):
        named |= {part for word in _WORD.findall(joined) if (part := _part(word))} or _only(_like(joined))
    return frozenset(named)


def _decoded(text: str) -> str:
    """Decode UTF-8 that was read as Latin-1, the standard's encoding for this tag."""
    try:
        return text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return text


def _part(word: str) -> Part | None:
    """Return what a word names. It may be several words written as one: CHESTABDOMEN is "other"."""
    if unicodedata.normalize("NFC", word) in _ACCENTED:
        return "other"
    named = _composed_of(_plain(word))
    if named is None:
        named = _only(_like(word))
    return "other" if "other" in named else "chest" if named else None


def _composed_of(word: str) -> frozenset[Part] | None:
    """Split a word into known words and affixes and return what these name; None if anything is left over."""
    named: dict[int, frozenset[Part]] = {0: frozenset()}  # by the position up to which the word is known
    for start in range(len(word)):
        for member in _MEMBERS if start in named else ():
            if word.startswith(member, start):
                part = {_PARTS[member]} if member in _PARTS else set()
                named.setdefault(start + len(member), named[start] | part)
    return named.get(len(word))


def _only(named: frozenset[Part]) -> frozenset[Part]:
    """Return nothing if a damaged word may name either part."""
    return named if len(named) == 1 else frozenset()


def _like(word: str) -> frozenset[Part]:
    """Return what the known words name that differ from a word only in letters that may be damaged."""
    pattern, damaged = _DAMAGE.subn(".?", word)
    if not damaged or len(word) - damaged < _FEWEST:
        return frozenset()
    return frozenset(part for known, part in _PARTS.items() if re.fullmatch(pattern, known))
