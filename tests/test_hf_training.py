"""What happens to an exported model in transformers, and the way back to fairseq."""

import json

import pytest
import torch
from exported_models import HEAD, close, padded_tokens, write_checkpoint
from small_model import small_model

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

import fairseq_tupe.interop.hf  # noqa: F401
from fairseq_tupe.__main__ import main
from fairseq_tupe.data.tokenizer import Tokenizer

pytest_plugins = ["exported_models"]


def test_way_back(exported, tmp_path, capsys):
    from fairseq import checkpoint_utils

    model, folder, ours = exported
    out = tmp_path / "back" / "checkpoint.pt"
    assert main(["import-hf", str(folder), str(out)]) == 0
    assert Tokenizer.find(out.parent).fingerprint == ours.fingerprint
    (again,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(out)], {"data": str(out.parent)})
    assert task.labels == ["entailment", "not_entailment"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    # transformers saves no language model head with a classifier
    saved = tmp_path / "saved"
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(saved)
    capsys.readouterr()
    assert main(["import-hf", str(saved), str(tmp_path / "saved.pt")]) == 0
    assert "not in the folder, so fresh: encoder.lm_head.bias" in capsys.readouterr().out
    state = torch.load(tmp_path / "saved.pt", weights_only=True)["model"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]) or name.startswith("encoder.lm_head."), name


def test_training_in_transformers(exported, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    _, folder, _ = exported
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    texts = ["bado kemi", "ranu", "vute si te", "po"] * 2
    rows = [{**tokenizer(text), "labels": number % 2} for number, text in enumerate(texts)]
    arguments = TrainingArguments(str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True,
                                  learning_rate=1e-3, save_strategy="no", disable_tqdm=True)  # fmt: skip
    trainer = Trainer(classifier, arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer))
    before = {name: value.clone() for name, value in classifier.state_dict().items()}
    loss = trainer.train().training_loss
    assert 0 < loss < 10
    moved = {name for name, value in classifier.state_dict().items() if not torch.equal(value, before[name])}
    assert {"classifier.out_proj.weight", "tupe.sentence_encoder.positional_bias.untied.embedding.weight",
            "tupe.sentence_encoder.positional_bias.relative.weight"} <= moved  # fmt: skip


def test_losses(exported):
    _, folder, _ = exported
    tokens, mask = padded_tokens()
    lm = AutoModelForMaskedLM.from_pretrained(folder)
    labels = tokens.masked_fill(mask == 0, -100)
    output = lm(tokens, mask, labels=labels)
    expected = torch.nn.functional.cross_entropy(output.logits[mask.bool()], tokens[mask.bool()])
    close(output.loss, expected)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    targets = torch.tensor([0, 1, 1])
    output = classifier(tokens, mask, labels=targets)
    close(output.loss, torch.nn.functional.cross_entropy(output.logits, targets))
    assert lm(tokens, return_dict=False)[0].shape == (3, 11, lm.config.vocab_size)


def test_a_fresh_head_starts_as_in_fairseq(exported):
    _, folder, _ = exported
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True)
    width = classifier.config.hidden_size
    bound = 1 / width**0.5
    assert classifier.classifier.out_proj.weight.abs().max() <= bound
    assert classifier.classifier.out_proj.weight.std() > 0.3 * bound  # and not N(0, 0.02)


def test_regression(tmp_path):
    model = small_model()
    model.register_classification_head(HEAD, num_classes=1)
    path = write_checkpoint(tmp_path / "checkpoint.pt", model.eval(), ["unused"], criterion="tupe_sentence_prediction",
                            regression_target=True, num_classes=1)  # fmt: skip
    assert main(["export-hf", "--no-tokenizer", str(path), str(tmp_path / "hf")]) == 0
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    tokens, mask = padded_tokens()
    output = loaded(tokens, mask, labels=torch.tensor([0.1, 0.2, 0.3]))
    close(output.logits, model(tokens, classification_head_name=HEAD)[0])
    close(output.loss, ((output.logits[:, 0] - torch.tensor([0.1, 0.2, 0.3])) ** 2).mean())
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "back.pt")]) == 0
    assert torch.load(tmp_path / "back.pt", weights_only=True)["cfg"]["criterion"]["regression_target"] is True


def test_model_card_and_inspection(exported, capsys):
    _, folder, _ = exported
    card = (folder / "README.md").read_text()
    for part in ("# TUPE-R", "AutoModelForSequenceClassification", "| updates | 7 |", "best loss: 3.5", "abs/2006.15595"):
        assert part in card
    assert main(["inspect", "--json", str(folder)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["variant"] == "TUPE-R"
    assert facts["labels"] == {"0": "entailment", "1": "not_entailment"}


def test_refusals(exported, tmp_path, capsys):
    _, folder, _ = exported
    path = write_checkpoint(tmp_path / "checkpoint.pt", small_model())
    for arguments, expected in (
        (["export-hf", str(path), str(folder)], "no tokenizer found"),
        (["export-hf", "--no-tokenizer", str(path), str(folder)], "exists already"),
        (["export-hf", "--no-tokenizer", "--head", "x", str(path), str(tmp_path / "o")], "has no classification head x, but"),
        (["export-hf", str(folder), str(tmp_path / "o")], "transformers folder"),
        (["import-hf", str(tmp_path), str(tmp_path / "o")], "no config.json there"),
    ):
        assert main(arguments) == 1
        assert expected in capsys.readouterr().err
    torch.save({"model": {"encoder.x": torch.ones(1)}, "cfg": {"model": {"_name": "roberta"}}}, path)
    assert main(["export-hf", "--no-tokenizer", str(path), str(tmp_path / "o")]) == 1
    assert "fairseq's, model roberta" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "roberta"}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert main(["import-hf", str(tmp_path), str(tmp_path / "o")]) == 1
    assert "a model of type roberta, expected tupe" in capsys.readouterr().err
