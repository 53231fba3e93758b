// Every chart: from the page's numbers to Plotly traces, and to the rows of its table.

const KINDS = { transport: "blue", das: "orange", baseline: "grey", control: "grey" };
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
const PARTS = { recording: "grey", signatures: "sky", transport: "green", closed_form: "purple", newton: "vermillion", calibration: "blue", das: "orange", test: "muted" };
const kindOf = Object.fromEntries((data.methods ?? []).map((m) => [m.name, m.kind]));
const tested = (data.methods ?? []).filter((m) => m.accuracy.mean !== null);
const own = tested.filter((m) => m.kind !== "control");
const controls = tested.filter((m) => m.kind === "control");
const narrow = () => root.clientWidth < 640;
const tone = (m) => colour(m.name === picked.method ? "vermillion" : KINDS[m.kind]);

// The range of an axis of accuracies: never so short that noise looks like a cliff, and not far beyond 1.
function accuracyRange(values, least = 0.2) {
  const known = values.filter((x) => typeof x === "number");
  const high = Math.min(1.02, Math.max(...known) + 0.02), low = Math.min(Math.min(...known) - 0.02, high - least);
  return [Math.max(-0.02, low), high];
}

function rowAxis(names) {
  return { tickvals: names.map((_, k) => k), ticktext: names.map((n) => safe(n)), autorange: "reversed", showgrid: false, zeroline: false, ticklabelstandoff: 6 };
}

// -- accuracy and cost ------------------------------------------------------------------------------------------

charts.accuracy = () => {
  if (!own.length) return "No method has a test accuracy yet.";
  const dots = { x: [], y: [], text: [] };
  own.forEach((m, k) => Object.entries(m.accuracy.seeds).forEach(([seed, x]) => {
    dots.x.push(x); dots.y.push(k); dots.text.push(`${safe(m.name)}, seed ${seed}: ${fixed(x)}`);
  }));
  const traces = [
    { type: "scatter", mode: "markers", name: "a seed", x: dots.x, y: dots.y, hovertext: dots.text, hoverinfo: "text", marker: { size: 6, color: colour("grey"), opacity: 0.45 } },
    { type: "scatter", mode: "markers", name: "mean", x: own.map((m) => m.accuracy.mean), y: own.map((_, k) => k), hoverinfo: "text",
      hovertext: own.map((m) => `${safe(m.name)}: ${fixed(m.accuracy.mean)} ± ${fixed(m.accuracy.sd)}`), marker: { size: 12, color: own.map(tone) } },
    { type: "scatter", mode: "markers", name: "whole place swapped", x: own.map((m) => m.full_patch), y: own.map((_, k) => k), hoverinfo: "text",
      hovertext: own.map((m) => `whole places of ${safe(m.name)} swapped: ${fixed(m.full_patch)}`), marker: { size: 10, symbol: "diamond-open", color: colour("ink"), line: { width: 1.5 } } },
  ];
  const dashes = ["dash", "dot"];
  const shapes = controls.map((m, k) => ({ type: "line", x0: m.accuracy.mean, x1: m.accuracy.mean, y0: 0, y1: 1, yref: "paper", line: { color: colour("muted"), width: 1.2, dash: dashes[k] } }));
  controls.forEach((m, k) => traces.push({ type: "scatter", mode: "lines", x: [null], y: [null], name: `${m.name} ${fixed(m.accuracy.mean)}`, line: { color: colour("muted"), width: 1.2, dash: dashes[k] } }));
  const low = Math.min(...tested.map((m) => m.accuracy.mean), ...dots.x);
  return {
    traces,
    layout: { height: 130 + 30 * own.length, shapes, margin: { l: 8, r: 16, t: narrow() ? 76 : 40, b: 44 }, yaxis: { ...rowAxis(own.map((m) => m.name)), range: [own.length - 0.5, -0.5], autorange: false },
      xaxis: { range: [Math.max(-0.02, low - 0.05), 1.015], title: { text: "average exact accuracy" } } },
    rows: [["method", "kind", "mean", "sd over seeds", "whole place swapped", ...data.seeds.map((s) => `seed ${s}`)],
      ...tested.map((m) => [m.name, m.kind, m.accuracy.mean, m.accuracy.sd, m.full_patch, ...data.seeds.map((s) => m.accuracy.seeds[s] ?? null)])],
  };
};

