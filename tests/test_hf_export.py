"""Exported models compute what fairseq's do, in transformers and without this package."""

import ast
import json
import random
import subprocess
import sys

import pytest
import torch
from exported_models import HEAD, PAD, close, padded_tokens, write_checkpoint
from fairseq_processes import environment
from small_model import SIZES, VARIANTS, random_tokens, small_model

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertModel,
    DistilBertModel,
    RobertaForMaskedLM,
    RobertaModel,
    pipeline,
)

import fairseq_tupe.interop.hf  # noqa: F401
from fairseq_tupe.__main__ import main
from fairseq_tupe.interop.hf import bundle

pytest_plugins = ["exported_models"]


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
        *("Bado KEMI.", "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467", "a\rb", "a\u00a0b", "a\u2028b\u0085c"),
        *("你好 नमस्ते مرحبا", "<s> </s> <pad> <unk>", "<0x41>", "http://a.com/b, me@x.org and abcde.pdf"),
        *("<url> first<email>x", "", "   ", "\u2581a\u2581"),
        *("\x01<s\x01>", "İẞΑΣ ﬁ e\u0301", "ＡＢＣ", "`` '' ,, ....", "<URL>"),
    ]
    rng = random.Random(2)
    letters = "badokeminu  .,'<>/@_-09éüß中\u00a0\u2028\r\n\U0001f600\u200d\u0301ﬁ▁"
    texts += ["".join(rng.choices(letters, k=rng.randint(1, 50))) for _ in range(500)]
    codes = [*range(1, 0x300), *range(0xE000, 0x1FA00)]
    texts += ["".join(map(chr, rng.choices(codes, [99] * 0x2FF + [1] * 0x11A00, k=12))) for _ in range(200)]
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
    inputs = AutoTokenizer.from_pretrained(again, **load)([text, text[:9]], padding=True, return_tensors="pt")
    out["again"] = saved(**inputs).logits.tolist()
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
    modules = [f"fairseq_tupe.modules.{name}" for name in modules]
    for module in [*modules, "fairseq_tupe.interop.hf.modeling_tupe", "fairseq_tupe.errors"]:
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


def test_auto_classes(exported):
    _, folder, _ = exported
    assert type(AutoModel.from_pretrained(folder)).__module__ == "fairseq_tupe.interop.hf.modeling_tupe"
    filled = pipeline("fill-mask", model=str(folder), tokenizer=str(folder))("bado <mask>.")
    assert len(filled) == 5
