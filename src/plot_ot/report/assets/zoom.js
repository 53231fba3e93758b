// The way from coarse to fine, drawn as the paper's Figure 1 from this run's numbers: click a step to look inside.

const zoom = { variable: data.variables?.[0], open: null };
const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function text(x, y, said, kind = "", anchor = "start") {
  const made = shape("text", { x, y, class: kind, "text-anchor": anchor });
  made.textContent = said;
  return made;
}

function clipped(text, pixels, size = 7) {
  const most = Math.max(3, Math.floor(pixels / size));
  const letters = Array.from(String(text));
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

// Words in lines of at most so many pixels; a word that is longer by itself is cut.
function wrapped(words, pixels, size = 6.1) {
  const most = Math.max(8, Math.floor(pixels / size)), lines = [];
  for (const word of String(words).split(" ").filter(Boolean)) {
    const last = lines[lines.length - 1];
    if (last !== undefined && last.length + 1 + word.length <= most) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word.length > most ? clipped(word, pixels, size) : word);
  }
  return lines;
}

const percent = (x) => {
  if (typeof x !== "number") return "–";
  const value = Math.round(x * 1e9) / 1e9;
  if (value > 0 && value < 0.001) return "<0.1 %";
  if (value > 0.999 && value < 1) return ">99.9 %";
  return `${(100 * value).toFixed((value > 0 && value < 0.02) || (value > 0.98 && value < 1) ? 1 : 0)} %`;
};
const shareOf = (level, item) => (level.total ? item[1] / level.total : null);
const MEASURES = { mass: "share of the variable's mass", score: "calibration accuracy", directions: "length" };

function itemText(level, [name, mass, norm, score]) {
  if (level.measure === "directions") return `${name}\nlength ${short(mass)}`;
  const share = level.total ? ` (${fixed((100 * mass) / level.total, 1)} % of the row)` : "";
  const lines = [name, mass === null ? "no coupling at this step" : `mass ${short(mass)}${share}`];
  if (norm !== null) lines.push(`raw signature norm ${short(norm)}`);
  lines.push(`calibration accuracy ${score === null ? "not measured here" : fixed(score)}`);
  return lines.join("\n");
}

// -- the drawing ------------------------------------------------------------------------------------------------

const TOP = { title: 16, line: 15 };

function drawZoom() {
  const box = document.getElementById("zoom-drawing");
  if (!box) return;
  const found = at("zoom")?.[zoom.variable];
  const focused = document.activeElement?.closest?.("#zoom-drawing [data-stage]")?.dataset.stage; // kept when drawn anew
  box.replaceChildren();
  if (!found) {
    box.append(element("p", { class: "muted" }, `Nothing is recorded about the way of ${picked.method} to ${zoom.variable} in seed ${picked.seed}.`));
    return;
  }
  const width = box.clientWidth || 900, upright = width < 680; // a phone: steps under one another
  const svg = shape("svg", { role: "group", "aria-label": `The way to ${zoom.variable}` });
  const height = (upright ? stacked : sideBySide)(svg, found, width);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const tip = element("div", { class: "tip", role: "status" });
  tip.hidden = true;
  box.append(svg, tip);
  if (focused !== undefined) svg.querySelector(`[data-stage="${focused}"]`)?.focus({ preventScroll: true });
  wireZoom(box, svg, tip, found.levels);
}

function sideBySide(svg, found, width) {
  const { levels, handle } = found, n = levels.length;
  const node = Math.min(150, Math.max(64, 26 + 8.6 * zoom.variable.length)), last = 218, gap = Math.min(46, width * 0.045);
  const along = n ? Math.min(n === 1 ? 460 : 340, (width - node - last - gap * (n + 1)) / n) : 0;
  const heads = levels.map((level, k) => headOf(level, k, along));
  const head = Math.max(30, ...heads.map((h) => h.height));
  const body = 330, middle = head + body / 2;
  svg.append(wedge(node - 8, middle - 2, middle + 2, node + gap, n ? head : middle - 60, n ? head + body : middle + 60));
  pill(svg, node / 2, middle, node);
  let x = node + gap;
  levels.forEach((level, k) => {
    const stage = stageGroup(level, k, n), rows = rowsOf(level, body);
    stage.append(shape("rect", { x: x - 6, y: 0, width: along + 12, height: head + body + 8, class: "frame", rx: 8 }));
    heads[k].draw(stage, x, head);
    drawRows(stage, level, rows, x, head, along);
    const final = k + 1 === n, target = final ? [middle - 125, middle + 125] : [head, head + body];
    let from = target[0]; // the next step opens up what was taken; the handle is put together from it, share by share
    const beams = beamsOf(rows);
    const taken = sum(beams.map(([a, b]) => b - a)) || 1;
    beams.slice(0, 64).forEach(([a, b]) => {
      const to = final ? from + ((target[1] - target[0]) * (b - a)) / taken : target[1];
      svg.append(wedge(x + along + 2, head + a, head + b, x + along + gap - 2, final ? from : target[0], to));
      if (final) from = to;
    });
    svg.append(stage);
    x += along + gap;
  });
  svg.append(handleCard(handle, { x, y: middle - 125, width: Math.min(260, Math.max(last, width - x)), height: 250 }));
  return head + body + 12;
}