charts.scatter = () => {
  if (!data.scatter.length) return "No variable was tested on both kinds of pairs.";
  const names = distinct(data.scatter.map((r) => r.variable));
  const group = (name, kind, rows, size, colours) => ({
    type: "scatter", mode: "markers", name, x: rows.map((r) => r.sensitivity), y: rows.map((r) => r.invariance), hoverinfo: "text",
    hovertext: rows.map((r) => `${safe(r.method)}, ${safe(r.variable)}, seed ${r.seed}<br>sensitivity ${fixed(r.sensitivity)}<br>invariance ${fixed(r.invariance)}`),
    marker: { size, color: colours, opacity: 0.8, symbol: rows.map((r) => SYMBOLS[names.indexOf(r.variable) % SYMBOLS.length]), line: { width: 1, color: colour("bg") } },
  });
  const traces = Object.entries({ transport: "transport", das: "DAS", baseline: "baselines", control: "controls" }).map(([kind, name]) =>
    group(name, kind, data.scatter.filter((r) => kindOf[r.method] === kind && r.method !== picked.method), kind === "control" ? 11 : 8, kind === "control" ? colour("ink") : colour(KINDS[kind])));
  traces.push(group(picked.method, "picked", data.scatter.filter((r) => r.method === picked.method), 11, colour("vermillion")));
  names.forEach((v, k) => traces.push({ type: "scatter", mode: "markers", x: [null], y: [null], name: safe(v), hoverinfo: "skip", marker: { size: 9, symbol: `${SYMBOLS[k % SYMBOLS.length]}-open`, color: colour("ink") } }));
  return {
    traces: traces.filter((t) => t.x.length),
    layout: { height: 430, xaxis: { title: { text: "sensitivity: pairs that change the variable" }, range: [-0.03, 1.03] }, yaxis: { title: { text: "invariance: pairs that do not" } },
      margin: { l: 8, r: 16, t: narrow() ? 90 : 34, b: 8 } },
    rows: [["seed", "method", "variable", "sensitivity", "invariance"], ...data.scatter.map((r) => [r.seed, r.method, r.variable, r.sensitivity, r.invariance])],
  };
};

// Round numbers for the ticks of a logarithmic axis.
const ROUND = [-2, -1, 0, 1, 2, 3, 4].flatMap((n) => [1, 2, 5].map((k) => Number(`${k}e${n}`)));

// Accuracy against stretch, a point per method; the line joins those that no other method beats in both.
charts.stretch = (figure) => {
  const points = own.map((m) => {
    const mine = data.naturalness.filter((h) => h.method === m.name && h.stretch !== null);
    return { name: m.name, m, stretch: mine.length ? sum(mine.map((h) => h.stretch)) / mine.length : null, accuracy: m.accuracy.mean };
  }).filter((p) => p.stretch !== null && p.stretch > 0);
  if (points.length < 2) return "Stretch is compared where several methods have handles.";
  const byStretch = [...points].sort((a, b) => a.stretch - b.stretch);
  const front = byStretch.filter((p, k) => byStretch.slice(0, k).every((q) => q.accuracy < p.accuracy));
  const logs = points.map((p) => Math.log10(p.stretch)), scores = points.map((p) => p.accuracy);
  const spans = { x: padded(Math.min(...logs, -0.05), Math.max(...logs, 0.05), 0.08), y: accuracyRange(scores) };
  const order = points.map((p, k) => [p, k]).sort(([a], [b]) => Number(b.name === picked.method) - Number(a.name === picked.method) || Number(front.includes(b)) - Number(front.includes(a)));
  const placed = [];
  placeLabels(order.map(([p]) => ({ x: p.stretch, y: p.accuracy, label: p.name })), spans, (figure.clientWidth || 900) - 80, 250).forEach((where, k) => { placed[order[k][1]] = where; });
  return {
    traces: [
      { type: "scatter", mode: "lines", name: "best at this stretch", x: front.map((p) => p.stretch), y: front.map((p) => p.accuracy), line: { color: colour("line"), width: 6, shape: "hv" }, hoverinfo: "skip" },
      { type: "scatter", mode: "markers+text", name: "this run", x: points.map((p) => p.stretch), y: points.map((p) => p.accuracy), text: points.map((_, k) => placed[k][1]), textposition: points.map((_, k) => placed[k][0]), textfont: { size: 12 }, cliponaxis: false, hoverinfo: "text",
        hovertext: points.map((p) => `${safe(p.name)}<br>accuracy ${fixed(p.accuracy)}<br>stretch ${fixed(p.stretch, 2)}`), marker: { size: 11, color: points.map((p) => tone(p.m)) } },
    ],
    layout: { height: 380, margin: { l: 8, r: 24, t: narrow() ? 60 : 34, b: 8 }, shapes: [{ type: "line", x0: 1, x1: 1, y0: 0, y1: 1, yref: "paper", line: { color: colour("muted"), width: 1, dash: "dot" } }],
      xaxis: { type: "log", title: { text: "stretch of edited states, logarithmic (natural = 1)" }, range: spans.x, tickvals: ROUND, ticktext: ROUND.map(String) }, yaxis: { range: spans.y, title: { text: "average exact accuracy" } } },
    rows: [["method", "accuracy", "stretch"], ...points.map((p) => [p.name, p.accuracy, p.stretch])],
  };
};

