"""The recorded numbers of the original implementation, and the model they belong to (see tests/golden/README.md)."""

from pathlib import Path

import torch
from fairseq.data import Dictionary

from fairseq_tupe.interop.reference import build_reference_model, load_reference_checkpoint

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = ("tupe_a", "tupe_r")
EXTRA_SPECIALS = ["<file>", "<email>", "<url>"]


def reference_dictionary(path: Path) -> Dictionary:
    """A dict.txt as the original's tasks load it: three more specials, ``<mask>`` last."""
    dictionary = Dictionary(extra_special_symbols=EXTRA_SPECIALS)
    dictionary.add_from_file(str(path))
    dictionary.add_symbol("<mask>")
    return dictionary


class GoldenModel:
    """One recorded model: weights, dictionary, and what the original computed with them."""

    def __init__(self, name: str, attention_backend: str = "auto"):
        self.attention_backend = attention_backend
        self.expected = torch.load(GOLDEN / f"{name}.expected.pt", weights_only=True)
        self.state = load_reference_checkpoint(GOLDEN / f"{name}.checkpoint.pt")
        self.dictionary = reference_dictionary(GOLDEN / "tupe_a.dict.txt")

    def build(self):
        """A fresh copy of the model, in eval mode (no dropout either way: its rates are zero)."""
        return build_reference_model(self.state, self.dictionary, attention_backend=self.attention_backend)
