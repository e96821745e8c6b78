"""The original's checkpoints, given to fairseq's own programs as they are."""

import json
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from fairseq_processes import USER_DIR, run_many
from golden_data import GOLDEN, VARIANTS, GoldenModel, reference_dictionary

from fairseq_tupe.__main__ import main
from fairseq_tupe.data.sentence_pairs import load_indexed
from fairseq_tupe.errors import TupeError
from fairseq_tupe.interop import reference_checkpoint
from fairseq_tupe.interop.reference import build_reference_model, convert_name, load_reference_checkpoint

# bits a masked token over the recorded validation samples (golden/README.md)
RECORDED = {"tupe_a": 8.6128, "tupe_r": 8.6187}
SIZES = [
    *("--encoder-layers", 2, "--encoder-embed-dim", 64, "--encoder-ffn-embed-dim", 256, "--encoder-attention-heads", 4),
    *("--max-positions", 128, "--embedding-normalize"),
]
ADAM = ["--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--adam-eps", 1e-6, "--weight-decay", 0.01, "--clip-norm", 1.0]
LOG = ["--log-format", "json", "--log-interval", 1, "--num-workers", 0]
HEAD = "classification_heads.sentence_classification_head"


@pytest.fixture(scope="module")
def reference_run(shared):
    return shared / "golden" / "reference_run"


@pytest.fixture(scope="module")
def finished(reference_run, tmp_path_factory):
    """fairseq-validate on the original's files, ten more updates from their optimizer state, and fine-tuning from them."""
    folder = tmp_path_factory.mktemp("reference")
    assert main(["convert", str(reference_run / "tupe_a.checkpoint_last.pt"), str(folder / "converted.pt")]) == 0
    data, sst = reference_run / "data-bin", reference_run / "SST-2-bin"
    files = {name: reference_run / f"{name}.checkpoint_last.pt" for name in ("tupe_a", "tupe_r", "tupe_r_sst2")}
    common = ["--user-dir", USER_DIR, "--batch-size", 16, *LOG]
    pretrain = [
        *("fairseq-train", data, *common, "--task", "tupe_masked_lm", "--reference-dictionary", "--criterion", "masked_lm"),
        *("--arch", "tupe_roberta", *SIZES, *ADAM, "--lr", 5e-4, "--lr-scheduler", "fixed", "--max-update", 610),
        *("--tokens-per-sample", 128, "--sample-break-mode", "complete", "--disable-validation", "--no-epoch-checkpoints"),
    ]
    finetune = [
        *("fairseq-train", sst, *common, "--task", "tupe_sentence_prediction", "--reference-dictionary", "--num-classes", 2),
        *("--criterion", "tupe_sentence_prediction", "--arch", "tupe_roberta", *SIZES, "--rel-pos", *ADAM, "--lr", 1e-4),
        *("--lr-scheduler", "fixed", "--train-subset", "valid", "--no-epoch-checkpoints", "--no-save"),
    ]
    cases = {
        **{name: ["fairseq-validate", data, *common, "--path", files[name]] for name in RECORDED},
        "sst2": ["fairseq-validate", sst, *common, "--path", files["tupe_r_sst2"]],
        "converted": ["fairseq-validate", data, *common, "--path", folder / "converted.pt"],
        "go on": [*pretrain, "--rel-pos", "--restore-file", files["tupe_r"], "--save-dir", folder / "go on"],
        "go on converted": [*pretrain, "--restore-file", folder / "converted.pt", "--save-dir", folder / "converted"],
        "go on fine-tuned": [*finetune, "--restore-file", files["tupe_r_sst2"], "--max-update", 1002, "--save-dir", folder / "c"],
        "fine-tune": [*finetune, "--restore-file", files["tupe_r"], "--reset-optimizer", "--reset-dataloader", "--reset-meters",
                      "--max-update", 2, "--save-dir", folder / "d"],
        "wrong variant": [*pretrain, "--restore-file", files["tupe_r"], "--save-dir", folder / "e"],
    }  # fmt: skip
    results = {}
    for program in ("fairseq-validate", "fairseq-train"):
        chosen = {name: case for name, case in cases.items() if case[0] == program}
        results.update(zip(chosen, run_many(folder / program, list(chosen.values()), timeout=900), strict=True))
    return results


@pytest.mark.parametrize("variant", VARIANTS)
def test_validate(finished, variant):
    process = finished[variant].check()
    (valid,) = process.log("valid")
    # other masks than the recorded ones; the deviation between draws is 0.055 bits
    assert valid["valid_loss"] == pytest.approx(RECORDED[variant], abs=0.2)
    assert f"{variant.upper().replace('_', '-')}, pretrained, 2 layers of width 64, 600 updates" in process.output


