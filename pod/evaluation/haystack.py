"""What long prompts are filled up with, noise, words or any text, how much of it, and how needles get into it."""

import bisect
import importlib
import importlib.util
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.".split()
ADJECTIVES = (
    "able ancient angry basic bitter blank blue bold brave brief bright broad broken calm careful cheap clean "
    "clear clever cold common cool curious daily damp dark deep dense dry dull dusty eager early easy elegant "
    "empty equal exact faint fair famous fancy fast final fine firm flat fresh gentle giant glad golden grand "
    "great green happy hard heavy hidden hollow honest huge humble icy ideal idle jolly keen kind large late lazy "
    "light little lively local lonely long loud loyal lucky major mellow merry mild minor modern narrow neat new "
    "noble noisy odd old open pale patient plain polite proud pure quick quiet rapid rare ready rich rough round "
    "royal rural sharp short shy silent silver simple slow small smooth soft solid steady steep strange strong "
    "sudden sweet swift tall tame thin tidy tiny true vast vivid warm weak white wide wild wise witty wooden "
    "young"
).split()
NOUNS = (
    "acorn actor anchor apple arrow autumn badge banner barrel basket beach beacon bell bench berry bird blanket "
    "boat bottle branch bread bridge brush bucket button cabin camel candle canyon carpet castle cedar chain "
    "chair cherry circle cloud coast coin comet compass copper coral cotton cradle crane crystal curtain desert "
    "diamond door dragon drum eagle engine falcon farmer feather fence ferry field flag flame flute forest fossil "
    "fountain fox garden gate glacier glove grape guitar hammer harbor harvest helmet hill honey horse island "
    "ivory jacket jewel journey kettle kitchen kite ladder lake lantern leaf lemon letter lily lion magnet maple "
    "marble market meadow melon mirror mountain needle nest novel oasis ocean olive orchard otter owl paddle "
    "painter palace panda paper parrot pebble pencil pepper piano pigeon pillow planet plum pocket poem prairie "
    "puzzle quilt rabbit rainbow raven reef ribbon river robin rocket rope saddle salmon school shadow shell ship "
    "shore signal sparrow spider spoon spring squirrel stable star statue stone storm stream summer sunset table "
    "temple thread thunder ticket tiger timber tower train tulip tunnel turtle valley velvet village violin wagon "
    "walnut water whale wheat willow window winter wolf zebra"
).split()


def word_lists() -> tuple[list[str], list[str], list[str]]:
    """Adjectives, nouns, verbs: wonderwords' where it is installed, as RULER has it, else those here, without verbs."""
    if importlib.util.find_spec("wonderwords") is None:
        return ADJECTIVES, NOUNS, []
    words = importlib.import_module("wonderwords").RandomWord()  # of no extra: other words are other samples
    return tuple(sorted(words.filter(include_categories=[kind])) for kind in ("adjective", "noun", "verb"))


_DEPTHS = 40  # in how many steps the depths of needles in a text are drawn


@dataclass
class Haystack:
    """Any long text, repeated where it is too short.

    Args:
        text: at least one word.
    """

    text: str
    words: list[str] = field(init=False, repr=False)
    ends: list[int] = field(init=False, repr=False)  # word counts after which a sentence ends

    def __post_init__(self) -> None:
        self.words = self.text.split()
        if not self.words:
            raise ValueError("the haystack is empty: give any long text")
        self.ends = [n for n, word in enumerate(self.words, start=1) if word.rstrip("\"')").endswith((".", "!", "?"))]
        if len(self.ends) * 200 < len(self.words):
            self.ends = list(range(1, len(self.words) + 1))  # hardly any sentences: code, verse, other scripts

    def take(self, count: int) -> tuple[list[str], list[int]]:
        """The first `count` words, and where among them sentences end."""
        turns = math.ceil(count / len(self.words))
        ends = [turn * len(self.words) + end for turn in range(turns) for end in self.ends]
        return (self.words * turns)[:count], ends[: bisect.bisect_right(ends, count)]

    def hide(self, draw: random.Random, size: int, needles: list[str], after_sentences: bool) -> str:
        """`size` words with the needles between sentences or words, at depths drawn from 40 steps."""
        words, ends = self.take(size)
        ends = [0, *ends] if after_sentences else range(len(words) + 1)
        depths = sorted(draw.sample(range(_DEPTHS), len(needles)))
        places = [ends[round(depth / (_DEPTHS - 1) * (len(ends) - 1))] for depth in depths]
        parts, last = [], 0
        for place, needle in zip(places, needles, strict=True):
            parts += [*words[last:place], needle]
            last = place
        return " ".join([*parts, *words[last:]])


def noise(size: int) -> list[str]:
    """Lines of `size` words of noise together."""
    full, rest = divmod(size, len(NOISE))
    return [" ".join(NOISE)] * full + ([" ".join(NOISE[:rest])] if rest else [])


def insert(draw: random.Random, lines: list[str], needles: list[str]) -> list[str]:
    """The lines with the needles in their order at random places."""
    places = range(len(lines) + 1)
    few = len(places) < len(needles)
    chosen = sorted(draw.choices(places, k=len(needles)) if few else draw.sample(places, len(needles)))
    mixed = list(lines)
    for offset, (place, needle) in enumerate(zip(chosen, needles, strict=True)):
        mixed.insert(place + offset, needle)
    return mixed


def fit(make: Callable[[int], tuple[int, Any]], room: int) -> tuple[int, Any]:
    """The largest size whose tokens are at most `room`, or one within half a percent of it.

    Args:
        make: size -> (tokens, made); tokens grow about evenly with the size.
        room: tokens.

    Returns:
        (tokens, made); those of size 0 where even that has too many.
    """
    low, best = 0, make(0)
    base = best[0]
    high, size, tries = None, max(1, (room - base) // 4), 0
    while best[0] <= room and best[0] < 0.995 * room and (high is None or high - low > 1):
        tokens, made = make(size)
        if tokens <= room:
            low, best = size, (tokens, made)
        else:
            high = size
        # Where the straight line through size 0 and this one reaches the room; halving when that does not get there.
        tries += 1
        size = int(size * (room - base) / max(1, tokens - base))
        if high is None:
            size = min(max(size, low + 1), 8 * low + 8)
        elif not low < size < high or tries > 6:
            size = (low + high) // 2
    return best
