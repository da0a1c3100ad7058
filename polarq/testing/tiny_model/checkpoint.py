"""The checkpoint folder of the tiny model: Qwen3's architecture, seeded random weights, the shipped tokenizer."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polarq.testing.tiny_model.safetensors import write_safetensors

Weights = dict[str, npt.NDArray[np.float32]]

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
MAX_POSITIONS = 32_768
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True)
class TinyModel:
    """Sizes of the network. The defaults give 0.6 million parameters, 2.4 MB on disk."""

    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 2
    head_size: int = 32
    seed: int = 0

    def weights(self, vocabulary: int) -> Weights:
        """Random weights by tensor name (linear layers as [out, in]).

        The scales are wider than a trained model's initialisation: each projection keeps the size of its input, so that
        every token of the context moves the prediction, and logits spread by about 2.4, so that neighbouring positions
        differ by whole nats. A log-probability taken from the wrong position then cannot pass by chance.
        """
        rng = np.random.default_rng(self.seed)

        def random(rows: int, columns: int, scale: float) -> npt.NDArray[np.float32]:
            return rng.normal(0.0, scale, (rows, columns)).astype(np.float32)

        def linear(rows: int, columns: int) -> npt.NDArray[np.float32]:
            return random(rows, columns, 1 / math.sqrt(columns))

        def ones(size: int) -> npt.NDArray[np.float32]:
            return np.ones(size, dtype=np.float32)

        attention = self.heads * self.head_size
        weights: Weights = {"model.embed_tokens.weight": random(vocabulary, self.hidden, 1.0)}
        for index in range(self.layers):
            layer = f"model.layers.{index}"
            weights |= {
                f"{layer}.input_layernorm.weight": ones(self.hidden),
                f"{layer}.self_attn.q_proj.weight": linear(attention, self.hidden),
                f"{layer}.self_attn.k_proj.weight": linear(attention, self.hidden),
                f"{layer}.self_attn.v_proj.weight": linear(attention, self.hidden),
                f"{layer}.self_attn.o_proj.weight": linear(self.hidden, attention),
                f"{layer}.self_attn.q_norm.weight": ones(self.head_size),
                f"{layer}.self_attn.k_norm.weight": ones(self.head_size),
                f"{layer}.post_attention_layernorm.weight": ones(self.hidden),
                f"{layer}.mlp.gate_proj.weight": linear(self.intermediate, self.hidden),
                f"{layer}.mlp.up_proj.weight": linear(self.intermediate, self.hidden),
                f"{layer}.mlp.down_proj.weight": linear(self.hidden, self.intermediate),
            }
        weights["model.norm.weight"] = ones(self.hidden)
        weights["lm_head.weight"] = random(vocabulary, self.hidden, 0.3)
        return weights

    def config(self, vocabulary: int, end_of_turn_id: int, end_of_text_id: int) -> dict[str, object]:
        """config.json in the form that transformers reads."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "float32",
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": end_of_turn_id,
            "pad_token_id": end_of_text_id,
        }


def make_tiny_model(folder: Path, model: TinyModel | None = None) -> Path:
    """Write a checkpoint that vLLM and transformers load, with the scripted server's tokenizer and chat template.

    The same `model` gives the same bytes. Returns `folder`, made if need be.
    """
    model = model or TinyModel()
    shipped = files("polarq.testing.inference")
    tokenizer = gzip.decompress(shipped.joinpath("tokenizer.json.gz").read_bytes())
    ids = _token_ids(tokenizer)
    vocabulary = math.ceil((max(ids.values()) + 1) / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    end_of_turn_id, end_of_text_id = ids[END_OF_TURN], ids[END_OF_TEXT]

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "chat_template.jinja").write_bytes(shipped.joinpath("chat_template.jinja").read_bytes())
    _write_json(folder / "config.json", model.config(vocabulary, end_of_turn_id, end_of_text_id))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TURN,
            "pad_token": END_OF_TEXT,
            "model_max_length": MAX_POSITIONS,
        },
    )
    _write_json(
        folder / "generation_config.json", {"do_sample": True, "eos_token_id": [end_of_turn_id, end_of_text_id]}
    )
    write_safetensors(folder / "model.safetensors", model.weights(vocabulary))
    return folder


def _token_ids(tokenizer: bytes) -> dict[str, int]:
    """Every token of a tokenizer.json with its id, the added ones included."""
    document = json.loads(tokenizer)
    ids: dict[str, int] = dict(document["model"]["vocab"])
    return ids | {added["content"]: added["id"] for added in document["added_tokens"]}


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
