"""A generated, verifiable task: describe a thing in one short sentence."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from klrl.language.data.prompts import Content, Fields, Prompt

SYSTEM = "You answer in one short sentence."
REQUEST = "Describe the {topic} in one short sentence of at most {words} words."
#: Limits on the number of words; each prompt states one of them.
MOST_WORDS = (8, 10, 12)
#: A response of fewer words does not count as a sentence.
LEAST_WORDS = 4
TOPICS = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split()
#: About one in this many topics belongs to the evaluation split.
EVAL_MODULUS = 4

_SENTENCE_END = re.compile(r"[.!?]")
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


@dataclass(frozen=True)
class Instructions:
    """Generates instruction number i, which depends only on ``seed``, ``split`` and i.

    No topic is in both splits, "train" and "eval", whatever the seeds.
    """

    seed: int = 0
    split: str = "train"

    def __call__(self, index: int) -> Prompt:
        """Return instruction ``index``; its row has ``topic`` and ``words``, the limit on words."""
        rng = random.Random(f"instructions/{self.split}/{self.seed}/{index}")
        topic, words = rng.choice(topics(self.split)), rng.choice(MOST_WORDS)
        turns = (
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": REQUEST.format(words=words, topic=topic)},
        )
        return Prompt(turns, {"topic": topic, "words": words}, f"instruction {index}")


def topics(split: str) -> list[str]:
    """Return the topics of a split; the checksum of a topic determines its split."""
    return [t for t in TOPICS if (zlib.crc32(t.encode()) % EVAL_MODULUS > 0) == (split == "train")]


# ------------------------------------------------------------------------------------- rewards


def followed(
    prompts: Sequence[Content], responses: Sequence[str], rows: Sequence[Fields]
) -> list[float]:
    """Return the gold score: 1 if the response follows all :func:`parts`, else 0."""
    return [float(all(parts(r, row))) for r, row in zip(responses, rows, strict=True)]


def followed_share(
    prompts: Sequence[Content], responses: Sequence[str], rows: Sequence[Fields]
) -> list[float]:
    """Return the share of the instruction's :func:`parts` that the response follows."""
    kept = [parts(response, row) for response, row in zip(responses, rows, strict=True)]
    return [sum(each) / len(each) for each in kept]


def parts(response: str, row: Fields) -> tuple[bool, bool, bool]:
    """Return whether a response is one sentence, keeps the word limits and names the topic.

    A sentence begins with a capital letter, has at least four words, and has one end mark, as its
    last character.

    ``row`` contains ``topic`` and ``words``.
    """
    text = response.strip()
    words = _WORD.findall(text.lower())
    named = {word.removesuffix("'s").removesuffix("’s") for word in words}
    ends = [found.end() for found in _SENTENCE_END.finditer(text)]
    return (
        text[:1].isupper() and len(words) >= LEAST_WORDS and ends == [len(text)],
        LEAST_WORDS <= len(words) <= row["words"],
        not named.isdisjoint({row["topic"], f"{row['topic']}s"}),
    )
