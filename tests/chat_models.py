"""A word tokenizer with chat templates like those of well-known models, and a small random network that reads it."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

CITIES = ("Paris", "Lyon", "Rome", "Milan", "New York", "Los Angeles", "Rio", "San Jose")
WORDS = "You are brief . Is in Europe Yes No ? the city of The answer is a system user assistant : ( helpful".split()
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>", "<|start|>", "<|end|>", "[INST]", "[/INST]")

TEMPLATES = {
    # turns with marks, no beginning-of-sequence token, a system message of its own where none is given
    "marks": (
        "{% if messages[0]['role'] != 'system' %}<|start|>system\nYou are helpful.<|end|>\n{% endif %}"
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    ),
    # its own beginning-of-sequence token, contents trimmed
    "trims": (
        "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
    ),
    # no system messages
    "strict": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    ),
    # the system message inside the last user's turn
    "folds": (
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n\n' %}"
        "{% elif m['role'] == 'user' %}[INST] {% if loop.last %}{{ ns.system }}{% endif %}{{ m['content'] }}[/INST]"
        "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    # what it is given is not what it writes
    "shouts": "{% for m in messages %}{{ m['content'] | replace('Is', 'The answer is') }}{% endfor %}",
}


def chat_tokenizer(template: str | None = "marks") -> Any:
    """One token for every word and mark; names of two words have two."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    words = dict.fromkeys([*SPECIAL, "\n", *WORDS, *(w for c in CITIES for w in c.split())])
    made = Tokenizer(models.WordLevel({w: k for k, w in enumerate(words)}, unk_token="<unk>"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\w+|[^\w\s]"), behavior="removed", invert=True)
    made.add_special_tokens(list(SPECIAL))
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **names)
    tokenizer.chat_template = None if template is None else TEMPLATES[template]
    return tokenizer


def chat_model(tokenizer: Any, seed: int = 1000) -> Any:
    """A random Llama of three blocks for this tokenizer."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3) if p.ndim > 1 else None
    return model
