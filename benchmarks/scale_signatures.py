"""Approximate signatures at scale: every neuron of a language model as a site.

python benchmarks/scale_signatures.py                  # SmolLM2 with the planted adapter, 64 pairs, seeds 0 to 2
python benchmarks/scale_signatures.py --pairs 8 --layers 24 26 28      # a quick look
python benchmarks/scale_signatures.py --model planted-1000             # an embedded net, seconds

Five parts, each written to docs/results/scale_signatures.json as soon as it is measured; run again with the same
options, what is there is not measured again (--fresh measures all).

- agreement: all neurons of some blocks exactly, linearised, and linearised with exact verification within a budget;
- seeds: the same agreement on the pairs of further seeds;
- everywhere: all neurons of all blocks, without the exact comparison;
- flatness: linearised signatures of 100 to 10,000 sites at the same places;
- slope: exact signatures of growing menus, in resumed tokens.

Work is counted in block-tokens, one token through one block; a backward pass counts as two (the weights are frozen, so
its products are as many as the forward pass's: counting it as one, given beside it, is nearer to the truth).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from heq_speed import ROOT, THREADS, commit, machine, say
from measuring import Peak, resident, timed
from pages import markdown
from plot_ot.edits import Frame
from plot_ot.models.named import shipped_adapters
from plot_ot.models.tiny import TINY
from plot_ot.signatures import Readout, Signatures, SignatureSpec, measure_signatures
from plot_ot.signatures.jacobian import jacobian_signatures
from plot_ot.sites import Site, SiteFamily, neurons
from plot_ot.stages.prefilter import Prefilter, rank_correlation
from plot_ot.subjects import BankRecording, Place, Store, record
from plot_ot.tasks import MultipleChoice
from plot_ot.tasks.language import PHI, STAGE_B
from plot_ot.tasks.text_data import Sizes
from plot_ot.transport import Transport, couple

TOP = 20
SITES = (100, 300, 1000, 3000, 10_000)
SLOPE = (8, 16, 32, 64, 128)
REPEATS = 3
ROW_TRANSPORTS = {"balanced": STAGE_B, "one-sided": Transport("uot-one-sided", (0.1,), (1.0,))}


@dataclass
class Spent:
    """Block-tokens since the last `clear`; outputs are what a linearised pass goes back from."""

    outputs: int
    forward: int = 0
    backward: int = 0
    responses: int = 0

    def clear(self) -> None:
        self.forward = self.backward = self.responses = 0

    def watch(self, subject: Any) -> None:
        """Count every resumed batch of this subject from now on."""
        resume, blocks = subject.resume, len(subject.decoder.blocks)

        def counted(store: Store, rows: Tensor, start: Place, activation: Tensor, later: Mapping[str, Any]) -> Tensor:
            tokens = activation.shape[0] * activation.shape[1]
            passed = tokens * (blocks - 1 - start.layer)
            self.forward += passed
            if activation.requires_grad:
                self.backward += self.outputs * passed
            else:
                self.responses += tokens
            return resume(store, rows, start, activation, later)

        subject.resume = counted

    @property
    def counts(self) -> dict[str, int]:
        """With a backward pass as two, and as one."""
        return {
            "block_tokens": self.forward + 2 * self.backward,
            "block_tokens_backward_as_one": self.forward + self.backward,
            "responses": self.responses,
        }


@dataclass(frozen=True)
class Bench:
    """One model and seed, recorded."""

    fit: BankRecording
    readout: Readout
    spec: SignatureSpec
    spent: Spent

    @classmethod
    def of(cls, args: argparse.Namespace, seed: int) -> Bench:
        adapter = None if args.model in TINY else args.adapter
        task = MultipleChoice(args.model, adapter, phi=args.phi, sizes=Sizes(args.pairs, 4, 4, 4))
        prepared = task.prepare(seed, Path())
        [fit] = record(prepared.subject, prepared.splits.fit)
        spent = Spent(fit.base_outputs.shape[-1])
        spent.watch(prepared.subject)
        return cls(fit, prepared.readout, PHI[args.phi][1], spent)

    def measured(self, work: Callable[[], Signatures]) -> tuple[Signatures, dict[str, Any]]:
        """The signatures, and what they took."""
        self.spent.clear()
        with Peak(resident()) as peak:
            found, seconds = timed(work)
        return found, {**self.spent.counts, "cpu_seconds": seconds.cpu, "peak_mb": peak.bytes / 2**20}

    def places(self, layers: Sequence[int]) -> list[Place]:
        return [p for p in self.fit.subject.places if p.layer in layers]

    def exact(self, family: SiteFamily) -> tuple[Signatures, dict[str, Any]]:
        return self.measured(lambda: measure_signatures(self.fit, family, self.readout, self.spec))

    def linear(self, family: SiteFamily) -> tuple[Signatures, dict[str, Any]]:
        return self.measured(lambda: jacobian_signatures(self.fit, family, self.readout, self.spec))

    def filtered(self, family: SiteFamily, budget: float, transport: Transport) -> tuple[Signatures, dict[str, Any]]:
        variables = self.fit.bank.variables
        prefilter = Prefilter(budget)
        return self.measured(lambda: prefilter(self.fit, family, self.readout, self.spec, variables, transport))


# -- the parts ----------------------------------------------------------------------------------------------------


def agreement(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """How many of the exact top sites linearising and verifying finds, and at which cost."""
    family = neurons(bench.fit, bench.places(args.layers))
    exact, cost_exact = bench.exact(family)
    linear, cost_linear = bench.linear(family)
    found, cost_found = bench.filtered(family, args.budget, STAGE_B)
    assert found.exact is not None
    verified = set(found.exact.nonzero().squeeze(1).tolist())
    rows = []
    scopes = {"all": list(range(len(family))), **{p.name: family.at(p) for p in family.places}}
    for i, v in enumerate(exact.variables):
        for scope, sites in scopes.items():
            best = _top(exact.cost[i], sites)
            rows.append(
                {
                    "variable": v,
                    "scope": scope,
                    "sites": len(sites),
                    "spearman": rank_correlation(exact.cost[i, sites], linear.cost[i, sites]),
                    "top_linear": len(best & _top(linear.cost[i], sites)) / len(best),
                    "top_verified": len(best & verified) / len(best),
                    "top_found": len(best & _top(found.cost[i], sites)) / len(best),
                }
            )
    masses = []
    for name, transport in ROW_TRANSPORTS.items():
        plans = [couple(s, transport)[0] for s in (exact, linear, found)]
        for v in exact.variables:
            best, by_linear, by_found = (set(c.ranking(v)[:TOP]) for c in plans)
            masses.append(
                {
                    "transport": name,
                    "variable": v,
                    "top_linear": len(best & by_linear) / TOP,
                    "top_verified": len(best & verified) / TOP,
                    "top_found": len(best & by_found) / TOP,
                }
            )
    return {
        "layers": args.layers,
        "sites": len(family),
        "pairs": len(bench.fit),
        "budget": args.budget,
        "by_cost": rows,
        "by_mass": masses,
        "said": asdict(found.agreement) if found.agreement else None,
        "exact": cost_exact,
        "linear": cost_linear,
        "found": cost_found,
        "share": cost_found["block_tokens"] / cost_exact["block_tokens"],
        "share_backward_as_one": cost_found["block_tokens_backward_as_one"] / cost_exact["block_tokens"],
    }


def further_seeds(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The agreement over all sites on the pairs of each seed after the first."""
    found = []
    for seed in args.seeds[1:]:
        r = agreement(Bench.of(args, seed), args)
        found.append({"seed": seed, "share": r["share"], "rows": [x for x in r["by_cost"] if x["scope"] == "all"]})
    return found


