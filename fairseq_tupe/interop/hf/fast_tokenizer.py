"""From a tokenizer folder (spm.model, dict.txt, manifest.json) to the Rust tokenizer with the same ids."""

from collections.abc import Iterator
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fairseq_tupe.errors import TupeError
from fairseq_tupe.interop.hf.tokenization_tupe import MASK, NOTHING, WORD_START, TupeTokenizer

BPE = 2  # sentencepiece's TrainerSpec.ModelType


def build_tokenizer(ours: Any, rows: int, specials: tuple[str, ...], max_length: int) -> TupeTokenizer:
    """The transformers tokenizer equal to one of ours.

    Args:
        ours: :class:`fairseq_tupe.data.tokenizer.Tokenizer`.
        rows: of the model's embedding.
        specials: extra special symbols after ``<unk>``: the original's three, or none.
        max_length: the model's ``max_positions``.

    Raises:
        TupeError: sentencepiece model and embedding do not belong together, or the model is not a BPE.
    """
    path = ours.folder / "spm.model"
    data = path.read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    kind, charsmap = model_settings(data)
    if kind != BPE:
        raise TupeError(f"{path}: sentencepiece model of type {kind}, expected BPE ({BPE}), which is all that can be exported")
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *specials, *ours.symbols()]
    if len(symbols) >= rows:
        raise TupeError(f"{path}: {len(symbols)} symbols and {MASK}, but the model's embedding has {rows} rows")
    symbols += [f"madeupword{number:04d}" for number in range(rows - len(symbols) - 1)]
    vocabulary = {symbol: index for index, symbol in enumerate([*symbols, MASK])}
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=list(merges(processor)),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=any(processor.is_byte(index) for index in range(processor.get_piece_size())),
        )
    )
    steps = [normalizers.Replace(NOTHING, "")]
    if charsmap:
        steps += [normalizers.Precompiled(charsmap), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B:0 </s>:0", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    user_defined = [piece for piece in user_defined_pieces(data) if piece in vocabulary]
    backend.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in user_defined])
    return TupeTokenizer(
        tokenizer_object=backend,
        cleaning=ours.cleaning.to_dict(),
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token=MASK,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def merges(processor: Any) -> Iterator[tuple[str, str]]:
    """Pairs in the order in which sentencepiece's BPE joins them: the best scored result first."""
    pieces = [
        processor.id_to_piece(index)
        for index in sorted(range(processor.get_piece_size()), key=lambda index: -processor.get_score(index))
        if not (processor.is_byte(index) or processor.is_control(index) or processor.is_unknown(index))
    ]
    known = {piece: rank for rank, piece in enumerate(pieces)}
    for piece in pieces:
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [pair for pair in pairs if pair[0] in known and pair[1] in known]
        yield from sorted(pairs, key=lambda pair: (known[pair[0]], known[pair[1]]))


# --- sentencepiece's ModelProto, as far as needed; the protobuf package would be one more dependency for three fields ----


def model_settings(data: bytes) -> tuple[int, bytes]:
    """Model type (``TrainerSpec.model_type``) and compiled normalization rules (empty for "identity")."""
    kind, charsmap = 1, b""
    for number, value in _fields(data):
        if number == 2:  # trainer_spec
            kind = next((entry for field, entry in _fields(value) if field == 3), kind)
        elif number == 3:  # normalizer_spec
            charsmap = next((entry for field, entry in _fields(value) if field == 2), charsmap)
    return kind, charsmap


def user_defined_pieces(data: bytes) -> list[str]:
    """Pieces that are matched before anything else (``SentencePiece.type`` 4)."""
    pieces = (dict(_fields(value)) for number, value in _fields(data) if number == 1)
    return [piece[1].decode("utf-8") for piece in pieces if piece.get(3) == 4]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of one protobuf message: integers, or bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
        else:
            size, place = _varint(data, place) if kind == 2 else ({1: 8, 5: 4}[kind], place)
            value, place = data[place : place + size], place + size
        yield key >> 3, value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
