"""Cleaning, line filters, sentences, rows of files: properties on any text, and worked examples."""

import gzip
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairseq_tupe.data import line_filters, sentences, text_input
from fairseq_tupe.data.cleaning import CleaningOptions, clean, decode_line
from fairseq_tupe.data.corpus_stages import TextOptions, clean_rows
from fairseq_tupe.data.hashing import HashSet, hash_lines, reseed
from fairseq_tupe.errors import TupeError

ALL_OPTIONS = [CleaningOptions(*switches) for switches in itertools.product([True, False], repeat=4)]
# Pieces that the rules react to, so that random text meets them, next to each other too.
FRAGMENTS = (
    "www.", "http://", "a.com", ".com", "@", "b@c.org", "readme.txt", "hello.pdf", "<url>", ",", ".", "..", "*", "`", "'", "\\",
    "\u200b", "\u0301", "e", "H\u0331", "\u212a", "\u1fef", "\u0130", "\u017f", "\u2014", "\u2026", "\r", "\u2028", "\x85", "/",
    "-", "_", "x", " ", "\u03a3", "\ud800", "\ufffd", "\u2581", "|",
)  # fmt: skip
TEXT = st.one_of(st.text(), st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=2)), max_size=14).map("".join))


@settings(max_examples=700, deadline=None)
@given(TEXT, st.sampled_from(ALL_OPTIONS))
@example("0.COMH\u0331", CleaningOptions())
@example("WWW.\u0130", CleaningOptions())
@example("WWW.\u212a", CleaningOptions(normalize=False))
@example("0@0.AA.@0.AA", CleaningOptions())
@example("a@b.coH\u0331", CleaningOptions())
def test_cleaning_any_text_gives_one_line_and_twice_changes_nothing(text, options):
    once = clean(text, options)
    assert clean(once, options) == once
    assert clean(text, options) == once
    assert len(once.splitlines()) <= 1
    assert once == " ".join(once.split())
    once.encode("utf-8")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("\u201cHello,\u201d she said \u2014 it\u2019s 5\u20136\u2026", '"hello," she said - it\'s 5-6...'),
        ("See http://www.example.com/a?x=1. Or Google.com/maps!", "see <url>. or <url>!"),
        ("Mail John.Doe+x@mail.example.co.uk, please.", "mail <email>, please."),
        ("me@x.com\u00e9 or x@y", "me@x.com\u00e9 or x@y"),
        ("The file report_final.PDF and notes.txt.", "the file <file> and <file>."),
        ("U.S. law, e.g. section 3.5; Mr. Smith", "u.s. law, e.g. section 3.5; mr. smith"),
        ("a\rb\u2028c\x85d\u00a0e\x00f\tg", "a b c d ef g"),
        ("wait ..... what,, now,.", "wait ... what, now."),
        ("cafe\u0301 \ufb01ne na\u00adive \uff21", "caf\u00e9 fine naive a"),
        ("  \u2581  ", ""),
        ("x\\y and \\emph", "x y and emph"),
        ("**bold** and 2 * 3", "bold** and 2 * 3"),
    ],
)
def test_cleaning_examples(raw, expected):
    assert clean(raw, CleaningOptions()) == expected


def test_each_cleaning_switch_turns_off_its_own_step_only():
    raw = "\u201cMail\u201d Me@x.org \ufffd"
    assert clean(raw, CleaningOptions()) == '"mail" <email>'
    assert clean(raw, CleaningOptions(lowercase=False)) == '"Mail" <email>'
    assert clean(raw, CleaningOptions(placeholders=False)) == '"mail" me@x.org'
    assert clean(raw, CleaningOptions(normalize=False)) == "\u201cmail\u201d <email>"
    assert clean(raw, CleaningOptions(repair=False)) == '"mail" <email> \ufffd'


