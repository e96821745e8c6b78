"""Metrics of sentence tasks: over the whole dev set, equal on one rank and two, and equal to sklearn's and scipy's."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.logging import metrics
from fairseq_processes import finish, run, run_ranks, start
from omegaconf import OmegaConf
from scipy.stats import pearsonr, spearmanr
from sentence_data import flags, rows_of, validate_flags, write_task_bin
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from fairseq_tupe.criterions.tupe_sentence_prediction import TupeSentencePredictionCriterion
from fairseq_tupe.data.sentence_labels import real_labels
from fairseq_tupe.interop.reference import build_reference_model, load_reference_checkpoint
from fairseq_tupe.tasks.tupe_sentence_prediction import TupeSentencePredictionConfig, TupeSentencePredictionTask

LABELS = ("1", "0")  # label "1" has index 0: f1 must not be of the class with index 1
RESET = ("--reset-optimizer", "--reset-lr-scheduler", "--reset-dataloader", "--reset-meters")
# 33 rows in batches of 8: the last batch is one row, and the second of two ranks gets a dummy batch
SIZES = {"train": 96, "valid": 33, "valid1": 20}


def start_training(folder, labels: tuple, *more) -> SimpleNamespace:
    """Start to train on generated rows with two dev sets."""
    splits = {split: rows_of(size, seed, labels, pair=bool(labels)) for seed, (split, size) in enumerate(SIZES.items())}
    data = write_task_bin(folder / "data-bin", splits, labels)
    arguments = flags(data, folder / "ck", len(labels) or 1, "--valid-subset", "valid,valid1", *more)
    process, last = start("fairseq-train", *arguments), folder / "ck" / "checkpoint_last.pt"
    return SimpleNamespace(folder=folder, data=data, splits=splits, last=last, train=process)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A binary pair task and a regression task on single sentences, both trained and validated once more."""
    best = ("--best-checkpoint-metric", "f1", "--maximize-best-checkpoint-metric")
    runs = {
        "classification": start_training(tmp_path_factory.mktemp("c"), LABELS, "--max-epoch", 6, *best),
        "regression": start_training(tmp_path_factory.mktemp("r"), (), "--max-epoch", 4, "--regression-target"),
    }
    for one in runs.values():
        one.train = finish(one.train).check()
        one.validate = start("fairseq-validate", *validate_flags(one.data, one.last, "--valid-subset", "valid,valid1"))
    for one in runs.values():
        one.validate = finish(one.validate).check()
    return runs


@pytest.fixture
def classification(trained):
    return trained["classification"]


@pytest.fixture
def regression(trained):
    return trained["regression"]


def outputs_of(checkpoint, split: str) -> torch.Tensor:
    """The model's outputs (N, classes) for a split, row by row in file order."""
    [model], _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    model.eval()
    dataset = task.load_dataset(split)
    with torch.no_grad():
        return torch.cat([
            model(dataset[row]["tokens"].unsqueeze(0), classification_head_name="sentence_classification_head")[0]
            for row in range(len(dataset))
        ])  # fmt: skip


def figures(stats: dict, split: str, names) -> dict:
    return {name: stats[f"{split}_{name}"] for name in names}


def percent(value: float) -> float:
    return round(100 * float(value), 2)


def test_classification_equals_sklearn(classification):
    names = ("accuracy", "f1", "mcc")
    for split in ("valid", "valid1"):
        predictions = [LABELS[index] for index in outputs_of(classification.last, split).argmax(dim=1)]
        truth = [row[2] for row in classification.splits[split]]
        expected = {
            "accuracy": percent(accuracy_score(truth, predictions)),
            "f1": percent(f1_score(truth, predictions, pos_label="1")),
            "mcc": percent(matthews_corrcoef(truth, predictions)),
        }
        assert len(set(predictions)) == 2, "the trained model tells the classes apart, or this test shows nothing"
        assert figures(classification.train.log(split)[-1], split, names) == expected
        assert figures(classification.validate.log(split)[-1], split, names) == expected


def test_regression_equals_scipy(regression):
    names = ("pearson", "spearman")
    for split in ("valid", "valid1"):
        predictions = outputs_of(regression.last, split).view(-1).double().numpy()
        truth = [row[2] for row in regression.splits[split]]
        expected = {
            "pearson": percent(pearsonr(predictions, truth)[0]),
            "spearman": percent(spearmanr(predictions, truth)[0]),
        }
        mse = sum((p - t) ** 2 for p, t in zip(predictions, truth, strict=True)) / len(truth)
        for log in (regression.train.log(split)[-1], regression.validate.log(split)[-1]):
            assert figures(log, split, names) == expected
            assert log[f"{split}_loss"] == pytest.approx(mse, abs=6e-4), "the squared error is not divided by log 2"


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_two_ranks_give_the_numbers_of_one(kind, trained):
    trained = trained[kind]
    more = ["--regression-target"] if kind == "regression" else []
    ranks = run_ranks(2, "fairseq-train", *flags(
        trained.data, trained.folder / "ck2", 1 if more else 2, *more, "--restore-file", trained.last, *RESET,
        "--lr", 0, "--valid-subset", "valid,valid1", "--load-checkpoint-on-all-dp-ranks",
    ))  # fmt: skip
    for rank in ranks:
        rank.check()
    for split in ("valid", "valid1"):
        names = ("pearson", "spearman") if more else ("accuracy", "f1", "mcc")
        one, two = (figures(process.log(split)[-1], split, (*names, "loss")) for process in (trained.train, ranks[0]))
        assert two == one


