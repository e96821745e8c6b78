"""A trained model on raw text: ``TupeRobertaModel.from_pretrained(DIR)`` and what it returns."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import checkpoint_utils, utils
from omegaconf import open_dict
from torch import Tensor, nn

from fairseq_tupe.data.sentence_labels import PADDING_ROW
from fairseq_tupe.data.sentence_pairs import PairFormat
from fairseq_tupe.errors import TupeError

logger = logging.getLogger(__name__)

MASK = "<mask>"
WORD_START = "\u2581"  # sentencepiece's mark of a piece that begins a word
DICTIONARY_PLACES = ("input0", "", "tokenizer")  # below a data or checkpoint folder


class TupeRobertaHubInterface(nn.Module):
    """A model with its task and tokenizer; the methods are those of fairseq's ``RobertaHubInterface``.

    Args:
        cfg: the checkpoint's whole configuration.
        task: ``tupe_masked_lm`` or ``tupe_sentence_prediction``.
        model: the model, left in the mode it is in (:func:`load_hub_interface` puts it into eval mode).
        tokenizer: :class:`fairseq_tupe.data.tokenizer.Tokenizer` whose dictionary is the task's.
    """

    def __init__(self, cfg: Any, task: Any, model: nn.Module, tokenizer: Any):
        super().__init__()
        self.cfg, self.task, self.model, self.tokenizer = cfg, task, model, tokenizer
        self.dictionary = task.source_dictionary
        self._said_trimmed = False
        self._shift = self.dictionary.nspecial - 4  # the tokenizer counts fairseq's own four special symbols
        self.register_buffer("_float_tensor", torch.tensor([0.0]), persistent=False)  # knows the device

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._float_tensor.device

    @property
    def labels(self) -> list | None:
        """Label texts in the order that the checkpoint was trained with; ``predict``'s last axis. None where there are none."""
        return getattr(self.task, "labels", None)

    @property
    def row_format(self) -> PairFormat:
        """The formatter of rows: the task's own, so that ids equal those of its datasets."""
        if hasattr(self.task, "row_format"):
            return self.task.row_format
        eos = self.dictionary.eos()
        return PairFormat(bos=self.dictionary.bos(), eos=eos, separator=eos, max_length=self.model.max_positions())

    def encode(self, sentence: str, *more: str, no_separator: bool = False, truncate: bool | None = None) -> Tensor:
        """Ids (T,) of ``<s> A </s>``, or ``<s> A </s> </s> B </s>`` of a pair, from raw text.

        Args:
            sentence, more: raw text, cleaned as the pretraining data were.
            no_separator: leave out the second of the two ``</s>`` between sentences.
            truncate: trim to the model's ``max_positions`` as the task's datasets do, the longer sentence first. By default
                pairs are, the first time with a warning, and single sentences are not: using one that is too long fails.

        Raises:
            TupeError: more than two sentences are to be trimmed.
        """
        contents = [self._content(text) for text in (sentence, *more)]
        row_format = replace(self.row_format, separator=None) if no_separator else self.row_format
        limit, length = row_format.max_length, sum(map(len, contents)) + row_format.special_tokens(len(contents))
        truncate = len(contents) == 2 if truncate is None else truncate
        if not truncate or limit is None or length <= limit:
            return _join(replace(row_format, max_length=None), contents)
        if len(contents) > 2:
            raise TupeError(f"{len(contents)} sentences of {length} tokens in all don't fit the limit of {limit} tokens")
        if not self._said_trimmed:
            self._said_trimmed = True
            logger.warning(f"a pair of {length} tokens was trimmed to {limit}; later ones will be without a word")
        return row_format(*contents)

    def decode(self, tokens: Tensor) -> str | list:
        """Text of a row of ids (T,); a list of texts where it holds several sentences. Undoes :meth:`encode`.

        Padding is ignored. What cleaning changed, such as upper case, does not come back.
        """
        if tokens.dim() != 1:
            raise TupeError(f"decode takes one row of ids, got a tensor of shape {tuple(tokens.shape)}")
        ids = [index for index in tokens.tolist() if index != self.dictionary.pad()]
        ids = ids[1:] if ids[:1] == [self.dictionary.bos()] else ids
        texts = [self._text(content) for content in _split(ids, self.dictionary.eos())]
        return texts[0] if len(texts) == 1 else texts

    def extract_features(self, tokens: Tensor, return_all_hiddens: bool = False) -> Tensor | list:
        """Last layer's output (B, T, C), or a list of all layers' with the embedding output first.

        Args:
            tokens: ids (T,) or (B, T), right-padded.
            return_all_hiddens: return the list.

        Raises:
            TupeError: the rows are longer than ``max_positions``, or column 0 is not ``<s>`` though the model needs it.
        """
        tokens = tokens.unsqueeze(0) if tokens.dim() == 1 else tokens
        features, extra = self.model(tokens.to(self.device), features_only=True, return_all_hiddens=return_all_hiddens)
        if return_all_hiddens:
            return [state.transpose(0, 1) for state in extra["inner_states"]]
        return features

    def register_classification_head(self, name: str, num_classes: int | None = None, inner_dim: int | None = None) -> None:
        """Add a classification head with fresh values."""
        self.model.register_classification_head(name, num_classes=num_classes, inner_dim=inner_dim)
        self.model.classification_heads[name].to(self.device).train(self.model.training)

    def predict(self, head: str, tokens: Tensor, return_logits: bool = False) -> Tensor:
        """Log probabilities (B, classes) of a head; index i is :attr:`labels` [i].

        Args:
            head: name of a classification head.
            tokens: ids (T,) or (B, T).
            return_logits: return logits instead; a head with one output (regression) always does.

        Raises:
            TupeError: as :meth:`extract_features`, or there is no such head.
        """
        heads = self.model.classification_heads
        if head not in heads:
            raise TupeError(f'no classification head "{head}"; the model has {", ".join(heads) or "none"}')
        logits = heads[head](self.extract_features(tokens))
        return logits if return_logits or logits.shape[-1] == 1 else F.log_softmax(logits.float(), dim=-1)

    def fill_mask(self, text: str, topk: int = 5) -> list:
        """The likeliest pieces in place of the one ``<mask>`` of a text.

        Returns:
            ``topk`` triples (text filled in, probability, piece), the likeliest first. A piece that begins a word begins with
            a space; special symbols are left out.

        Raises:
            TupeError: there is not exactly one ``<mask>``, or the text is too long.
        """
        if text.count(MASK) != 1:
            raise TupeError(f'fill_mask takes a text with one {MASK}, found {text.count(MASK)} in "{text}"')
        left, right = text.split(MASK)
        mask = self.dictionary.index(MASK)
        content = [*self._content(left), mask, *self._content(right, begins_word=not right or right[0].isspace())]
        row = replace(self.row_format, max_length=None)(content).unsqueeze(0).to(self.device)
        with utils.model_eval(self.model), torch.no_grad():
            logits, _ = self.model(row, masked_tokens=row.eq(mask))
        probabilities = logits.view(-1).float().softmax(dim=-1)
        candidates = probabilities.clone()
        candidates[self._not_text().to(self.device)] = -1.0
        filled = []
        for index in candidates.topk(min(topk, len(candidates))).indices.tolist():
            piece = self.dictionary[index].replace(WORD_START, " ")
            whole = text.replace(f" {MASK}" if f" {MASK}" in text else MASK, piece)
            filled.append((whole if left else whole.lstrip(), probabilities[index].item(), piece))
        return filled

    def _content(self, text: str, begins_word: bool = True) -> list:
        """Ids of a text without special tokens; ``begins_word=False`` for the rest of a text that was cut inside a word."""
        if not begins_word:
            pieces = self.tokenizer.encode_pieces(text)
            first = pieces[0].removeprefix(WORD_START) if pieces else ""
            if pieces and (not first or first in self.dictionary):
                return [self.dictionary.index(piece) for piece in ([first] if first else []) + pieces[1:]]
        return [index + self._shift if index >= 4 else index for index in self.tokenizer.encode(text)]

    def _text(self, ids: list) -> str:
        """Text of content ids; ``<mask>`` stays visible."""
        mask, special = self.dictionary.index(MASK), self.dictionary.nspecial
        return self.tokenizer.decode(
            self.tokenizer.mask_id if index == mask else index - self._shift if index >= special else index for index in ids
        )

    def _not_text(self) -> Tensor:
        """Ids that stand for no text: fairseq's special symbols, padding rows and ``<mask>``."""
        symbols = enumerate(self.dictionary.symbols)
        return torch.tensor([i for i, symbol in symbols if i < 4 or symbol == MASK or PADDING_ROW.fullmatch(symbol)])


