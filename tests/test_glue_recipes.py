"""finetune-flags, the YAML files beside it, and the three GLUE scripts from raw files to fairseq-validate's metrics."""

import argparse
import contextlib
import dataclasses
import io
import json
import pickle
import re
import shutil
import subprocess
import sys

import hydra
import numpy as np
import pytest
import torch
from fairseq import options
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_processes import Finished, environment, run
from glue_data import make_tokenizer, write_rte, write_sts_b
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from fairseq_tupe.data import glue_preparation, glue_recipes
from fairseq_tupe.data.glue_checks import MODEL_OPTIONS
from fairseq_tupe.data.glue_recipes import half_epoch
from fairseq_tupe.data.glue_tasks import GLUE_TASKS
from fairseq_tupe.errors import TupeError
from fairseq_tupe.models.config import TupeRobertaConfig

TASKS = [name for name, task in GLUE_TASKS.items() if task.trainable]
# Settings that depend on where files lie or how large they are; a command line also holds an unused `scoring`.
NOT_COMPARED = re.compile(
    r"common\.(user_dir|tensorboard_logdir)|task\.data|checkpoint\.(save_dir|finetune_from_model)|"
    r"(dataset\.validate|checkpoint\.save)_interval_updates|scoring\b.*"
)


def save_checkpoint(path, **config):
    """A file with the configuration of a checkpoint; weights are not needed here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    base = {"common": {"fp16": False, "seed": 1}, "model": {"_name": "tupe_roberta_base", "embedding_normalize": True}}
    torch.save({"cfg": {**base, **config}, "model": {}}, path)
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Folder with RTE-bin and STS-B-bin of a few rows."""
    root = tmp_path_factory.mktemp("recipes")
    tokenizer = make_tokenizer(root / "tokenizer")
    write_rte(root / "RTE")
    write_sts_b(root / "STS-B")
    arguments = argparse.Namespace(
        glue_dir=str(root), tasks=["RTE", "STS-B"], tokenizer=str(tokenizer), out=str(root / "bin"), drop_bad_rows=False
    )
    glue_preparation.run(arguments)
    return root / "bin"


def fake_data(folder, task):
    """The files that finetune-flags looks at, for any task, with the rows of a small RTE."""
    for name in ("input0", "input1"):
        for split in ("train", *task.valid_subsets):
            for ending in ("bin", "idx"):
                (folder / name).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder.parent / "RTE-bin" / "input0" / f"train.{ending}", folder / name / f"{split}.{ending}")
        (folder / name / "dict.txt").touch()
    (folder / "label").mkdir()
    (folder / "label" / "dict.txt").write_text("".join(f"{label} 1\n" for label in task.labels))
    for split in ("train", *task.valid_subsets):
        (folder / "label" / f"{split}.{'label' if task.regression else 'idx'}").touch()
    return folder


