"""Trains the small byte-level BPE tokenizer that the scripted server ships, from the standard library's sources.

    python -m polarq.testing.inference.make_tokenizer [PATH]

The file is shipped because its ids depend on the Python version whose sources were read; run this only to make a
different vocabulary. Layout: 0 to 2 are the special tokens, then the 256 bytes, then the merges, then the added
tags (thinking and tool tags, which are ordinary text to a decoder), then the special tokens that stand for pictures.
"""

from __future__ import annotations

import gzip
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PICTURE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
ADDED_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY_SIZE = 4000
CORPUS_FILES = 160
AGENT_WORDS = (
    "system user assistant tool bash command arguments name function tests calculator repository Let me look at"
    " the code first. Now I will fix the parser and run the tests again. All tests pass. python3 -m unittest"
    ' {"name": "bash", "arguments": {"command": "cat calculator.py"}} {"returncode": 0, "output": ""}'
)


def corpus() -> Iterator[str]:
    """The texts the merges are learned from: library sources in a fixed order, and what agents write."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for path in sources[:CORPUS_FILES]:
        yield path.read_text(encoding="utf-8", errors="replace")
    yield "\n".join([AGENT_WORDS] * 60)


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ADDED_TAGS])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in PICTURE_TOKENS])
    return tokenizer


def write(tokenizer: Tokenizer, path: Path) -> int:
    """Writes the tokenizer as compact, reproducible gzip; returns the file's size in bytes."""
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    text = json.dumps(description, ensure_ascii=False, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    return path.stat().st_size


def main(arguments: list[str]) -> int:
    path = Path(arguments[0]) if arguments else Path(__file__).with_name("tokenizer.json.gz")
    tokenizer = train()
    size = write(tokenizer, path)
    sys.stdout.write(f"{path}: {tokenizer.get_vocab_size()} tokens, {size} bytes\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
