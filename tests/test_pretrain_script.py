"""scripts/pretrain.sh and config/pretraining/*.yaml: the paper's recipe, the same by both ways, and what they refuse."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import yaml
from fairseq import options
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_processes import USER_DIR, Finished, environment, finish, start, tiny_sentences, write_data_bin
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

SCRIPT = USER_DIR.parent / "scripts" / "pretrain.sh"
CONFIGS = USER_DIR / "config" / "pretraining"
# the paper's section 4 and appendix, as options
VARIANTS = {
    "tupe-a": {},
    "tupe-r": {"rel_pos": True},
    "bert-a": {"position_encoding": "absolute"},
    "bert-r": {"position_encoding": "absolute", "rel_pos": True},
    "tupe-a-tie-cls": {"tie_cls": True},
    "bert-a-d": {"position_encoding": "untied-projections"},
}
# small enough for a test, for both ways
SMALL = {
    "model.encoder_layers": 1,
    "model.encoder_embed_dim": 16,
    "model.encoder_ffn_embed_dim": 32,
    "model.encoder_attention_heads": 2,
    "task.tokens_per_sample": 32,
    "dataset.num_workers": 0,
    "dataset.batch_size": 4,
    "optimization.update_freq": 1,
    "common.log_interval": 1,
    "common.log_format": "json",
}


def pretrain(*words, cwd=None, timeout=120) -> Finished:
    """Run pretrain.sh in this environment."""
    process = subprocess.run(
        ["bash", str(SCRIPT), *map(str, words)], cwd=cwd, env=environment(FAIRSEQ_TUPE_VENV=sys.prefix),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    return Finished(process.returncode, process.stdout, process.stderr)


def flags(*words, cwd=None) -> list[str]:
    """What pretrain.sh would hand to fairseq-train."""
    return pretrain(*words, "--print-flags", cwd=cwd).check().stdout.splitlines()


def refusal(*words, cwd=None) -> str:
    """The one line of a run that is refused."""
    result = pretrain(*words, cwd=cwd)
    assert result.returncode == 1, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A data-bin with a tokenizer folder, in a path that is hard on scripts."""
    folder = tmp_path_factory.mktemp("pre 'train'; ü") / "data"
    write_data_bin(folder, train=tiny_sentences(150), valid=tiny_sentences(12, seed=1))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "spm.model").write_bytes(b"pieces")
    (folder / "tokenizer" / "dict.txt").write_bytes((folder / "dict.txt").read_bytes())
    return folder


