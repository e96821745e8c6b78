"""Ways to compute softmax(q k^T * scale + bias) v, equal but for rounding; see :mod:`.selection`."""
