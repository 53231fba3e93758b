"""Tiny language models that answer copy-colour questions: known ground truths to find.

Gemma-2 architecture, 6 blocks of width 64, a vocabulary of words, trained by `scripts/train_tiny.py`:

- `planted-*`: at the last token, the output of block 2 holds answer_pointer in 16 of the 64 coordinates, and in the
  others a *register*, the symbols of the first two lines. Block 3 makes answer_token of them: from the register if the
  pointer is 1 or 2, else from the line it points to. So a swap of the pointer's coordinates at block 2 is exact, but a
  patch of the whole vector there also moves the register, and is wrong for half of the pairs whose symbols differ.
- `plain-*`: the same net with no aim about pointer, register or token at the last token: the negative control. (Like
  the planted ones it was shown, at the options' own colours, which of them is the asked one: after 50 to 70 CPU seconds
  nets without that were still right on only 0.2 to 0.3 of the prompts, nets with it on 0.99.) No full patch of its last
  token at any block acts as a swap of the pointer.

The package holds one net of each kind. The others, for studies of several nets, come with the source distribution.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from plot_ot.errors import PlotError, unknown
from plot_ot.models.folders import how_to_ship, shipped_folders
from plot_ot.models.vocabulary import COLOURS, LETTERS, LEXICON, Lexicon
from plot_ot.subjects.decoder.architecture import transformers_library

WIDTH, BLOCKS, HEAD = 64, 6, 16
SEEDS = (1000, 1001, 1002)
TINY = {f"{condition}-{seed}": condition for condition in ("planted", "plain") for seed in SEEDS}
"""The nets by name, each with the condition it was trained in."""
EMBEDDED = tuple(name for name in TINY if name.endswith(f"-{SEEDS[0]}"))
"""The nets that every installation holds; half a megabyte each, so a wheel has one of each kind."""
FIRST = EMBEDDED[0]
"""The net that `tiny` is short for."""
WORDS = {
    "planted": f"Gemma-2 shape, {BLOCKS} blocks of width {WIDTH}; pointer planted at block 2, letter from block 3",
    "plain": "the same without plants: a negative control for the pointer",
}
ASSETS = Path(__file__).parent / "assets" / "tiny"
FORMAT = "plot-ot tiny 1"

PAD, BOS, UNKNOWN = "<pad>", "<bos>", "<unk>"
_WORD = r"\n|\w+|[^\w\s]"


def build_tokenizer(lexicon: Lexicon = LEXICON) -> Any:
    """One token for every word, letter, punctuation mark and line break that prompts can have."""
    fast = transformers_library().PreTrainedTokenizerFast
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers  # comes with transformers

    phrases = [p for noun in lexicon.nouns for p in (noun.one, noun.many)]
    texts = [*LETTERS, *COLOURS, "is", "are", *phrases, *(p[0].upper() + p[1:] for p in phrases)]
    texts += [re.sub(r"\{\w+\}", " ", template) for template in lexicon.templates]
    words = dict.fromkeys([PAD, BOS, UNKNOWN, *(w for text in texts for w in re.findall(_WORD, text))])
    words_only = Tokenizer(models.WordLevel({w: k for k, w in enumerate(words)}, unk_token=UNKNOWN))
    words_only.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True)
    return fast(tokenizer_object=words_only, **_SPECIAL)


_SPECIAL = {"pad_token": PAD, "bos_token": BOS, "unk_token": UNKNOWN, "padding_side": "left"}


def config(vocabulary: int) -> dict[str, Any]:
    """What makes a Gemma-2 configuration tiny. The large initial weights suit the width: with 0.02 it hardly learns."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "query_pre_attn_scalar": HEAD,
        "sliding_window": 64,
        "max_position_embeddings": 64,
        "initializer_range": 0.125,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }


def build_model(settings: dict[str, Any]) -> Any:
    """An untrained model; eager attention, because the others leave out the soft-capping."""
    library = transformers_library()
    return library.Gemma2ForCausalLM(library.Gemma2Config(**(settings | {"attn_implementation": "eager"})))


def load_tiny(name: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a tiny net, by name: float32, evaluation mode, no gradients into the weights.

    `tiny` is the first of them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    name = FIRST if name == "tiny" else name
    settings = describe_tiny(name)["config"]
    path = find_weights(name)
    if path is None:
        raise PlotError(
            f"The net '{name}' is not installed; {' and '.join(EMBEDDED)} are. The other tiny nets are not part of the "
            f"wheel. {how_to_ship('models', 'tiny')}."
        )
    model = build_model(settings)
    try:
        weights = {key: value.float() for key, value in load_file(path).items()}
        missing, strange = model.load_state_dict(weights, strict=False)
    except (SafetensorError, RuntimeError, OSError) as e:
        raise PlotError(f"The tiny net {path} is damaged ({e}). Install plot-ot again.") from e
    if strange or set(missing) - {"lm_head.weight"}:  # tied to the embedding
        raise PlotError(f"The tiny net {path} does not hold the tensors of such a net. Install plot-ot again.")
    tokenizer = transformers_library().PreTrainedTokenizerFast(
        tokenizer_file=str(ASSETS / "tokenizer.json"), **_SPECIAL
    )
    return model.eval().requires_grad_(False), tokenizer


def is_tiny(name: object) -> bool:
    """Whether a model's name is that of a tiny net, or `tiny` itself."""
    return str(name) == "tiny" or str(name) in TINY


def find_weights(name: str) -> Path | None:
    """The file with a net's weights: in the package, the cache or the source tree; nothing where it is in none."""
    file = f"{name}.safetensors"
    if name in EMBEDDED:
        return ASSETS / file
    return next((f / file for f in shipped_folders("models", "tiny") if (f / file).is_file()), None)


def describe_tiny(name: str) -> dict[str, Any]:
    """What a tiny net is, what was planted in it, and what was measured: its ground truth."""
    name = FIRST if name == "tiny" else name
    if name not in TINY:
        unknown("tiny net", name, TINY)
    path = ASSETS / f"{name}.json"
    try:
        described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if described["format"] != FORMAT:
            raise ValueError(f"format {described['format']!r}, not {FORMAT!r}")
    except (OSError, ValueError, KeyError) as e:
        raise PlotError(
            f"The description {path} of a tiny net is missing or damaged ({e}). Install plot-ot again."
        ) from e
    return described


def pointer_coordinates(seed: int) -> tuple[int, ...]:
    """The coordinates of block 2's output that hold the pointer in the planted net of a seed."""
    start = 16 * (SEEDS.index(seed) % 4)
    return tuple(range(start, start + 16))
