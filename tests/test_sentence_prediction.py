"""The task of sentences and pairs: rows, trimming, labels, refusals, resuming, Hydra."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fairseq_processes import USER_DIR, finish, run, start
from omegaconf import OmegaConf
from sentence_data import WORDS, dictionary_of, flags, rows_of, validate_flags, write_indexed, write_task_bin

from fairseq_tupe.data.sentence_pairs import PairFormat, pair_lengths
from fairseq_tupe.errors import TupeError
from fairseq_tupe.tasks.tupe_sentence_prediction import TupeSentencePredictionConfig, TupeSentencePredictionTask

LABELS = ("entailment", "not_entailment")


def longest_first(first: list, second: list, budget: int) -> tuple:
    """Hugging Face's rule, word by word: one token at a time from the longer one, on a tie from the second."""
    first, second = list(first), list(second)
    while len(first) + len(second) > budget:
        (first if len(first) > len(second) else second).pop()
    return first, second


def settings(data, num_classes: int = 2, **changes):
    """Options as fairseq passes them to the task."""
    values = {
        "data": str(data), "num_classes": num_classes, "regression_target": False, "best_checkpoint_metric": "loss",
        "maximize_best_checkpoint_metric": False,
        "classification_head_name": "sentence_classification_head", "seed": 1, **changes,
    }  # fmt: skip
    return OmegaConf.structured(TupeSentencePredictionConfig(**values))


def load(data, split: str = "train", num_classes: int = 2, **changes):
    return TupeSentencePredictionTask.setup_task(settings(data, num_classes, **changes)).load_dataset(split)


def ids(*words: str) -> list:
    return [4 + WORDS.index(word) for word in words]


# --- rows ------------------------------------------------------------------------------------------------------------


def test_pairs_are_trimmed_longest_first_with_both_ends():
    bos, eos = 0, 2
    for first_length in range(12):
        for second_length in range(12):
            first, second = list(range(10, 10 + first_length)), list(range(30, 30 + second_length))
            for limit in (6, 7, 12, 13):
                kept = longest_first(first, second, limit - 4)
                expected = [bos, *kept[0], eos, eos, *kept[1], eos]
                row = PairFormat(bos, eos, eos, limit)(first, second)
                assert row.tolist() == expected
                assert PairFormat(bos, eos, eos, limit).row_lengths(first_length, second_length) == len(row) <= limit


def test_trimmed_lengths_of_arrays_equal_those_of_numbers():
    first, second = np.random.default_rng(0).integers(0, 40, (2, 200))
    expected = np.array([pair_lengths(int(a), int(b), 29) for a, b in zip(first, second, strict=True)])
    fits = first + second <= 29
    assert (np.stack(pair_lengths(first, second, 29), axis=1) == expected).all()
    assert (expected[fits] == np.stack([first, second], axis=1)[fits]).all()
    assert (expected[~fits].sum(axis=1) == 29).all()


def test_single_sentences_keep_their_end():
    assert PairFormat(0, 2, 2, 5)([5, 6, 7, 8]).tolist() == [0, 5, 6, 7, 2]
    assert PairFormat(0, 2, 2)([]).tolist() == [0, 2]
    assert PairFormat(0, 2, 2)([], []).tolist() == [0, 2, 2, 2]
    assert PairFormat(None, 2, None)([5], [6]).tolist() == [5, 2, 6, 2]
    with pytest.raises(TupeError, match="at most 4 tokens"):
        PairFormat(0, 2, 2, 4)([5], [6])


def test_no_row_is_dropped_and_empty_sentences_stay(tmp_path):
    rows = [("w1 w2", "w3", "entailment"), ("", "w4", "not_entailment"), ("w5", "", "entailment"),
            (" ".join(WORDS), " ".join(WORDS[::-1]), "not_entailment")]  # fmt: skip
    data = write_task_bin(tmp_path, {"train": rows, "valid": rows}, LABELS)
    dataset = load(data, max_positions=12, no_shuffle=True)
    assert [dataset[row]["tokens"].tolist() for row in range(4)] == [
        [0, *ids("w1", "w2"), 2, 2, *ids("w3"), 2],
        [0, 2, 2, *ids("w4"), 2],
        [0, *ids("w5"), 2, 2, 2],
        [0, *ids("w0", "w1", "w2", "w3"), 2, 2, *ids("w39", "w38", "w37", "w36"), 2],
    ]
    assert dataset.sizes.tolist() == [len(dataset[row]["tokens"]) for row in range(4)] == [7, 5, 5, 12]
    assert dataset.filter_indices_by_size(dataset.ordered_indices(), 12)[1] == []
    batch = dataset.collater([dataset[row] for row in (3, 1)])
    assert batch["net_input"]["src_tokens"][1].tolist() == [0, 2, 2, *ids("w4"), 2, *[1] * 7]
    assert batch["target"].tolist() == [1, 1]
    assert batch["id"].tolist() == [3, 1]
    assert batch["ntokens"] == 17


