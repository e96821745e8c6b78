"""The fast tokenizer of exported models: fairseq's ids, from text cleaned as the pretraining text was."""

from transformers import PreTrainedTokenizerFast

from fairseq_tupe.data.cleaning import CleaningOptions, clean

WORD_START = "\u2581"
# Cleaned text holds no control characters, so one can stand for "nothing"; tokenizer.json's normalizer removes it.
NOTHING = "\x01"
MASK = "<mask>"
NAMES_IN_TEXT = ("<s>", "<pad>", "</s>", "<unk>")


class TupeTokenizer(PreTrainedTokenizerFast):
    """Cleans text in Python, then lets the Rust tokenizer cut it: ``<s> A </s>``, and for a pair ``<s> A </s> </s> B </s>``.

    ``<mask>`` in a text is the mask. Other special tokens written out in a text are ordinary text, as they are when data are
    prepared. Offsets are into the cleaned text, in which blanks are ``\u2581`` and the first word has one before it.

    Args:
        cleaning: the switches of ``fairseq_tupe.data.cleaning.CleaningOptions``; None only joins blanks.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "right"

    @property
    def cleaning_options(self) -> "CleaningOptions | None":
        """The switches. Not kept in an ``__init__``: transformers would then rebuild the Rust tokenizer without its merges."""
        cleaning = self.init_kwargs.get("cleaning")
        return None if cleaning is None else CleaningOptions.from_dict(cleaning, "tokenizer_config.json")

    def clean_text(self, text: str) -> str:
        """The text that is cut into tokens; the same as before preparing data."""
        options = self.cleaning_options
        return " ".join(text.split()) if options is None else clean(text, options)

    def _prepare(self, text: str) -> str:
        parts = []
        for number, part in enumerate(text.split(MASK)):
            cleaned = self.clean_text(part)
            for name in NAMES_IN_TEXT:
                cleaned = cleaned.replace(name, name[0] + NOTHING + name[1:])
            # after a mask a word goes on, unless a blank stands between them
            begins_word = cleaned and (number == 0 or part[0].isspace())
            parts.append((WORD_START if begins_word else "") + cleaned.replace(" ", WORD_START))
        return MASK.join(parts) or NOTHING

    def _prepare_all(self, text):
        if isinstance(text, str):
            return self._prepare(text)
        return None if text is None else [self._prepare_all(part) for part in text]

    def _encode_plus(self, text, text_pair=None, *args, is_split_into_words=False, **kwargs):
        if is_split_into_words:
            raise ValueError("TupeTokenizer takes whole texts (is_split_into_words=False): cleaning needs them")
        if isinstance(text, (list, tuple)) and text and isinstance(text[0], (list, tuple)):  # a batch of pairs
            text, text_pair = [pair[0] for pair in text], [pair[1] for pair in text]
        return super()._encode_plus(self._prepare_all(text), self._prepare_all(text_pair), *args, **kwargs)
