#!/usr/bin/env python3
"""Writes tokenizer.json, a small byte-level BPE in the layout of GPT-2's, and tokens.json: what Hugging Face's tokenizers
(pip install tokenizers) make of some texts. Run from the project's root."""
import json
import pathlib
import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).parent
TEXTS = [
    "", " ", "Hello world", "  two  spaces, and a tab\tand\n\n\nlines \n ", "it's we'll they've I'm you'd he're 'quoted' IT'S",
    "1234567 3.14159 ½ ² ٣٤ Ⅷ", "naïve café über straße Ελλάδα мир 世界 日本語 한국어 हिन्दी ไทย", "emoji 😀👩‍👩‍👧 🇩🇪 e\u0301",
    "a\u00a0b\u2003c\u3000d\u0085e\u180ef\u200bg\u2028h\ufeff", "<|endoftext|>", "one<|endoftext|>two <|end|> <|end|>ing<|endof",
    "x" * 300, "ab" * 200 + " " + "=" * 77, "if (a == b) { return c[i++]->d; } // done", "\x00\x01\x7f\u0080\u00ad\ufffd",
    "the the the The THE tHe\r\n\r\nthe", "'sabc 's 't're", "   \n   x", "\n", "trailing   ", "x\n\u0085\n\u0085\ny",
]


def drawn_texts():
    draw = random.Random(7)
    letters = "abc ABC  \n\t'.,0123\u00e9\u0416\u4e2d\U0001f600\u00a0\u0301-_"
    return ["".join(draw.choice(letters) for _ in range(draw.randrange(1, 60))) for _ in range(200)]


def main():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<|endoftext|>"], show_progress=False)
    learnt = [pathlib.Path(name).read_text() for name in ("README.md", "CHANGELOG.md", "docs/errors.md")]
    tokenizer.train_from_iterator(learnt + ["a\n\u0085\n\u0085\nb"] * 500, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|end|>", "<|end|>ing")])
    tokenizer.save(str(HERE / "tokenizer.json"), pretty=False)
    texts = TEXTS + drawn_texts()
    told = [[text, tokenizer.encode(text).ids] for text in texts]
    (HERE / "tokens.json").write_text(json.dumps(told, ensure_ascii=True, separators=(",", ":")) + "\n")


main()