def flags(task, data, *words):
    """What finetune-flags prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert glue_recipes.run(argparse.Namespace(task=task, data=str(data), words=list(map(str, words)))) == 0
    return printed.getvalue().splitlines()


def leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def resolved_flags(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fairseq-train"])
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    return dict(leaves(OmegaConf.to_container(convert_namespace_to_omegaconf(args))))


def resolved_yaml(folder, name, *overrides):
    """What fairseq-hydra-train makes of a file: its schema, the file, and the defaults of registered dataclasses."""
    hydra_init(name)
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(folder), version_base="1.1"):
        config = hydra.compose(name, overrides=list(overrides))
    add_defaults(config)
    return dict(leaves(OmegaConf.to_container(config, resolve=True, enum_to_str=True)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TASKS)
def test_script_and_yaml_give_the_same_settings(tmp_path, prepared, repo, monkeypatch, name):
    task = GLUE_TASKS[name]
    shutil.copytree(prepared / "RTE-bin", tmp_path / "RTE-bin")
    data = fake_data(tmp_path / "data", task)
    checkpoint = save_checkpoint(tmp_path / "pretrained.pt")
    words = flags(name, data, "--checkpoint", checkpoint, "--save-dir", tmp_path / "save")
    script = resolved_flags([*words, f"--user-dir={repo / 'fairseq_tupe'}"], monkeypatch)
    folder, file = repo / "fairseq_tupe" / "config" / "finetuning", name.lower().replace("-", "_")
    yaml = resolved_yaml(folder, file, f"task.data={data}", f"checkpoint.finetune_from_model={checkpoint}")
    keys = [key for key in {**script, **yaml} if not NOT_COMPARED.fullmatch(key)]
    different = {key: (script.get(key), yaml.get(key)) for key in keys if script.get(key, "absent") != yaml.get(key, "absent")}
    assert different == {}
    assert len(keys) > 200
    assert script["checkpoint.finetune_from_model"] == yaml["checkpoint.finetune_from_model"] == str(checkpoint)
    assert yaml["common.user_dir"].endswith("/fairseq_tupe")
    # the paper's own figures, written out: updates of half an epoch at batch 32, epochs, metric
    half = {"CoLA": 134, "SST-2": 1053, "MRPC": 58, "STS-B": 90, "QQP": 5686, "MNLI": 6136, "QNLI": 1637, "RTE": 39, "WNLI": 10}
    assert yaml["dataset.validate_interval_updates"] == yaml["checkpoint.save_interval_updates"] == half[name]
    assert script["optimization.max_epoch"] == (5 if name in ("MNLI", "QNLI", "QQP") else 10)
    assert script["checkpoint.best_checkpoint_metric"] == {"CoLA": "mcc", "STS-B": "pearson"}.get(name, "accuracy")
    assert script["dataset.valid_subset"] == ("valid,valid1" if name == "MNLI" else "valid")
    assert script["task.num_classes"] == {"STS-B": 1, "MNLI": 3}.get(name, 2)


def test_the_model_comes_from_the_checkpoint(tmp_path, prepared, monkeypatch, repo):
    model = {
        "_name": "tupe_roberta_tiny", "encoder_layers": 3, "rel_pos": True, "rel_pos_bins": 16, "max_rel_pos": 64,
        "encoder_embed_dim": 128, "max_positions": 64, "encoder_normalize_before": True, "position_encoding": "absolute",
        "activation_fn": "relu", "dropout": 0.5, "attention_dropout": 0.0,
    }  # fmt: skip
    checkpoint = save_checkpoint(tmp_path / "checkpoint_last.pt", model=model)
    words = flags("RTE", prepared / "RTE-bin", "--checkpoint", checkpoint, "--save-dir", tmp_path / "save")
    assert {word for word in words if word.startswith("--arch")} == {"--arch=tupe_roberta_tiny"}
    settings = resolved_flags([*words, f"--user-dir={repo / 'fairseq_tupe'}"], monkeypatch)
    expected = {**model, "dropout": 0.1, "attention_dropout": 0.1, "encoder_ffn_embed_dim": 512, "embedding_normalize": False}
    assert {key: settings[f"model.{key}"] for key in expected} == expected
    assert settings["task.max_positions"] in (None, 64)
    appended = resolved_flags([*words, f"--user-dir={repo / 'fairseq_tupe'}", "--encoder-layers=1", "--lr=2e-5"], monkeypatch)
    assert (appended["model.encoder_layers"], appended["optimization.lr"]) == (1, [2e-5])


def test_every_option_of_the_model_is_copied_or_the_recipes():
    names = {field.name for field in dataclasses.fields(TupeRobertaConfig)} - {"_name"}
    recipe = {
        "dropout",
        "attention_dropout",
        "activation_dropout",
        "pooler_dropout",
        "pooler_activation_fn",
        "load_checkpoint_heads",
        "attention_backend",
        "cpu_autocast",
    }
    assert names - recipe == set(MODEL_OPTIONS)


def test_half_an_epoch_in_updates():
    short = np.full(100, 10)
    assert half_epoch(short, batch_size=32, max_tokens=4400, groups=1) == 2  # 4 batches
    assert half_epoch(short, batch_size=32, max_tokens=100, groups=1) == 5  # 10 batches of 10 rows
    assert half_epoch(short, batch_size=8, max_tokens=4400, groups=4) == 2  # 13 batches, 4 updates
    assert half_epoch(np.full(97, 10), batch_size=32, max_tokens=4400, groups=3) == 1
    long = np.full(40, 400)
    assert half_epoch(long, batch_size=32, max_tokens=4400, groups=1) == 2  # 11 rows of 400 fit: 4 batches


def test_refusals(tmp_path, prepared):
    rte, save_dir = prepared / "RTE-bin", tmp_path / "save"
    good = save_checkpoint(tmp_path / "good" / "checkpoint.pt", task={"_name": "tupe_masked_lm"})
    make_tokenizer(tmp_path / "other" / "tokenizer", seed=7, vocab_size=320)
    other = save_checkpoint(tmp_path / "other" / "checkpoint.pt")
    stock = save_checkpoint(tmp_path / "stock.pt", model={"_name": "roberta_base"})
    mnli = save_checkpoint(tmp_path / "mnli.pt", task={"_name": "tupe_sentence_prediction", "num_classes": 3})
    torn = tmp_path / "torn.pt"
    torn.write_bytes(good.read_bytes()[:500])
    unsafe = tmp_path / "unsafe.pt"
    unsafe.write_bytes(pickle.dumps(print))
    ran = {"task": {"data": str(rte)}, "optimization": {"lr": [3e-5]}, "checkpoint": {"finetune_from_model": str(good)}}
    save_checkpoint(save_dir / "checkpoint_last.pt", **ran)
    for task, data, words, message in (
        ("RTE", rte, [], "--checkpoint is missing, expected a file, or none to start from scratch"),
        ("RTE", rte, ["--checkpoint", tmp_path / "no.pt"], f"{tmp_path / 'no.pt'}: the checkpoint does not exist"),
        ("RTE", rte, ["--checkpoint", torn], f"{torn}: the checkpoint is damaged"),
        ("RTE", rte, ["--checkpoint", unsafe], f"{unsafe}: not loaded, because it asks for"),
        ("RTE", rte, ["--checkpoint", stock], f"{stock} holds a model 'roberta_base', expected tupe_roberta"),
        ("RTE", rte, ["--checkpoint", other], f"{rte} was made with another tokenizer than {other}"),
        ("RTE", rte, ["--checkpoint", "none"], "starting from scratch needs the model's flags, at least --arch"),
        ("RTE", rte, ["--checkpoint", "none", "--validate"], "--checkpoint none can't be validated"),
        ("RTE", rte, ["--checkpoint", good, "--validate"], "was trained by task tupe_masked_lm, expected one"),
        ("RTE", rte, ["--checkpoint", mnli, "--validate"], f"{mnli} was fine-tuned to predict 3 classes, RTE needs 2 classes"),
        ("AX", rte, ["--checkpoint", good], "AX has no training or dev set: use a model fine-tuned on MNLI"),
        ("SST-2", rte, ["--checkpoint", good], f"{rte / 'label' / 'dict.txt'} holds labels ['entailment', 'not_ent"),
        ("STS-B", rte, ["--checkpoint", good], f"{rte} has no label/train.label, expected a train set of STS-B with labels"),
        ("RTE", tmp_path, ["--checkpoint", good], f"{tmp_path} holds no RTE data (no input0/dict.txt): prepare it with"),
        ("RTE", rte, ["--checkpoint", good, "--valid-subset", "valid,valid1"], f"{rte} has no input0/valid1.idx"),
        ("RTE", rte, ["--checkpoint", good, "--save-dir", save_dir], "is of another run (learning rate 3e-05, now 5e-05)"),
        ("RTE", rte, ["--checkpoint", good, "--save-dir", save_dir, "--lr", "3e-5", "--seed=2"],
         "is of another run (seed 1, now 2)"),
    ):  # fmt: skip
        with pytest.raises(TupeError) as error:
            flags(task, data, *words)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    flags("RTE", rte, "--checkpoint", good, "--save-dir", save_dir, "--lr", "3e-5")  # the same run: goes on


def script(repo, name, *words, cwd):
    process = subprocess.run(
        ["bash", str(repo / "scripts" / name), *map(str, words)],
        cwd=cwd, env=environment(FAIRSEQ_TUPE_VENV=sys.prefix), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return Finished(process.returncode, process.stdout, process.stderr)


@pytest.mark.parametrize("name", ["prepare_glue_data.sh", "finetune_glue.sh", "validate_glue.sh"])
def test_scripts_explain_themselves(repo, tmp_path, name):
    helped = script(repo, name, "--help", cwd=tmp_path).check()
    assert helped.stdout.startswith(f"usage: {name} ")
    first = "GLUE_DIR" if name.startswith("prepare") else "TASK"
    bare = script(repo, name, cwd=tmp_path)
    assert (bare.returncode, bare.stderr) == (1, f"{name}: error: {first} is missing (see --help)\n")
    if not name.startswith("prepare"):
        missing = script(repo, name, "RTE", "no such.pt", cwd=tmp_path)
        assert (missing.returncode, missing.stderr) == (1, f"{name}: error: checkpoint no such.pt does not exist\n")


TINY = ["--encoder-layers", 1, "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2]
TINY += ["--max-positions", 48, "--rel-pos", "--rel-pos-bins", 8, "--max-rel-pos", 16]
SMALL = ["--batch-size", 8, "--lr", 5e-3, "--num-workers", 0, "--log-format", "json"]


def test_from_raw_files_to_metrics(repo, tmp_path):
    """Prepare, fine-tune from scratch, validate, fine-tune the result on another task, go on with that, and run the YAML."""
    root = tmp_path / "it's a; folder - ü"
    write_rte(root / "-glue" / "RTE", train=20, dev=6)
    write_sts_b(root / "-glue" / "STS-B", train=37, dev=9)
    make_tokenizer(root / "tok" / "tokenizer")
    script(repo, "prepare_glue_data.sh", "-glue", "RTE", "sts-b", "--tokenizer", "tok", "--out=bin", cwd=root).check()

    scratch = [*TINY, *SMALL, "--max-epoch", 2, "--save-dir", "from scratch"]
    trained = script(
        repo, "finetune_glue.sh", "STS-B", "none", "bin/STS-B-bin", "--arch", "tupe_roberta_tiny", *scratch, cwd=root
    ).check()
    valid = trained.log("valid")
    # 37 rows in batches of 8 are 5 updates an epoch: validated at 3, 6, 9 and at the end
    assert [row["valid_num_updates"] for row in valid] == [3, 6, 9, 10]
    assert (root / "from scratch" / "tokenizer" / "spm.model").read_bytes() == (root / "tok/tokenizer/spm.model").read_bytes()
    best = max(range(4), key=lambda i: (valid[i]["valid_pearson"], i))

    checked = script(
        repo, "validate_glue.sh", "STS-B", "from scratch/checkpoint_best.pt", "bin/STS-B-bin", "--log-format=json", cwd=root
    ).check()
    (row,) = checked.log("valid")
    assert row["valid_pearson"] == valid[best]["valid_pearson"]
    assert row["valid_spearman"] == valid[best]["valid_spearman"]

    rte = ["RTE", "from scratch/checkpoint_best.pt", "bin/RTE-bin", "--save-dir", "rte", *SMALL]
    first = script(repo, "finetune_glue.sh", *rte, "--max-epoch", 1, cwd=root).check()
    assert "is initialised anew: the checkpoint has 1 classes" in first.output
    more = script(repo, "finetune_glue.sh", *rte, "--max-epoch", 2, cwd=root).check()
    assert "loading pretrained model from" in first.output
    assert "loading pretrained model from" not in more.output
    assert [row["epoch"] for row in first.log("train") + more.log("train")] == [1, 2]
    assert [row["train_num_updates"] for row in more.log("train")] == [6]

    overrides = [f"+model.{str(key)[2:].replace('-', '_')}={value}" for key, value in zip(TINY[:10:2], TINY[1:10:2], strict=True)]
    overrides += ["model.rel_pos=true", "+model.rel_pos_bins=8", "+model.max_rel_pos=16", "model.embedding_normalize=false"]
    overrides += ["dataset.batch_size=8", "optimization.lr=[5e-3]", "dataset.num_workers=0", "common.log_format=json"]
    quoted = json.dumps(str(root / "bin" / "STS-B-bin"), ensure_ascii=False)
    config = run(
        "fairseq-hydra-train", "--config-dir", repo / "fairseq_tupe/config/finetuning", "--config-name", "sts_b",
        f"task.data={quoted}", "checkpoint.finetune_from_model=null", "optimization.max_epoch=2",
        "model._name=tupe_roberta_tiny", "dataset.validate_interval_updates=3", "checkpoint.save_dir=yaml", "hydra.run.dir=.",
        f"common.user_dir={repo / 'fairseq_tupe'}", *overrides, cwd=root,
    ).check()  # fmt: skip
    same = ("valid_num_updates", "valid_pearson", "valid_spearman", "valid_loss")
    assert [[row[key] for key in same] for row in config.log("valid")] == [[row[key] for key in same] for row in valid]