charts.capacity = () => {
  const mine = at("capacity");
  if (!mine) return `${picked.method} has no accuracy by number of directions in seed ${picked.seed}.`;
  const palette = ["blue", "orange", "green", "purple", "sky", "vermillion"].map(colour);
  const rows = [["variable", "directions", "accuracy", "shuffled values"]], traces = [];
  Object.entries(mine).forEach(([v, c], k) => {
    const main = palette[k % palette.length], line = { type: "scatter", x: c.sizes, hoverinfo: "text" };
    traces.push({ ...line, mode: "lines+markers", name: safe(v), y: c.accuracy, line: { color: main, width: 2.5 }, marker: { color: main, size: c.sizes.map((n) => (n === c.taken ? 14 : 6)) },
      hovertext: c.sizes.map((n, i) => `${safe(v)}, ${n} direction${n === 1 ? "" : "s"}<br>accuracy ${fixed(c.accuracy[i])}${n === c.taken ? "<br>the handle's size" : ""}`) });
    if (c.shuffled) traces.push({ ...line, mode: "lines", name: `${safe(v)}, shuffled values`, y: c.shuffled, line: { color: main, width: 1.5, dash: "dash" }, hovertext: c.sizes.map((n, i) => `${safe(v)} shuffled, ${n} direction${n === 1 ? "" : "s"}<br>accuracy ${fixed(c.shuffled[i])}`) });
    c.sizes.forEach((n, i) => rows.push([v, n, c.accuracy[i], c.shuffled?.[i] ?? null]));
  });
  const sizes = distinct(Object.values(mine).flatMap((c) => c.sizes)).sort((x, y) => x - y);
  const apart = sizes[sizes.length - 1] ** ((narrow() ? 4 : 2) / 40); // numbers nearer than this would run into each other
  const named = sizes.reduce((kept, n) => (kept.length && n < kept[kept.length - 1] * apart ? kept : [...kept, n]), []);
  return {
    traces,
    layout: { height: 360, margin: { l: 8, r: 16, t: narrow() ? 76 : 34, b: 44 }, xaxis: { type: "log", title: { text: "directions, logarithmic" }, exponentformat: "none", tickvals: named, ticktext: named.map(String), tickangle: 0 }, yaxis: { title: { text: "accuracy" }, range: [-0.02, 1.03] } },
    rows,
  };
};

charts.profile = () => {
  const mine = at("profile");
  if (!mine) return `${picked.method} tried no single place on calibration pairs in seed ${picked.seed}.`;
  const rows = [["variable", "place", "token", "layer", "best calibration accuracy", "low", "high", "told from the best"]];
  Object.entries(mine).forEach(([v, { places }]) => places.forEach(([place, token, layer, score, low, high, best, asGood]) => rows.push([v, place, token, layer, score, low, high, best ? "best" : asGood ? "no" : "yes"])));
  const every = Object.values(mine).flatMap(({ places }) => places);
  const tokens = distinct(every.map((t) => t[1])), layers = distinct(every.map((t) => t[2])).sort((x, y) => x - y);
  const grid = distinct(every.map((t) => t[0])).length > Math.max(tokens.length, layers.length); // else one place per token or layer
  const made = grid ? profileGrid(mine, tokens, layers) : profileLine(mine);
  return { ...made, rows };
};

const tried = (v, t) => `${safe(v)} in ${safe(t[0])}<br>best calibration accuracy ${percent(t[3])} [${percent(t[4])}, ${percent(t[5])}]${t[6] ? "<br>the best place" : t[7] ? "<br>these pairs cannot tell it from the best place" : ""}`;

// Layers by tokens, a panel per variable: the number stands in every cell that was tried; the best ones are framed.
function profileGrid(mine, tokens, layers) {
  const lines = Object.entries(mine).map(([v, { places }]) => {
    const cell = (layer, token) => places.filter((t) => t[2] === layer && t[1] === token).sort((a, b) => b[3] - a[3])[0];
    const grid = layers.map((layer) => tokens.map((token) => cell(layer, token)));
    return { title: v, note: `best: ${places.find((t) => t[6])?.[0] ?? "–"}`, xtitle: "token", x: tokens, y: layers.map((n) => `layer ${n}`), absolute: true, marked: grid.map((row) => row.map((t) => Boolean(t && (t[6] || t[7])))),
      z: grid.map((row) => row.map((t) => t?.[3] ?? null)), said: grid.map((row) => row.map((t) => (t ? percent(t[3]) : ""))), text: grid.map((row) => row.map((t) => (t ? tried(v, t) : "not tried"))) };
  });
  return panels(pairsOf(lines), { cell: 24 });
}