function stacked(svg, found, width) {
  const { levels, handle } = found, n = levels.length;
  pill(svg, width / 2, 20, Math.min(width, 30 + 8.6 * zoom.variable.length));
  let y = 40;
  levels.forEach((level, k) => {
    svg.append(down(width / 2, y + 3, 16));
    y += 26;
    const head = headOf(level, k, width), rows = rowsOf(level, level.measure === "directions" ? 78 * level.strips.length : Math.min(330, Math.max(40, 21 * level.items.length)));
    const body = Math.max(...rows.map((r) => r.to), 40);
    const stage = stageGroup(level, k, n);
    stage.append(shape("rect", { x: 0, y: y - 4, width, height: head.height + body + 10, class: "frame", rx: 8 }));
    head.draw(stage, 0, head.height, y);
    drawRows(stage, level, rows, 0, y + head.height, width);
    svg.append(stage);
    y += head.height + body + 8;
  });
  svg.append(down(width / 2, y + 3, 16));
  svg.append(handleCard(handle, { x: 0, y: y + 26, width, height: 214 }));
  return y + 26 + 220;
}

const wedge = (x0, a0, a1, x1, b0, b1) => shape("polygon", { points: `${x0},${a0} ${x1},${b0} ${x1},${b1} ${x0},${a1}`, class: "wedge" });
const down = (x, y, size) => shape("polygon", { points: `${x - size},${y} ${x + size},${y} ${x},${y + size}`, class: "arrow" });

function pill(svg, x, y, width) {
  svg.append(shape("rect", { x: x - width / 2, y: y - 19, width, height: 38, rx: 19, class: "node" }));
  svg.append(text(x, y + 5, clipped(zoom.variable, width - 16, 8.2), "node-name", "middle"));
}

function stageGroup(level, k, n) {
  const open = zoom.open === k;
  return shape("g", { class: `stage${open ? " open" : ""}`, tabindex: "0", role: "button", "data-stage": k, "aria-expanded": String(open), "aria-label": stageLabel(level, k, n) });
}

const stageName = (level, k) => `${k + 1} · ${level.items.length} ${level.items.length === 1 ? level.title.replace(/s$/, "") : level.title}`;

function stageLabel(level, k, n) {
  const top = level.items.filter((i) => i[4]).map((i) => i[0]);
  return `Step ${k + 1} of ${n}: ${level.items.length} ${level.title}. ${level.why} Taken: ${top.slice(0, 8).join(", ")}. Press Enter to look inside.`;
}

// The title of a step, why its red rows were taken, and what its columns are.
function headOf(level, k, width) {
  const why = wrapped(level.why, width), scored = level.items.some((i) => i[3] !== null) && level.measure === "mass";
  const height = TOP.title + 8 + TOP.line * why.length + (level.measure === "directions" ? 4 : 20);
  return {
    height,
    draw(stage, x, bottom, y = 0) {
      stage.append(text(x, y + TOP.title, clipped(stageName(level, k), width, 8.4), "big"));
      why.forEach((line, j) => stage.append(text(x, y + TOP.title + 19 + j * TOP.line, line, "small")));
      if (level.measure === "directions") return;
      const [a, b] = columns(level, width);
      stage.append(text(x + a, y + bottom - 7, level.measure === "score" ? "accuracy" : "mass", "small"));
      if (scored) stage.append(text(x + b, y + bottom - 7, clipped("calibration accuracy", width - b, 5.9), "small"));
    },
  };
}

// Where the bars and the dots of a step begin.
function columns(level, width) {
  const names = shortNames(level.items.map((i) => i[0]));
  const longest = Math.max(...names.map((x) => String(x).length));
  const a = level.items.length <= 25 ? Math.min(0.36 * width, 14 + 7.2 * longest) : longest <= 8 ? 10 + 6.4 * longest : 0;
  const scored = level.measure === "mass" && level.items.some((i) => i[3] !== null);
  return [a, scored ? a + (width - a) * 0.52 : width];
}

