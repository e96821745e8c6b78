"""Exported models compute what fairseq's do, in transformers and without this package; and they come back bit for bit."""

import argparse
import ast
import json
import random
import subprocess
import sys

import pytest
import torch
from fairseq_processes import environment
from small_model import SIZES, VARIANTS, random_tokens, small_dictionary, small_model

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from omegaconf import OmegaConf
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertModel,
    DistilBertModel,
    RobertaForMaskedLM,
    RobertaModel,
    pipeline,
)

import fairseq_tupe.interop.hf  # noqa: F401
from fairseq_tupe.__main__ import main
from fairseq_tupe.data.cleaning import PLACEHOLDERS, CleaningOptions, clean
from fairseq_tupe.data.dictionaries import dictionary_symbols, write_dictionary
from fairseq_tupe.data.tokenizer import Tokenizer, write_manifest
from fairseq_tupe.data.tokenizer_training import train_model
from fairseq_tupe.interop.hf import bundle, mapping
from fairseq_tupe.interop.reference_checkpoint import whole_config

HEAD = "sentence_classification_head"
PAD = 1


def write_checkpoint(path, model, labels=(), **options):
    """A checkpoint as fairseq saves it."""
    task = "tupe_sentence_prediction" if labels else "tupe_masked_lm"
    model_options = {key: value for key, value in OmegaConf.to_container(model.cfg, enum_to_str=True).items() if key[0] != "_"}
    args = argparse.Namespace(**{"arch": "tupe_roberta", "task": task, "criterion": "masked_lm", "data": str(path.parent),
                                 "tpu": False, **model_options, **options})  # fmt: skip
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(whole_config(args), resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": 7, "optimizer_name": "FairseqAdam", "criterion_name": "MaskedLmLoss"}],
        "task_state": {"labels": list(labels)} if labels else {},
        "extra_state": {"best": 3.5, "train_iterator": {"epoch": 2, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
    }
    torch.save(state, path)
    return path


def padded_tokens():
    """Three rows of different lengths and their attention mask."""
    tokens = random_tokens(3, 11)
    for row, length in enumerate((11, 7, 2)):
        tokens[row, length:] = PAD
    return tokens, tokens.ne(PAD).long()


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A tokenizer trained as prepare-pretrain-data trains one, on generated words."""
    folder = tmp_path_factory.mktemp("data") / "tokenizer"
    folder.mkdir()
    rng = random.Random(1)
    syllables = ["ba", "do", "ke", "mi", "nu", "po", "ra", "si", "te", "vu"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(200)]
    sentences = [clean(" ".join(rng.choices(words, k=9)) + ".", CleaningOptions()) for _ in range(600)]
    sentences += [f"see {name} now" for name in PLACEHOLDERS] + ["naïve café"]
    corpus = folder.parent / "corpus.txt"
    corpus.write_text("\n".join(sentences) + "\n", "utf-8")
    data = train_model(corpus, len(sentences), corpus.stat().st_size, 10**6, 500)
    (folder / "spm.model").write_bytes(data)
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    symbols = dictionary_symbols([processor.id_to_piece(index) for index in range(processor.get_piece_size())])
    write_dictionary(folder / "dict.txt", symbols, [1] * len(symbols))
    write_manifest(folder, CleaningOptions(), {})
    return folder


@pytest.fixture(scope="module")
def exported(tokenizer_folder, tmp_path_factory):
    """A TUPE-R with a head, its folder, and its tokenizer."""
    from fairseq.data import Dictionary

    folder = tmp_path_factory.mktemp("run")
    dictionary = Dictionary.load(str(tokenizer_folder / "dict.txt"))
    dictionary.add_symbol("<mask>")
    model = small_model(dictionary=dictionary, rel_pos=True, max_positions=40)
    torch.manual_seed(5)
    model.register_classification_head(HEAD, num_classes=2)
    labels = ["entailment", "not_entailment"]
    path = write_checkpoint(folder / "checkpoint_best.pt", model.eval(), labels, num_classes=2, data=str(tokenizer_folder.parent))
    assert main(["export-hf", str(path), str(folder / "hf")]) == 0
    return model, folder / "hf", Tokenizer.load(tokenizer_folder)


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(tmp_path, variant, prenorm):
    model = small_model(**VARIANTS[variant], encoder_normalize_before=prenorm)
    path = write_checkpoint(tmp_path / "checkpoint.pt", model)
    assert main(["export-hf", "--no-tokenizer", str(path), str(tmp_path / "hf")]) == 0
    tokens, mask = padded_tokens()
    with torch.no_grad():
        expected, extra = model(tokens, return_all_hiddens=True)
        for attention in ("eager", "sdpa"):
            loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf", attn_implementation=attention)
            output = loaded(tokens, attention_mask=mask, output_hidden_states=True)
            real = mask.bool()
            close(output.logits[real], expected[real])
            for ours, theirs in zip(extra["inner_states"], output.hidden_states, strict=True):
                close(theirs[real], ours.transpose(0, 1)[real])
            # without a mask padding is found by its id
            close(loaded(tokens).logits[real], expected[real])
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "back.pt")]) == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["model"].keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, back["model"][name]), name
    for name, value in back["cfg"]["model"].items():
        if name in SIZES or name in VARIANTS[variant]:
            assert value == {**SIZES, **VARIANTS[variant]}[name] or (name in ("rel_pos_bins", "max_rel_pos")), name


def test_masked_tokens_other_than_padding(exported):
    model, folder, _ = exported
    loaded = AutoModelForMaskedLM.from_pretrained(folder)
    tokens = random_tokens(2, 9)
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0  # hidden, though the ids there are ordinary ones
    with torch.no_grad():
        close(loaded(tokens, attention_mask=mask).logits[1, :5], model(tokens[1:, :5])[0][0])
    with pytest.raises(ValueError, match="right-padded"):
        loaded(tokens, attention_mask=mask.flip(1))
    with pytest.raises(ValueError, match="41 tokens is longer than max_positions = 40"):
        loaded(random_tokens(1, 41))


def test_ids_of_any_text(exported):
    _, folder, ours = exported
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.is_fast
    texts = [
        *("Bado KEMI.", "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467", "a\rb", "a\u00a0b", "a\u2028b\u0085c", "你好 नमस्ते مرحبا"),
        *("<s> </s> <pad> <unk>", "<0x41>", "http://a.com/b, me@x.org and abcde.pdf", "<url> first<email>x", "", "   ", "\u2581a\u2581"),
        *("\x01<s\x01>", "İẞΑΣ ﬁ e\u0301", "ＡＢＣ", "`` '' ,, ....", "<URL>"),
    ]
    rng = random.Random(2)
    letters = "badokeminu  .,'<>/@_-09éüß中\u00a0\u2028\r\n\U0001f600\u200d\u0301ﬁ▁"
    texts += ["".join(rng.choices(letters, k=rng.randint(1, 50))) for _ in range(500)]
    texts += ["".join(chr(rng.choice([rng.randrange(1, 0x300), rng.randrange(0xE000, 0x1F9FF)])) for _ in range(12)) for _ in range(200)]
    batch = theirs(texts, add_special_tokens=False)["input_ids"]
    for text, ids in zip(texts, batch, strict=True):
        assert ids == ours.encode(text), repr(text)
        assert theirs.decode(ids).strip() == ours.decode(ids).strip()
    pair = theirs("bado", "kemi")["input_ids"]
    assert pair == [0, *ours.encode("bado"), 2, 2, *ours.encode("kemi"), 2]
    assert theirs("bado", "")["input_ids"] == [0, *ours.encode("bado"), 2, 2, 2]
    assert theirs("bado <mask>")["input_ids"] == [0, *ours.encode("bado"), theirs.mask_token_id, 2]
    assert theirs([("bado", "kemi")])["input_ids"] == [pair]
    assert theirs.mask_token_id == ours.mask_id


WITHOUT_THIS_PACKAGE = """
import json, sys
sys.modules["fairseq"] = sys.modules["fairseq_tupe"] = None  # importing them is an error
import torch
from transformers import (AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, logging, pipeline)
logging.set_verbosity_error()
folder, again, text = sys.argv[1:]
load = dict(trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, **load)
inputs = tokenizer([text, text[:9]], padding=True, return_tensors="pt")
lm, classifier = (auto.from_pretrained(folder, **load) for auto in (AutoModelForMaskedLM, AutoModelForSequenceClassification))
bare = AutoModel.from_pretrained(folder, **load)
half = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16, **load)
with torch.no_grad():
    out = {"ids": inputs["input_ids"].tolist(), "lm": lm(**inputs).logits.tolist(), "cls": classifier(**inputs).logits.tolist(),
           "features": bare(**inputs).last_hidden_state.tolist(), "half": half(**inputs).logits.float().tolist()}
out["fill"] = [row["token"] for row in pipeline("fill-mask", model=lm, tokenizer=tokenizer)(text[:9] + " <mask>.")]
out["label"] = pipeline("text-classification", model=classifier, tokenizer=tokenizer)(text)[0]["label"]
classifier.save_pretrained(again)
tokenizer.save_pretrained(again)
saved = AutoModelForSequenceClassification.from_pretrained(again, **load)
with torch.no_grad():
    out["again"] = saved(**AutoTokenizer.from_pretrained(again, **load)([text, text[:9]], padding=True, return_tensors="pt")).logits.tolist()
print(json.dumps(out))
"""


def test_folder_needs_neither_fairseq_nor_this_package(exported, tmp_path):
    model, folder, ours = exported
    text = "Bado kemi ranu 😀 vute."
    env = environment(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
    env.pop("PYTHONPATH", None)
    arguments = [sys.executable, "-c", WITHOUT_THIS_PACKAGE, str(folder), str(tmp_path / "again"), text]
    finished = subprocess.run(arguments, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    out = json.loads(finished.stdout.splitlines()[-1])
    rows = [torch.tensor([0, *ours.encode(part), 2]) for part in (text, text[:9])]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    assert out["ids"] == tokens.tolist()
    with torch.no_grad():
        logits, classes = model(tokens)[0], model(tokens, classification_head_name=HEAD)[0]
        features = model.extract_features(tokens)[0]
    real = tokens.ne(PAD)
    close(torch.tensor(out["lm"])[real], logits[real])
    close(torch.tensor(out["features"])[real], features[real])
    close(torch.tensor(out["cls"]), classes)
    close(torch.tensor(out["again"]), classes)
    close(torch.tensor(out["half"]), classes, 0.05 * classes.abs().max().item())
    row = torch.tensor([[0, *ours.encode(text[:9]), ours.mask_id, *ours.encode("x.")[-1:], 2]])
    with torch.no_grad():
        assert out["fill"] == model(row)[0][0, -3].topk(5).indices.tolist()
    assert out["label"] == ["entailment", "not_entailment"][classes[0].argmax()]


def test_stock_classes_refuse(exported):
    for stock in (RobertaModel, RobertaForMaskedLM, BertModel, DistilBertModel):
        with pytest.raises(KeyError, match="this is TUPE"):
            stock.from_pretrained(exported[1])


def test_bundled_code_is_the_same_code(exported):
    """Every class and function of the modules is in the exported file, statement by statement, and computes nothing besides."""
    text = (exported[1] / "modeling_tupe.py").read_text()
    bundled = {node.name: ast.dump(node) for node in ast.parse(text).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    names = set()
    modules = ["attention", "encoder_layer", "heads", "positional_bias", "sentence_encoder"]
    for module in [*(f"fairseq_tupe.modules.{name}" for name in modules), "fairseq_tupe.interop.hf.modeling_tupe", "fairseq_tupe.errors"]:
        for node in ast.parse(bundle.source_of(module)).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                assert bundled[node.name] == ast.dump(node), node.name
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                assert ast.unparse(node) in ast.unparse(ast.parse(text)), ast.unparse(node)
    elsewhere = [f"# --- {module.replace('.', '/')}.py ---" for module in bundle.REPLACED]
    if not any(line in text for line in elsewhere):
        assert {"SentenceEncoder", "PositionalBias", "BiasedSelfAttention", "LanguageModelHead"} <= names
    assert "fairseq" not in "".join(line for line in text.splitlines() if line.startswith(("import", "from")))


def test_clashing_names_are_not_bundled(tmp_path, monkeypatch):
    package = tmp_path / "fairseq_tupe_clash.py"
    package.write_text("from fairseq_tupe.errors import TupeError\nclass TupeError(ValueError):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="another module of the bundle"):
        bundle.bundle("fairseq_tupe_clash")


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
    for part in ("# TUPE-R", "AutoModelForSequenceClassification", "| updates | 7 |", "best loss: 3.5", "arxiv.org/abs/2006.15595"):
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
        (["export-hf", "--no-tokenizer", "--head", "x", str(path), str(tmp_path / "o")], "has no classification head x, but none"),
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


def test_auto_classes(exported):
    _, folder, _ = exported
    assert type(AutoModel.from_pretrained(folder)).__module__ == "fairseq_tupe.interop.hf.modeling_tupe"
    filled = pipeline("fill-mask", model=str(folder), tokenizer=str(folder))("bado <mask>.")
    assert len(filled) == 5
    assert mapping.SIGNATURE == "encoder.positional_signature"
    assert small_dictionary().index("<mask>") == 24