def test_every_row_comes_once_and_shuffling_is_of_training_only(tmp_path):
    rows = rows_of(50, 0, LABELS)
    data = write_task_bin(tmp_path, {"train": rows, "train1": rows[:7], "valid": rows}, LABELS)
    task = TupeSentencePredictionTask.setup_task(settings(data))
    train = task.load_dataset("train", combine=True)
    assert len(train) == 57
    assert sorted(train.ordered_indices()) == list(range(57)) != list(train.ordered_indices())
    valid = task.load_dataset("valid")
    assert sorted(valid.ordered_indices()) == list(range(50))
    assert (np.diff(valid.sizes[valid.ordered_indices()]) >= 0).all()
    assert list(load(data, no_shuffle=True).ordered_indices()) == list(range(50))


def test_reference_dictionary_shifts_words_and_labels(tmp_path):
    specials = ("<file>", "<email>", "<url>")
    data = write_task_bin(tmp_path, {"train": [("w1", None, "b")]}, ("a", "b"), specials)
    dataset = load(data, reference_dictionary=True)
    assert dataset[0]["tokens"].tolist() == [0, 7 + 1, 2]
    assert int(dataset[0]["target"]) == 1


def test_regression_targets_keep_their_precision_under_fp16(tmp_path):
    data = write_task_bin(tmp_path, {"train": [("w1", None, 0.123456789), ("w2", None, 1)]})
    batch = load(data, num_classes=1, regression_target=True)
    batch = batch.collater([batch[0], batch[1]])
    assert batch["target"].dtype == torch.float64  # fairseq halves float32
    assert batch["target"].tolist() == [0.123456789, 1.0]


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(match: str, *arguments, **changes) -> None:
    with pytest.raises(TupeError, match=match) as caught:
        load(*arguments, **changes)
    assert "\n" not in str(caught.value)


def test_refused_labels(tmp_path):
    rows = rows_of(6, 0, LABELS)
    data = write_task_bin(tmp_path / "data", {"train": rows, "valid": rows}, LABELS)
    refused(r'label/dict.txt has 2 labels \(0 = "entailment", 1 = "not_entailment"\), --num-classes is 3', data, num_classes=3)
    refused("--num-classes is -1", data, num_classes=-1)
    refused("pass --num-classes 1, not 2", data, regression_target=True)

    labels = dictionary_of(LABELS, 3)
    for text, found in (("neutral", "<unk>"), ("", ""), ("entailment entailment", "entailment entailment")):
        write_indexed(data / "label" / "train", labels, [row[2] for row in rows[:4]] + [text, "entailment"])
        refused(f'data/label/train: row 5 has label "{found}", expected one of entailment, not_entailment', data)
    write_indexed(data / "label" / "train", labels, ["madeupword0001"] + ["entailment"] * 5)
    refused("row 1 has label", data)
    write_indexed(data / "label" / "train", labels, [row[2] for row in rows[:5]])
    refused("input0 has 6 rows and label has 5", data)


@pytest.mark.parametrize(("text", "found"), [("x", "x"), ("", ""), ("1 2", "1 2"), ("nan", "nan"), ("a\u2028b", "a\u2028b")])
def test_refused_regression_labels(tmp_path, text, found):
    data = write_task_bin(tmp_path, {"train": [("w1", None, 0.5), ("w2", None, text), ("w3", None, 1)]})
    refused(f'train.label: line 2 is "{found}", expected one number', data, num_classes=1, regression_target=True)


