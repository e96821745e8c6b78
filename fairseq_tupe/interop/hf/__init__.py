"""Importing this registers TUPE with transformers: Auto classes then load exported folders without remote code."""

from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from fairseq_tupe.interop.hf.configuration_tupe import TupeConfig
from fairseq_tupe.interop.hf.modeling_tupe import TupeForMaskedLM, TupeForSequenceClassification, TupeModel
from fairseq_tupe.interop.hf.tokenization_tupe import TupeTokenizer

__all__ = ["TupeConfig", "TupeForMaskedLM", "TupeForSequenceClassification", "TupeModel", "TupeTokenizer"]

AutoConfig.register("tupe", TupeConfig, exist_ok=True)
AutoModel.register(TupeConfig, TupeModel, exist_ok=True)
AutoModelForMaskedLM.register(TupeConfig, TupeForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(TupeConfig, TupeForSequenceClassification, exist_ok=True)
AutoTokenizer.register(TupeConfig, fast_tokenizer_class=TupeTokenizer, exist_ok=True)
