"""TUPE, the Transformer with Untied Positional Encoding (arXiv 2006.15595), as a fairseq user directory.

Importing registers the models, tasks, criterion and learning rate schedule with fairseq. Where fairseq can't be imported the
package still imports, so that ``python -m fairseq_tupe doctor`` can say why: the error is kept in ``FAIRSEQ_ERROR``.
"""

import sys

__version__ = "0.1.0"

FAIRSEQ_ERROR = None


def _import_fairseq() -> None:
    import re

    import fairseq

    if not hasattr(fairseq, "__version__"):
        raise ImportError(f"{list(fairseq.__path__)[0]} is only a folder, not fairseq: run from another folder")
    if tuple(map(int, re.findall(r"\d+", fairseq.__version__)[:3])) < (0, 12, 2):
        raise ImportError(f"fairseq {fairseq.__version__} is too old, 0.12.2 or later is needed: bash scripts/setup.sh")


try:
    _import_fairseq()
except Exception as error:  # a broken fairseq fails in many ways: ImportError, ValueError (dataclasses), OSError
    FAIRSEQ_ERROR = error
    if sys.argv[:1] != ["-m"]:  # python -m fairseq_tupe speaks for itself
        print(f"fairseq_tupe: fairseq can't be used ({error}); run: python -m fairseq_tupe doctor", file=sys.stderr)
else:
    # By name: fairseq skips its own scan of tasks/ and models/ where this package was imported before --user-dir.
    from . import fairseq_hooks
    from .criterions import tupe_sentence_prediction as _criterion  # noqa: F401
    from .models import tupe_roberta as _model  # noqa: F401
    from .optim import tupe_adam as _optimizer  # noqa: F401
    from .optim.lr_scheduler import tupe_polynomial_decay as _schedule  # noqa: F401
    from .tasks import tupe_masked_lm as _masked_lm  # noqa: F401
    from .tasks import tupe_sentence_prediction as _sentence_prediction  # noqa: F401

    fairseq_hooks.install()