def test_only_line_feeds_end_a_regression_label(tmp_path):
    data = write_task_bin(tmp_path, {"train": [("w1", None, 0.5), ("w2", None, 1)]})
    (tmp_path / "label" / "train.label").write_bytes(b"0.5\r\n1")
    assert load(data, num_classes=1, regression_target=True).targets.tolist() == [0.5, 1.0]
    (tmp_path / "label" / "train.label").write_bytes(b"0.5\r1\n2\n")
    refused("line 1 is", data, num_classes=1, regression_target=True)


def test_refused_files(tmp_path):
    rows = rows_of(6, 0, LABELS, pair=True)
    data = write_task_bin(tmp_path / "data", {"train": rows, "valid": rows}, LABELS)
    refused(r"test.idx and .*test.bin not found; .*input0 has train, valid", data, split="test")
    refused("no such folder", tmp_path / "missing")
    refused("no input0/dict.txt there", tmp_path)
    (tmp_path / "input0").mkdir()
    (tmp_path / "input0" / "dict.txt").touch()
    refused("input0/dict.txt is empty", tmp_path)
    (data / "input1" / "valid.bin").unlink()
    refused(r"input1/valid.bin not found", data, split="valid")
    write_indexed(data / "input1" / "train", dictionary_of(WORDS), ["w1"] * 5)
    refused("input0 has 6 rows and input1 has 5", data)
    (data / "input1" / "train.bin").write_bytes(b"")
    refused("input1/train.bin is empty", data)
    (data / "input1" / "train.idx").write_bytes(b"not an index")
    (data / "input1" / "train.bin").write_bytes(b"12345678")
    refused("damaged", data)
    (data / "input1" / "dict.txt").write_text("other 1\n")
    refused(r"input1/dict.txt differs from .*input0/dict.txt", data)
    (data / "label" / "dict.txt").unlink()
    (data / "input1" / "dict.txt").unlink()
    refused("label/dict.txt", data)


def test_test_sets_need_no_labels(tmp_path):
    data = write_task_bin(tmp_path, {"train": rows_of(4, 0, LABELS), "test": rows_of(4, 1, LABELS)}, LABELS)
    for ending in ("bin", "idx"):
        (data / "label" / f"test.{ending}").unlink()
    dataset = load(data, "test")
    assert "target" not in dataset.collater([dataset[0], dataset[1]])


def model_config(**changes):
    from fairseq_tupe.models.config import TupeRobertaTinyConfig

    config = replace(TupeRobertaTinyConfig(), encoder_layers=1, max_positions=20, **changes)
    config._name = "tupe_roberta_tiny"
    return OmegaConf.structured(config)


def test_first_token_must_be_bos_where_the_model_has_a_cls_rule(tmp_path):
    data = write_task_bin(tmp_path, {"train": rows_of(4, 0, LABELS)}, LABELS)
    without = TupeSentencePredictionTask.setup_task(settings(data, init_token=-1))
    for config in (model_config(), model_config(rel_pos=True)):
        with pytest.raises(TupeError, match="pass --init-token 0"):
            without.build_model(config)
    for config in (model_config(tie_cls=True), model_config(position_encoding="absolute")):
        without.build_model(config)
    assert without.load_dataset("train")[0]["tokens"][0] != 0
    task = TupeSentencePredictionTask.setup_task(settings(data))
    model = task.build_model(model_config())
    assert task.max_positions() == model.max_positions() == 20
    assert model.classification_heads["sentence_classification_head"].out_proj.out_features == 2
    with pytest.raises(TupeError, match="21.*20"):
        TupeSentencePredictionTask.setup_task(settings(data, max_positions=21)).build_model(model_config())


