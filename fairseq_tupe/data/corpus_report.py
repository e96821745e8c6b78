"""The report of `prepare-pretrain-data`: report.json, what is printed, and what a user should be told."""

import resource
from pathlib import Path

from fairseq_tupe import __version__
from fairseq_tupe.data.corpus_pipeline import Settings
from fairseq_tupe.data.line_filters import REASONS
from fairseq_tupe.data.tokenizer import Tokenizer

# reason -> (how it reads, the switch that turns the filter off)
_DROPPED = {
    "empty": ("blank", ""),
    "too_short": ("too short", "--no-length-filter or a smaller --min-chars"),
    "too_long": ("too long", "--no-length-filter"),
    "few_letters": ("with few letters", "--no-letter-filter"),
    "table": ("remains of tables", "--no-table-filter"),
    "maths": ("remains of formulas", "--no-maths-filter"),
    "no_sentence": ("without a sentence long enough", "--no-length-filter or a smaller --min-sentence-chars"),
    "duplicate": ("repeated", "--no-deduplicate"),
    "rare_words": ("mostly rare words", "--no-rare-word-filter"),
}
assert set(REASONS) < set(_DROPPED)


def result_files(folder: Path) -> list[Path]:
    """The files of a finished data folder, in order; without its report and what is only there during the work."""
    shards = sorted(folder.glob("shard*")) or [folder]
    files = [shard / f"{part}.{ending}" for shard in shards for part in ("train", "valid") for ending in ("bin", "idx")]
    files += [folder / "dict.txt", *(shard / "dict.txt" for shard in shards if shard != folder)]
    return files + [folder / "tokenizer" / name for name in ("spm.model", "dict.txt", "manifest.json")]


def files_intact(folder: Path, report: dict) -> bool:
    """True where every file of an earlier report is there in its size."""
    try:
        return all((folder / name).stat().st_size == size for name, size in report["files"].items())
    except (OSError, KeyError, AttributeError):
        return False


def make(settings: Settings, key: str, results: dict[str, dict], folder: Path) -> dict:
    """The report as a dict; `results` are what the four stages returned."""
    cleaned, parts, encoded = results["clean"], results["split"], results["encode"]
    dropped = {reason: cleaned.get(reason, 0) for reason in _DROPPED}
    dropped["rare_words"] = parts["rare_words"]
    tokenizer = Tokenizer.load(folder / "tokenizer")
    seconds = {stage: round(result["seconds"], 2) for stage, result in results.items()}
    without_training = sum(seconds.values()) - seconds["tokenize"]
    return {
        "command": "prepare-pretrain-data",
        "version": __version__,
        "key": key,
        "inputs": [{"file": str(path), "bytes": path.stat().st_size} for path in settings.files],
        "settings": _plain_settings(settings, tokenizer),
        "text_bytes": cleaned["text_bytes"],
        "lines": {"in": cleaned["lines"], "kept": parts["train_lines"] + parts["valid_lines"], "dropped": dropped},
        "repaired_lines": cleaned.get("repaired_lines", 0),
        "dropped_bytes": cleaned.get("dropped_bytes", 0),
        "rare_word_filter_ran": parts["rare_filter"],
        "train": {"lines": parts["train_lines"], **encoded["train"]},
        "valid": {"lines": parts["valid_lines"], **encoded["valid"]},
        "tokenizer": {
            "sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "dictionary_size": len(tokenizer.symbols()),
            "trained": results["tokenize"]["trained"],
        },
        "seconds": seconds,
        "megabytes_per_second": round(cleaned["text_bytes"] / 1e6 / max(without_training, 1e-3), 2),
        "peak_memory_megabytes": _peak_memory(),
        "files": {str(path.relative_to(folder)): path.stat().st_size for path in result_files(folder)},
    }


