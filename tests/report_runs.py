"""Run directories for the tests of the report: small, made up, and with everything a study of a text task records."""

from pathlib import Path

import torch

from plot_ot.edits import Frame
from plot_ot.files.run_directory import RunDirectory
from plot_ot.files.run_layout import handle_path
from plot_ot.files.writing import write_json
from plot_ot.handles import Edit, Handle
from plot_ot.subjects import Place

LAYERS, WIDTH = 6, 32
POSITIONS = {2: "query", -1: "last"}
PLACES = [Place(f"block_output.{n}@{p}", WIDTH, n, p) for p in POSITIONS for n in range(LAYERS)]
VARIABLES = ("AnswerPointer", "AnswerToken")
NASTY = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">\'" & <b>bold</b>'
SPOKEN = {"rtl": "שאלה: צבע השמיים هو أزرق؟", "emoji": "A banana 🍌👩‍👩‍👧 is yellow.", "nasty": NASTY}
FAMILIES = ("answerPosition", "randomLetter")
BASIS = torch.linalg.qr(torch.arange(WIDTH * 8.0).reshape(WIDTH, 8).sin())[0]


KINDS = {"plot-native": "transport", "plot-pca": "transport", "das": "das", "full-vector": "baseline"}


def key(seed: int, method: str) -> dict:
    return {"task": "mcqa", "subject": "tiny-lm", "seed": seed, "method": method}


def score(seed: int, method: str, variable: str, bank: str) -> float:
    """A different number for every record, so that a mix-up shows."""
    order = ("no-edit", "copy-source", "full-vector", "plot-native", "plot-pca", "das")
    return round(
        0.31
        + 0.1 * order.index(method)
        + 0.013 * seed
        + 0.007 * VARIABLES.index(variable)
        + 0.029 * (bank == "invariance"),
        6,
    )


def records(seed: int, method: str) -> list[dict]:
    found = []
    for v in VARIABLES:
        for bank in ("sensitivity", "invariance"):
            a = score(seed, method, v, bank)
            families = {
                f: {"value": a - 0.01 * k, "pairs": 50 + k, "low": a - 0.05, "high": a + 0.03}
                for k, f in enumerate(FAMILIES)
            }
            one = {
                **key(seed, method),
                "variable": v,
                "bank": bank,
                "accuracy": a,
                "pairs": 100,
                "interval": [a - 0.04, a + 0.02],
                "families": families,
            }
            found.append(one | ({"full_patch": 0.4} if method not in ("no-edit", "copy-source") else {}))
    return found


def handle(method: str, variable: str) -> Handle:
    place = PLACES[LAYERS + 3 + VARIABLES.index(variable)]
    if method == "plot-native":
        gains = torch.zeros(WIDTH)
        gains[8:12] = torch.tensor([0.5, 1.0, 1.5, 2.0])
        return Handle(variable, (Edit(place, Frame.identity(WIDTH), gains),), "a network")
    kind = {"plot-pca": "pca", "das": "das"}.get(method, "identity")
    frame = Frame.identity(WIDTH) if kind == "identity" else Frame.orthonormal(BASIS, kind)
    gains = torch.ones(frame.rank) if kind != "pca" else torch.tensor([1.2, 1.2, 0.6, 0.6, 0, 0, 0, 0])
    return Handle(variable, (Edit(place, frame, gains),), "a network")


def chosen(method: str, variable: str) -> dict:
    place = handle(method, variable).edits[0].place.name
    scores = {p.name: 0.3 + 0.05 * p.layer for p in PLACES[LAYERS:]}
    if method == "das":
        return {"support": place, "k": 8, "calibration_score": 0.9, "by_support": scores}
    if method == "full-vector":
        return {"support": place, "calibration_score": 0.5, "by_support": scores}
    sites = [f"{place}[8:12]"] if method == "plot-native" else [f"{place}.pc[0:2]", f"{place}.pc[0:4]"]
    return {
        "K": len(sites),
        "strength": 1.2,
        "epsilon": 1.0,
        "beta": None,
        "transport": "eot",
        "support": place,
        "sites": sites,
        "by_support": {place: 0.9},
        "calibration_score": 0.92 if method == "plot-pca" else 0.88,
    }