function rowsOf(level, body) {
  if (level.measure === "directions") {
    const step = Math.min(96, body / level.strips.length), start = (body - step * level.strips.length) / 2;
    return level.strips.map((strip, k) => ({ strip, k, from: start + k * step, to: start + (k + 1) * step, on: true }));
  }
  const step = Math.min(30, body / level.items.length), start = (body - step * level.items.length) / (body > 200 ? 2 : 1e9);
  return level.items.map((item, k) => ({ item, k, from: start + k * step, to: start + (k + 1) * step, on: Boolean(item[4]) }));
}

// Neighbouring rows that were taken, as one beam.
function beamsOf(rows) {
  const found = [];
  rows.filter((r) => r.on).forEach((r) => { const last = found[found.length - 1]; if (last && Math.abs(last[1] - r.from) < 0.01) last[1] = r.to; else found.push([r.from, r.to]); });
  return found;
}

function drawRows(stage, level, rows, x, y, width) {
  if (level.measure === "directions") return rows.forEach((row) => drawStrip(stage, row, x, y, width));
  const names = shortNames(level.items.map((i) => i[0])), [a, b] = columns(level, width);
  const values = level.items.map((i) => Math.max(0, (level.measure === "score" ? i[3] : i[1]) ?? 0));
  const most = Math.max(...values, 1e-12), step = rows[0].to - rows[0].from, roomy = step >= 12.5 && a > 0;
  const space = step > 8 ? 3 : step > 3 ? 0.6 : 0, value = a ? 50 : 0, side = a ? 0 : 74;
  const every = Math.ceil(13 / step), taken = rows.filter((r) => r.on).map((r) => r.from); // many rows: every so many have a name
  let free = -1e9;
  rows.forEach(({ item, k, from, on }) => {
    const top = y + from + space / 2, tall = Math.max(step - space, 0.5), round = Math.min(3, step / 4), base = y + from + step / 2 + 4;
    const slab = shape("g", { class: on ? "on" : "", "data-item": k });
    slab.append(shape("rect", { x, y: top, width: width - side, height: tall, class: "slab", rx: round }));
    const long = b - a - value - side - 4;
    const bar = shape("rect", { x: x + a, y: top, width: Math.max(1, (long * values[k]) / most), height: tall, class: "bar", rx: round });
    if (!on) bar.setAttribute("opacity", 0.35 + (0.6 * values[k]) / most);
    slab.append(bar);
    const named = roomy || (on && base - free >= 13), tick = !named && !on && a > 0 && k % every === 0 && taken.every((t) => Math.abs(t - from) >= 13);
    if (named && a) {
      slab.append(text(x + 5, base, clipped(names[k], a - 8), step < 20 ? "small name" : "name"));
      slab.append(text(x + b - 6, base, level.measure === "mass" && level.total ? percent(shareOf(level, item)) : percent(values[k]), "small", "end"));
    } else if (tick) slab.append(text(x + 5, base, clipped(names[k], a - 8), "small"));
    else if (named) slab.append(text(x + width - side + 6, base, clipped(names[k], 70), "small")); // long names: only what was taken has one
    if (named && !roomy) free = base;
    if (b < width && item[3] !== null) scoreDot(slab, item[3], x + b, base - 4, width - b - side, a > 0, roomy, named && a > 0);
    stage.append(slab);
  });
}

function scoreDot(slab, score, x, y, width, spaced, large, labelled) {
  const long = width - (spaced ? 60 : 10);
  slab.append(shape("line", { x1: x, x2: x + long, y1: y, y2: y, class: "track" }));
  slab.append(shape("circle", { cx: x + long * Math.min(1, Math.max(0, score)), cy: y, r: large ? 4.5 : 2.5, class: "score" }));
  if (labelled) slab.append(text(x + width - 5, y + 4, percent(score), "small", "end"));
}

