"""Prompts of about N tokens, the same for the same seed, and no two alike."""

from __future__ import annotations

import random

# Common words that one token holds, with the space before it, in the vocabularies of today's byte-level BPE models.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea kid body information back
parent face others level office door health person art war history party result change morning reason research girl
guy moment air teacher force education foot boy age policy music market sense nation plan college interest death
experience effect use class control field development role effort rate heart drug show leader light voice wife
police mind price report decision son view relationship town road arm difference value building action season
society tax director position player record paper space ground form event official matter center couple site project
activity star table need court oil situation cost industry figure street image phone data picture practice piece
land product doctor wall news test movie north love support technology step baby computer type attention film tree
source bank risk tonight stage rest fire future chance board army camera growth loss degree wonder apple bread chair
dance earth farm glass horse iron king lake mountain ocean paint queen river sugar train uncle village wind yellow
zero bird cloud dream engine flower garden hill island journey kitchen letter mirror needle orange pencil quiet rain
silver tower window
"""
WORDS = tuple(_TEXT.split())

UNIQUE_WORDS = 3  # of a prompt: they spell its index, so len(WORDS) ** 3 prompts of a seed differ


class PromptSource:
    """Prompts by index: `shared_prefix` words common to all, `UNIQUE_WORDS` that spell the index, the rest at random.

    The index comes as early as it can, its lowest digit first, so that neighbours differ within the first block of
    tokens and a server's prefix cache finds no more than `shared_prefix`.

    Args:
        words: length of a prompt, at least `shared_prefix + UNIQUE_WORDS`.
        shared_prefix: words at the head that every prompt of this seed has in common.
        seed: another seed gives other prompts, prefix included.
    """

    def __init__(self, *, words: int, shared_prefix: int = 0, seed: int = 0) -> None:
        assert words >= shared_prefix + UNIQUE_WORDS, f"{words} words leave no room beside {shared_prefix} shared ones"
        rng = random.Random(f"{seed}:prefix")
        self._seed = seed
        self._digits = rng.sample(WORDS, len(WORDS))
        self._prefix = rng.choices(WORDS, k=shared_prefix)
        self._random_words = words - shared_prefix - UNIQUE_WORDS

    def prompt(self, index: int) -> str:
        """Prompt number `index`, 0 ≤ index < len(WORDS) ** UNIQUE_WORDS."""
        spelled, rest = [], index
        for _ in range(UNIQUE_WORDS):
            rest, digit = divmod(rest, len(WORDS))
            spelled.append(self._digits[digit])
        assert rest == 0, f"prompt {index} is beyond what {UNIQUE_WORDS} words can spell"
        tail = random.Random(f"{self._seed}:{index}").choices(WORDS, k=self._random_words)
        return " ".join(self._prefix + spelled + tail)