def couplings(seed: int, method: str) -> list[dict]:
    """Stage A over tokens and layers, Stage B inside the chosen layer."""
    coarse = {
        "stage": 0,
        "support": "all",
        "variables": list(VARIABLES),
        "sites": [p.name for p in PLACES],
        "kind": "uot",
        "epsilon": 1.0,
        "beta": 0.3,
    }
    rows = []
    for v in VARIABLES:
        place = handle(method, v).edits[0].place.name
        mass = [0.5 / (1 + abs(k - coarse["sites"].index(place))) ** 2 for k in range(len(PLACES))]
        rows.append([m / sum(mass) / 2 for m in mass])
    coarse |= {"plan": rows, "flags": [], "raw_norms": [1.0 + 0.1 * k for k in range(len(PLACES))], "converged": True}
    found = [coarse]
    for k, v in enumerate(VARIABLES):
        place = handle(method, v).edits[0].place.name
        sites = (
            [f"{place}[{n}:{n + 4}]" for n in range(0, WIDTH, 4)]
            if method == "plot-native"
            else [f"{place}.pc[0:{n}]" for n in (1, 2, 4, 8)]
        )
        plan = [[0.5 / len(sites)] * len(sites) for _ in VARIABLES]
        plan[k] = [
            0.5 * (2 + (s in chosen(method, v)["sites"])) / (2 * len(sites) + len(chosen(method, v)["sites"]))
            for s in sites
        ]
        fine = {
            "stage": 1,
            "support": place,
            "variables": list(VARIABLES),
            "sites": sites,
            "kind": "eot",
            "epsilon": 1.0,
            "beta": None,
            "plan": plan,
        }
        found.append(
            fine
            | {
                "flags": [{"kind": "saturated", "detail": "2, 2 sites tie for the top; costs break the tie"}],
                "raw_norms": [2.0] * len(sites),
            }
        )
    return [{**key(seed, method), "scale": "none", **c} for c in found]


def surface(seed: int, method: str, variable: str) -> dict:
    sizes, strengths = [1, 2, 4], [0.5, 1.0, 1.2, 2.0, 4.0]
    scores = [[round(0.9 - 0.02 * abs(i - 1) - 0.03 * abs(j - 2), 4) for j in range(5)] for i in range(3)]
    c = chosen(method, variable)
    return {
        **key(seed, method),
        "variable": variable,
        "support": c["support"],
        "sizes": sizes,
        "strengths": strengths,
        "scores": scores,
        "K": c["K"],
        "strength": c["strength"],
    }


def examples(seed: int, method: str, spoken: dict[str, str]) -> list[dict]:
    found = []
    for k in range(24):
        said = list(spoken.values())[k % len(spoken)]
        base = f"Question: {said} What color?\nA. red\nB. blue\nAnswer:"
        position = {"label": "last token", "base": [len(base) - 1, len(base)], "source": [0, 8]}
        found.append(
            {
                **key(seed, method),
                "variable": VARIABLES[k % 2],
                "family": FAMILIES[k % 3 == 0],
                "bank": "sensitivity",
                "base_prompt": base,
                "source_prompt": "Question: plain?\nAnswer:",
                "before": " A",
                "after": " B" if k % 4 else " A",
                "expected": " B",
                "source_answer": " C" if k % 3 == 2 else " B",
                "discriminating": k % 3 != 0,
                "right": bool(k % 4),
                "position": position,
            }
        )
    return found


def verdict(seed: int, method: str, variable: str) -> dict:
    a = score(seed, method, variable, "sensitivity")
    status = "placed and compact" if method != "plot-native" else "not localized"
    evidence = {
        "handle": a,
        "handle_low": a - 0.04,
        "handle_high": a + 0.02,
        "invariance": 0.95,
        "invariance_low": 0.85 if method == "plot-native" else 0.93,
        "copy_source": 0.1,
        "random_mean": 0.3,
        "random_best": 0.35,
        "full_patch": 0.4,
        "size": 4,
        "width": WIDTH,
        "discriminating": 90,
    }
    return {
        **key(seed, method),
        "variable": variable,
        "status": status,
        "sentence": f"{variable}: {status}; handle {a:.3f}.",
        "evidence": evidence,
    }