def leaves(tree, prefix=""):
    """(dotted name, value) of every setting."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def by_command_line(words) -> dict:
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, input_args=list(words))
    return dict(leaves(OmegaConf.to_container(convert_namespace_to_omegaconf(args), enum_to_str=True)))


def by_hydra(name, *overrides) -> dict:
    hydra_init(name)
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.1"):
        config = hydra.compose(name, overrides=list(overrides))
    add_defaults(config)
    return dict(leaves(OmegaConf.to_container(config, resolve=True, enum_to_str=True)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_script_and_yaml_are_the_same_settings(variant, tmp_path, monkeypatch):
    monkeypatch.setenv("PWD", str(USER_DIR.parent))
    data = write_data_bin(tmp_path / "data", train=tiny_sentences(2))
    words = flags(data, "--save-dir", tmp_path / "save", "--variant", variant, "--gpus", 1)
    assert "--fp16" in words
    words.remove("--fp16")  # refused where there is no GPU
    ours = by_command_line(words)
    paths = (f"task.data={data}", f"checkpoint.save_dir={tmp_path / 'save'}")
    assert by_hydra(variant.replace("-", "_"), *paths)["common.fp16"] is True
    theirs = by_hydra(variant.replace("-", "_"), *paths, "common.fp16=false")
    # the command line fills in parts that no training run uses, Hydra leaves them out
    unused = re.compile(r"(scoring|bpe|tokenizer|simul_type)\b")
    ours, theirs = ({k: v for k, v in tree.items() if not unused.match(k)} for tree in (ours, theirs))
    assert {k: (ours.get(k), theirs.get(k)) for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)} == {}
    plain = {"position_encoding": "untied", "rel_pos": False, "tie_cls": False}
    assert {k: ours[f"model.{k}"] for k in plain} == {**plain, **VARIANTS[variant]}


def test_recipe_is_the_papers():
    recipe = yaml.safe_load((CONFIGS / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["dataset"]["batch_size"] * recipe["optimization"]["update_freq"][0] == 256
    assert recipe["task"]["tokens_per_sample"] == 512
    assert recipe["task"]["mask_prob"] == 0.15
    assert recipe["optimization"]["lr"] == [1e-4]
    assert recipe["optimization"]["max_update"] == 1_000_000
    assert recipe["lr_scheduler"] == {"_name": "tupe_polynomial_decay", "warmup_updates": 10_000}
    adam = {"_name": "adam", "adam_betas": "(0.9, 0.999)", "adam_eps": 1e-6, "weight_decay": 0.01}
    assert recipe["optimizer"] == adam
    kept = recipe["checkpoint"]["keep_interval_updates_pattern"]
    assert recipe["checkpoint"]["save_interval_updates"] == 25_000
    assert all(updates % kept == 0 for updates in (100_000, 300_000, 600_000, 1_000_000))
    known = set(FairseqConfig.__dataclass_fields__) | {"hydra"}
    assert recipe.keys() <= known


def test_update_freq_makes_the_papers_batch(data, tmp_path):
    def value(words, name):
        return words[len(words) - 1 - words[::-1].index(name) + 1]

    for options_, update_freq in {("--gpus", 1): 16, ("--gpus", 8): 2, ("--gpus", 4, "--batch-size", 64): 1}.items():
        words = flags(data, "--save-dir", tmp_path, *options_)
        assert value(words, "--update-freq") == str(update_freq), options_
        assert "--fp16" in words
        assert "--cpu" not in words
    cpu = flags(data, "--save-dir", tmp_path, "--gpus", 0)
    assert int(value(cpu, "--batch-size")) * int(value(cpu, "--update-freq")) == 256
    assert "--cpu" in cpu
    assert "--fp16" not in cpu
    without = flags(data, "--save-dir", tmp_path, "--gpus", 1, "--without", "--fp16", "--lr", "3e-4", "--size=small")
    assert "--fp16" not in without
    assert value(without, "--lr") == "3e-4"
    assert value(without, "--arch") == "tupe_roberta_small"


def test_data_may_be_shards(data, tmp_path):
    for number in range(11):
        shutil.copytree(data, tmp_path / "all" / f"shard{number}")
    folders = flags("all", "--save-dir", "x", "--gpus", 1, cwd=tmp_path)[0].split(":")
    assert folders == [str(tmp_path / "all" / f"shard{number}") for number in range(11)]
    assert flags("all/shard1:all/shard0", "--save-dir", "x", "--gpus", 1, cwd=tmp_path)[0] == f"{folders[1]}:{folders[0]}"


def test_refusals(data, tmp_path):
    save = ("--save-dir", tmp_path / "save", "--gpus", 0)
    assert "DATA is missing" in refusal(*save)
    assert "no folder /nowhere" in refusal("/nowhere", *save)
    assert "train.idx" in refusal(tmp_path, *save)
    assert "--save-dir is missing" in refusal(data)
    assert "tupe-a, tupe-r, bert-a, bert-r, tupe-a-tie-cls, bert-a-d" in refusal(data, *save, "--variant", "bert")
    assert "tiny, small, base, large" in refusal(data, *save, "--size", "huge")
    assert "--size needs a value" in refusal(data, *save, "--size")
    assert "--gpus takes a number" in refusal(data, "--save-dir", tmp_path / "save", "--gpus", "all")
    assert "DATA comes before" in refusal("--lr", "1e-3", data, *save)
    assert "--without --lr-zero" in refusal(data, *save, "--without", "--lr-zero")
    assert "--update-freq takes a number" in refusal(data, *save, "--update-freq", "many")
    shutil.copytree(data, tmp_path / "a:b")
    assert "colon" in refusal(tmp_path / "a:b", *save)
    assert not (tmp_path / "save").exists()
    (tmp_path / "save" / "tokenizer").mkdir(parents=True)
    (tmp_path / "save" / "tokenizer" / "spm.model").write_bytes(b"other pieces")
    (tmp_path / "save" / "checkpoint_last.pt").write_bytes(b"weights")
    assert "another tokenizer" in pretrain(data, *save).stderr
    assert (tmp_path / "save" / "tokenizer" / "spm.model").read_bytes() == b"other pieces"


def test_both_ways_train_alike_keep_checkpoints_and_resume(data, tmp_path):
    """Four updates by each way give the same losses; the script goes on, and keeps every second checkpoint for good."""
    small = [word for key, value in SMALL.items() for word in (f"--{key.split('.')[1].replace('_', '-')}", value)]
    keep = ["--save-interval-updates", 1, "--keep-interval-updates", 1, "--keep-interval-updates-pattern", 2]
    save = tmp_path / "by script"
    words = [data, "--save-dir", save, "--size", "tiny", "--gpus", 0, *small, *keep, "--max-update"]
    overrides = [f"++{key}={f'[{value}]' if key.endswith('update_freq') else value}" for key, value in SMALL.items()]
    overrides += ["common.cpu=true", "common.fp16=false", "model._name=tupe_roberta_tiny", "optimization.max_update=4"]
    overrides += [f'task.data="{data}"', "checkpoint.save_dir=by_hydra", f"common.user_dir={USER_DIR}"]
    process = start("fairseq-hydra-train", "--config-dir", CONFIGS, "--config-name", "tupe_r", *overrides, cwd=tmp_path)
    script = pretrain(*words, 4).check()
    by_yaml = finish(process).check()

    for result in (script, by_yaml):
        assert re.search(r"effective batch: 1 ranks x batch size 4 x update_freq 1 = 4 ", result.output)
        assert re.search(r"the effective batch is 4 .*, the paper's is 256", result.output)
    losses, yaml_losses = ([row["loss"] for row in result.log("train_inner")] for result in (script, by_yaml))
    assert len(losses) == 4
    assert losses == yaml_losses
    assert (tmp_path / "by_hydra" / "checkpoint_last.pt").is_file()
    assert not list(tmp_path.glob("*.log"))

    assert (save / "tokenizer" / "spm.model").read_bytes() == b"pieces"
    assert list((save / "tensorboard").rglob("events.*"))
    resumed = pretrain(*words, 7).check()
    assert [row["num_updates"] for row in resumed.log("train_inner")] == [5, 6, 7]
    kept = {path.name for path in save.glob("checkpoint_1_*.pt")}
    # 1, 3 and 5 went; 7 is the last one that is not kept for good
    assert kept == {"checkpoint_1_2.pt", "checkpoint_1_4.pt", "checkpoint_1_6.pt", "checkpoint_1_7.pt"}