def _join(row_format: PairFormat, contents: list) -> Tensor:
    """A row of any number of sentences, none trimmed."""
    row = row_format(contents[0])
    for content in contents[1:]:
        separator = [] if row_format.separator is None else [row_format.separator]
        row = torch.cat([row, torch.tensor([*separator, *content, row_format.eos])])
    return row


def _split(ids: list, eos: int) -> list:
    """Contents of the sentences of a row that begins after ``<s>``; an ``</s>`` right after one's own is a separator."""
    contents, start = [], 0
    while start < len(ids):
        end = ids.index(eos, start) if eos in ids[start:] else len(ids)
        contents.append(ids[start:end])
        start = end + 1
        if ids[start : start + 1] == [eos]:
            start += 1
            if start == len(ids):
                contents.append([])  # no separator, but the </s> of an empty sentence
    return contents or [[]]


def load_hub_interface(
    model_name_or_path: str,
    checkpoint_file: str = "checkpoint_best.pt",
    data_name_or_path: str | None = None,
    **overrides,
) -> TupeRobertaHubInterface:
    """Load a checkpoint of ours with all its classification heads, in eval mode on the CPU, and find its tokenizer.

    Args:
        model_name_or_path: folder of the checkpoint.
        checkpoint_file: file in it.
        data_name_or_path: folder with the dictionary: absolute, or relative to the current folder or to the checkpoint's. By
            default the one that the checkpoint was trained on, or else the checkpoint's folder.
        overrides: options that replace the checkpoint's.

    Raises:
        TupeError: a file is missing, or dictionary, tokenizer and checkpoint do not belong together.
    """
    from fairseq_tupe.data.tokenizer import Tokenizer

    folder = Path(model_name_or_path)
    path = folder / checkpoint_file
    if not path.is_file():
        there = ", ".join(sorted(other.name for other in folder.glob("*.pt"))) or "no *.pt file"
        raise TupeError(f"{path} not found; {folder} " + (f"has {there}" if folder.is_dir() else "is no folder"))
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path), {"load_checkpoint_heads": True, **overrides})
    saved = state.get("cfg")
    if saved is None or not str(saved.task._name).startswith("tupe_"):
        name = "of another format" if saved is None else f"of task {saved.task._name}"
        raise TupeError(f"{path} is a checkpoint {name}: expected tupe_masked_lm or tupe_sentence_prediction")
    data, dictionary = _find_data(folder, data_name_or_path, str(overrides.get("data", saved.task.data)))
    with open_dict(saved):
        # pretraining looks for dict.txt itself, sentence tasks for the places that were searched
        saved.task.data = str(data if saved.task._name == "tupe_sentence_prediction" else dictionary.parent)
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], state=state)
    tokenizer = Tokenizer.find(data, folder)
    _check_dictionary(tokenizer, task.source_dictionary, dictionary)
    return TupeRobertaHubInterface(cfg, task, models[0].eval(), tokenizer).eval()