// One token: accuracy over layers, with intervals; filled marks are the best place and those that are not told from it.
function profileLine(mine) {
  const palette = ["blue", "orange", "green", "purple", "sky", "vermillion"].map(colour), traces = [];
  const order = []; // places in the network's order, whichever variables tried them
  Object.values(mine).forEach(({ places }) => places.forEach(([place, , layer]) => { if (!order.some(([p]) => p === place)) order.push([place, layer]); }));
  order.sort((a, b) => a[1] - b[1]);
  const names = order.map(([p]) => p), where = Object.fromEntries(names.map((p, k) => [p, k]));
  Object.entries(mine).forEach(([v, { places }], k) => {
    const main = palette[k % palette.length], shift = 0.08 * (k - (Object.keys(mine).length - 1) / 2);
    traces.push({
      type: "scatter", mode: "lines+markers", name: safe(v), x: places.map(([p]) => where[p] + shift), y: places.map((t) => t[3]), hoverinfo: "text", hovertext: places.map((t) => tried(v, t)), line: { color: main, width: 1, dash: "dot" },
      error_y: { type: "data", symmetric: false, array: places.map((t) => t[5] - t[3]), arrayminus: places.map((t) => t[3] - t[4]), color: main, thickness: 1, width: 0 },
      marker: { size: 10, color: places.map((t) => (t[6] || t[7] ? main : colour("bg"))), line: { width: 2, color: main } },
    });
  });
  const step = Math.max(1, Math.ceil(names.length / (narrow() ? 6 : 16)));
  const labelled = names.map((_, k) => k).filter((k) => k % step === 0);
  return {
    traces,
    layout: { height: 320, margin: { l: 8, r: 16, t: narrow() ? 60 : 34, b: 8 }, showlegend: traces.length > 1,
      xaxis: { tickvals: labelled, ticktext: labelled.map((k) => safe(clipped(names[k].replace(/^block_output\.(\d+)(@-1)?$/, "block $1"), 120))), range: [-0.5, names.length - 0.5], showgrid: false }, yaxis: { title: { text: "best calibration accuracy" }, range: [-0.02, 1.04] } },
  };
}

charts.runtime = () => {
  const timed = (data.methods ?? []).filter((m) => m.seconds.mean !== null);
  if (!timed.length) return "No runtime was recorded.";
  const parts = distinct(timed.flatMap((m) => Object.keys(m.parts)));
  const traces = parts.map((p) => ({
    type: "bar", orientation: "h", name: p.replace("_", " "), x: timed.map((m) => m.parts[p] ?? 0), y: timed.map((_, k) => k), hoverinfo: "text",
    hovertext: timed.map((m) => `${safe(m.name)}<br>${safe(p)}: ${fixed(m.parts[p] ?? 0)} s of ${fixed(m.seconds.mean)} s`), marker: { color: colour(PARTS[p] ?? "grey") },
  }));
  const annotations = timed.map((m, k) => ({ x: m.seconds.mean, y: k, text: `${fixed(m.seconds.mean, 2)} s`, showarrow: false, xanchor: "left", xshift: 5, font: { size: 12, color: colour("muted") } }));
  return {
    traces,
    layout: { barmode: "stack", bargap: 0.35, height: 130 + 27 * timed.length, annotations, margin: { l: 8, r: 56, t: narrow() ? 60 : 34, b: 44 },
      yaxis: rowAxis(timed.map((m) => m.name)), xaxis: { title: { text: "seconds per seed" }, rangemode: "tozero" } },
    rows: [["method", ...parts, "total", "sd over seeds"], ...timed.map((m) => [m.name, ...parts.map((p) => m.parts[p] ?? 0), m.seconds.mean, m.seconds.sd])],
  };
};

// Where each label goes, so that none covers another or a mark; a label without room is left to hovering.
function placeLabels(points, spans, width, height) {
  const px = (p) => [((Math.log10(p.x) - spans.x[0]) / (spans.x[1] - spans.x[0])) * width, (1 - (p.y - spans.y[0]) / (spans.y[1] - spans.y[0])) * height];
  const taken = points.map((p) => { const [x, y] = px(p); return [x - 8, y - 8, x + 8, y + 8]; });
  const free = (b) => b[0] >= 0 && b[2] <= width && taken.every((t) => b[2] < t[0] || b[0] > t[2] || b[3] < t[1] || b[1] > t[3]);
  return points.map((p) => {
    const [x, y] = px(p), w = 7.2 * p.label.length, h = 15;
    const options = { "top center": [x - w / 2, y - 9 - h, x + w / 2, y - 9], "bottom center": [x - w / 2, y + 9, x + w / 2, y + 9 + h], "middle right": [x + 9, y - h / 2, x + 9 + w, y + h / 2], "middle left": [x - 9 - w, y - h / 2, x - 9, y + h / 2] };
    const found = p.label ? Object.entries(options).find(([, b]) => free(b)) : null;
    if (found) taken.push(found[1]);
    return found ? [found[0], safe(p.label)] : ["top center", ""];
  });
}

const padded = (low, high, share) => [low - share * (high - low || 1), high + share * (high - low || 1)];