def test_broken_utf8_is_dropped_or_refused():
    assert decode_line(b"caf\xe9 au lait", CleaningOptions()) == ("caf au lait", 1)
    with pytest.raises(UnicodeDecodeError):
        decode_line(b"caf\xe9", CleaningOptions(repair=False))
    options = TextOptions(CleaningOptions(repair=False), line_filters.LineFilterOptions())
    with pytest.raises(TupeError, match=r"in\.txt: line 8, byte 3 is not UTF-8"):
        clean_rows([b"fine", b"caf\xe9"], "in.txt", 7, options)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a" * 49, "too_short"),
        ("a" * 50, None),
        ("a" * 1_000_001, "too_long"),
        ("a" * 50 + " 1" * 10, None),  # 50 letters of 70: a share of 0.714
        ("a" * 50 + " 1" * 11, "few_letters"),  # 50 of 72: 0.694
        ("a" * 49 + "1", "few_letters"),  # 50 characters, 49 letters
        ("| " + "a" * 60, "table"),
        ("a" * 60 + "|" * 4, "table"),
        ("a" * 60 + "|" * 3, None),
        ("a" * 60 + "\\" * 4, "maths"),
        ("\u0434" * 60, None),  # letters of every script count
        ("", "empty"),
    ],
)
def test_line_filters_keep_the_original_thresholds(line, reason):
    assert line_filters.why_dropped(line, line, line_filters.LineFilterOptions()) == reason


def test_each_line_filter_can_be_turned_off():
    for line, switch in (("a b", "length"), ("1" * 60, "letters"), ("|" + "a" * 60, "tables"), ("\\" * 9 + "a" * 60, "maths")):
        assert line_filters.why_dropped(line, line, line_filters.LineFilterOptions()) is not None
        options = line_filters.LineFilterOptions(**{switch: False})
        found = line_filters.why_dropped(line, line, options)
        assert found is None or (switch == "length" and found == "few_letters")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=80), TEXT.map(lambda text: text.encode("utf-8", "replace"))), max_size=12))
def test_every_row_is_kept_or_dropped_for_one_reason(rows):
    options = TextOptions(CleaningOptions(), line_filters.LineFilterOptions(min_chars=3), min_sentence_chars=1)
    try:
        records, hashes, counts = clean_rows(rows, "x", 1, options)
    except TupeError:  # what is mostly no text is refused as a whole
        return
    dropped = sum(counts.get(reason, 0) for reason in (*line_filters.REASONS, "no_sentence"))
    assert len(records) + dropped == len(rows)
    assert len(hashes) == len(records)
    assert all(b"\n" not in record and record.decode("utf-8") for record in records)


def test_rare_words_are_counted_over_the_whole_corpus():
    table = line_filters.WordCounts()
    for text in ("common common words", "common words zyx"):
        table.add(*line_filters.WordCounts.count(text))
    rare = table.rare({"common", "words", "zyx", "qwv"}, fewer_than=2)
    assert rare == {"zyx", "qwv"}
    assert line_filters.has_many_rare_words(["zyx", "qwv", "common"], rare, 0.3)
    assert not line_filters.has_many_rare_words(["zyx", "common", "words", "words"], rare, 0.3)


def test_sentence_split_knows_abbreviations_and_looks_into_long_quotations():
    assert sentences.split_sentences("Mr. Weston came at 3.5 p.m. to Highbury. Emma was glad! Was she?") == [
        "Mr. Weston came at 3.5 p.m. to Highbury.",
        "Emma was glad!",
        "Was she?",
    ]
    first, second = "I went there " + "and there " * 30 + "again.", "Then I came " + "home and home " * 20 + "at last."
    spoken = f'He said so. "{first} {second}" She "laughed" at him.'
    assert sentences.split_sentences(spoken) == ["He said so.", f'"{first}', f'{second}"', 'She "laughed" at him.']


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["A b.", '"Oh', 'no."', "Mr. X", "word " * 20, "Why?", "\U0001f600.", "(", '"'])).map(" ".join))
def test_sentence_split_and_joining_lose_no_character(text):
    text = " ".join(text.split())
    parts = sentences.split_sentences(text)
    assert "".join(" ".join(parts).split()) == "".join(text.split())
    assert " ".join(sentences.join_short(parts)) == " ".join(parts)


