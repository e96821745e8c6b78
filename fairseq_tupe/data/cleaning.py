"""Cleaning of one line of text: what pretraining data, GLUE sentences and the hub interface all go through.

Facts about the original (guolinke/TUPE, preprocess/): it drops bytes that are not UTF-8, squeezes blanks, runs Moses'
punctuation normalisation, lower-cases, and puts ``<url>``, ``<email>`` and ``<file>`` for such names. Differences here:

- Punctuation is not split from words, nor words at hyphens: sentencepiece does that where it pays.
- The punctuation table is our own and smaller than Moses' (quotes, dashes, ellipsis, full-width forms); it never moves a
  comma over a quote. Text is brought to Unicode's NFC form.
- Names are found in running text, since there are no separate tokens yet; an address needs no prefix of three letters.
- A line is never cut in two: CR, NEL, U+2028 and other blanks inside it become one space.

Every step has a switch in `CleaningOptions`. Cleaning never raises on a str, and cleaning twice changes nothing more.
"""

import re
import unicodedata
from dataclasses import asdict, dataclass, fields
from typing import Any

from fairseq_tupe.errors import TupeError

PLACEHOLDERS = ("<url>", "<email>", "<file>")


@dataclass(frozen=True)
class CleaningOptions:
    """The switches that a tokenizer remembers, so that text for fine-tuning is cleaned as its pretraining text was.

    Attributes:
        repair: drop bytes that are not UTF-8 and the replacement character; off, such bytes are an error.
        normalize: NFC, plain quotes and dashes, no invisible characters, no backslashes, no doubled punctuation.
        placeholders: put <url>, <email> and <file> for web addresses, e-mail addresses and file names.
        lowercase: lower-case everything.
    """

    repair: bool = True
    normalize: bool = True
    placeholders: bool = True
    lowercase: bool = True

    def to_dict(self) -> dict:
        """The switches as a plain dict, for a manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any, source: str) -> "CleaningOptions":
        """Reads `to_dict`'s result; raises TupeError naming `source` unless it holds exactly the known switches."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names or not all(isinstance(v, bool) for v in values.values()):
            raise TupeError(f"{source}: the cleaning switches are {values!r}, expected true or false for {sorted(names)}")
        return cls(**values)


# sentencepiece writes U+2581 for a space and could not tell the two apart; the rest of blanks is str.split's own set.
_WORD_MARK = "\u2581"


def _character_table() -> dict[str, str]:
    """What `normalize` does to single characters."""
    table = {}
    for characters, plain in (
        ("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\u2036", '"'),
        ("\u2018\u2019\u201a\u201b\u00b4\u2032\u2035", "'"),
        ("\u2010\u2011\u2012\u2013\u2212", "-"),
        ("\u2014\u2015", " - "),
        ("\u2026", "..."),
        ("\u3000", " "),
        # Invisible: soft hyphen, zero-width space, direction marks, byte order mark. The joiners U+200C and U+200D stay:
        # emoji and several scripts need them.
        ("\u00ad\u061c\u180e\u200b\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufeff\ufff9\ufffa\ufffb\ufffc", ""),
        ("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", ""),
    ):
        table.update(dict.fromkeys(characters, plain))
    table.update({"\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl"})
    table.update({chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)})  # full-width forms of ASCII
    return table


_CHARACTERS = _character_table()
_SPECIAL = re.compile("[" + re.escape("".join(_CHARACTERS)) + "]")
# Control characters that are no blanks; C1 without NEL, which is one.
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
# Half of a surrogate pair can't be encoded at all; the others stand for lost text.
_SURROGATES = re.compile("[\ud800-\udfff]")
_REPLACEMENTS = re.compile("[\ufffd\ufffe\uffff]")

_COMMAS = re.compile(r",+(?=[,.])")
_DOTS = re.compile(r"\.{4,}")
_MARKUP_STARS = re.compile(r"(?:^|(?<= ))\*+(?=[^\s*])")