def test_best_metric_must_exist(tmp_path):
    data = write_task_bin(tmp_path, {"train": rows_of(4, 0, LABELS)}, LABELS)
    name, head = "tupe_sentence_prediction", "sentence_classification_head"
    criterion = OmegaConf.create({"_name": name, "classification_head_name": head, "regression_target": False})
    for metric in ("loss", "accuracy", "mcc"):
        for maximize in (False, True):
            best = settings(data, best_checkpoint_metric=metric, maximize_best_checkpoint_metric=maximize)
            task = TupeSentencePredictionTask.setup_task(best)
            if maximize == (metric != "loss"):
                task.build_criterion(criterion)
                continue
            with pytest.raises(TupeError, match=f"a .*er {metric} is better: .* --maximize-best-checkpoint-metric"):
                task.build_criterion(criterion)
    for metric in ("f1", "pearson", "acc"):
        task = TupeSentencePredictionTask.setup_task(settings(data, best_checkpoint_metric=metric))
        with pytest.raises(TupeError, match=f"{metric} does not exist for this task .*choose one of loss, accuracy, mcc"):
            task.build_criterion(criterion)


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_label_order_is_kept_and_checked(tmp_path):
    """A run, then the same folder and checkpoint with data whose label dictionary is in the other order, and other heads."""
    splits = {"train": rows_of(16, 0, LABELS), "valid": rows_of(9, 1, LABELS)}
    data = write_task_bin(tmp_path / "data", splits, LABELS)
    other = write_task_bin(tmp_path / "other", splits, LABELS[::-1])
    three = ("a", "b", "c")
    classes = write_task_bin(tmp_path / "three", {"train": rows_of(16, 0, three), "valid": rows_of(9, 1, three)}, three)
    save_dir, last = tmp_path / "ck", tmp_path / "ck" / "checkpoint_last.pt"
    run("fairseq-train", *flags(data, save_dir, 2)).check()
    before = last.read_bytes()
    recorded = torch.load(last, weights_only=True)
    assert recorded["task_state"] == {"labels": list(LABELS)}
    assert recorded["extra_state"]["TupeSentencePredictionTask"] == {"labels": list(LABELS)}

    orders = ('0 = "not_entailment", 1 = "entailment"', '0 = "entailment", 1 = "not_entailment"')
    resumed = start("fairseq-train", *flags(other, save_dir, 2, "--max-epoch", 2))
    validated = start("fairseq-validate", *validate_flags(other, last))
    for process in (finish(resumed), finish(validated)):
        assert process.returncode != 0
        [line] = process.errors
        assert all(order in line for order in orders)
    assert last.read_bytes() == before

    # the same order goes on; another task may start from these weights, with a head of its own
    resumed = start("fairseq-train", *flags(data, save_dir, 2, "--max-epoch", 2))
    moved = start("fairseq-train", *flags(classes, tmp_path / "ck3", 3, "--restore-file", last, "--reset-optimizer",
                                          "--reset-lr-scheduler", "--reset-dataloader", "--reset-meters"))  # fmt: skip
    assert finish(resumed).check().log("valid")[-1]["valid_num_updates"] == 4
    said = 'head "sentence_classification_head" is initialised anew: the checkpoint has 2 classes'
    output = finish(moved).check().stdout
    assert said in output
    assert "this model 3" in output


HYDRA = """
# @package _group_
common: {{user_dir: '{user_dir}', log_format: json}}
task: {{_name: tupe_sentence_prediction, data: '{data}', num_classes: 1, init_token: 0, separator_token: 2}}
criterion: {{_name: tupe_sentence_prediction}}
model: {{_name: tupe_roberta_tiny, encoder_layers: 1, max_positions: 12}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
optimization: {{lr: [0.001], max_epoch: 1}}
dataset: {{batch_size: 8, num_workers: 0}}
checkpoint: {{save_dir: '{save_dir}', best_checkpoint_metric: {metric}, maximize_best_checkpoint_metric: true}}
"""


def test_hydra_with_the_criterion_named_only(tmp_path):
    """The task reads the criterion's options, which Hydra does not know before the user directory is imported."""
    data = write_task_bin(tmp_path / "data", {"train": rows_of(16, 0), "valid": rows_of(9, 1)})
    processes = []
    for name, metric in (("classes", "accuracy"), ("numbers", "spearman")):
        values = {"user_dir": USER_DIR, "data": data, "save_dir": tmp_path / name, "metric": metric}
        (tmp_path / f"{name}.yaml").write_text(HYDRA.format(**values))
        more = ["+criterion.regression_target=true"] if name == "numbers" else []
        processes.append(start("fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", name, *more, cwd=tmp_path))
    classes, numbers = map(finish, processes)
    assert any("label/dict.txt" in line for line in classes.errors)  # classification is the default; these labels are numbers
    stats = numbers.check().log("valid")[-1]
    assert {"valid_pearson", "valid_spearman"} <= stats.keys()
    assert (tmp_path / "numbers" / "checkpoint_best.pt").is_file()
