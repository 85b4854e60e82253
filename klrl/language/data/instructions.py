"""A generated, verifiable instruction: describe a thing in one short sentence.

Nothing is downloaded; functions verify the answers.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from klrl.language.data.prompts import Content, Fields, Prompt

SYSTEM = "You answer in one short sentence."
REQUEST = "Describe the {topic} in one short sentence of at most {words} words."
#: Most words of an answer; each prompt asks for one of them.
MOST_WORDS = (8, 10, 12)
#: A shorter answer is no sentence.
LEAST_WORDS = 4
_NOUNS = (
    "air ant apple arm autumn bag ball bank barn beach bean bear bed bee bell bicycle bird blood "
    "boat bone book boot bottle box boy branch brass bread brick bridge brush bucket bus butter "
    "button cake camel camera candle car carpet cat cellar chain chair chalk cheese chess church "
    "circle city clay clock cloth cloud coal coat coffee coin comb copper cork corn cotton cow "
    "crab crow crown cup curtain dance dentist desert desk dog doll door dragon drum duck eagle "
    "ear earth egg elbow engine eye family farm feather fence field finger fire fish flag flame "
    "floor flour flower flute fog foot forest fork fox frog fruit garden gate ghost giraffe "
    "glass glove glue goat gold grass guitar hair hammer hand harbour hat hawk heart hedge "
    "helmet hen hill honey hook horse hotel house ice iron island ivory jam jar jungle kettle "
    "key king kitchen kite knee knife ladder lake lamp leaf leather lemon letter library light "
    "lion lizard lock mango map market meat medal melon milk mill mirror money monkey moon "
    "morning mother mountain mouse mouth museum music nail neck needle nest net night nose nut "
    "oak oar ocean office oil onion orange oven owl paint palace paper parrot peach pencil "
    "penguin pepper piano picture pig pillow pilot pin pipe plane planet plant plate plough "
    "pocket poem poet police potato pump queen rabbit radio rain rat ribbon rice ring river road "
    "robin rock roof room root rope rose salt sand scarf school sea seed shadow sheep shell ship "
    "shirt shoe silk silver sister skin sky sleep smoke snail snow soap sock soup spade spider "
    "spoon spring square star station steam stone storm street sugar summer sun swan sword table "
    "tailor tea teacher tent theatre thread throat thumb ticket tiger toe tongue tooth towel "
    "tower town toy train tree trumpet tunnel turtle umbrella uncle valley vase village violin "
    "voice volcano wall watch water wave wheel whistle wind window wine winter wolf wood wool "
    "yard zebra"
)
TOPICS = _NOUNS.split()
#: One in this many topics belongs to the evaluation split.
EVAL_SHARE = 4

_SENTENCE_END = re.compile(r"[.!?]")
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


@dataclass(frozen=True)
class Instructions:
    """Instruction number i; the settings and i alone determine it.

    Args:
        seed: another seed gives another order.
        split: "train" or "eval". No topic is in both, whatever the seeds.
    """

    seed: int = 0
    split: str = "train"

    def __call__(self, index: int) -> Prompt:
        """Instruction number ``index``; its row holds ``topic`` and ``words``, the most allowed."""
        rng = random.Random(f"instructions/{self.split}/{self.seed}/{index}")
        topic, words = rng.choice(topics(self.split)), rng.choice(MOST_WORDS)
        turns = (
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": REQUEST.format(words=words, topic=topic)},
        )
        return Prompt(turns, {"topic": topic, "words": words}, f"instruction {index}")


def topics(split: str) -> list[str]:
    """The topics of a split, by their checksums."""
    return [t for t in TOPICS if (zlib.crc32(t.encode()) % EVAL_SHARE > 0) == (split == "train")]


# ------------------------------------------------------------------------------------- rewards


def followed(
    prompts: Sequence[Content], responses: Sequence[str], rows: Sequence[Fields]
) -> list[float]:
    """The gold score: 1 where every part of the instruction is followed, else 0."""
    return [float(all(parts(r, row))) for r, row in zip(responses, rows, strict=True)]


def followed_share(
    prompts: Sequence[Content], responses: Sequence[str], rows: Sequence[Fields]
) -> list[float]:
    """The share of the instruction's parts that are followed."""
    kept = [parts(response, row) for response, row in zip(responses, rows, strict=True)]
    return [sum(each) / len(each) for each in kept]


def parts(response: str, row: Fields) -> tuple[bool, bool, bool]:
    """(One sentence, at most so many words, about the topic).

    A sentence begins with a capital, has four words or more and one mark that ends it, at its end:
    what was cut off is none.

    Args:
        response: text without its EOS.
        row: holds ``topic`` and ``words``.
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