// What one direction reads and writes: a signed bar per neuron, up for positive weights.
function drawStrip(stage, { strip, k, from, to }, x, y, width) {
  const group = shape("g", { class: "on strip", "data-item": k });
  const kinds = strip.writes ? ["reads", "writes"] : ["reads"];
  const tall = (to - from - 18) / kinds.length;
  group.append(text(x, y + from + 12, `${strip.name}${strip.writes ? "" : " reads and writes"}`, "small name"));
  kinds.forEach((kind, j) => {
    const top = y + from + 18 + j * tall, high = Math.max(6, tall - 5), zero = top + high / 2;
    const left = strip.writes ? 44 : 0, cell = (width - left) / strip[kind].length;
    const most = Math.max(...strip[kind].map(Math.abs), 1e-12);
    if (strip.writes) group.append(text(x, zero + 4, kind, "small"));
    group.append(shape("rect", { x: x + left, y: top, width: width - left, height: high, class: "slab", rx: 3 }));
    strip[kind].forEach((value, i) => {
      const size = (Math.abs(value) / most) * (high / 2 - 1);
      group.append(shape("rect", { x: x + left + i * cell, y: value > 0 ? zero - size : zero, width: Math.max(0.8, cell - (cell > 4 ? 1 : 0)), height: Math.max(0.3, size), class: kind, "data-cell": `${kind} ${i}` }));
    });
  });
  stage.append(group);
}

function handleCard(handle, at) {
  const card = shape("g", { class: "handle-card" });
  card.append(shape("rect", { ...at, rx: 12, class: "box" }));
  const inner = at.width - 30, own = handle.shares.handle;
  const lines = wrapped(handle.extent, inner, 9).slice(0, 3).map((line) => [line, "big"]);
  if (own) {
    lines.push([`right on ${percent(own[0])}`, "right"], ...wrapped(`of the ${handle.pairs?.toLocaleString("en") ?? ""} test pairs that can tell`, inner).map((line) => [line, "small"]));
    if (own.length > 1) lines.push([`95 % interval ${percent(own[1])} to ${percent(own[2])}`, "small"]);
    for (const [key, label] of [["copy_source", "copying the source"], ["random_mean", "random handles"], ["full_patch", "whole place swapped"]]) {
      if (handle.shares[key]) lines.push([`${label} ${percent(handle.shares[key][0])}`, "small"]);
    }
  } else {
    for (const [bank, [accuracy]] of Object.entries(handle.tests)) lines.push([`${bank}, all test pairs: ${percent(accuracy)}`, "small"]);
  }
  if (typeof handle.calibration === "number") lines.push([`calibration accuracy ${percent(handle.calibration)}`, "small"]);
  if (handle.setting) lines.push(...wrapped(handle.setting, inner).slice(0, 2).map((line) => [line, "small"]));
  let y = at.y + 8;
  const tall = { big: 21, right: 27, small: 18 };
  const squeeze = Math.min(1, (at.height - 22) / sum(lines.map(([, kind]) => tall[kind])));
  lines.forEach(([said, kind]) => {
    y += tall[kind] * squeeze;
    card.append(text(at.x + 15, y, clipped(said, at.width - 24, kind === "small" ? 5.9 : 8.2), kind));
  });
  return card;
}

// -- hovering and looking inside ----------------------------------------------------------------------------------

function hoverText(level, slab, target) {
  const k = Number(slab.dataset.item), cell = target.dataset?.cell;
  if (level.measure !== "directions") return itemText(level, level.items[k]);
  const strip = level.strips[k];
  if (!cell) return `${strip.name} of ${strip.place}`;
  const [kind, i] = cell.split(" "), step = Math.ceil(strip.width / strip.reads.length);
  const neuron = step === 1 ? `neuron ${i}` : `neurons ${i * step} to ${Math.min(strip.width, (Number(i) + 1) * step) - 1}`;
  return `${strip.name} ${kind} ${neuron}\n${short(strip[kind][i])}`;
}

