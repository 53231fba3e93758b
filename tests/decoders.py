"""Small random language models of many families, prompts of mixed length, and the oracle they are judged by."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from plot_ot.subjects import DecoderSubject, Place, Recording, record_pairs

transformers = pytest.importorskip("transformers")

VOCABULARY, DEPTH, WIDTH = 61, 4, 16
ANSWERS = ((5, 6), (7,), (8, 9, 10))
LENGTHS = (9, 12, 7, 12, 3, 10)


def configuration(family: str) -> "transformers.PreTrainedConfig":
    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    without_groups = {k: v for k, v in usual.items() if k != "num_key_value_heads"}
    mixed = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    gemma = {"head_dim": 8, "query_pre_attn_scalar": 8, **mixed}
    made: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
        "llama": lambda: transformers.LlamaConfig(**usual),
        "llama-tied": lambda: transformers.LlamaConfig(**usual, tie_word_embeddings=True),
        "qwen2": lambda: transformers.Qwen2Config(**usual, use_sliding_window=True, **mixed),
        "qwen3": lambda: transformers.Qwen3Config(**usual, head_dim=8),
        "gemma2": lambda: transformers.Gemma2Config(
            **usual, **gemma, attn_logit_softcapping=1.5, final_logit_softcapping=2.0
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **usual,
            **gemma,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        ),
        "mistral": lambda: transformers.MistralConfig(**usual, sliding_window=5),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=DEPTH, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
        ),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**without_groups),
        "phi": lambda: transformers.PhiConfig(**usual),
        "olmo2": lambda: transformers.Olmo2Config(**usual),
        "mixtral": lambda: transformers.MixtralConfig(**usual, num_local_experts=3),
        "phi3": lambda: transformers.Phi3Config(**usual, sliding_window=5),
        "olmo": lambda: transformers.OlmoConfig(**usual, clip_qkv=0.8),
        "smollm3": lambda: transformers.SmolLM3Config(**usual, no_rope_layers=[1, 0] * 2),
        "starcoder2": lambda: transformers.Starcoder2Config(**usual, sliding_window=6),
        "stablelm": lambda: transformers.StableLmConfig(**usual, use_parallel_residual=True),
        "cohere": lambda: transformers.CohereConfig(**usual, logit_scale=0.3),
        "granite": lambda: transformers.GraniteConfig(
            **usual,
            embedding_multiplier=3.0,
            attention_multiplier=0.4,
            residual_multiplier=0.6,
            logits_scaling=2.0,
        ),
        "opt": lambda: transformers.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            word_embed_proj_dim=WIDTH,
            ffn_dim=24,
            num_hidden_layers=DEPTH,
            num_attention_heads=4,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "biogpt": lambda: transformers.BioGptConfig(**without_groups, scale_embedding=True),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **usual,
            head_dim=8,
            num_local_experts=3,
            num_experts_per_tok=2,
            **mixed,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        ),
    }
    return made[family]()


FAMILIES = (
    *("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gemma3"),
    *("mistral", "gpt2", "gpt_neox", "phi", "olmo2", "mixtral"),
)

NAMED = ("phi3", "olmo", "smollm3")
"""More families that the documentation names."""
UNNAMED = ("starcoder2", "stablelm", "cohere", "granite", "opt", "biogpt", "gpt_oss")
"""Families that nothing outside the tests mentions."""


def network(family: str, seed: int = 1000) -> nn.Module:
    """A random model whose attention is not nearly uniform and whose edits matter."""
    torch.manual_seed(seed)
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}  # the only one that caps
    model = transformers.AutoModelForCausalLM.from_config(configuration(family), **attention).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3) if p.ndim > 1 else p.add_(0.1 * torch.randn(p.shape))
    return model


def prompts(seed: int = 1000) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


PROMPTS = prompts()


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    chosen = [PROMPTS[int(r)] for r in rows[:, 0]]
    longest = max(map(len, chosen)) + 1  # a column of padding for all, too
    ids = [[0] * (longest - len(p)) + p for p in chosen]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in chosen]
    return torch.tensor(ids), torch.tensor(mask)


def where(row: Tensor) -> dict[str, int]:
    """Named tokens, from the end: `early` is elsewhere in every prompt, `third` never is."""
    n = len(PROMPTS[int(row)])
    return {"early": -(n - int(row) % 3), "third": -3}


POSITIONS = {
    "early": lambda rows: torch.tensor([where(r)["early"] for r in rows]),
    "third": lambda rows: -3,
}

BASE, SOURCE = torch.tensor([[0], [1], [2], [3], [4], [0]]), torch.tensor([[5], [0], [1], [2], [3], [4]])


def recorded(model: nn.Module, **options: object) -> Recording:
    subject = DecoderSubject(model, encode, ANSWERS, **options)
    return record_pairs(subject, (BASE, SOURCE))[0]


# -- the oracle: plain torch hooks on the whole model, one unpadded prompt at a time -------------------------------

Change = Callable[[Tensor], Tensor]


def block_list(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == DEPTH)


def inner(block: nn.Module, kind: str) -> nn.Module:
    names = {
        "attention_output": ("self_attn", "attn", "attention"),
        "mlp_output": ("mlp", "block_sparse_moe", "fc2"),
    }[kind]
    return next(getattr(block, name) for name in names if hasattr(block, name))


def projection(block: nn.Module) -> nn.Module:
    attention = inner(block, "attention_output")
    return next(
        getattr(attention, name) for name in ("o_proj", "c_proj", "dense", "out_proj") if hasattr(attention, name)
    )


def _change(h: Tensor, edit: Change, token: int | None, columns: slice) -> Tensor:
    rows = slice(None) if token is None else slice(token, token + 1 or None)
    old = h[0, rows, columns]
    new = edit(old.flatten().float()).to(h.dtype).view_as(old)
    whole = torch.zeros(h.shape, dtype=torch.bool)
    whole[0, rows, columns] = True
    return torch.where(whole, torch.nn.functional.pad(new, (columns.start, h.shape[2] - columns.stop)), h)


@contextlib.contextmanager
def hooked(model: nn.Module, edits: dict[str, Change], tokens: dict[str, int]) -> Iterator[None]:
    """While open, the vector at each named place becomes edits[place](vector); `tokens` says where positions are.

    Places `@all` are all tokens' vectors, one after the other.
    """
    handles = []
    for name, edit in edits.items():
        path, _, position = name.partition("@")
        kind, layer, *head = path.split(".")
        token = None if position == "all" else tokens[position] if position else -1
        block = block_list(model)[int(layer)]
        size = WIDTH if kind != "head_output" else head_width(model)
        columns = slice(int(head[0]) * size, (int(head[0]) + 1) * size) if head else slice(0, size)

        def before(_: nn.Module, args: tuple, e: Change = edit, t: int | None = token, c: slice = columns) -> tuple:
            return (_change(args[0], e, t, c), *args[1:])

        def after(
            _: nn.Module, __: object, out: object, e: Change = edit, t: int | None = token, c: slice = columns
        ) -> object:
            if isinstance(out, tuple):
                return (_change(out[0], e, t, c), *out[1:])
            return _change(out, e, t, c)

        if kind == "head_output":
            handles.append(projection(block).register_forward_pre_hook(before))
        else:
            module = block if kind == "block_output" else inner(block, kind)
            handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def head_width(model: nn.Module) -> int:
    return int(getattr(model.config, "head_dim", None) or WIDTH // 4)


def plain(model: nn.Module, row: Tensor, edits: dict[str, Change], tokens: dict[str, int] | None = None) -> Tensor:
    """Logits over the vocabulary after one prompt, by itself."""
    with hooked(model, edits, tokens or {}):
        return model(input_ids=torch.tensor([PROMPTS[int(row)]])).logits[0, -1].float()


def as_answers(logits: Tensor, rest: bool = False) -> Tensor:
    columns = [logits[..., list(group)].amax(dim=-1) for group in ANSWERS]
    if rest:
        others = [t for t in range(VOCABULARY) if t not in {t for group in ANSWERS for t in group}]
        columns.append(logits[..., others].amax(dim=-1))
    return torch.stack(columns, dim=-1)


def variants(recording: Recording, place: Place) -> Tensor:
    """Unedited, swapped whole, and beyond it with a strength: [3, pairs, d]."""
    base, source = recording.base_at(place), recording.source_at(place)
    return torch.stack([base, source, base + 2.5 * (source - base)])


def whole_forwards(model: nn.Module, place: Place, activation: Tensor) -> Tensor:
    """The vocabulary's logits of every variant and pair, each by a forward pass of its own."""
    one = [
        torch.stack(
            [plain(model, row, {place.name: lambda _, a=a: a}, where(row)) for row, a in zip(BASE, v, strict=True)]
        )
        for v in activation
    ]
    return torch.stack(one)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
