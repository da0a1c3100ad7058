"""The shipped tokenizer: byte-level BPE, with the bytes behind every id.

Encoding goes through the real `tokenizers` library. Decoding is done here from each token's bytes, because a
server streams: a character that is split over several tokens shows up with the last of them, as in vLLM.
"""

from __future__ import annotations

import codecs
import gzip
import random
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

from tokenizers import Tokenizer as BpeTokenizer

DRIFT_RATE = 0.15
"""Share of the splittable tokens that `encode_drifted` splits."""


class Tokenizer:
    """Text to ids and back. Ids are plain ints in `range(vocabulary_size)`."""

    def __init__(self, bpe: BpeTokenizer) -> None:
        self._bpe = bpe
        self.vocabulary_size: int = bpe.get_vocab_size()
        self.end_of_text_id = self._id_of("<|endoftext|>")
        self.turn_start_id = self._id_of("<|im_start|>")
        self.turn_end_id = self._id_of("<|im_end|>")
        self.image_token_id = self._id_of("<|image_pad|>")
        around_images = {self._id_of("<|vision_start|>"), self.image_token_id, self._id_of("<|vision_end|>")}
        self.special_ids = frozenset({self.end_of_text_id, self.turn_start_id, self.turn_end_id, *around_images})
        added = {token_id: token.content for token_id, token in bpe.get_added_tokens_decoder().items()}
        self._added_ids = frozenset(added)
        self.assistant_opening: list[int] = [self.turn_start_id, *self.encode("assistant\n")]
        """The ids that open an assistant turn in the shipped chat template."""
        unhide = {shown: byte for byte, shown in enumerate(_shown_bytes())}
        self._bytes = [
            added[token_id].encode()
            if token_id in added
            else bytes(unhide[char] for char in bpe.id_to_token(token_id) or "")
            for token_id in range(self.vocabulary_size)
        ]
        self._longest = max(map(len, self._bytes))
        self._byte_ids = {token: token_id for token_id, token in enumerate(self._bytes) if len(token) == 1}

    def _id_of(self, token: str) -> int:
        token_id = self._bpe.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokenizer file has no token {token}; make it again with make_tokenizer")
        return int(token_id)

    def encode(self, text: str) -> list[int]:
        """The canonical ids of `text`; special tokens written in the text become their ids."""
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def encode_aside(self, text: str) -> list[int]:
        """The same for a thread: other threads run meanwhile."""
        [encoded] = self._bpe.encode_batch_fast([text], add_special_tokens=False)  # unlike encode() it frees the lock
        return list(encoded.ids)

    def fewest(self, text: str) -> int:
        """No encoding of `text` has fewer ids than this; costs no encoding."""
        return -(-len(text.encode(errors="replace")) // self._longest)

    def encode_drifted(self, text: str, seed: int) -> list[int]:
        """Other ids for the same text, as a model may sample them: some tokens are cut in two, chosen by `seed`.

        Decodes to `text` exactly, and differs from `encode(text)` whenever any token of it can be cut.
        """
        canonical = self.encode(text)
        cuttable = [i for i, token_id in enumerate(canonical) if self._cuttable(token_id)]
        if not cuttable:
            return canonical
        chance = random.Random(f"{seed}\0{text}")
        chosen = {i for i in cuttable if chance.random() < DRIFT_RATE} or {chance.choice(cuttable)}
        ids: list[int] = []
        for i, token_id in enumerate(canonical):
            ids += self._cut(self._bytes[token_id], chance) if i in chosen else [token_id]
        return ids

    def _cuttable(self, token_id: int) -> bool:
        return token_id not in self._added_ids and len(self._bytes[token_id]) > 1

    def _cut(self, token: bytes, chance: random.Random) -> list[int]:
        at = chance.randrange(1, len(token))
        return [*self._ids_of_bytes(token[:at]), *self._ids_of_bytes(token[at:])]

    def _ids_of_bytes(self, part: bytes) -> list[int]:
        try:
            return self.encode(part.decode())
        except UnicodeDecodeError:
            return [self._byte_ids[part[i : i + 1]] for i in range(len(part))]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._bytes[token_id] for token_id in token_ids).decode(errors="replace")

    def shown(self, token_id: int) -> str:
        """The token as the vocabulary spells it (a leading blank is shown as U+0120), for `/tokenize`."""
        return str(self._bpe.id_to_token(token_id))

    def pieces(self, token_ids: Iterable[int]) -> list[str]:
        """The text that each id completes, in order: "" while a character still lacks bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return [decoder.decode(self._bytes[token_id]) for token_id in token_ids]

    def contains(self, token_id: object) -> bool:
        return isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < self.vocabulary_size


def _shown_bytes() -> list[str]:
    """How byte-level BPE writes each of the 256 bytes: printable ones as themselves, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shown: list[str] = []
    hidden = 0
    for byte in range(256):
        if byte in printable:
            shown.append(chr(byte))
        else:
            shown.append(chr(0x100 + hidden))
            hidden += 1
    return shown


@cache
def load_tokenizer() -> Tokenizer:
    """The tokenizer that ships with polarq; loaded once a process."""
    packed = files("polarq.testing.inference").joinpath("tokenizer.json.gz").read_bytes()
    return Tokenizer(BpeTokenizer.from_str(gzip.decompress(packed).decode()))