function wireZoom(box, svg, tip, levels) {
  const show = (event) => {
    const slab = event.target.closest("[data-item]"), stage = event.target.closest("[data-stage]");
    tip.hidden = !slab || !stage;
    if (tip.hidden) return;
    tip.textContent = hoverText(levels[Number(stage.dataset.stage)], slab, event.target);
    const frame = box.getBoundingClientRect();
    const x = event.clientX - frame.left, y = event.clientY - frame.top;
    tip.style.left = `${Math.max(0, Math.min(x + 14, frame.width - tip.offsetWidth))}px`;
    tip.style.top = `${y + 16}px`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  svg.addEventListener("click", (event) => {
    const stage = event.target.closest("[data-stage]");
    if (stage) openStage(Number(stage.dataset.stage));
  });
  svg.addEventListener("keydown", (event) => {
    const stage = event.target.closest("[data-stage]");
    if (!stage) return;
    const k = Number(stage.dataset.stage);
    const turn = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" || event.key === " ") openStage(k);
    else if (turn) svg.querySelector(`[data-stage="${k + turn}"]`)?.focus();
    else return;
    event.preventDefault();
  });
}

function openStage(k) {
  zoom.open = k;
  drawZoom();
  document.querySelector(`#zoom-drawing [data-stage="${k}"]`)?.focus({ preventScroll: true });
  const panel = document.getElementById("zoom-detail");
  panel.hidden = false;
  const level = at("zoom")[zoom.variable].levels[k];
  panel.querySelector("h3").textContent = `Inside ${stageName(level, k)}${level.setting ? `: ${level.setting}` : ""}`;
  draw(panel.querySelector("figure"));
}

function closeStage() {
  zoom.open = null;
  const panel = document.getElementById("zoom-detail");
  if (panel) panel.hidden = true;
  drawZoom();
}

charts.stage = () => {
  const level = at("zoom")?.[zoom.variable]?.levels[zoom.open];
  if (!level) return "Pick a step above.";
  return level.measure === "directions" ? insideDirections(level) : insideSites(level);
};

function insideDirections({ strips }) {
  const kinds = strips.some((s) => s.writes) ? ["reads", "writes"] : ["reads"];
  const step = Math.ceil(strips[0].width / strips[0].reads.length);
  const panel = (kind) => ({ title: kinds.length > 1 ? kind : "reads and writes", xtitle: step > 1 ? `neuron (groups of ${step})` : "neuron", x: null, y: strips.map((s) => s.name),
    z: strips.map((s) => s[kind]), text: strips.map((s) => s[kind].map((value, i) => `${safe(s.name)} ${kind} ${i}: ${short(value)}`)) });
  const rows = [["direction", "place", "reads or writes", "neuron", "weight"]];
  strips.forEach((s) => kinds.forEach((kind) => s[kind].forEach((value, i) => rows.push([s.name, s.place, kind, i * step, value]))));
  return { ...panels(kinds.map((kind) => [panel(kind)])), rows };
}

function insideSites(level) {
  const items = level.items, score = level.measure === "score";
  const normed = items.some((i) => i[2] !== null), scored = !score && items.some((i) => i[3] !== null);
  const texts = items.map((i) => itemText(level, i).split("\n").map(safe).join("<br>"));
  const x = items.map((_, k) => k), common = { x, hovertext: texts, hoverinfo: "text" };
  const shares = items.map((i) => (score ? i[3] : (shareOf(level, i) ?? i[1])));
  const traces = [{ ...common, type: "bar", name: MEASURES[level.measure], y: shares, marker: { color: items.map((i) => colour(i[4] ? "vermillion" : "sky")) } }];
  if (scored) traces.push({ ...common, type: "scatter", mode: "markers", name: "calibration accuracy", y: items.map((i) => i[3]), marker: { color: colour("ink"), size: 9 } });
  if (normed) traces.push({ ...common, type: "scatter", mode: "markers", name: "raw signature norm (right axis)", yaxis: "y2", y: items.map((i) => i[2]), marker: { color: colour("muted"), size: 7, symbol: "line-ew-open", line: { width: 2 } } });
  const step = Math.max(1, Math.ceil(items.length / (narrow() ? 8 : 24)));
  const names = shortNames(items.map((i) => i[0]));
  const labelled = x.filter((k) => k % step === 0);
  return {
    traces,
    layout: { height: 320, bargap: 0.15, margin: { l: 8, r: 8, t: 36, b: 8 }, xaxis: { tickvals: labelled, ticktext: labelled.map((k) => safe(clipped(names[k], 120))), showgrid: false },
      yaxis: { title: { text: scored ? "share, accuracy" : MEASURES[level.measure] }, rangemode: "tozero" },
      ...(normed ? { yaxis2: { overlaying: "y", side: "right", rangemode: "tozero", showgrid: false, title: { text: "norm" } } } : {}) },
    rows: [["site", "mass", "share of the row", "raw signature norm", "calibration accuracy", "taken"], ...items.map((i) => [i[0], i[1], shareOf(level, i), i[2], i[3], i[4] ? "yes" : "no"])],
  };
}

function variableButtons() {
  for (const box of document.querySelectorAll("[data-variables]")) {
    box.hidden = data.variables.length < 2;
    box.replaceChildren(...data.variables.map((v) => element("button", { type: "button", "aria-pressed": String(v === zoom.variable), onclick: () => { zoom.variable = v; variableButtons(); refreshZoom(); drawOne(); } }, v)));
  }
}

function refreshZoom() {
  const levels = at("zoom")?.[zoom.variable]?.levels ?? [];
  if (zoom.open !== null && zoom.open < levels.length) openStage(zoom.open);
  else closeStage();
}
