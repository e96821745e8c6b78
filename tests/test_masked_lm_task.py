"""The pretraining task: dictionary, splitting of blocks, masking, shards, and batches in which nothing is masked."""

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, TokenBlockDataset, data_utils
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from fairseq_processes import USER_DIR, masked_lm_flags, run_many, tiny_sentences, write_data_bin
from omegaconf import OmegaConf

from fairseq_tupe.data.block_splitting import split_long_blocks
from fairseq_tupe.errors import TupeError
from fairseq_tupe.tasks.tupe_masked_lm import TupeMaskedLMConfig, TupeMaskedLMTask, word_beginnings

LIMIT = 24


def build(data, task=TupeMaskedLMTask, config=TupeMaskedLMConfig, **options):
    """A task as fairseq builds it."""
    options = {"tokens_per_sample": LIMIT, "sample_break_mode": "complete", "seed": 5, **options}
    return task.setup_task(OmegaConf.structured(config(data=str(data), **options)))


def samples(task, split="train", epoch=1):
    """Every sample of a split: (id, source tokens, target tokens), sorted by id."""
    task.load_dataset(split, epoch=epoch)
    dataset = task.dataset(split)
    dataset.set_epoch(epoch)
    items = [dataset[index] for index in range(len(dataset))]
    return sorted(((item["id"], item["net_input.src_tokens"], item["target"]) for item in items), key=lambda item: item[0])


def restored(task, sample):
    """Tokens before masking: the targets where something was predicted."""
    _, source, target = sample
    return torch.where(target.ne(task.dictionary.pad()), target, source).tolist()


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Sentences of at most 13 tokens."""
    return write_data_bin(tmp_path_factory.mktemp("short"), train=tiny_sentences(60), valid=tiny_sentences(20, 1))


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Some sentences are longer than a sample."""
    sentences = tiny_sentences(20) + tiny_sentences(6, 1, longest=200) + tiny_sentences(20, 2)
    return write_data_bin(tmp_path_factory.mktemp("long"), train=sentences, valid=sentences[:30])


@pytest.mark.parametrize("break_mode", ["none", "complete", "complete_doc"])
def test_without_long_blocks_samples_are_those_of_stock(short, break_mode):
    for epoch in (1, 2):
        ours = samples(build(short, sample_break_mode=break_mode), epoch=epoch)
        stock = samples(build(short, MaskedLMTask, MaskedLMConfig, sample_break_mode=break_mode), epoch=epoch)
        assert len(ours) == len(stock) > 10
        for a, b in zip(ours, stock, strict=True):
            assert a[0] == b[0]
            assert a[1].tolist() == b[1].tolist()
            assert a[2].tolist() == b[2].tolist()


def test_splitting_costs_nothing_where_no_block_is_long(short):
    task = build(short)
    sentences = data_utils.load_indexed_dataset(str(short / "train"), task.dictionary)
    blocks = TokenBlockDataset(sentences, sentences.sizes, LIMIT - 1, pad=1, eos=2, break_mode="complete")
    assert split_long_blocks(blocks, LIMIT - 1) is blocks