def _plain_settings(settings: Settings, tokenizer: Tokenizer) -> dict:
    filters = settings.text.filters
    return {
        **tokenizer.cleaning.to_dict(),
        "unwrap": settings.unwrap,
        "length_filter": filters.length,
        "min_chars": filters.min_chars,
        "letter_filter": filters.letters,
        "table_filter": filters.tables,
        "maths_filter": filters.maths,
        "deduplicate": settings.deduplicate,
        "rare_word_filter": settings.rare_words,
        "sentence_split": settings.text.split_sentences,
        "join_short": settings.text.join_short,
        "min_sentence_chars": settings.text.min_sentence_chars,
        "valid_fraction": settings.valid_fraction,
        "seed": settings.seed,
        "shards": settings.shards,
    }


def _peak_memory() -> dict[str, int]:
    """Peak resident memory so far, of this process and of its largest ended child, in megabytes (Linux counts kilobytes)."""
    kinds = {"main": resource.RUSAGE_SELF, "worker": resource.RUSAGE_CHILDREN}
    return {name: resource.getrusage(kind).ru_maxrss // 1024 for name, kind in kinds.items()}


def one_line(report: dict) -> str:
    """An earlier result in a few words."""
    train, valid = report.get("train", {}), report.get("valid", {})
    return f"{train.get('sentences', 0):,} and {valid.get('sentences', 0):,} sentences"


def summary(report: dict, out: Path) -> str:
    """What is printed at the end."""
    lines, train, valid = report["lines"], report["train"], report["valid"]
    rows = [("lines in", f"{lines['in']:,} ({report['text_bytes'] / 1e6:.1f} MB)")]
    rows += [(f"  {_DROPPED[reason][0]}", f"{count:,}") for reason, count in lines["dropped"].items() if count]
    rows.append(("lines kept", f"{lines['kept']:,}"))
    if report["repaired_lines"]:
        rows.append(("lines repaired", f"{report['repaired_lines']:,} ({report['dropped_bytes']:,} bytes dropped)"))
    for name, part in (("train", train), ("valid", valid)):
        rows.append((name, f"{part['lines']:,} lines, {part['sentences']:,} sentences, {part['tokens']:,} tokens"))
    if train["left_out_in_both"] or valid["left_out_in_both"]:
        both = f"{valid['left_out_in_both']:,} of valid, {train['left_out_in_both']:,} of train"
        rows.append(("sentences in both, left out", both))
    rows.append(("unknown tokens", f"{train['unknown_rate']:.4%} (spelled in bytes: {train['byte_piece_rate']:.4%})"))
    tokenizer = report["tokenizer"]
    rows.append(("dictionary", f"{tokenizer['dictionary_size']:,} symbols of {tokenizer['vocab_size']:,} pieces"))
    rows.append(("seconds", ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report["seconds"].items())))
    rows.append(("speed", f"{report['megabytes_per_second']:.1f} MB/s without the tokenizer's training"))
    rows.append(("written to", str(out)))
    return "\n".join(f"{name:<34}{value}" for name, value in rows)


def explain_dropped(counts: dict, settings: Settings) -> str:
    """Lines in, and what became of them, with the switch of the filter that took most."""
    found = [(counts[reason], reason) for reason in _DROPPED if counts.get(reason)]
    text = ", ".join(f"{count:,} {_DROPPED[reason][0]}" for count, reason in found) or "none"
    cure = _DROPPED[max(found)[1]][1] if found else ""
    limit = f" (lines need {settings.text.filters.min_chars} characters)" if any(r == "too_short" for _, r in found) else ""
    return f"{counts.get('lines', 0):,} lines in, {text}{limit}" + (f"; try {cure}" if cure else "")


def warnings(report: dict) -> list[str]:
    """What looks wrong about a corpus, one line each."""
    lines = report["lines"]
    found = []
    filled = lines["in"] - lines["dropped"]["empty"]
    for reason, (words, switch) in _DROPPED.items():
        count = lines["dropped"][reason]
        if switch and reason != "duplicate" and count > 0.5 * filled:
            found.append(f"{count / filled:.0%} of the lines were left out ({words}); if they are wanted: {switch}")
    if report["repaired_lines"] > 0.01 * filled:
        found.append(f"{report['repaired_lines']:,} lines held bytes that are not UTF-8, which were dropped: another encoding?")
    return found
