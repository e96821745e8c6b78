"""Masked language modelling on packed sentences: ``--task tupe_masked_lm`` with the stock ``masked_lm`` criterion.

As fairseq's ``masked_lm``, but: blocks longer than the limit are split, not dropped; ``--mask-whole-words`` works from
the dictionary of a sentencepiece model; a batch without a masked token counts as nothing; the dictionary of the
reference implementation is one flag away; what can't work is refused in one line. Without a too long block, and
without the new flags, batches and masks are exactly those of ``masked_lm``.
"""

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from fairseq import utils
from fairseq.data import Dictionary, PrependTokenDataset, TokenBlockDataset, data_utils
from fairseq.data.shorten_dataset import maybe_shorten_dataset
from fairseq.logging import metrics
from fairseq.tasks import masked_lm, register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from hydra.core.hydra_config import HydraConfig

from fairseq_tupe.data.block_splitting import split_long_blocks
from fairseq_tupe.errors import TupeError

logger = logging.getLogger(__name__)

REFERENCE_SPECIALS = ("<file>", "<email>", "<url>")
WORD_START = "\u2581"  # sentencepiece's mark of a piece that begins a word


@dataclass
class TupeMaskedLMConfig(MaskedLMConfig):
    """Options of the task: those of ``masked_lm`` and what follows."""

    tokens_per_sample: int = field(default=512, metadata={"help": "most tokens of a sample, <s> included (the paper: 512)"})
    mask_whole_words: bool = field(
        default=False, metadata={"help": "mask whole words; needs the dictionary of a sentencepiece model"}
    )
    reference_dictionary: bool = field(
        default=False,
        metadata={"help": "token ids of the reference implementation: <file>, <email> and <url> follow <unk>"},
    )


@register_task("tupe_masked_lm", dataclass=TupeMaskedLMConfig)
class TupeMaskedLMTask(MaskedLMTask):
    """See the module's docstring. Bad data and settings raise TupeError."""

    args = None  # stock load_dataset reads it where words are masked whole, and only there

    def __init__(self, cfg: TupeMaskedLMConfig, dictionary):
        super().__init__(cfg, dictionary)
        if cfg.tokens_per_sample < 2:
            raise TupeError(f"--tokens-per-sample {cfg.tokens_per_sample} leaves no room for a token beside <s>")
        if cfg.mask_whole_words:
            word_beginnings(dictionary)  # refuse now, not after the model is built

    @classmethod
    def setup_task(cls, cfg: TupeMaskedLMConfig, **kwargs):
        """Load the dictionary, which all shards must share, and build the task."""
        return cls(cfg, cls.load_dict(cfg))

    @classmethod
    def load_dict(cls, cfg: TupeMaskedLMConfig) -> Dictionary:
        """Dictionary of the first data folder, without <mask>; TupeError where another shard's differs."""
        first, *others = data_folders(cfg.data)
        dictionary = load_dictionary(os.path.join(first, "dict.txt"), cfg.reference_dictionary)
        for folder in others:
            path = os.path.join(folder, "dict.txt")
            other = load_dictionary(path, cfg.reference_dictionary)
            if other != dictionary:
                raise TupeError(
                    f"{path} ({len(other):,} types) differs from {first}/dict.txt ({len(dictionary):,} types): "
                    f"all shards must be binarized with one dictionary"
                )
        logger.info(f"dictionary: {len(dictionary)} types")
        return dictionary

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        """Load a split; of several data folders, epoch e takes number (e - 1) modulo their count."""
        with _sentencepiece_words():
            super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)

    def _load_dataset_split(self, split, epoch, combine):
        folders = data_folders(self.cfg.data)
        path = os.path.join(folders[(epoch - 1) % len(folders)], split)
        sentences = _load_sentences(path, self.source_dictionary, combine)
        sentences = maybe_shorten_dataset(
            sentences,
            split,
            self.cfg.shorten_data_split_list,
            self.cfg.shorten_method,
            self.cfg.tokens_per_sample,
            self.cfg.seed,
        )
        limit = self.cfg.tokens_per_sample - 1  # one less for <s>
        blocks = split_long_blocks(self._pack(sentences, limit), limit)
        logger.info(f"loaded {len(blocks)} blocks from: {path}")
        return PrependTokenDataset(blocks, self.source_dictionary.bos())

    def _pack(self, sentences, limit: int):
        break_mode = str(self.cfg.sample_break_mode)
        if break_mode == "eos":  # a block is a sentence; TokenBlockDataset needs np.compat, gone in numpy 2
            return sentences
        return TokenBlockDataset(
            sentences,
            sentences.sizes,
            limit,
            pad=self.source_dictionary.pad(),
            eos=self.source_dictionary.eos(),
            break_mode=break_mode,
        )

    def filter_indices_by_size(self, indices, dataset, max_positions=None, ignore_invalid_inputs=False):
        """Keep every block: none is longer than --tokens-per-sample, so only a small --max-tokens could drop one."""
        kept, ignored = dataset.filter_indices_by_size(indices, max_positions)
        if len(ignored) > 0:
            longest = max(dataset.size(index) for index in ignored)
            raise TupeError(
                f"{len(ignored):,} blocks of up to {longest} tokens exceed the limit of {max_positions} tokens: raise "
                f"--max-tokens to {longest} or lower --tokens-per-sample {self.cfg.tokens_per_sample}"
            )
        return kept

    def build_model(self, cfg, from_checkpoint=False):
        """Build the model; TupeError where it has fewer positions than --tokens-per-sample."""
        model = super().build_model(cfg, from_checkpoint)
        positions = model.max_positions()
        if isinstance(positions, int) and positions < self.cfg.tokens_per_sample:
            raise TupeError(
                f"--tokens-per-sample {self.cfg.tokens_per_sample} is more than the model's "
                f"--max-positions {positions}: lower the first or raise the second"
            )
        return model

    def reduce_metrics(self, logging_outputs, criterion):
        """Log metrics; where no token was masked, on any rank, the loss is zero over zero tokens and not NaN."""
        masked = sum(log.get("sample_size", 0) for log in logging_outputs)
        super().reduce_metrics(logging_outputs, criterion if masked > 0 else _NothingMasked())


