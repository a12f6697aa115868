"""Guessing the next tokens of a run from its own: what followed the last few of them earlier may follow again.

A guess costs a place in a batch, and saves a step where it is right. So it is never longer than what is the same before
it, nor than twice what was right of the run's last guess: guesses grow where text repeats, and stay short elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from array import array

DRAFTING: Final = 4
"""So many sequences are guessed for at once, at most: a batch of more is no cheaper per token."""
FIRST: Final = 4
"""A run's first guess is at most so long."""
LEAST: Final = 1
"""A guess after one of which nothing was right is at most so long."""
_LONGEST: Final = 24
"""Places that have so many tokens in common with the end are equally good."""


def longer(right: int) -> int:
    """How long the next guess may be where `right` tokens of the last were right."""
    return max(LEAST, 2 * right)


def guess(tokens: array[int], ngram: int, most: int) -> array[int]:
    """At most `most` tokens, as they followed an earlier place where the last `ngram` tokens or more are.

    The place is that where most tokens are the same, the last one of those; not more are guessed than are the same.
    What follows it is read over again where it is too short: a text that runs in a circle goes on so. Empty where there
    is no such place.
    """
    if most < 1 or len(tokens) <= ngram:
        return tokens[:0]
    held = np.frombuffer(tokens, np.int32)
    places = np.flatnonzero(held[:-1] == held[-1])
    matched = 1
    while matched < _LONGEST and places.size:
        before = places[places >= matched]
        before = before[held[before - matched] == held[-1 - matched]]
        if not before.size:
            break
        places, matched = before, matched + 1
    if matched < ngram or not places.size:
        return tokens[:0]
    wanted = min(most, matched)
    place = int(places[-1]) + 1
    follows = tokens[place : place + wanted]
    while len(follows) < wanted:
        follows += follows
    return follows[:wanted]
