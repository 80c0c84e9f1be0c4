"""Makes a tiny Qwen2-VL with random weights: images of 224 x 224 are 64 tokens, with positions of three axes.

Knows the files that vLLM reads, by what `transformers` writes. Weights are wide enough that greedy tokens
follow from the pixels.
"""

import argparse
from pathlib import Path
from typing import Any

from tiny_model import HEADS, INNER, KV_HEADS, LAYERS, LONGEST, SPREAD, VOCABULARY, WIDTH

WORDS = VOCABULARY - 4
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
START, END, IMAGE, VIDEO = range(WORDS, VOCABULARY)
PATCH = 14


def write_processor(folder: Path) -> None:
    """One word, one token; and how pixels are cut into patches."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    words = {f"t{number}": number for number in range(WORDS)}
    words |= {name: WORDS + number for number, name in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", eos_token="t2", additional_special_tokens=SPECIAL
    )
    images = Qwen2VLImageProcessor(min_pixels=(4 * PATCH) ** 2, max_pixels=(16 * PATCH) ** 2)
    processor = Qwen2VLProcessor(
        image_processor=images, tokenizer=fast, video_processor=Qwen2VLVideoProcessor()
    )
    processor.save_pretrained(folder)


def write_model(folder: Path) -> None:
    """Seeded noise."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision: dict[str, Any] = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": WIDTH,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": PATCH,
    }
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": LONGEST,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    }
    config = Qwen2VLConfig(
        vision_config=vision,
        text_config=text,
        vision_start_token_id=START,
        vision_end_token_id=END,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    torch.manual_seed(7)
    model = Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, SPREAD)
    model.save_pretrained(folder)
    config.architectures = ["Qwen2VLForConditionalGeneration"]
    config.save_pretrained(folder)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder)
    write_processor(folder)


if __name__ == "__main__":
    main()
