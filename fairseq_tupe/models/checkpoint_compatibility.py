"""Say in one line why a checkpoint does not fit a model, in the words of the options that decide it."""

from typing import Any

from fairseq_tupe.errors import TupeError
from fairseq_tupe.models.config import variant_name
from fairseq_tupe.models.encoder_adapter import positional_signature
from fairseq_tupe.modules.sentence_encoder import POSITION_ENCODINGS

SIGNATURE = "encoder.positional_signature"
DICTIONARY_SIGNATURE = "encoder.dictionary_signature"
ENCODER = "encoder.sentence_encoder."
# key below ENCODER -> [(axis, option)]
SIZES = {
    "embed_tokens.weight": [(1, "--encoder-embed-dim")],
    "layers.0.fc1.weight": [(0, "--encoder-ffn-embed-dim")],
}
NORMS = {"layernorm_embedding.weight": "--embedding-normalize", "layer_norm.weight": "--encoder-normalize-before"}


def describe_signature(signature: Any) -> tuple[str, str]:
    """The variant's name and the options that give it, from :func:`positional_signature`."""
    encoding_index, rel_pos, cls_rule, bins, distance, heads = (int(value) for value in signature)
    encoding = list(POSITION_ENCODINGS)[encoding_index]
    tie_cls = encoding == "untied" and not cls_rule
    options = [f"--position-encoding {encoding}"]
    options += [f"--rel-pos --rel-pos-bins {bins} --max-rel-pos {distance}"] if rel_pos else []
    options += ["--tie-cls"] if tie_cls else []
    return variant_name(encoding, bool(rel_pos), tie_cls), " ".join([*options, f"--encoder-attention-heads {heads}"])


def check_state_dict(model: Any, state_dict: dict, prefix: str) -> None:
    """Compare a checkpoint's weights with the model they are meant for.

    Weights that came from elsewhere may not know their dictionary: they take the model's.

    Raises:
        TupeError: naming the options to change and the keys that are missing or left over.
    """
    ours = {prefix + key: value for key, value in model.state_dict().items()}
    if prefix + SIGNATURE not in state_dict:
        raise TupeError(
            f"not a checkpoint of tupe_roberta: it has no {SIGNATURE}, but keys such as {next(iter(state_dict), 'none at all')}"
        )
    state_dict.setdefault(prefix + DICTIONARY_SIGNATURE, ours[prefix + DICTIONARY_SIGNATURE])
    problems = _different_variant(model.cfg, state_dict[prefix + SIGNATURE])
    problems += _different_sizes(ours, state_dict, prefix)
    missing, extra = sorted(ours.keys() - state_dict.keys()), sorted(state_dict.keys() - ours.keys())
    if missing:
        problems.append(f"missing in the checkpoint: {_some(missing)}")
    if extra:
        problems.append(f"not in this model: {_some(extra)}")
    if not problems:
        problems += [
            f"{key} is {tuple(state_dict[key].shape)} in the checkpoint and {tuple(value.shape)} in this model"
            for key, value in ours.items()
            if value.shape != state_dict[key].shape
        ]
    if problems:
        raise TupeError("the checkpoint is of another model: " + "; ".join(problems))


def _different_variant(cfg: Any, theirs: Any) -> list[str]:
    ours = positional_signature(cfg)
    if theirs.tolist() == ours.tolist():
        return []
    (their_name, their_options), (our_name, our_options) = describe_signature(theirs), describe_signature(ours)
    return [f"it holds {their_name} ({their_options}), this model is {our_name} ({our_options}): pass the checkpoint's options"]


def _different_sizes(ours: dict, theirs: dict, prefix: str) -> list[str]:
    problems = []
    for key, axes in SIZES.items():
        key = prefix + ENCODER + key
        for axis, option in axes:
            if key in theirs and theirs[key].shape[axis] != ours[key].shape[axis]:
                problems.append(f"{option} is {theirs[key].shape[axis]} there and {ours[key].shape[axis]} here")
    layers = [len({key for key in state if _is_layer(key, prefix)}) for state in (theirs, ours)]
    if layers[0] != layers[1]:
        problems.append(f"--encoder-layers is {layers[0]} there and {layers[1]} here")
    rows = [len(state[prefix + ENCODER + "embed_tokens.weight"]) for state in (theirs, ours)]
    if rows[0] != rows[1]:
        problems.append(
            f"its dictionary has {rows[0]} types and the data's dictionary {rows[1]}: use data prepared with its tokenizer"
        )
    elif not theirs[prefix + DICTIONARY_SIGNATURE].equal(ours[prefix + DICTIONARY_SIGNATURE].cpu()):
        problems.append(
            f"its dictionary and the data's have {rows[0]} types each, but not the same ones in the same order: use data "
            "prepared with its tokenizer"
        )
    for key, option in NORMS.items():
        there, here = (prefix + ENCODER + key in state for state in (theirs, ours))
        if there != here:
            problems.append(f"{option} is {'on' if there else 'off'} there and {'on' if here else 'off'} here")
    for key, extra in {
        "positional_bias.untied.embedding": 1,
        "untied_projections.embedding": 1,
        "embed_positions": 0,
    }.items():
        key = f"{prefix}{ENCODER}{key}.weight"
        if key in theirs and key in ours and len(theirs[key]) != len(ours[key]):
            problems.append(f"--max-positions is {len(theirs[key]) - extra} there and {len(ours[key]) - extra} here")
    return problems


def _is_layer(key: str, prefix: str) -> bool:
    return key.startswith(prefix + ENCODER + "layers.") and key.endswith(".fc1.weight")


def _some(keys: list, most: int = 4) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")
