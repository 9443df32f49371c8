"""Decides from a distribution's metadata whether its source may train the demo model.

The first of these that is present decides: License-Expression (SPDX), License classifiers, the
License field. Permissive means a license on the list below and nothing else: an unknown name, a
copyleft one, a proprietary one or silence leaves the distribution out, with the reason recorded.
"""

import re
from dataclasses import dataclass
from email.message import Message

SPDX = {
    "0BSD", "AFL-3.0", "APACHE-2.0", "BLUEOAK-1.0.0", "BSD-2-CLAUSE", "BSD-3-CLAUSE",
    "BSD-3-CLAUSE-OPEN-MPI", "BSL-1.0", "CC0-1.0", "CNRI-PYTHON", "HPND", "ISC", "MIT", "MIT-0",
    "MIT-CMU", "NCSA", "PSF-2.0", "PYTHON-2.0", "PYTHON-2.0.1", "UNLICENSE", "ZLIB", "ZPL-2.1",
}  # fmt: skip
EXCEPTIONS = {"LLVM-EXCEPTION"}

CLASSIFIERS = {
    "Apache Software License",
    "BSD License",
    "Boost Software License 1.0 (BSL-1.0)",
    "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication",
    "Historical Permission Notice and Disclaimer (HPND)",
    "ISC License (ISCL)",
    "MIT License",
    "MIT No Attribution License (MIT-0)",
    "Python Software Foundation License",
    "The Unlicense (Unlicense)",
    "Zero-Clause BSD (0BSD)",
    "zlib/libpng License",
}

# The License field is free text: these spellings are accepted, after lower case and single spaces.
FIELDS = {
    "3-clause bsd", "3-clause bsd license", "apache", "apache 2", "apache 2.0",
    "apache 2.0 license", "apache license", "apache license 2.0", "apache license, version 2.0",
    "apache software license", "apache software license 2.0", "bsd", "bsd 2-clause",
    "bsd 3-clause", "bsd 3-clause license", "bsd license", "bsd-3", "isc", "isc license", "mit",
    "mit license", "new bsd", "psf", "psf license", "python software foundation license",
    "the mit license", "the mit license (mit)", "the unlicense (unlicense)", "zlib",
}  # fmt: skip

RESTRICTED = re.compile(r"\b[AL]?GPL|General Public License|Mozilla|MPL|EULA|Proprietary", re.I)


@dataclass(frozen=True)
class Decision:
    permissive: bool
    license: str  # the words in the metadata that decided, shortened
    reason: str  # empty when permissive


def decide(metadata: Message) -> Decision:
    """Whether the metadata of one distribution states a permissive license, and why not."""
    expression = str(metadata.get("License-Expression") or "").strip()
    if expression:
        return _decision(_permissive_expression(expression), expression, "not on the SPDX list")
    field = " ".join(str(metadata.get("License") or "").split())
    classifiers = [
        entry.split(" :: ")[-1]
        for entry in metadata.get_all("Classifier") or []
        if entry.startswith("License ::") and entry != "License :: OSI Approved"
    ]
    if classifiers:
        words = "; ".join(classifiers)
        if len(field) <= 100 and RESTRICTED.search(field):
            return Decision(False, f"{words}; {field}", "the License field disagrees")
        allowed = all(name in CLASSIFIERS for name in classifiers)
        return _decision(allowed, words, "a classifier is not on the list")
    if not field:
        return Decision(False, "", "no license stated")
    allowed = field.lower() in FIELDS or _permissive_expression(field)
    return _decision(allowed, field[:100], "the License field is not on the list")


def _decision(allowed: bool, words: str, reason: str) -> Decision:
    return Decision(allowed, words, "" if allowed else reason)


def _permissive_expression(expression: str) -> bool:
    """Evaluate an SPDX expression: OR needs one permissive side, AND both; bad syntax is False."""
    tokens = re.findall(r"[()]|[^\s()]+", expression.upper())

    def either() -> bool:
        allowed = both()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            allowed = both() or allowed
        return allowed

    def both() -> bool:
        allowed = term()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            allowed = term() and allowed
        return allowed

    def term() -> bool:
        token = tokens.pop(0) if tokens else ""
        if token == "(":
            allowed = either()
            return bool(tokens) and tokens.pop(0) == ")" and allowed
        allowed = token in SPDX
        if tokens and tokens[0] == "WITH":
            tokens.pop(0)
            allowed = bool(tokens) and tokens.pop(0) in EXCEPTIONS and allowed
        return allowed

    return either() and not tokens