@pytest.mark.parametrize("break_mode", ["none", "complete", "complete_doc", "eos"])
def test_no_token_is_lost(long, break_mode):
    task = build(long, sample_break_mode=break_mode)
    sentences = data_utils.load_indexed_dataset(str(long / "train"), task.dictionary)
    expected = [token for sentence in sentences for token in sentence.tolist()]
    assert max(map(len, sentences)) > 2 * LIMIT
    rows = [restored(task, sample) for sample in samples(task)]
    assert all(row[0] == task.dictionary.bos() for row in rows)
    assert [token for row in rows for token in row[1:]] == expected
    assert max(map(len, rows)) <= LIMIT
    if break_mode == "eos":
        assert len(rows) == sum(-(-len(sentence) // (LIMIT - 1)) for sentence in sentences)
    # and the batches of an epoch, on each of two ranks, hold every sample once
    ids = []
    for rank in range(2):
        batches = task.get_batch_iterator(
            task.dataset("train"), max_sentences=4, max_positions=(LIMIT,), required_batch_size_multiple=8,
            num_shards=2, shard_id=rank, disable_iterator_cache=True,
        )  # fmt: skip
        for batch in batches.next_epoch_itr():
            assert batch == {} or batch["net_input"]["src_tokens"].shape[1] <= LIMIT
            ids += batch["id"].tolist() if batch else []
    assert sorted(ids) == list(range(len(rows)))


def test_a_sentence_of_more_than_65535_tokens(tmp_path):
    sentence = ["▁w1"] * 70_000 + ["▁w2"]
    data = write_data_bin(tmp_path, train=[sentence, ["▁w3"]])
    task = build(data, tokens_per_sample=512)
    rows = [restored(task, sample) for sample in samples(task)]
    assert sum(len(row) - 1 for row in rows) == 70_002 + 2
    assert max(map(len, rows)) <= 512
    assert min(len(row) for row in rows[:-1]) > 256  # equal parts, not a stump at the end


def test_reference_dictionary(tmp_path):
    data = write_data_bin(tmp_path, extra_specials=("<file>", "<email>", "<url>"), train=tiny_sentences(5))
    dictionary = build(data, reference_dictionary=True).dictionary
    assert [dictionary.index(word) for word in ("<s>", "<pad>", "</s>", "<unk>", "<file>", "<email>", "<url>", "▁w0")] == [
        *range(8)
    ]
    assert dictionary.nspecial == 7
    assert dictionary.index("<mask>") == len(dictionary) - 1 == 7 + 50
    stock = build(data).dictionary
    assert (stock.index("▁w0"), stock.nspecial, len(stock)) == (4, 4, 55)


def test_mask_symbol_is_there_once(tmp_path):
    data = write_data_bin(tmp_path, train=tiny_sentences(5))
    (data / "dict.txt").write_text((data / "dict.txt").read_text(encoding="utf-8") + "<mask> 1\n", encoding="utf-8")
    task = build(data)
    assert task.dictionary.symbols.count("<mask>") == 1
    assert task.mask_idx == task.dictionary.index("<mask>") == 54


def test_reference_run_dictionary_and_batches(shared):
    task = build(shared / "golden/reference_run/data-bin", reference_dictionary=True, tokens_per_sample=128)
    checkpoint = torch.load(shared / "golden/reference_run/tupe_a.valid_items.pt", weights_only=True)
    task.load_dataset("valid")
    assert len(task.dataset("valid")) > len(checkpoint["src_tokens"])  # its four over-long samples are split


@pytest.mark.parametrize("break_mode", ["none", "complete"])
def test_whole_words(long, break_mode):
    task = build(long, mask_whole_words=True, mask_prob=0.3, sample_break_mode=break_mode)
    begins = [symbol.startswith("▁") or symbol.startswith("<") for symbol in task.dictionary.symbols]
    partly = apart = masked_words = long_words = 0
    for sample in samples(task):
        tokens, hit = restored(task, sample), sample[2].ne(1).tolist()
        apart += not begins[tokens[1]] and hit[0] != hit[1]
        starts = [i for i, token in enumerate(tokens) if begins[token] or i == 1] + [len(tokens)]
        for start, end in zip(starts, starts[1:], strict=False):
            masked_words += all(hit[start:end])
            long_words += all(hit[start:end]) and end - start > 1
            partly += any(hit[start:end]) and not all(hit[start:end])
    assert partly == 0
    assert masked_words > 50
    assert long_words > 10
    assert apart > 0  # some block begins inside a word, and <s> is not a part of it
    plain = build(long, mask_prob=0.3, sample_break_mode=break_mode)
    assert [restored(plain, s) for s in samples(plain)] == [restored(task, s) for s in samples(task)]


def test_word_beginnings():
    dictionary = Dictionary()
    for symbol in ("▁the", "s", "▁", "<url>", "<0xE2>", "madeupword0000", "<mask>"):
        dictionary.add_symbol(symbol)
    assert word_beginnings(dictionary).tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1]


def test_shards_in_turn(tmp_path, short):
    other = write_data_bin(tmp_path, train=tiny_sentences(33, 7), valid=tiny_sentences(9, 8))
    task = build(f"{short}:{other}")
    assert task.has_sharded_data("train")
    alone = [[restored(t, s) for s in samples(t)] for t in (build(short), build(other))]
    for epoch in (1, 2, 3, 4):
        assert [restored(task, s) for s in samples(task, epoch=epoch)] == alone[(epoch - 1) % 2]
    first_valid = build(short)
    assert [restored(task, s) for s in samples(task, "valid")] == [
        restored(first_valid, s) for s in samples(first_valid, "valid")
    ]


def test_refusals(tmp_path, short):
    def refused(*words, data=short, **options):
        with pytest.raises(TupeError) as refusal:
            build(data, **options).load_dataset("train")
        assert "\n" not in str(refusal.value)
        for word in words:
            assert str(word) in str(refusal.value)

    words = write_data_bin(tmp_path / "words", train=tiny_sentences(5))
    entries = (words / "dict.txt").read_text(encoding="utf-8")
    refused(tmp_path / "nowhere", "does not exist", data=tmp_path / "nowhere")
    refused("'nowhere'", "relative paths start at", data=f"{short}:nowhere")
    (words / "train.bin").rename(words / "kept")
    refused(words / "train.bin", "does not exist", data=words)
    (words / "train.bin").write_bytes(b"")
    refused(words / "train.bin", "empty", data=words)
    (words / "train.bin").write_bytes((words / "kept").read_bytes()[:-2])
    refused(words / "train.bin", "damaged", data=words)
    (words / "train.bin").unlink()
    (words / "kept").rename(words / "train.bin")
    (words / "dict.txt").write_text(entries.replace("▁w7 ", "other "), encoding="utf-8")
    refused(words / "dict.txt", short / "dict.txt", "differs", data=f"{short}:{words}")
    (words / "dict.txt").write_text(entries.replace("▁", ""), encoding="utf-8")
    refused("--mask-whole-words", "U+2581", data=words, mask_whole_words=True)
    (words / "dict.txt").write_text(entries + "<url> 3\n", encoding="utf-8")
    refused(words / "dict.txt", "<url>", "--reference-dictionary", data=words, reference_dictionary=True)
    (words / "dict.txt").write_text("no numbers here\n", encoding="utf-8")
    refused(words / "dict.txt", "no numbers", data=words)
    (words / "dict.txt").write_bytes(b"\xff\xfe\x00 3\n")
    refused(words / "dict.txt", data=words)
    (words / "dict.txt").write_text(entries.splitlines()[0] + "\n", encoding="utf-8")
    refused(words / "train.bin", "6 types", "don't match", data=words)
    (words / "dict.txt").write_text("")
    refused(words / "dict.txt", "empty", data=words)
    (words / "dict.txt").unlink()
    refused(words / "dict.txt", "does not exist", data=words)
    empty = write_data_bin(tmp_path / "empty", train=[])
    refused(empty / "train.bin", "empty", data=empty)


def test_training_without_a_masked_token_and_refusals_of_the_program(tmp_path, short):
    save = tmp_path / "save"
    nothing = ["--mask-prob", "1e-9", "--max-epoch", 1]
    each = ["--no-epoch-checkpoints", "--save-interval-updates", 1, "--keep-interval-updates", 1, "--disable-validation"]
    validate = ["--user-dir", USER_DIR, "--task", "tupe_masked_lm", "--path", save / "checkpoint_last.pt"]
    train, validation, saving, *refused = run_many(
        tmp_path / "logs",
        [
            ["fairseq-train", *masked_lm_flags(short, save, *nothing)],
            ["fairseq-validate", short, *validate, "--batch-size", 4, "--log-format", "json"],
            ["fairseq-train", *masked_lm_flags(short, tmp_path / "each", *nothing, *each)],
            ["fairseq-train", *masked_lm_flags(short, tmp_path / "no", *nothing, "--tokens-per-sample", 64)],
            ["fairseq-train", *masked_lm_flags(short, tmp_path / "no", *nothing, "--max-tokens", 20)],
        ],
    )
    expected = [["--tokens-per-sample 64", "--max-positions 32"], ["--max-tokens", "32 tokens", "limit of 20"]]
    for process, words in zip(refused, expected, strict=True):
        assert process.returncode != 0
        assert len(process.errors) == 1
        assert all(word in process.errors[0] for word in words)
        assert "Traceback" not in process.output
        assert not list((tmp_path / "no").glob("*.pt"))
    # fairseq leaves out the interval's checkpoint where an epoch ends
    last = int(saving.check().log("train")[-1]["train_num_updates"])
    assert (tmp_path / "each" / f"checkpoint_1_{last}.pt").read_bytes() == (tmp_path / "each/checkpoint_last.pt").read_bytes()
    losses = [row["loss"] for row in train.check().log("train_inner")]
    assert len(losses) > 3
    assert set(losses) == {0.0}
    assert train.log("valid")[-1]["valid_loss"] == 0.0
    (row,) = validation.check().log("valid")
    assert row["valid_loss"] == 0.0
    assert "nan" not in (train.stdout + validation.stdout).lower()


def test_only_some_batches_without_a_masked_token_do_not_move_the_mean():
    from fairseq.criterions.masked_lm import MaskedLmLoss
    from fairseq.logging import metrics

    task = object.__new__(TupeMaskedLMTask)
    criterion = object.__new__(MaskedLmLoss)
    some = {"loss": torch.tensor(8 * np.log(2.0)), "sample_size": torch.tensor(4), "ntokens": 9, "nsentences": 1}
    none = {**some, "loss": torch.tensor(0.0), "sample_size": torch.tensor(0)}
    with metrics.aggregate(new_root=True) as total:
        for logs in ([some], [none], [none, some], [none]):
            task.reduce_metrics(logs, criterion)
    assert total.get_smoothed_values()["loss"] == pytest.approx(2.0, abs=1e-3)
