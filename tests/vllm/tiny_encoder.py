"""Makes a tiny BERT with random weights. It has the tokenizer of `tiny_model.py`'s model.

Knows the files that vLLM reads: `tiny_encoder.py FOLDER MODEL`.
"""

import shutil
import sys
from pathlib import Path

LONGEST = 1024


def make(folder: Path, model: Path) -> None:
    """Makes it."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=LONGEST,
    )
    BertModel(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder / name)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