charts.frontier = (figure) => {
  const points = own.filter((m) => m.seconds.mean !== null);
  if (!points.length) return "Accuracy and runtime are not both known for any method yet.";
  const byTime = [...points].sort((a, b) => a.seconds.mean - b.seconds.mean);
  const front = byTime.filter((m, k) => byTime.slice(0, k).every((x) => x.accuracy.mean < m.accuracy.mean));
  const paper = data.published?.points ?? [];
  const marks = [...points.map((m) => ({ x: m.seconds.mean, y: m.accuracy.mean, label: m.name, first: m.name === picked.method ? 2 : Number(front.includes(m)) })), ...paper.map((p) => ({ x: p.seconds, y: p.accuracy, label: `paper: ${p.method}`, first: 1 }))];
  const times = marks.map((m) => Math.log10(m.x)), scores = marks.map((m) => m.y);
  const spans = { x: padded(Math.min(...times), Math.max(...times), 0.08), y: accuracyRange(scores) };
  const order = marks.map((m, k) => [m, k]).sort(([a], [b]) => b.first - a.first); // what is picked, the frontier and the paper are named first
  const placed = [];
  placeLabels(order.map(([m]) => m), spans, (figure.clientWidth || 900) - 80, 300).forEach((where, k) => { placed[order[k][1]] = where; });
  const traces = [
    { type: "scatter", mode: "lines", name: "best at this cost", x: front.map((m) => m.seconds.mean), y: front.map((m) => m.accuracy.mean), line: { color: colour("line"), width: 6, shape: "hv" }, hoverinfo: "skip" },
    { type: "scatter", mode: "markers+text", name: "this run", x: points.map((m) => m.seconds.mean), y: points.map((m) => m.accuracy.mean),
      error_y: { type: "data", array: points.map((m) => m.accuracy.sd), color: colour("line"), thickness: 1.2, width: 0 },
      text: points.map((_, k) => placed[k][1]), textposition: points.map((_, k) => placed[k][0]), textfont: { size: 12 }, cliponaxis: false,
      hovertext: points.map((m) => `${safe(m.name)}<br>${fixed(m.accuracy.mean)} ± ${fixed(m.accuracy.sd)}<br>${fixed(m.seconds.mean, 2)} ± ${fixed(m.seconds.sd, 2)} s`), hoverinfo: "text",
      marker: { size: 11, color: points.map(tone) } },
  ];
  if (paper.length) traces.push({
    type: "scatter", mode: "markers+text", name: "published in the paper, on another machine", x: paper.map((p) => p.seconds), y: paper.map((p) => p.accuracy), text: paper.map((_, k) => placed[points.length + k][1]),
    textposition: paper.map((_, k) => placed[points.length + k][0]), textfont: { size: 11.5, color: colour("muted") }, cliponaxis: false, hoverinfo: "text",
    hovertext: paper.map((p) => `published: ${p.method}<br>${p.accuracy} ± ${p.accuracy_sd}<br>${p.seconds} ± ${p.seconds_sd} s<br>${safe(data.published.setting)}`),
    marker: { size: 11, symbol: "diamond-open", color: colour("purple"), line: { width: 2 } },
  });
  return {
    traces,
    layout: { height: 440, margin: { l: 8, r: 24, t: narrow() ? 76 : 40, b: 8 }, xaxis: { type: "log", title: { text: "seconds per seed, logarithmic" }, range: spans.x, dtick: 1, exponentformat: "none" }, yaxis: { range: spans.y, title: { text: "average exact accuracy" } } },
    rows: [["source", "method", "accuracy", "sd", "seconds", "sd of seconds"], ...points.map((m) => ["this run", m.name, m.accuracy.mean, m.accuracy.sd, m.seconds.mean, m.seconds.sd]),
      ...paper.map((p) => ["paper", p.method, p.accuracy, p.accuracy_sd, p.seconds, p.seconds_sd])],
  };
};