def _find_data(folder: Path, wanted: str | None, saved: str) -> tuple:
    """The data folder and the dictionary in it."""
    default = [Path(saved), Path(saved.split(":")[0]), folder]  # the second: the first of several shards
    candidates = list(dict.fromkeys(default if wanted is None else [Path(wanted), folder / wanted]))
    for candidate in candidates:
        for place in DICTIONARY_PLACES:
            if (candidate / place / "dict.txt").is_file():
                return candidate, candidate / place / "dict.txt"
    looked = ", ".join(str(candidate) for candidate in candidates)
    raise TupeError(
        f"no dictionary (input0/dict.txt, dict.txt or tokenizer/dict.txt) in {looked}: pass data_name_or_path, the folder of "
        "the data that the checkpoint was trained on"
    )


def _check_dictionary(tokenizer: Any, dictionary: Any, path: Path) -> None:
    theirs = tokenizer.symbols()
    ours = [s for s in dictionary.symbols[dictionary.nspecial : dictionary.index(MASK)] if not PADDING_ROW.fullmatch(s)]
    if theirs != ours:
        raise TupeError(
            f"the tokenizer in {tokenizer.folder} ({len(theirs)} pieces) does not fit {path} ({len(ours)} types): "
            "put the tokenizer that the data were prepared with beside them"
        )