class _NothingMasked:
    """Stands in for a criterion whose loss would be 0 / 0."""

    @staticmethod
    def reduce_metrics(logging_outputs) -> None:
        metrics.log_scalar("loss", 0.0, 0, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["loss"].avg))


def data_folders(data: str) -> list[str]:
    """The folders of ``dir1:dir2``; TupeError where one is missing."""
    folders = utils.split_paths(data)
    for folder in folders:
        if not os.path.isdir(folder) and "://" not in folder:
            part = "" if folder == data else f" (part of {data})"
            where = "" if os.path.isabs(folder) else f"; relative paths start at {os.getcwd()}"
            if where and HydraConfig.initialized():
                where += ", where Hydra runs: write ${oc.env:PWD}/..., or set hydra.run.dir=."
            raise TupeError(f"data folder '{folder}'{part} does not exist{where}")
    return folders


def load_dictionary(path: str, reference: bool = False) -> Dictionary:
    """Read a dict.txt; with `reference`, <file>, <email>, <url> become ids 4, 5, 6 and every other id moves by 3."""
    dictionary = Dictionary(extra_special_symbols=list(REFERENCE_SPECIALS) if reference else None)
    try:
        dictionary.add_from_file(path)
    except FileNotFoundError:
        raise TupeError(f"{path} does not exist: a data folder holds dict.txt beside its *.bin and *.idx") from None
    except Exception as error:  # fairseq raises bare Exception for a wrong encoding
        cure = " (is --reference-dictionary right here?)" if reference and "Duplicate" in str(error) else ""
        raise TupeError(f"{path} is not a fairseq dictionary: {str(error).splitlines()[0]}{cure}") from error
    if len(dictionary) == dictionary.nspecial:
        raise TupeError(f"{path} is empty: it holds one `piece count` a line")
    return dictionary


def _load_sentences(path: str, dictionary: Dictionary, combine: bool):
    for suffix in (".idx", ".bin"):
        if not os.path.exists(path + suffix) and "://" not in path:
            raise TupeError(f"{path}{suffix} does not exist: prepare the data, or name the splits it has")
    if os.path.exists(path + ".bin") and not os.path.getsize(path + ".bin"):
        raise TupeError(f"{path}.bin is empty: prepare the data again")
    try:
        sentences = data_utils.load_indexed_dataset(path, dictionary, combine=combine)
        if sentences:
            last = sentences[len(sentences) - 1]  # fails where the .bin is cut short
    except Exception as error:  # numpy, mmap and fairseq each fail in their own way on a damaged file
        raise TupeError(f"{path}.idx or {path}.bin is damaged ({error}): prepare the data again") from error
    if not sentences:
        raise TupeError(f"{path}.idx holds no sentence")
    # a sample: the whole would take as long as reading the corpus
    largest = max(int(sentence.max()) for sentence in [last, *(sentences[i] for i in range(min(len(sentences), 1000)))])
    if largest >= len(dictionary):
        raise TupeError(
            f"{path}.bin holds token {largest}, but dict.txt beside it has {len(dictionary):,} types: they don't match"
        )
    return sentences


def word_beginnings(dictionary: Dictionary) -> torch.Tensor:
    """Which types begin a word: pieces that start with sentencepiece's mark, and specials. (types,) uint8."""
    marked = [symbol.startswith(WORD_START) for symbol in dictionary.symbols]
    if not any(marked):
        raise TupeError(
            f"--mask-whole-words needs the dictionary of a sentencepiece model, but none of its {len(dictionary):,} "
            f"types begins with '{WORD_START}' (U+2581)"
        )
    whole = {"<mask>", *REFERENCE_SPECIALS}
    begins = [
        mark or index < dictionary.nspecial or symbol in whole or symbol.startswith("madeupword")
        for index, (mark, symbol) in enumerate(zip(marked, dictionary.symbols, strict=True))
    ]
    return torch.tensor(begins, dtype=torch.uint8)


class _WordBeginnings:
    """What MaskTokensDataset gathers from, with the first token after <s> a beginning even where a block cuts a word.

    Otherwise the rest of a cut word would belong to <s>, and be masked together with it.
    """

    def __init__(self, begins: torch.Tensor):
        self.begins = begins

    def gather(self, _dim: int, tokens: torch.Tensor) -> torch.Tensor:
        marks = self.begins[tokens]
        marks[:2] = 1
        return marks


@contextmanager
def _sentencepiece_words():
    """Let stock load_dataset take word beginnings from the dictionary: its own way wants a --bpe and self.args."""
    stock = masked_lm.get_whole_word_mask
    masked_lm.get_whole_word_mask = lambda _args, dictionary: _WordBeginnings(word_beginnings(dictionary))
    try:
        yield
    finally:
        masked_lm.get_whole_word_mask = stock