def test_undefined_is_never_best_and_says_why(regression):
    state = torch.load(regression.last, weights_only=True)
    for key in ("weight", "bias"):
        state["model"][f"classification_heads.sentence_classification_head.out_proj.{key}"].zero_()
    torch.save(state, regression.folder / "constant.pt")
    save_dir = regression.folder / "ck3"
    train = run("fairseq-train", *flags(
        regression.data, save_dir, 1, "--regression-target", "--restore-file", regression.folder / "constant.pt", *RESET,
        "--lr", "0,1e-2", "--max-epoch", 3, "--best-checkpoint-metric", "pearson", "--maximize-best-checkpoint-metric",
    )).check()  # fmt: skip
    first, *later = [stats["valid_pearson"] for stats in train.log("valid")]
    assert first is None
    assert all(isinstance(value, float) and math.isfinite(value) for value in later)
    warning = "no value for pearson and spearman, so this can't be the best checkpoint by it: all 33 predictions are 0"
    assert train.stdout.count(warning) == 1
    best = torch.load(save_dir / "checkpoint_best.pt", weights_only=True)
    assert best["extra_state"]["val_loss"] == max(later)

    validate = run("fairseq-validate", *validate_flags(regression.data, regression.folder / "constant.pt")).check()
    assert math.isnan(validate.log("valid")[-1]["valid_pearson"])
    assert validate.stdout.count("all 33 predictions are 0") == 1


def test_checkpoints_hold_no_tensors_of_metrics(classification, regression):
    def tensors(value):
        if isinstance(value, dict):
            return [found for part in value.values() for found in tensors(part)]
        if isinstance(value, (list, tuple)):
            return [found for part in value for found in tensors(part)]
        return [value] if torch.is_tensor(value) and value.numel() > 1 else []

    for trained in (classification, regression):
        extra = torch.load(trained.last, weights_only=True)["extra_state"]
        assert not tensors(extra)
        assert type(extra["val_loss"]) is float
        assert type(extra["best"]) is float


@pytest.mark.parametrize("labels", [("0", "1"), ("1", "0")])
def test_f1_is_of_label_1(labels):
    """Truth 1, 1, 1, 0 and predictions 1, 0, 1, 1: precision and recall of "1" are 2/3; of "0" both are 0."""
    task = SimpleNamespace(labels=labels, target_dictionary=None)
    criterion = TupeSentencePredictionCriterion(SimpleNamespace(classification_head_name="head", regression_target=False), task)
    stats = validate(criterion, labels, truth="1110", predictions="1011")
    assert stats["f1"] == 66.67
    assert stats["accuracy"] == 50.0
    assert stats["mcc"] == -33.33


@pytest.mark.parametrize("labels", [("a", "b"), ("1", "2", "3")])
def test_f1_needs_two_labels_and_a_1(labels):
    task = SimpleNamespace(labels=labels, target_dictionary=None)
    criterion = TupeSentencePredictionCriterion(SimpleNamespace(classification_head_name="head", regression_target=False), task)
    truth, predictions = list(labels) * 2, list(labels) + list(labels[::-1])
    stats = validate(criterion, labels, truth, predictions)
    assert "f1" not in stats
    assert stats["mcc"] == percent(matthews_corrcoef(truth, predictions))


class GivenLogits(torch.nn.Module):
    """A model whose answer is decided beforehand."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits
        self.classification_heads = {"head": None}

    def forward(self, **unused):
        return self.logits, {}


def validate(criterion, labels, truth, predictions) -> dict:
    indices = torch.tensor([labels.index(label) for label in predictions])
    model = GivenLogits(torch.nn.functional.one_hot(indices, len(labels)).float()).eval()
    sample = {"net_input": {}, "ntokens": 9, "target": torch.tensor([labels.index(label) for label in truth])}
    _, _, outputs = criterion(model, sample)
    with metrics.aggregate(new_root=True) as agg:
        criterion.reduce_metrics([outputs])
        return agg.get_smoothed_values()


def test_whole_set_metrics_of_the_reference(shared):
    run_folder = shared / "golden" / "reference_run"
    expected = torch.load(run_folder / "tupe_r_sst2.dev_logits.pt", weights_only=True)
    cfg = OmegaConf.structured(TupeSentencePredictionConfig(
        data=str(run_folder / "SST-2-bin"), num_classes=2, reference_dictionary=True, regression_target=False,
        classification_head_name="sentence_classification_head", best_checkpoint_metric="mcc",
        maximize_best_checkpoint_metric=True, seed=1, max_positions=128,
    ))  # fmt: skip
    task = TupeSentencePredictionTask.setup_task(cfg)
    assert real_labels(task.label_dictionary) == task.labels == ["1", "0"]
    model = build_reference_model(load_reference_checkpoint(run_folder / "tupe_r_sst2.checkpoint_last.pt"), task.dictionary)
    criterion = TupeSentencePredictionCriterion(cfg, task)
    dataset = task.load_dataset("valid")
    order = dataset.ordered_indices()
    outputs = []
    for start_row in range(0, len(dataset), 64):
        batch = dataset.collater([dataset[row] for row in order[start_row : start_row + 64]])
        for row, tokens in zip(batch["id"].tolist(), batch["net_input"]["src_tokens"], strict=True):
            assert tokens[tokens != 1].tolist() == expected["src_tokens"][row].tolist()
        outputs.append(task.valid_step(batch, model, criterion)[2])
    with metrics.aggregate(new_root=True) as agg:
        task.reduce_metrics(outputs, criterion)
        stats = agg.get_smoothed_values()
    assert stats["accuracy"] == percent(expected["accuracy"])
    assert stats["mcc"] == percent(expected["mcc"])