def test_validate_converted(finished):
    (converted,), (direct,) = (finished[name].check().log("valid") for name in ("converted", "tupe_a"))
    assert converted["valid_loss"] == direct["valid_loss"]
    assert "original TUPE repository" not in finished["converted"].output


def test_validate_fine_tuned(finished):
    process = finished["sst2"].check()
    (valid,) = process.log("valid")
    assert (valid["valid_accuracy"], valid["valid_mcc"]) == (74.20, 48.43)
    assert "TUPE-R, fine-tuned, with sentence_classification_head (2 outputs)" in process.output


@pytest.mark.parametrize("case", ["go on", "go on converted"])
def test_ten_more_updates(finished, case):
    process = finished[case].check()
    updates = process.log("train_inner")
    assert [row["num_updates"] for row in updates] == list(range(601, 611))
    assert updates[0]["epoch"] == 3  # 142 batches into it, as saved
    losses = [row["loss"] for row in updates]
    assert max(losses) < 9.2, losses
    assert sum(losses) / 10 == pytest.approx(8.6, abs=0.25), losses


def test_fine_tuning(finished):
    for case, updates in (("go on fine-tuned", [1001, 1002]), ("fine-tune", [1, 2])):
        process = finished[case].check()
        rows = process.log("train_inner")
        assert [row["num_updates"] for row in rows] == updates
        assert all(math.isfinite(row["loss"]) for row in rows)
    assert f"{HEAD}.dense.weight is not in the checkpoint" in finished["fine-tune"].output


def test_wrong_variant_names_the_options(finished):
    process = finished["wrong variant"]
    assert process.returncode == 1
    (message,) = process.errors
    assert "it holds TUPE-R (--position-encoding untied --rel-pos --rel-pos-bins 32" in message


def test_moments_belong_to_their_parameters(reference_run):
    """Adam's second moments look like the squared gradients of today's model, parameter by parameter.

    Many parameters have the same shape, so a wrong order would load without an error.
    """
    state = load_reference_checkpoint(reference_run / "tupe_a.checkpoint_last.pt")
    model = build_reference_model(state, reference_dictionary(reference_run / "data-bin" / "dict.txt"))
    items = torch.load(reference_run / "tupe_a.valid_items.pt", weights_only=True)
    rows = [(src, target) for src, target in zip(items["src_tokens"], items["target"], strict=True) if len(src) <= 128]
    squares = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for start in range(0, 192, 16):
        tokens, target = (
            torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True, padding_value=1)
            for column in zip(*rows[start : start + 16], strict=True)
        )
        model.zero_grad()
        masked = target.ne(1)
        F.cross_entropy(model(tokens, masked_tokens=masked)[0], target[masked]).backward()
        for name, parameter in model.named_parameters():
            squares[name] += parameter.grad**2
    converted = reference_checkpoint.convert_checkpoint(state)["last_optimizer_state"]["state"]
    moments = {name: converted[number]["exp_avg_sq"] for number, name in enumerate(squares)}
    matrices = [name for name, value in squares.items() if value.dim() == 2]
    for name in matrices:
        same_shape = [other for other in matrices if moments[other].shape == squares[name].shape]
        likeness = {other: alike(squares[name], moments[other]) for other in same_shape}
        assert max(likeness, key=likeness.get) == name, likeness
        assert likeness[name] > 0.4


def alike(first, second) -> float:
    """Correlation of the logarithms."""
    logarithms = torch.stack([(value + 1e-30).log().flatten() for value in (first, second)])
    return torch.corrcoef(logarithms)[0, 1].item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_flat_moments_of_fp16(variant):
    """fairseq keeps one long vector with --fp16; sliced by our parameters, each slice is that parameter's moments."""
    state = GoldenModel(variant).state
    theirs = reference_checkpoint.reference_order(state["model"])
    vectors = [torch.randn(state["model"][name].numel()) for name in theirs]
    flat = {"state": {0: {"step": 5, "exp_avg": torch.cat(vectors), "exp_avg_sq": torch.cat(vectors) ** 2}}, "loss_scale": 4.0,
            "param_groups": [{"lr": 0.1, "params": [0]}]}  # fmt: skip
    state["last_optimizer_state"] = flat
    converted = reference_checkpoint.convert_checkpoint(state)
    model = GoldenModel(variant).build()
    expected = dict(zip(map(convert_name, theirs), vectors, strict=True))
    entry = converted["last_optimizer_state"]["state"][0]
    assert entry["step"] == 5
    assert converted["last_optimizer_state"]["loss_scale"] == 4.0
    slices = entry["exp_avg"].split([parameter.numel() for parameter in model.parameters()])
    for (name, _), values in zip(model.named_parameters(), slices, strict=True):
        assert torch.equal(values, expected[name]), name


