// The way from coarse to fine, drawn as the paper's Figure 1 from this run's numbers: click a stage to look inside.

const zoom = { variable: data.variables?.[0], open: null };
const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function clipped(text, pixels, size = 7) {
  const most = Math.max(3, Math.floor(pixels / size));
  const letters = Array.from(String(text));
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

const ofItem = (level, item) => (level.measure === "score" ? item[3] : item[1]);
const MEASURES = { mass: "mass", score: "calibration accuracy", length: "length of the directions" };

function itemText(level, [name, mass, norm, score]) {
  if (level.measure === "length") return `${name}\n${level.title} here: ${short(mass)}`;
  const share = level.total ? ` (${fixed((100 * mass) / level.total, 1)} % of the row)` : "";
  const lines = [name, mass === null ? "no coupling at this stage" : `mass ${short(mass)}${share}`];
  lines.push(`raw signature norm ${norm === null ? "not measured for this group" : short(norm)}`);
  lines.push(`calibration accuracy ${score === null ? "not measured here" : fixed(score)}`);
  return lines.join("\n");
}

function drawZoom() {
  const box = document.getElementById("zoom-drawing");
  if (!box) return;
  const found = at("zoom")?.[zoom.variable];
  const focused = document.activeElement?.closest?.("#zoom-drawing [data-stage]")?.dataset.stage; // kept when drawn anew
  box.replaceChildren();
  if (!found) {
    box.append(element("div", { class: "empty" }, `Nothing is recorded about the way of ${picked.method} to ${zoom.variable} in seed ${picked.seed}.`));
    return;
  }
  const width = box.clientWidth || 900;
  const upright = width < 680; // a phone: stages under one another
  const levels = found.levels;
  const n = levels.length;
  const node = upright ? 40 : Math.min(150, Math.max(70, 26 + 8.6 * zoom.variable.length)), handle = upright ? 224 : 200, gap = upright ? 34 : Math.min(70, width * 0.06);
  const head = 44;
  const along = upright ? 86 : Math.min(n === 1 ? 520 : 360, Math.max(110, (width - node - handle - gap * (n + 1)) / Math.max(n, 1)));
  const across = upright ? width : 330;
  const height = upright ? node + n * (head + along) + (n + 1) * gap + handle : head + across + 26;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": `The way to ${zoom.variable}` });
  // m runs along the way, c across it
  const rect = (m, c, ml, cl, more) => shape("rect", upright ? { x: c, y: m, width: cl, height: ml, ...more } : { x: m, y: c, width: ml, height: cl, ...more });
  const wedge = (m0, a0, a1, m1, b0, b1) => {
    const p = [[m0, a0], [m1, b0], [m1, b1], [m0, a1]].map(([m, c]) => (upright ? `${c},${m}` : `${m},${c}`));
    return shape("polygon", { points: p.join(" "), class: "wedge" });
  };
  const middle = upright ? across / 2 : head + across / 2;
  const c0 = upright ? 0 : head, c1 = upright ? across : head + across;

  let m = node;
  const inner = n ? [c0, c1] : [middle - 60, middle + 60];
  svg.append(wedge(node / 2, middle - 2, middle + 2, m + gap + (upright && n ? head : 0), ...inner));
  const pill = { width: upright ? Math.min(width, 30 + 8.6 * zoom.variable.length) : node, height: 38 };
  const [px, py] = upright ? [middle, node / 2] : [node / 2, middle];
  svg.append(shape("rect", { x: px - pill.width / 2, y: py - 19, ...pill, rx: 19, class: "node" }));
  svg.append(text(px, py + 5, clipped(zoom.variable, pill.width - 20, 8.2), "node-name", "middle"));
  levels.forEach((level, k) => {
    m += gap + (upright ? head : 0);
    const values = level.items.map((i) => Math.max(0, ofItem(level, i) ?? 0));
    const most = Math.max(...values, 1e-12);
    const step = across / level.items.length;
    const named = !upright && step >= 13; // room for a name before and a value after every bar
    const names = shortNames(level.items.map((i) => i[0]));
    const before = named ? Math.min(0.5 * along, 14 + 7.4 * Math.max(...names.map((x) => x.length))) : 0, after = named ? 46 : 0;
    const space = step > 8 ? 2 : step > 3 ? 0.6 : 0;
    const stage = shape("g", { class: `stage${zoom.open === k ? " open" : ""}`, tabindex: "0", role: "button", "data-stage": k, "aria-expanded": String(zoom.open === k), "aria-label": stageLabel(level, k, n) });
    stage.append(rect(m - 5, c0 - 5, along + 10, across + 10, { class: "frame", rx: 8 }));
    const titleAt = upright ? [0, m - 26] : [m, 16];
    stage.append(text(...titleAt, stageName(level, k), "big"));
    stage.append(text(titleAt[0], titleAt[1] + 17, clipped(level.setting, upright ? width : along + gap - 12, 6.6), "small"));
    level.items.forEach((item, j) => {
      const c = c0 + j * step;
      const slab = shape("g", { class: item[4] ? "on" : "", "data-item": j });
      slab.append(rect(m, c + space / 2, along, Math.max(step - space, 0.5), { class: "slab", rx: Math.min(3, step / 4) }));
      const bar = rect(m + before, c + space / 2, Math.max(1, ((along - before - after) * values[j]) / most), Math.max(step - space, 0.5), { class: "bar", rx: Math.min(3, step / 4) });
      if (!item[4]) bar.setAttribute("opacity", 0.3 + (0.6 * values[j]) / most);
      slab.append(bar);
      if (named) {
        slab.append(text(m + 6, c + step / 2 + 4, clipped(names[j], before - 8), step < 20 ? "small" : ""));
        slab.append(text(m + along - 6, c + step / 2 + 4, level.measure === "mass" && level.total ? `${fixed((100 * item[1]) / level.total, 0)} %` : level.measure === "length" ? short(item[1]) : fixed(item[3]), "small", "end"));
      }
      stage.append(slab);
    });
    const next = k + 1 < n ? m + along + gap + (upright ? head : 0) : m + along + gap;
    const target = k + 1 < n ? [c0, c1] : upright ? [c0, c1] : [middle - 118, middle + 118];
    const chosen = level.items.map((i, j) => [i, j]).filter(([i]) => i[4]);
    const runs = []; // neighbours are drawn as one beam
    chosen.forEach(([, j]) => { const last = runs[runs.length - 1]; if (last && last[1] === j - 1) last[1] = j; else runs.push([j, j]); });
    let from = target[0]; // the next stage opens up what was taken; the handle is put together from it, share by share
    runs.slice(0, 64).forEach(([a, b]) => {
      const to = k + 1 < n ? target[1] : from + ((target[1] - target[0]) * (b + 1 - a)) / chosen.length;
      svg.append(wedge(m + along, c0 + a * step, c0 + (b + 1) * step, next, k + 1 < n ? target[0] : from, to));
      from = to;
    });
    svg.append(stage);
    m += along;
  });
  m += gap;
  svg.append(handleCard(found.handle, upright ? { x: 0, y: m, width: across, height: handle } : { x: m, y: middle - 118, width: Math.max(handle, Math.min(240, width - m)), height: 236 }));
  const tip = element("div", { class: "tip", role: "status" });
  tip.hidden = true;
  box.append(svg, tip);
  if (focused !== undefined) svg.querySelector(`[data-stage="${focused}"]`)?.focus({ preventScroll: true });
  wireZoom(box, svg, tip, levels);
}

function text(x, y, said, kind = "", anchor = "start") {
  const made = shape("text", { x, y, class: kind, "text-anchor": anchor });
  made.textContent = said;
  return made;
}

const stageName = (level, k) => `${k + 1} · ${level.title}`;

function stageLabel(level, k, n) {
  const top = level.items.filter((i) => i[4]).map((i) => i[0]);
  return `Stage ${k + 1} of ${n}: ${level.items.length} ${level.title}, ${level.setting}. Taken: ${top.slice(0, 8).join(", ")}. Press Enter to look inside.`;
}

function handleCard(handle, at) {
  const card = shape("g", { class: "handle-card" });
  card.append(shape("rect", { ...at, rx: 12, class: "box" }));
  const lines = [["handle", "big"], [`${handle.size} direction${handle.size === 1 ? "" : "s"}`, ""], [`in ${handle.places.join(", ")}`, "small"]];
  if (handle.setting) lines.push([handle.setting, "small"]);
  lines.push([`calibration ${fixed(handle.calibration)}`, ""]);
  for (const [bank, [accuracy, low, high]] of Object.entries(handle.tests)) {
    lines.push([`${bank} ${fixed(accuracy)}`, ""]);
    if (low !== undefined) lines.push([`95 %: ${fixed(low)} to ${fixed(high)}`, "small"]);
    if (bank in handle.full_patch) lines.push([`full patch ${fixed(handle.full_patch[bank])}`, "small"]);
  }
  const step = Math.min(24, (at.height - 24) / lines.length);
  lines.forEach(([said, kind], k) => card.append(text(at.x + 16, at.y + 22 + k * step, clipped(said, at.width - 24, kind === "small" ? 6.2 : 7), kind)));
  return card;
}

function wireZoom(box, svg, tip, levels) {
  const show = (event) => {
    const slab = event.target.closest("[data-item]"), stage = event.target.closest("[data-stage]");
    tip.hidden = !slab || !stage;
    if (tip.hidden) return;
    const level = levels[Number(stage.dataset.stage)];
    tip.textContent = itemText(level, level.items[Number(slab.dataset.item)]);
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
  panel.querySelector("h3").textContent = `Inside ${stageName(level, k)}`;
  draw(panel.querySelector("figure"));
}

function closeStage() {
  zoom.open = null;
  document.getElementById("zoom-detail").hidden = true;
  drawZoom();
}

charts.stage = () => {
  const level = at("zoom")?.[zoom.variable]?.levels[zoom.open];
  if (!level) return "Pick a stage above.";
  const items = level.items;
  const normed = items.some((i) => i[2] !== null);
  const texts = items.map((i) => itemText(level, i).split("\n").map(safe).join("<br>"));
  const traces = [{ type: "bar", name: MEASURES[level.measure], x: items.map((_, k) => k), y: items.map((i) => ofItem(level, i)), hovertext: texts, hoverinfo: "text", marker: { color: items.map((i) => colour(i[4] ? "vermillion" : "sky")) } }];
  if (normed) traces.push({ type: "scatter", mode: "markers", name: "raw signature norm (right axis)", yaxis: "y2", x: items.map((_, k) => k), y: items.map((i) => i[2]), hovertext: texts, hoverinfo: "text", marker: { color: colour("ink"), size: 6, symbol: "line-ew-open", line: { width: 2 } } });
  const scored = level.measure === "mass" && items.some((i) => i[3] !== null);
  const step = Math.max(1, Math.ceil(items.length / (narrow() ? 8 : 24)));
  const names = shortNames(items.map((i) => i[0]));
  const labelled = items.map((_, k) => k).filter((k) => k % step === 0);
  return {
    traces,
    layout: { height: 320, bargap: 0.15, margin: { l: 8, r: 8, t: 36, b: 8 }, xaxis: { tickvals: labelled, ticktext: labelled.map((k) => safe(clipped(names[k], 120))), showgrid: false },
      yaxis: { title: { text: MEASURES[level.measure] }, rangemode: "tozero" },
      ...(normed ? { yaxis2: { overlaying: "y", side: "right", rangemode: "tozero", showgrid: false, title: { text: "norm" } } } : {}),
      annotations: scored ? items.map((i, k) => [i, k]).filter(([i]) => i[3] !== null).map(([i, k]) => ({ x: k, y: i[1], text: `cal. ${fixed(i[3])}`, showarrow: false, yshift: 10, font: { size: 11, color: colour("muted") } })) : [] },
    rows: [["site", "mass", "share of the row", "raw signature norm", "calibration accuracy", "taken"], ...items.map((i) => [i[0], i[1], level.total ? i[1] / level.total : null, i[2], i[3], i[4] ? "yes" : "no"])],
  };
};

function variableButtons() {
  const box = document.getElementById("zoom-variables");
  if (!box) return;
  box.replaceChildren(...data.variables.map((v) => element("button", { type: "button", "aria-pressed": String(v === zoom.variable), onclick: () => { zoom.variable = v; variableButtons(); refreshZoom(); } }, v)));
}

function refreshZoom() {
  const levels = at("zoom")?.[zoom.variable]?.levels ?? [];
  if (zoom.open !== null && zoom.open < levels.length) openStage(zoom.open);
  else closeStage();
}
