"""Lines into sentences, and sentences too short to stand alone into their neighbours.

The original uses spaCy's statistical parser on lower-cased text. Here `sentencex` (Wikimedia, rules for many languages,
abbreviations included) works on the text before it is lower-cased, where capitals still tell a sentence from an
abbreviation: on 2 MB of novels it took 0.02 s, against 1.6 s for sentence-splitter, and about 1 s per MB for syntok and
4 s for pysbd; blingfire is as fast but splits at "Mr." and has had no release since 2021.
"""

import re

import sentencex

# sentencex keeps a quotation whole; above this many words it is split inside the quotation marks as well.
MAX_QUOTED_WORDS = 50
_WORD_CHARACTER = re.compile(r"\w")
_JOIN_TOGETHER = 200
_TERMINATORS = (".", '"', "!", "?")


def split_sentences(text: str) -> list[str]:
    """The sentences of one cleaned line, in order; joined by a space they are the line again, but for blanks."""
    sentences = []
    for sentence in sentencex.segment("en", text):
        if '"' in sentence and sentence.count(" ") > MAX_QUOTED_WORDS:
            sentences += _split_quotation(sentence)
        else:
            sentences.append(sentence.strip())
    return [sentence for sentence in sentences if sentence]


def _split_quotation(text: str) -> list[str]:
    """Splits as if the quotation marks were blanks, then gives an opening mark back to the sentence that it opens."""
    pieces, start, opening = [], 0, ""
    for masked in sentencex.segment("en", text.replace('"', " ")):
        piece = opening + text[start : start + len(masked)]
        start += len(masked)
        opening = ""
        stripped = piece.rstrip()
        if stripped.endswith(' "') and start < len(text):
            stripped, opening = stripped[:-2].rstrip(), '"'
        pieces.append(stripped.strip())
    return pieces


def join_short(sentences: list[str], min_words: int = 5, max_words: int = 250) -> list[str]:
    """Joins each sentence of fewer than `min_words` words to a neighbour, the shortest pair first.

    A pair whose first part ends a sentence counts as 5 words longer, so that a heading or a broken piece is joined first;
    no pair over `max_words` is joined (the original's rule and numbers; it counts tokens, punctuation marks included).
    """
    sizes = [sentence.count(" ") + 1 for sentence in sentences]
    if len(sentences) < 2 or min(sizes) >= min_words:
        return sentences
    if len(sentences) > _JOIN_TOGETHER:  # the search below is quadratic
        groups = range(0, len(sentences), _JOIN_TOGETHER)
        return [s for i in groups for s in join_short(sentences[i : i + _JOIN_TOGETHER], min_words, max_words)]
    sentences = list(sentences)
    while min(sizes) < min_words:
        costs = [
            (size + following + 5 * sentence.endswith(_TERMINATORS), i)
            for i, (size, following, sentence) in enumerate(zip(sizes, sizes[1:], sentences, strict=False))
            if size + following <= max_words and min(size, following) < min_words
        ]
        if not costs:
            break
        _, i = min(costs)
        sentences[i : i + 2] = [sentences[i] + " " + sentences[i + 1]]
        sizes[i : i + 2] = [sizes[i] + sizes[i + 1]]
    return sentences


def keep_sentence(sentence: str, min_chars: int) -> bool:
    """False for what has no word character, or fewer than `min_chars` characters."""
    return len(sentence) >= min_chars and _WORD_CHARACTER.search(sentence) is not None
