"""What each GLUE task is: its files, columns, labels in their fixed order, metric and the paper's settings."""

from dataclasses import dataclass, field

from fairseq_tupe.errors import TupeError

INPUT_NAMES = ("input0", "input1")

# fairseq's split -> names of its file without ending: the GLUE site's, then those of the ``datasets`` library
_ONE_DEV_SET = {"train": ("train",), "valid": ("dev", "validation"), "test": ("test",)}
_NLI_LABELS = ("entailment", "neutral", "contradiction")
_ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Headerless:
    """Columns by position, for a layout without a header row."""

    stems: tuple[str, ...]  # file names without ending
    fields: tuple[int, ...]  # numbers of fields a row may have
    texts: tuple[int, ...]
    label: int


@dataclass(frozen=True)
class GlueTask:
    """One GLUE task. Column entries list the header names in use; the first one that a header holds counts."""

    name: str  # as GLUE writes it; the prepared folder is NAME-bin
    folders: tuple[str, ...]  # names its folder goes by inside a GLUE download
    texts: tuple[tuple[str, ...], ...]  # one entry an input
    label: tuple[str, ...]
    labels: tuple[str, ...]  # class i is labels[i], as in the ``datasets`` library; empty for regression
    metric: str  # the GLUE metric that picks the best checkpoint
    rows: dict[str, int]  # official number of rows a split
    label_range: tuple[float, float] | None = None  # regression only; divided by the upper end when written
    epochs: int = 10  # the paper: 5 for the three large tasks, 10 otherwise
    files: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(_ONE_DEV_SET))
    endings: tuple[str, ...] = (".tsv",)
    headerless: Headerless | None = None
    drops_malformed: bool = False  # rows with missing fields are known to occur in train; the original drops them
    other_rows: dict[str, int] = field(default_factory=dict)  # counts of another version in circulation
    other_version: str = ""

    @property
    def folder(self) -> str:
        """Name of the prepared folder."""
        return f"{self.name}-bin"

    @property
    def regression(self) -> bool:
        """True where the target is a number."""
        return self.label_range is not None

    @property
    def num_classes(self) -> int:
        """Size of the classification head."""
        return 1 if self.regression else len(self.labels)

    @property
    def valid_subsets(self) -> tuple[str, ...]:
        """Dev sets under fairseq's names."""
        return tuple(split for split in self.files if split.startswith("valid"))

    @property
    def trainable(self) -> bool:
        """False for a diagnostic set, which has a test part only."""
        return "train" in self.files


_TASKS = (
    GlueTask(
        name="CoLA",
        folders=("CoLA", "cola"),
        texts=(("sentence",),),
        label=("label",),
        labels=("0", "1"),
        metric="mcc",
        rows={"train": 8551, "valid": 1043, "test": 1063},
        headerless=Headerless(stems=("train", "dev"), fields=(4,), texts=(3,), label=1),
    ),
    GlueTask(
        name="SST-2",
        folders=("SST-2", "sst2", "sst_2", "SST2"),
        texts=(("sentence",),),
        label=("label",),
        labels=("0", "1"),
        metric="accuracy",
        rows={"train": 67349, "valid": 872, "test": 1821},
    ),
    GlueTask(
        name="MRPC",
        folders=("MRPC", "mrpc"),
        texts=(("#1 String", "sentence1"), ("#2 String", "sentence2")),
        label=("Quality", "label"),
        labels=("0", "1"),
        metric="accuracy",
        rows={"train": 3668, "valid": 408, "test": 1725},
    ),
    GlueTask(
        name="STS-B",
        folders=("STS-B", "stsb", "sts_b", "sts-b"),
        texts=(("sentence1",), ("sentence2",)),
        label=("score", "label"),
        labels=(),
        label_range=(0.0, 5.0),
        metric="pearson",
        rows={"train": 5749, "valid": 1500, "test": 1379},
        files={
            "train": ("train", "sts-train"),
            "valid": ("dev", "validation", "sts-dev"),
            "test": ("test", "sts-test"),
        },
        endings=(".tsv", ".csv"),
        # genre, file, year, id, score, sentence1, sentence2 and sometimes two sources
        headerless=Headerless(stems=("sts-train", "sts-dev", "sts-test"), fields=(7, 9), texts=(5, 6), label=4),
    ),
    GlueTask(
        name="QQP",
        folders=("QQP", "qqp"),
        texts=(("question1",), ("question2",)),
        label=("is_duplicate", "label"),
        labels=("0", "1"),
        metric="accuracy",
        epochs=5,
        rows={"train": 363846, "valid": 40430, "test": 390965},
        drops_malformed=True,
    ),
    GlueTask(
        name="MNLI",
        folders=("MNLI", "mnli"),
        texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        label=("gold_label", "label"),
        labels=_NLI_LABELS,
        metric="accuracy",
        epochs=5,
        rows={"train": 392702, "valid": 9815, "valid1": 9832, "test": 9796, "test1": 9847},
        files={
            "train": ("train",),
            "valid": ("dev_matched", "validation_matched"),
            "valid1": ("dev_mismatched", "validation_mismatched"),
            "test": ("test_matched",),
            "test1": ("test_mismatched",),
        },
    ),
    GlueTask(
        name="QNLI",
        folders=("QNLI", "qnli", "QNLIv2"),
        texts=(("question",), ("sentence",)),
        label=("label",),
        labels=_ENTAILMENT,
        metric="accuracy",
        epochs=5,
        rows={"train": 104743, "valid": 5463, "test": 5463},
        other_rows={"train": 108436, "valid": 5732, "test": 5740},
        other_version="the first QNLI, which GLUE replaced; its scores are not comparable",
    ),
    GlueTask(
        name="RTE",
        folders=("RTE", "rte"),
        texts=(("sentence1",), ("sentence2",)),
        label=("label",),
        labels=_ENTAILMENT,
        metric="accuracy",
        rows={"train": 2490, "valid": 277, "test": 3000},
    ),
    GlueTask(
        name="WNLI",
        folders=("WNLI", "wnli"),
        texts=(("sentence1",), ("sentence2",)),
        label=("label",),
        labels=("0", "1"),
        metric="accuracy",
        rows={"train": 635, "valid": 71, "test": 146},
    ),
    GlueTask(
        name="AX",
        folders=("AX", "ax", "diagnostic"),
        texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        label=("gold_label", "label"),
        labels=_NLI_LABELS,
        metric="mcc",
        rows={"test": 1104},
        files={"test": ("diagnostic", "ax", "test")},
    ),
)

GLUE_TASKS = {task.name: task for task in _TASKS}


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def find_task(name: str) -> GlueTask:
    """Task by name, upper or lower case, with or without its dash; TupeError lists the valid names."""
    for task in _TASKS:
        if _plain(name) == _plain(task.name):
            return task
    raise TupeError(f"unknown GLUE task {name!r}, expected one of {', '.join(GLUE_TASKS)}")
