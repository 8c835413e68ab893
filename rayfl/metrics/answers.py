"""How near a generated answer is to the one that a data set has."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """Returns a text's words in lower case: letters and digits, without signs.

    Of ASCII texts they are those of the package ``rouge-score`` without its stemmer, which also cuts words at letters
    with accents.
    """
    return _WORD.findall(text.lower())


def rouge_l(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Returns ROUGE-L, the F1 score of the longest common subsequence; 0 if one of the two is empty.

    Args:
        answer: words of the generated text.
        reference: words of the text that it is compared with.

    References:
        Lin: ROUGE: A Package for Automatic Evaluation of Summaries, ACL workshop 2004, section 3.1 (with beta = 1).
    """
    common = _longest_common(answer, reference)
    return 2 * common / (len(answer) + len(reference)) if common else 0.0


def _longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence."""
    before = [0] * (len(second) + 1)
    for one in first:
        row = [0]
        for place, other in enumerate(second):
            row.append(before[place] + 1 if one == other else max(before[place + 1], row[place]))
        before = row
    return before[-1]
