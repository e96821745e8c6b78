"""``python -m fairseq_tupe benchmark``: our backends against the original, stock RoBERTa and attention without a bias."""