def test_settings_and_options_of_the_command_line(reference_run):
    from fairseq import checkpoint_utils

    path = str(reference_run / "tupe_r_sst2.checkpoint_last.pt")
    state = checkpoint_utils.load_checkpoint_to_cpu(path, {"data": "elsewhere", "max_tokens": 99})
    cfg = state["cfg"]
    assert (cfg.task.data, cfg.dataset.max_tokens, cfg.dataset.batch_size) == ("elsewhere", 99, 32)
    assert cfg.task.reference_dictionary
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.warmup_ratio) == ("tupe_polynomial_decay", 0.06)
    assert (cfg.model._name, cfg.model.rel_pos, cfg.model.embedding_normalize) == ("tupe_roberta", True, True)
    assert not cfg.optimizer.tpu
    assert state["extra_state"]["best"] == pytest.approx(73.9955, abs=1e-3)
    assert [entry["num_updates"] for entry in state["optimizer_history"]] == [600, 1000]


def test_convert_and_inspect(reference_run, tmp_path, capsys):
    source, output = str(reference_run / "tupe_r_sst2.checkpoint_last.pt"), str(tmp_path / "out.pt")
    assert main(["convert", source, output]) == 0
    assert "converted: TUPE-R, fine-tuned" in capsys.readouterr().out
    facts = {}
    for path in (source, output):
        assert main(["inspect", "--json", path]) == 0
        facts[path] = json.loads(capsys.readouterr().out)
    for path, entry in facts.items():
        assert entry["variant"].startswith("TUPE-R, post-norm (--position-encoding untied --rel-pos"), path
        assert (entry["layers"], entry["width"], entry["attention heads"], entry["longest input"]) == (2, 64, 4, 128)
        assert (entry["updates"], entry["heads"]) == (1000, "sentence_classification_head (2 outputs)")
        assert entry["dictionary"].startswith("4005 types, 7 special ones first")
        assert entry["epoch"].startswith("4, after 250 batches")
    assert facts[source]["format"].startswith("the original TUPE repository's")
    assert facts[output]["format"] == "this project's"
    assert re.match(r"74\.|73\.9", facts[output]["best accuracy"])
    assert main(["convert", output, str(tmp_path / "again.pt")]) == 1
    assert "not a checkpoint of the original" in capsys.readouterr().err
    assert main(["convert", source, output]) == 1
    assert "exists already" in capsys.readouterr().err


def test_optimizer_of_other_weights_is_refused(tmp_path):
    state = GoldenModel("tupe_a").state
    order = [convert_name(name) for name in reference_checkpoint.reference_order(state["model"])]
    with pytest.raises(TupeError, match="--reset-optimizer"):
        reference_checkpoint.reorder_optimizer(state["last_optimizer_state"], state["model"], order[1:])


def test_other_checkpoints_are_left_alone():
    untouched = {"model": {"encoder.sentence_encoder.embed_tokens.weight": torch.ones(2, 2)}, "args": None, "cfg": {}}
    assert reference_checkpoint.upgrade_state(lambda state: state, untouched) is untouched
    assert GOLDEN.is_dir()


@pytest.fixture
def tokenizer_folder(reference_run, tmp_path):
    """The run's sentencepiece model as our tokenizer."""
    from fairseq_tupe.data.cleaning import CleaningOptions
    from fairseq_tupe.data.tokenizer import write_manifest

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(reference_run / "spm.model", folder)
    shutil.copy(reference_run / "data-bin" / "dict.txt", folder)
    write_manifest(folder, CleaningOptions(), {})
    return folder


def test_from_pretrained(reference_run, tokenizer_folder):
    from fairseq_tupe.models.tupe_roberta import TupeRobertaModel

    folder = tokenizer_folder.parent
    for name in ("tupe_r", "tupe_r_sst2"):
        shutil.copy(reference_run / f"{name}.checkpoint_last.pt", folder / f"{name}.pt")
    hub = TupeRobertaModel.from_pretrained(str(folder), "tupe_r.pt", str(folder))
    line = (reference_run / "valid.txt").read_text("utf-8").split("\n")[0]
    # the first validation sentence as the original binarized it, from the dictionary with three more specials
    rows = load_indexed(reference_run / "data-bin" / "valid", hub.dictionary)
    assert hub.encode(line)[1:].tolist() == rows[0].tolist()
    assert len(hub.fill_mask("she was very <mask>.")) == 5
    hub = TupeRobertaModel.from_pretrained(str(folder), "tupe_r_sst2.pt", str(folder))
    recorded = torch.load(reference_run / "tupe_r_sst2.dev_logits.pt", weights_only=True)
    with torch.no_grad():
        logits = hub.predict("sentence_classification_head", recorded["src_tokens"][3], return_logits=True)
    torch.testing.assert_close(logits[0], recorded["logits"][3], rtol=0, atol=1e-4)