def text_run(path: Path, seeds: tuple[int, ...] = (1, 2), spoken: dict[str, str] = SPOKEN) -> RunDirectory:
    """A finished run of a text task."""
    methods = ["plot-native", "plot-pca", "das", "full-vector"]
    config = {"task": "mcqa", "model": "tiny-lm", "methods": methods, "seeds": list(seeds), "size": 100}
    run = RunDirectory.open(path, config, {"plot_ot": "0.1.0"})
    results: dict = {"format": "plot-ot run 1", "task": "mcqa"} | {
        n: []
        for n in (
            "records",
            "runtimes",
            "selection",
            "verdicts",
            "profile",
            "cross",
            "sweeps",
            "failures",
            "notes",
            "surfaces",
            "examples",
        )
    }
    all_couplings: list[dict] = []
    for seed in seeds:
        places = [{"name": p.name, "width": p.width, "layer": p.layer, "position": p.position} for p in PLACES]
        results["notes"].append(
            {
                **key(seed, "controls"),
                "places": places,
                "calibration": {"pairs": 60, "sensitive": dict.fromkeys(VARIABLES, 30)},
            }
        )
        for method in ("no-edit", "copy-source"):
            results["records"] += records(seed, method)
        for k, method in enumerate(methods):
            results["records"] += records(seed, method)
            parts = {
                "recording": 0.5,
                "signatures": 0.25,
                "calibration": 1.0 + k,
                "das": 40.0 * (method == "das"),
                "test": 0.125,
            }
            results["runtimes"].append(
                {**key(seed, method), "kind": KINDS[method], "seconds": sum(parts.values()) + seed, "parts": parts}
            )
            for v in VARIABLES:
                h = handle(method, v)
                h.save(handle_path(path, seed, method, v))
                results["selection"].append(
                    {
                        **key(seed, method),
                        "variable": v,
                        "size": h.size,
                        "places": h.places,
                        "chosen": chosen(method, v),
                        "evidence": {"decoding": 0.95, "chance": 0.25, "stretch": 8.0 if method == "das" else 1.1},
                        "capacity": {"sizes": [1, 2, 4, 8], "accuracy": [0.4, 0.6, 0.9, 0.9], "shuffled": [0.1] * 4},
                    }
                )
                results["profile"] += [
                    {
                        **key(seed, method),
                        "variable": v,
                        "place": place.name,
                        "token": place.token,
                        "layer": place.layer,
                        "score": score,
                        "low": score - 0.05,
                        "high": score + 0.05,
                    }
                    for place, score in zip(PLACES, (0.3, 0.88, 0.9, 0.5, 0.4, 0.3), strict=False)
                ]
                results["cross"] += [
                    {**key(seed, method), "handle": v, "labels": w, "accuracy": 0.9 if v == w else 0.25 + 0.01 * k}
                    for w in VARIABLES
                ]
            if method != "full-vector":
                results["verdicts"] += [verdict(seed, method, v) for v in VARIABLES]
                results["examples"] += examples(seed, method, spoken)
            if method.startswith("plot"):
                all_couplings += couplings(seed, method)
                results["surfaces"] += [surface(seed, method, v) for v in VARIABLES]
        for value in (0.01, 0.1, 1.0):
            for parameter in ("epsilon", "beta"):
                results["sweeps"].append(
                    {
                        **key(seed, "plot-pca"),
                        "parameter": parameter,
                        "value": value,
                        "accuracy": 0.8 + 0.01 * seed,
                        "calibration": 0.9,
                        "flags": [{"kind": "saturated"}] if value < 0.1 else [],
                    }
                )
    write_json(path / "results.json", results)
    write_json(path / "couplings.json", all_couplings)
    return run