charts.sweep = () => {
  const sweeps = data.sweeps.filter((s) => s.points.length > 1);
  if (!sweeps.length) return "This run varied neither ε nor β.";
  const greek = { epsilon: "ε", beta: "β" };
  const traces = [];
  sweeps.forEach((s, k) => {
    const main = colour(["blue", "orange", "green", "purple"][k % 4]);
    const x = s.points.map((p) => p.value);
    const mark = (p) => (p.flags.includes("not converged") ? "x" : p.flags.includes("saturated") ? "circle-open" : "circle");
    traces.push(
      { type: "scatter", mode: "lines", x: [...x, ...[...x].reverse()], y: [...s.points.map((p) => p.mean + p.sd), ...[...s.points].reverse().map((p) => p.mean - p.sd)], fill: "toself", fillcolor: main, opacity: 0.16, line: { width: 0 }, hoverinfo: "skip", showlegend: false },
      { type: "scatter", mode: "lines+markers", name: `test accuracy, ${safe(s.method)}, ${greek[s.parameter] ?? s.parameter}`, x, y: s.points.map((p) => p.mean), line: { color: main }, marker: { size: 9, color: main, symbol: s.points.map(mark), line: { width: 2, color: main } }, hoverinfo: "text",
        hovertext: s.points.map((p) => `${greek[s.parameter] ?? s.parameter} = ${p.value}<br>test ${fixed(p.mean)} ± ${fixed(p.sd)}<br>calibration ${fixed(p.calibration)}${p.flags.length ? `<br>${safe(p.flags.join(", "))}` : ""}`) },
      { type: "scatter", mode: "lines", name: "calibration score", x, y: s.points.map((p) => p.calibration), line: { color: main, dash: "dash", width: 1.2 }, hoverinfo: "skip" },
    );
  });
  const scales = distinct(sweeps.map((s) => greek[s.parameter] ?? s.parameter)).join(", ");
  return {
    traces,
    layout: { height: 360, margin: { l: 8, r: 16, t: narrow() ? 76 : 40, b: 8 }, xaxis: { type: "log", title: { text: scales }, exponentformat: "none", tickvals: sweeps[0].points.map((p) => p.value), ticktext: sweeps[0].points.map((p) => String(p.value)) }, yaxis: { title: { text: "average exact accuracy" }, range: accuracyRange(sweeps.flatMap((s) => s.points.flatMap((p) => [p.mean - p.sd, p.mean + p.sd, p.calibration]))) } },
    rows: [["parameter", "method", "value", "accuracy", "sd", "calibration", "flags"], ...sweeps.flatMap((s) => s.points.map((p) => [s.parameter, s.method, p.value, p.mean, p.sd, p.calibration, p.flags.join("; ")]))],
  };
};

// -- heatmaps of one seed ---------------------------------------------------------------------------------------

// Values over sites as a grid of places x coordinates, or one row over names where sites overlap or are whole places.
function grid(menu, values) {
  const spans = menu.at.every(([, start]) => start !== null);
  const places = distinct(menu.at.map(([place]) => place));
  const cells = new Set();
  const overlap = spans && menu.at.some(([place, start, end]) => {
    for (let c = start; c < end; c++) { if (cells.has(`${place} ${c}`)) return true; cells.add(`${place} ${c}`); }
    return false;
  });
  if (!spans || overlap) return { z: [values], names: [menu.names], x: menu.names, y: [""] };
  const width = Math.max(...menu.at.map(([, , end]) => end));
  const blank = () => places.map(() => Array(width).fill(null));
  const z = blank(), names = blank();
  menu.at.forEach(([place, start, end], k) => {
    for (let c = start; c < end; c++) { z[places.indexOf(place)][c] = values[k]; names[places.indexOf(place)][c] = menu.names[k]; }
  });
  return { z, names, x: null, y: places };
}

// As many clauses of a sentence as fit: half of one would say something else.
const clauses = (words, pixels, size) => {
  const parts = words.split(", ");
  while (parts.length > 1 && parts.join(", ").length * size > pixels) parts.pop();
  return wrapped(parts.join(", "), pixels, size)[0] ?? "";
};