_LETTER = "a-zA-Z0-9"
# Repeats are bounded, so that a megabyte without a blank costs linear time.
_TAIL = rf"[^\s<>\"]{{0,2000}}[-{_LETTER}+&@#/%=~_|]"  # of an address: it does not end in punctuation
_DOMAIN = rf"(?:[{_LETTER}-]{{1,63}}\.){{1,8}}"
_ENDINGS = "pdf|mp4|mp3|docx?|xls|pptx?|wav|wma|csv|tsv|cpp|py|bat|reg|png|jpg|mov|avi|gif|rtf|txt|bmp|mid"
_NAMES = re.compile(
    rf"(?P<email>(?<![\w.+@>-])[{_LETTER}_.+-]{{1,64}}@{_DOMAIN}[a-zA-Z]{{2,12}}(?![\w@]))"
    rf"|(?P<url>(?<![\w@.-])(?:(?:[hH][tT][tT][pP][sS]?|[fF][tT][pP])://|[wW][wW][wW]\.){_TAIL}"
    rf"|(?<![\w@./>-]){_DOMAIN}(?a:(?i:com|net|org|edu|gov))(?![\w@-]|\.\w)(?:[/?#](?:{_TAIL})?)?)"
    rf"|(?P<file>(?<![\w.>-])[a-zA-Z_-][{_LETTER}_-]{{4,254}}\.(?a:(?i:{_ENDINGS}))(?![\w-]|\.\w))"
)
_MAYBE_NAME = re.compile(
    r"\.(?:com|net|org|edu|gov|pdf|mp[34]|doc|xls|ppt|wav|wma|csv|tsv|cpp|py|bat|reg|png|jpg|mov|avi|gif|rtf|txt|bmp|mid)",
    re.IGNORECASE,
)


def decode_line(raw: bytes, options: CleaningOptions) -> tuple[str, int]:
    """UTF-8 bytes to text; returns it with the number of bytes that were dropped.

    Raises:
        UnicodeDecodeError: where `options.repair` is off and the bytes are not UTF-8.
    """
    try:
        return raw.decode("utf-8"), 0
    except UnicodeDecodeError:
        if not options.repair:
            raise
    text = raw.decode("utf-8", errors="ignore")
    return text, len(raw) - len(text.encode("utf-8"))


def normalize(text: str, options: CleaningOptions) -> str:
    """One line with single blanks, without control characters and, as `options` say, with plain punctuation."""
    if not text.isascii():
        text = _SURROGATES.sub("", text).replace(_WORD_MARK, " ")
        if options.repair:
            text = _REPLACEMENTS.sub("", text)
        if options.normalize:
            text = _plain_characters(text)
    if not text.isprintable():
        text = _CONTROLS.sub("", text)
    if options.normalize and "\\" in text:
        text = text.replace("\\", " ")
    text = " ".join(text.split())
    return _plain_punctuation(text) if options.normalize else text


def _plain_characters(text: str) -> str:
    # Twice: a character removed from between a letter and its accent lets the two compose.
    text = _SPECIAL.sub(lambda match: _CHARACTERS[match.group()], unicodedata.normalize("NFC", text))
    return text if text.isascii() else unicodedata.normalize("NFC", _CONTROLS.sub("", text))


def _plain_punctuation(text: str) -> str:
    if "`" in text:
        text = text.replace("``", '"').replace("`", "'")
    if "''" in text:
        text = text.replace("''", '"')
    if ",," in text or ",." in text:
        text = _COMMAS.sub("", text)
    if "...." in text:
        text = _DOTS.sub("...", text)
    if "*" in text:
        text = _MARKUP_STARS.sub("", text)
    return text


def replace_names(text: str) -> str:
    """Puts <url>, <email> and <file> for web addresses, e-mail addresses and file names."""
    if "@" in text or "://" in text or _MAYBE_NAME.search(text) or "www." in text.lower():
        return _NAMES.sub(lambda match: f"<{match.lastgroup}>", text)
    return text


def lower(text: str, options: CleaningOptions) -> str:
    """Lower case, where `options` ask for it."""
    if not options.lowercase:
        return text
    if text.isascii():
        return text.lower()
    text = text.lower()
    if options.normalize:
        text = unicodedata.normalize("NFC", text)  # some capitals with an accent have no composed form
    # Lower-casing turns a few letters into ASCII ones, which may complete a name.
    return replace_names(text) if options.placeholders else text


def clean(text: str, options: CleaningOptions) -> str:
    """All steps on one piece of text; the result is one line without blanks at its ends."""
    text = normalize(text, options)
    if options.placeholders:
        text = replace_names(text)
    return lower(text, options)
