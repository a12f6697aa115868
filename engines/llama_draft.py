"""Guessing the next tokens of a run from its own: what followed the last few of them earlier may follow again.

A guess costs a place in a batch, and saves a step where it is right. So a run's guesses are at most twice as long as
what was right of its last one: they grow where text repeats, and stay short where it doesn't.
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
    """At most `most` tokens, as they followed an earlier place where the last `ngram` tokens are.

    The place is that where most tokens before are the same too, the last one of those. What follows it is read over
    again where it is too short: a text that runs in a circle goes on so. Empty where there is no such place.
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
    place = int(places[-1]) + 1
    follows = tokens[place : place + most]
    while len(follows) < most:
        follows += follows
    return follows[:most]