// Heatmaps in rows; each is divided by its own largest value, and hovering shows the value itself.
function panels(lines, { cell = 26, top = 8 } = {}) {
  const rows = narrow() ? lines.flat().map((p) => [p]) : lines;
  const full = Math.min(root.clientWidth - 40, 1080), titled = 44, below = 46;
  const heights = rows.map((row) => { const n = Math.max(...row.map((p) => p.z.length)); return Math.max(34, n * (n > 30 ? 10 : cell)); });
  const total = sum(heights) + (titled + below) * rows.length + top;
  const layout = { height: total, margin: { l: 8, r: 8, t: top + titled, b: below }, annotations: [], shapes: [], showlegend: false };
  const inner = total - layout.margin.t - layout.margin.b, gap = titled + below;
  const named = (p) => 16 + 7.2 * Math.max(...p.y.map((y) => y.length)); // pixels of a panel's row names
  const left = Math.max(...rows.map((row) => named(row[0])));
  const traces = [];
  let y1 = 1;
  rows.forEach((row, r) => {
    const y0 = Math.max(0, y1 - heights[r] / inner);
    row.forEach((p, c) => {
      const id = traces.length ? String(traces.length + 1) : "";
      const labels = c ? named(p) / full : 0;
      const domain = [c / row.length + labels, (c + 1) / row.length - (c < row.length - 1 ? 0.02 : 0)];
      const pixels = (domain[1] - domain[0]) * (full - left);
      const most = p.absolute ? 1 : Math.max(...p.z.flat().filter((v) => v !== null).map(Math.abs), 0);
      const said = p.said && pixels / p.z[0].length > 38;
      traces.push({ type: "heatmap", xaxis: `x${id}`, yaxis: `y${id}`, z: p.z.map((line) => line.map((v) => (v === null ? null : Math.abs(v) / (most || 1)))), hovertext: p.text, hoverinfo: "text", ...(said ? { text: p.said, texttemplate: "%{text}", textfont: { size: 11 } } : {}), zmin: 0, zmax: 1, colorscale: heatScale(), showscale: false, xgap: p.z[0].length <= 64 ? 1.5 : 0, ygap: 1.5, hoverongaps: false });
      (p.marked ?? []).forEach((line, i) => line.forEach((on, j) => { if (on) layout.shapes.push({ type: "rect", xref: `x${id}`, yref: `y${id}`, x0: j - 0.5, x1: j + 0.5, y0: i - 0.5, y1: i + 0.5, line: { color: colour("vermillion"), width: 2 } }); }));
      const names = p.x ? shortNames(p.x) : [];
      const longest = Math.max(1, ...names.map((name) => name.length));
      const room = Math.max(2, Math.floor(pixels / (longest * 7.5 + 12)));
      const step = p.x ? Math.max(1, Math.ceil(p.x.length / room)) : 1;
      layout[`xaxis${id}`] = { domain, anchor: `y${id}`, showgrid: false, title: { text: safe(p.xtitle ?? ""), font: { size: 11.5, color: colour("muted") }, standoff: 4 },
        ...(p.x ? { tickvals: p.x.map((_, i) => i).filter((i) => i % step === 0), ticktext: names.filter((_, i) => i % step === 0).map(safe), tickangle: 0 } : { tick0: 0, dtick: Math.max(1, Math.round(p.z[0].length / 10)) }) };
      layout[`yaxis${id}`] = { domain: [y0, y1], anchor: `x${id}`, tickvals: p.y.map((_, i) => i), ticktext: p.y.map(safe), autorange: "reversed", showgrid: false };
      const lead = wrapped(p.title, pixels, 8)[0] ?? "", note = clauses(p.note ?? "", pixels, 6.6);
      layout.annotations.push({ text: `<b>${safe(lead)}</b>${note ? `<br><span style="color:${colour("muted")}">${safe(note)}</span>` : ""}`, x: domain[0], y: y1, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", yshift: 5, showarrow: false, font: { size: 12.5 }, align: "left" });
    });
    y1 = y0 - gap / inner;
  });
  return { traces, layout };
}

const pairsOf = (list) => Array.from({ length: Math.ceil(list.length / 2) }, (_, k) => list.slice(2 * k, 2 * k + 2));

const couplingStage = { value: null };

charts.coupling = (figure) => {
  const mine = at("couplings");
  if (!mine) return kindOf[picked.method] === "das" ? `${picked.method} fits no coupling: it trains directions at every place it is given.` : `No coupling of ${picked.method} in seed ${picked.seed} is in this page.`;
  const variables = Object.keys(mine);
  const depth = Math.max(...variables.map((v) => mine[v].stages.length));
  stageButtons(figure, depth);
  const stage = Math.min(couplingStage.value ?? depth - 1, depth - 1);
  const shown = variables.filter((v) => mine[v].stages[stage]).map((v) => [v, mine[v].stages[stage]]);
  const rows = [["variable", "site", "mass", "share of the row", "weight after calibration", "raw signature norm"]];
  const list = [];
  const same = new Set(shown.map(([, s]) => s.menu)).size === 1;
  const grids = shown.map(([, s]) => grid(data.menus[s.menu], s.before));
  const hover = (v, s, values, word) => values.map((value, k) => {
    const total = sum(s.before);
    return `<b>${safe(data.menus[s.menu].names[k])}</b><br>${safe(v)}: ${word} ${short(value)}${word === "mass" ? ` (${fixed((100 * value) / (total || 1), 1)} % of the row)` : ""}<br>raw signature norm ${short(s.norms?.[k])}`;
  });
  shown.forEach(([v, s]) => {
    const total = sum(s.before) || 1;
    data.menus[s.menu].names.forEach((name, k) => rows.push([v, name, s.before[k], s.before[k] / total, s.after?.[k] ?? null, s.norms?.[k] ?? null]));
  });
  const calibrated = shown.some(([, s]) => s.after);
  if (same && !grids[0].y[0]) { // all variables over the same list of sites: one matrix
    const names = data.menus[shown[0][1].menu].names;
    const matrix = (key, word, title, some) => ({ title, z: some.map(([, s]) => s[key]), text: some.map(([v, s]) => hover(v, s, s[key], word)), x: names, y: some.map(([v]) => v), note: some[0][1].setting });
    list.push([matrix("before", "mass", "mass", shown), ...(calibrated ? [{ ...matrix("after", "weight", "weights that calibration took", shown.filter(([, s]) => s.after)), note: "" }] : [])]);
  } else {
    shown.forEach(([v, s], i) => {
      const menu = data.menus[s.menu];
      const g = grids[i], t = grid(menu, hover(v, s, s.before, "mass"));
      const line = [{ title: v, note: `mass · ${s.setting}`, z: g.z, text: t.z, x: g.x, y: g.y, xtitle: s.title }];
      list.push(line);
      if (s.after) {
        const after = grid(menu, s.after), said = grid(menu, hover(v, s, s.after, "weight"));
        line.push({ title: v, note: "weights that calibration took", z: after.z, text: said.z, x: after.x, y: after.y, xtitle: s.title });
      }
    });
  }
  return { ...panels(list.every((line) => line.length === 1) ? pairsOf(list.flat()) : list), rows };
};

function stageButtons(figure, depth) {
  const box = figure.querySelector(".stages");
  const names = Array.from({ length: depth }, (_, k) => `Stage ${String.fromCharCode(65 + k)}`);
  box.hidden = depth < 2;
  const current = Math.min(couplingStage.value ?? depth - 1, depth - 1);
  box.replaceChildren(...names.map((name, k) => element("button", { type: "button", "aria-pressed": String(k === current), onclick: () => { couplingStage.value = k; draw(figure); } }, name)));
}

charts.handle = () => {
  const mine = at("handles");
  if (!mine) return `The handle files of ${picked.method} in seed ${picked.seed} are not in this page.`;
  const list = [], rows = [["variable", "place", "basis", "coordinate", "value"]];
  const add = (line, v, edits, key, title, xtitle) => {
    const chosen = edits.filter((e) => e[key]);
    if (!chosen.length) return;
    const width = Math.max(...chosen.map((e) => e[key].length));
    const step = Math.max(1, Math.round(chosen[0].width / chosen[0].native.length));
    line.push({ title: v, note: title, xtitle: key !== "own" && step > 1 ? `${xtitle} (groups of ${step})` : xtitle, y: chosen.map((e) => e.place), x: null,
      z: chosen.map((e) => Array.from({ length: width }, (_, k) => e[key][k] ?? null)),
      text: chosen.map((e) => Array.from({ length: width }, (_, k) => `${safe(v)} at ${safe(e.place)}<br>${xtitle} ${k}: ${short(e[key][k])}`)) });
    chosen.forEach((e) => e[key].forEach((value, k) => rows.push([v, e.place, title, k, value])));
  };
  for (const [v, { edits }] of Object.entries(mine)) {
    const line = [], turned = edits.some((e) => e.own), oblique = edits.some((e) => e.writes);
    add(line, v, edits, "native", turned ? (oblique ? "where it reads" : "where it reads and writes") : "gains of the neurons", "neuron");
    if (oblique) add(line, v, edits, "writes", "where it writes", "neuron");
    const basis = { pca: "principal component", das: "rotated coordinate" }[edits.find((e) => e.own)?.basis] ?? "direction";
    if (turned && !oblique && distinct(edits.flatMap((e) => e.own ?? [])).length > 1) add(line, v, edits, "own", `gains of its ${basis}s`, basis);
    list.push(line);
  }
  return { ...panels(list.every((line) => line.length === 1) ? pairsOf(list.flat()) : list, { cell: 30 }), rows };
};

function noSurface() {
  const searched = Object.values(at("zoom") ?? {}).some((v) => v.handle.setting.includes("K ="));
  return searched ? `The K–λ calibration surface of ${picked.method} in seed ${picked.seed} is not in this page.` : `${picked.method} takes its directions whole: it searches no grid of K and λ.`;
}

charts.surface = () => {
  const mine = at("surfaces");
  if (!mine) return noSurface();
  const list = [], rows = [["variable", "K", "λ", "calibration score", "chosen"]];
  const stars = [];
  Object.entries(mine).forEach(([v, s]) => {
    s.sizes.forEach((K, i) => s.strengths.forEach((x, j) => rows.push([v, K, x, s.scores[i][j], K === s.K && x === s.strength ? "chosen" : ""])));
    stars.push([s.strengths.indexOf(s.strength), s.sizes.indexOf(s.K)]);
    const best = Math.max(...s.scores.flat());
    list.push({ title: v, note: `K = ${s.K}, λ = ${s.strength}: ${fixed(best)}`, xtitle: "λ", z: s.scores, x: s.strengths.map(String), y: s.sizes.map((K, i) => (i % Math.ceil(s.sizes.length / 8) ? "" : `K ${K}`)),
      text: s.scores.map((row, i) => row.map((score, j) => `${safe(v)}<br>K = ${s.sizes[i]}, λ = ${s.strengths[j]}<br>calibration ${fixed(score)}`)) });
  });
  const made = panels(pairsOf(list), { cell: list.every((p) => p.z.length < 8) ? 28 : 14 });
  made.traces.forEach((t) => { const all = t.z.flat(); t.zmin = Math.min(...all); t.zmax = Math.max(...all); });
  stars.forEach(([x, y], k) => made.traces.push({ type: "scatter", mode: "markers", xaxis: `x${k ? k + 1 : ""}`, yaxis: `y${k ? k + 1 : ""}`, x: [x], y: [y], hoverinfo: "skip", marker: { symbol: "star", size: 15, color: colour("vermillion"), line: { color: colour("bg"), width: 1.2 } } }));
  return { ...made, rows };
};