def test_short_sentences_join_their_shorter_neighbour():
    six, nine = "one two three four five six.", "a b c d e f g h i."
    assert sentences.join_short([nine, "Yes, sir.", six]) == [nine, "Yes, sir. " + six]
    assert sentences.join_short([nine, six]) == [nine, six]
    # The pair with the heading is 9 words, the other one 7 and a full stop between.
    assert sentences.join_short(["a b c d e f.", "Yes", "g h i j k l m n."]) == ["a b c d e f.", "Yes g h i j k l m n."]
    long = "w " * 249 + "w."
    assert sentences.join_short([long, "No."]) == [long, "No."]  # 251 words would be too many
    many = ["Oh."] * 1000
    assert all(len(part.split()) >= 5 for part in sentences.join_short(many))


def test_only_lf_ends_a_row(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes("\ufeffa\rb\nc\u2028d\x85e\r\nlast".encode())
    rows = [row for some in text_input.read_rows(path) for row in some]
    assert rows == [b"a\rb", "c\u2028d\x85e\r".encode(), b"last"]


def test_a_giant_row_is_cut_without_losing_a_byte(tmp_path):
    for name, text in (("words", "Some words here. " * 40_000), ("one", "\u00e9" * 300_000)):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        pieces = [row for some in text_input.read_rows(path) for row in some]
        assert b"".join(pieces).decode("utf-8") == text
        assert max(map(len, pieces)) <= text_input.MAX_ROW_BYTES
        assert all(piece.decode("utf-8") for piece in pieces)


def test_packed_files_are_told_by_content(tmp_path):
    path = tmp_path / "looks-plain.txt"
    path.write_bytes(gzip.compress(b"hello\nworld\n"))
    assert [row for some in text_input.read_rows(path) for row in some] == [b"hello", b"world"]
    path.write_bytes(gzip.compress(b"hello world\n" * 1000)[:-12])
    with pytest.raises(TupeError, match="ends too early"):
        list(text_input.read_rows(path))


def test_unwrap_ends_paragraphs_at_blank_and_at_short_rows():
    rows = [b"x" * 60, b"y" * 58, b"end of it.", b"z" * 60, b"", b"CHAPTER I", b"w" * 60]
    (first, last) = text_input.unwrap(iter([rows]), 60)
    assert first == [b"x" * 60 + b" " + b"y" * 58 + b" end of it.", b"z" * 60, b"CHAPTER I"]
    assert last == [b"w" * 60]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 40), max_size=40), max_size=12))
def test_hash_set_agrees_with_a_python_set(batches):
    ours, known = HashSet(), set()
    for batch in batches:
        fresh = ours.add(np.array(batch, dtype=np.uint64))
        expected = []
        for value in batch:
            expected.append(value not in known)
            known.add(value)
        assert fresh.tolist() == expected
    assert len(ours) == len(known)


def test_hash_set_needs_eight_bytes_a_line():
    ours = HashSet()
    values = np.random.default_rng(0).integers(0, 2**64, size=200_000, dtype=np.uint64)
    for part in np.split(values, 100):
        assert ours.add(part).all()
    assert not ours.add(values).any()
    assert sum(run.nbytes for runs in ours._runs for run in runs) == 8 * len(values)


def test_held_out_share_is_the_one_asked_for_and_moves_with_the_seed():
    hashes = hash_lines(b"line %d" % i for i in range(40_000))
    picks = [reseed(hashes, seed) < np.uint64(int(0.05 * 2**64)) for seed in (1, 2)]
    assert all(abs(pick.mean() - 0.05) < 0.006 for pick in picks)  # 5 standard errors
    assert abs((picks[0] & picks[1]).mean() - 0.0025) < 0.0015  # independent choices