def _top(cost: Tensor, sites: Sequence[int]) -> set[int]:
    return {sites[k] for k in cost[list(sites)].argsort(stable=True)[:TOP].tolist()}


def everywhere(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Every neuron of every block."""
    subject = bench.fit.subject
    family = neurons(bench.fit, subject.places)
    _, cost_linear = bench.linear(family)
    found, cost_found = bench.filtered(family, args.everywhere_budget, STAGE_B)
    depth = [p.layer for p in subject.places]
    last = max(depth)
    whole = sum((last - layer) * (p.width + 1) for layer, p in zip(depth, subject.places, strict=True))
    return {
        "sites": len(family),
        "pairs": len(bench.fit),
        "budget": args.everywhere_budget,
        "linear": cost_linear,
        "found": cost_found,
        "exact_block_tokens": whole * len(bench.fit),
        "said": asdict(found.agreement) if found.agreement else None,
        "top": {
            v: [family.sites[j].name for j in found.cost[i].argsort()[:TOP].tolist()]
            for i, v in enumerate(found.variables)
        },
    }


def flatness(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Linearised signatures of ever more spans of the same places' neurons, in turn, so that all see the same load."""
    places = bench.places(args.layers)
    times: dict[int, list[float]] = {n: [] for n in SITES}
    menus = {n: spans(places, n) for n in SITES}
    for _ in range(REPEATS):
        for n, menu in menus.items():
            times[n].append(bench.linear(menu)[1]["cpu_seconds"])
    seconds = {n: median(t) for n, t in times.items()}
    return {"layers": args.layers, "pairs": len(bench.fit), "cpu_seconds": seconds, "all": times}


def spans(places: Sequence[Place], count: int) -> SiteFamily:
    """So many spans of up to 8 neurons, dealt over the places."""
    generator = torch.Generator().manual_seed(count)
    sites = []
    for k in range(count):
        place = places[k % len(places)]
        length = 1 + int(torch.randint(min(8, place.width // 2), (1,), generator=generator))
        start = int(torch.randint(place.width - length + 1, (1,), generator=generator))
        sites.append(Site(f"{place.name}#{k}", place, tuple(range(start, start + length))))
    return SiteFamily(tuple(sites), {p.name: Frame.identity(p.width) for p in places})


def slope(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Exact signatures of ever more neurons of one block: tokens resumed per pair, and CPU seconds."""
    [place] = bench.places(args.layers)[-1:]
    menu = neurons(bench.fit, [place])
    rows = []
    for n in (n for n in SLOPE if n <= len(menu)):
        some = SiteFamily(menu.sites[:n], menu.frames)
        cost = min((bench.exact(some)[1] for _ in range(REPEATS)), key=lambda c: c["cpu_seconds"])
        tokens = cost["responses"] / len(bench.fit)
        rows.append({"sites": n, "tokens_per_pair": tokens, "cpu_seconds": cost["cpu_seconds"]})
    return {
        "place": place.name,
        "pairs": len(bench.fit),
        "rows": rows,
        "tokens_per_site_and_pair": _slope([(r["sites"], r["tokens_per_pair"]) for r in rows]),
        "cpu_ms_per_site_and_pair": 1e3 * _slope([(r["sites"], r["cpu_seconds"]) for r in rows]) / len(bench.fit),
    }


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares."""
    x, y = torch.tensor(points, dtype=torch.float64).T
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


PARTS: dict[str, Callable[[Bench, argparse.Namespace], Any]] = {
    "agreement": agreement,
    "seeds": further_seeds,
    "everywhere": everywhere,
    "flatness": flatness,
    "slope": slope,
}


# -- the page -----------------------------------------------------------------------------------------------------


def page(results: Mapping[str, Any]) -> str:
    """What was measured so far."""
    o = results["options"]
    lines = [
        "# Approximate signatures at scale",
        "",
        "Exact signatures cost one response per site and pair. [Linearised ones](../approximate.md) take all sites "
        "from a few backward passes; the best of them can then be verified exactly. How many of the best sites do "
        "they find, and at what cost?",
        "",
        f"Made by `{results['command']}` (commit {results['commit']}): MCQA on {o['model']}"
        f"{' with adapter ' + o['adapter'] if o['model'] not in TINY else ''}, seed {o['seeds'][0]}, φ `{o['phi']}`, "
        f"{o['pairs']} fit pairs, one thread. A block-token is one token through one block; a backward pass counts as "
        "two (in brackets: as one, since frozen weights need no gradient of their own).",
        "",
    ]
    parts = results["parts"]
    for name, write in {
        "agreement": _agreement,
        "seeds": _seeds,
        "everywhere": _everywhere,
        "flatness": _flatness,
        "slope": _slopes,
    }.items():
        if name in parts:
            lines += [*write(parts[name]), ""]
    return "\n".join(lines)


def _agreement(r: Mapping[str, Any]) -> list[str]:
    rows = [
        [x["variable"], x["scope"], str(x["sites"]), f"{x['spearman']:.3f}"]
        + [f"{x[k]:.2f}" for k in ("top_linear", "top_verified", "top_found")]
        for x in r["by_cost"]
    ]
    masses = [
        [x["transport"], x["variable"], *(f"{x[k]:.2f}" for k in ("top_linear", "top_verified", "top_found"))]
        for x in r["by_mass"]
    ]
    shares = ["linear alone", "verified", "found"]
    return [
        f"## All {r['sites']} neurons of blocks {', '.join(map(str, r['layers']))}",
        "",
        f"Jacobian and exact verification of {r['budget']:.0%} of the sites took {r['share']:.1%} "
        f"({r['share_backward_as_one']:.1%}) of the exact block-tokens: {r['found']['block_tokens']:,} against "
        f"{r['exact']['block_tokens']:,}; {r['found']['cpu_seconds']:.0f} CPU seconds against "
        f"{r['exact']['cpu_seconds']:.0f}. The Jacobian alone: {r['linear']['block_tokens']:,}. The table "
        f"shows which share of the exact top {TOP} sites is in the top {TOP} by linearised cost (*linear alone*), "
        f"among the sites that were verified (*verified*), and in the top {TOP} after verification (*found*):",
        "",
        *markdown(["variable", "among", "sites", "Spearman", *shares], rows),
        "",
        "The same for the sites of highest mass in the variable's row of the coupling:",
        "",
        *markdown(["transport", "variable", *shares], masses),
    ]


def _seeds(found: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [str(r["seed"]), f"{r['share']:.1%}", x["variable"], f"{x['spearman']:.3f}"]
        + [f"{x[k]:.2f}" for k in ("top_linear", "top_verified", "top_found")]
        for r in found
        for x in r["rows"]
    ]
    shares = ["linear alone", "verified", "found"]
    return [
        f"The same shares of the exact top {TOP} by cost among all sites, on the pairs of other seeds:",
        "",
        *markdown(["seed", "share of the exact cost", "variable", "Spearman", *shares], rows),
    ]


def _everywhere(r: Mapping[str, Any]) -> list[str]:
    said = r["said"]
    agreed = "; ".join(
        f"{v}: Spearman {said['spearman'][v]:.3f}, top-{said['top']} overlap {said['overlap'][v]:.2f}"
        + (f", {said['missed'][v]:.3f} of the sites verified at random belong to the top" if said["missed"] else "")
        for v in said["spearman"]
    )
    return [
        f"## Every neuron of every block: {r['sites']:,} sites",
        "",
        f"Jacobian: {r['linear']['block_tokens']:,} block-tokens, {r['linear']['cpu_seconds']:.0f} CPU seconds, "
        f"{r['linear']['peak_mb']:.0f} MB more than before; with exact verification of {r['budget']:.0%} of "
        f"the sites {r['found']['block_tokens']:,} and {r['found']['cpu_seconds']:.0f} s. Exact signatures would take "
        f"{r['exact_block_tokens']:,} block-tokens. On the verified sites: {agreed}.",
    ]


def _flatness(r: Mapping[str, Any]) -> list[str]:
    seconds = {int(n): t for n, t in r["cpu_seconds"].items()}
    least = min(seconds)
    rows = [[f"{n:,}", f"{t:.2f}", f"{t / seconds[least]:.2f}"] for n, t in seconds.items()]
    return [
        "## Linearised signatures against the number of sites",
        "",
        f"Spans of up to 8 neurons at blocks {', '.join(map(str, r['layers']))}, medians of {REPEATS} in turn.",
        "",
        *markdown(["sites", "CPU seconds", "over the smallest menu"], rows),
    ]


def _slopes(r: Mapping[str, Any]) -> list[str]:
    rows = [[str(x["sites"]), f"{x['tokens_per_pair']:.1f}", f"{x['cpu_seconds']:.2f}"] for x in r["rows"]]
    return [
        "## Exact signatures against the number of sites",
        "",
        f"Neurons of {r['place']}: {r['tokens_per_site_and_pair']:.3f} resumed tokens and "
        f"{r['cpu_ms_per_site_and_pair']:.2f} CPU ms per site and pair (least squares).",
        "",
        *markdown(["sites", "resumed tokens per pair", "CPU seconds"], rows),
    ]


# -- running ------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    planted = next(a for a in shipped_adapters("smollm2") if a.startswith("planted"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapter", default=planted)
    parser.add_argument("--phi", default="stack", choices=list(PHI))
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--layers", type=int, nargs="+", help="blocks to compare exactly (default: three of them)")
    parser.add_argument("--budget", type=float, default=0.1, help="share of the exact responses for verification")
    parser.add_argument("--everywhere-budget", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first one for all parts")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    args = parser.parse_args(argv)
    args.layers = args.layers or ([1, 2, 3] if args.model in TINY else [14, 20, 26])
    return args


def _repeatable(argv: Sequence[str]) -> list[str]:
    """The options that say what is measured."""
    hidden = {k for i, a in enumerate(argv) if a == "--out" for k in (i, i + 1)}
    return [a for i, a in enumerate(argv) if i not in hidden and a != "--fresh"]


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    torch.set_num_threads(THREADS)
    path = args.out / "scale_signatures.json"
    options = {k: v for k, v in vars(args).items() if k not in ("out", "parts", "fresh")}
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if args.fresh or results.get("options") != options:
        results = {"options": options, "parts": {}}
    results |= {
        "command": shlex.join(["python", "benchmarks/scale_signatures.py", *_repeatable(argv)]),
        "commit": commit(),
        "machine": machine(),
    }
    wanted = [p for p in args.parts if p not in results["parts"]]
    if wanted:
        bench = Bench.of(args, args.seeds[0])
        say(f"{len(bench.fit)} pairs recorded")
    for part in wanted:
        say(part)
        results["parts"][part] = PARTS[part](bench, args)
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "scale_signatures.md").write_text(page(json.loads(path.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
