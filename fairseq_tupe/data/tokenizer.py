"""The tokenizer that lies beside prepared data: cleaning, sentencepiece, and fairseq's ids, in one folder.

The folder holds spm.model, dict.txt and manifest.json (cleaning switches, SHA-256 of the two files, versions). sentencepiece
runs with its `identity` normalization: all normalization is `cleaning.clean`, so decoding gives the cleaned text back,
character by character; what has no piece of its own (emoji, rare scripts) is spelled in byte pieces.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from fairseq_tupe.data.cleaning import CleaningOptions, clean
from fairseq_tupe.data.dictionaries import FAIRSEQ_SPECIALS, MASK, OFFSET, dictionary_symbols, fairseq_ids, read_dictionary
from fairseq_tupe.errors import TupeError

MANIFEST_FORMAT = 1
MODEL, DICTIONARY, MANIFEST = "spm.model", "dict.txt", "manifest.json"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, cleaning: CleaningOptions, training: dict) -> dict:
    """Writes manifest.json for the spm.model and dict.txt that lie in `folder`; returns what it wrote."""
    processor = _load_model(folder / MODEL)
    manifest = {
        "format": MANIFEST_FORMAT,
        "cleaning": cleaning.to_dict(),
        "vocab_size": processor.get_piece_size(),
        "dictionary_size": len(read_dictionary(folder / DICTIONARY)[0]),
        "sentencepiece_version": sentencepiece.__version__,
        "training": training,
        "sha256": {name: sha256_of(folder / name) for name in (MODEL, DICTIONARY)},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return manifest


def _load_model(path: Path) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:
        raise TupeError(f"{path}: this is no sentencepiece model") from None
    return processor


class Tokenizer:
    """Text to fairseq ids and back. Make one with `load` or `find`.

    Attributes:
        folder: where it was loaded from.
        cleaning: the switches it was trained with.
        fingerprint: SHA-256 of spm.model; equal fingerprints mean equal ids.
        vocab_size: pieces in spm.model, its own specials included.
    """

    def __init__(self, folder: Path, processor: sentencepiece.SentencePieceProcessor, manifest: dict):
        self.folder = folder
        self.cleaning = CleaningOptions.from_dict(manifest.get("cleaning"), str(folder / MANIFEST))
        self.manifest = manifest
        self.fingerprint: str = manifest["sha256"][MODEL]
        self.vocab_size = processor.get_piece_size()
        self._processor = processor
        pieces = [processor.id_to_piece(i) for i in range(self.vocab_size)]
        ids = fairseq_ids(pieces, str(folder / MODEL))
        self._to_fairseq: list[int] = ids.tolist()
        self._from_fairseq = {fairseq_id: i for i, fairseq_id in enumerate(self._to_fairseq) if fairseq_id >= OFFSET}
        self.mask_id = len(self._from_fairseq) + OFFSET

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Reads a tokenizer folder.

        Raises:
            TupeError: where a file is missing, was changed since the manifest was written, or does not fit the others.
        """
        folder = Path(folder)
        for name in (MANIFEST, MODEL, DICTIONARY):
            if not (folder / name).is_file():
                raise TupeError(f"{folder}: no {name} there; expected a tokenizer folder ({MODEL}, {DICTIONARY}, {MANIFEST})")
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            sums = {name: str(manifest["sha256"][name]) for name in (MODEL, DICTIONARY)}
            kind = manifest["format"]
        except (ValueError, KeyError, TypeError):
            raise TupeError(f"{folder / MANIFEST}: this is no tokenizer manifest") from None
        if kind != MANIFEST_FORMAT:
            raise TupeError(f"{folder / MANIFEST}: format {kind!r}, expected {MANIFEST_FORMAT}; made by another version")
        for name, expected in sums.items():
            found = sha256_of(folder / name)
            if found != expected:
                raise TupeError(
                    f"{folder / name}: the file changed: its SHA-256 is {found[:12]}..., the manifest says {expected[:12]}..."
                )
        tokenizer = cls(folder, _load_model(folder / MODEL), manifest)
        tokenizer._check_dictionary()
        return tokenizer

    @classmethod
    def find(cls, *folders: str | Path) -> "Tokenizer":
        """The first tokenizer in F/tokenizer, F or F/../tokenizer for each given folder; TupeError lists what was looked at."""
        looked_at = []
        for folder in folders:
            base = Path(folder)
            for place in (base / "tokenizer", base, base.absolute().parent / "tokenizer"):
                if (place / MANIFEST).is_file() and (place / MODEL).is_file():
                    return cls.load(place)
                looked_at.append(str(place))
        needed = f"{MODEL}, {DICTIONARY} and {MANIFEST}"
        raise TupeError(f"no tokenizer found; looked at {', '.join(looked_at)}; expected {needed} in one of them")

    def _check_dictionary(self) -> None:
        symbols, _ = read_dictionary(self.folder / DICTIONARY)
        own = self.symbols()
        if symbols != own:
            row = next((i for i, (a, b) in enumerate(zip(symbols, own, strict=False)) if a != b), min(len(symbols), len(own)))
            raise TupeError(f"{self.folder / DICTIONARY}: line {row + 1} differs from {MODEL}: the two don't belong together")

    def symbols(self) -> list[str]:
        """The rows of dict.txt, in order."""
        return dictionary_symbols([self._processor.id_to_piece(i) for i in range(self.vocab_size)], str(self.folder / MODEL))

    def clean(self, text: str) -> str:
        """The cleaning of the pretraining text, without its line filters; one line, never an error."""
        return clean(text, self.cleaning)

    def encode(self, text: str) -> list[int]:
        """fairseq ids of `text` after `clean`, without <s> and </s>. A placeholder such as <url> is one id."""
        return [self._to_fairseq[i] for i in self._processor.encode(self.clean(text))]

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """`encode` of many texts."""
        table = self._to_fairseq
        return [[table[i] for i in ids] for ids in self._processor.encode([self.clean(text) for text in texts], num_threads=1)]

    def encode_pieces(self, text: str) -> list[str]:
        """The pieces of `text` after `clean`, as dict.txt spells them."""
        return self._processor.encode(self.clean(text), out_type=str)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of fairseq ids. <s>, <pad> and </s> are left out; <unk> and the mask's id are spelled <unk> and <mask>.

        Raises:
            TupeError: for an id beyond the dictionary and its <mask>.
        """
        parts: list[str] = []
        run: list[int] = []
        for item in ids:
            fairseq_id = int(item)
            if fairseq_id in self._from_fairseq:
                run.append(self._from_fairseq[fairseq_id])
                continue
            if fairseq_id not in (self.mask_id, *FAIRSEQ_SPECIALS.values()):
                raise TupeError(f"id {fairseq_id} is not in the dictionary: expected 0 to {self.mask_id}")
            if fairseq_id in (self.mask_id, FAIRSEQ_SPECIALS["<unk>"]):
                parts += [self._decode_run(run), MASK if fairseq_id == self.mask_id else "<unk>"]
                run = []
        parts.append(self._decode_run(run))
        return " ".join(part for part in parts if part)

    def _decode_run(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids)).strip() if ids else ""
