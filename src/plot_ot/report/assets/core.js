// The page's numbers, its theme, what is picked, and how a chart becomes a picture, a table and a file.

const root = document.documentElement;
const nonce = document.currentScript.nonce; // only scripts with this word may run
const data = JSON.parse(await unpack("data"));
const picked = { method: data.best, seed: data.seeds?.[0] };
const charts = {}; // name -> function of nothing that returns {traces, layout, rows} or a sentence
const followers = []; // what is drawn anew when another method or seed is picked

const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
const fixed = (x, digits = 3) => (typeof x === "number" ? x.toFixed(digits) : "–");
const short = (x) => (typeof x === "number" ? String(Number(x.toPrecision(3))) : "–");
const sum = (values) => values.reduce((a, b) => a + b, 0);
const distinct = (values) => [...new Set(values)];
const at = (part, method = picked.method, seed = picked.seed) => data[part]?.[String(seed)]?.[method] ?? null;
// Plotly reads a little HTML in its texts: names are shown as they are
const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// What tells names apart: without the token that all are at and the beginning they share, never cutting into a number.
function shortNames(full) {
  const token = /@[^@[\]]*$/.exec(full[0] ?? "")?.[0];
  const names = token && full.length > 1 && full.every((n) => n.endsWith(token)) ? full.map((n) => n.slice(0, -token.length)) : full;
  let shared = names[0] ?? "";
  for (const name of names) while (!name.startsWith(shared)) shared = shared.slice(0, -1);
  shared = shared.replace(/[[(]?[\d:]*$/, "");
  return names.length > 1 && shared.length > 3 && names.every((n) => n.length > shared.length) ? names.map((n) => n.slice(shared.length)) : names;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.addEventListener("click", value);
    else if (value !== undefined && value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

// -- theme ------------------------------------------------------------------------------------------------------

function setTheme(theme) {
  root.dataset.theme = theme;
  try { localStorage.setItem("plot-ot theme", theme); } catch { /* private windows have no storage */ }
}

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function heatScale() {
  return [0, 0.25, 0.5, 0.75, 1].map((x, k) => [x, colour(`heat${k}`)]);
}

function themed(layout) {
  const axis = { gridcolor: colour("faint"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true, zeroline: false };
  const themedAxes = Object.fromEntries(
    Object.keys(layout).filter((k) => /^[xy]axis/.test(k)).map((k) => [k, { ...axis, ...layout[k], title: { font: { size: 12.5, color: colour("muted") }, ...layout[k].title } }]),
  );
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
    margin: { l: 8, r: 8, t: 26, b: 8 },
    hoverlabel: { bgcolor: colour("ink"), bordercolor: colour("ink"), font: { color: colour("bg"), size: 12.5 }, align: "left" },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 }, traceorder: "normal" },
    hovermode: "closest",
    dragmode: "zoom",
    ...layout,
    ...themedAxes,
  };
}

// A phone has no room beside the legend: it stands above the chart, which keeps its height.
function heightOf({ traces, layout }) {
  const entries = layout.showlegend === false ? 0 : traces.filter((t) => t.name && t.showlegend !== false).length;
  return (layout.height ?? 380) + (root.clientWidth < 640 ? 19 * entries : 0);
}

// -- charts -----------------------------------------------------------------------------------------------------

const config = { displayModeBar: false, responsive: true, showTips: false };

async function draw(figure) {
  const built = charts[figure.dataset.chart](figure);
  const plot = figure.querySelector(".plot");
  const sentence = typeof built === "string";
  figure.querySelector("figcaption").hidden = sentence;
  plot.classList.toggle("empty", sentence);
  plot.style.height = "";
  figure.built = sentence ? null : built;
  if (sentence) {
    if (plot.data) Plotly.purge(plot);
    plot.textContent = built;
  } else {
    if (!plot.data) plot.textContent = "";
    built.layout.height = heightOf(built);
    plot.style.height = `${built.layout.height}px`;
    await Plotly.react(plot, built.traces, themed(built.layout), config);
  }
  const table = figure.querySelector(".numbers");
  if (table && !table.hidden) fillTable(figure);
}

function addTools(figure) {
  const tools = figure.querySelector(".tools");
  const name = figure.dataset.chart;
  tools.append(
    element("button", { type: "button", "aria-expanded": "false", title: "The numbers of this chart", onclick: (e) => toggleTable(figure, e.target) }, "Table"),
    element("button", { type: "button", title: "Download the numbers", onclick: () => save(`${name}.csv`, "text/csv", csv(figure.built.rows)) }, "CSV"),
    element("button", { type: "button", title: "Download the figure", onclick: () => saveFigure(figure, name) }, "SVG"),
  );
}

async function saveFigure(figure, name) {
  const before = root.dataset.theme;
  root.dataset.theme = "light"; // a paper is white
  const built = charts[name](figure);
  const width = figure.querySelector(".plot").clientWidth;
  const whole = { ...themed(built.layout), width, height: heightOf(built), paper_bgcolor: "white" };
  if (before === undefined) delete root.dataset.theme; else root.dataset.theme = before;
  const url = await Plotly.toImage({ data: built.traces, layout: whole }, { format: "svg", width, height: whole.height });
  save(`${name}.svg`, "image/svg+xml", decodeURIComponent(url.slice(url.indexOf(",") + 1)));
}

function toggleTable(figure, button) {
  let box = figure.querySelector(".numbers");
  if (!box) {
    box = element("div", { class: "numbers", tabindex: "0" });
    box.hidden = true;
    figure.append(box);
  }
  box.hidden = !box.hidden;
  button.setAttribute("aria-expanded", String(!box.hidden));
  if (!box.hidden) fillTable(figure);
}

function fillTable(figure) {
  const box = figure.querySelector(".numbers");
  const [head, ...rows] = figure.built?.rows ?? [["nothing to show"]];
  const cell = (x) => element("td", {}, x === null || x === undefined ? "–" : typeof x === "number" ? String(Number(x.toPrecision(6))) : String(x));
  box.replaceChildren(
    element("table", {}, element("thead", {}, element("tr", {}, ...head.map((h) => element("th", { scope: "col" }, h)))),
      element("tbody", {}, ...rows.slice(0, 2000).map((r) => element("tr", {}, ...r.map(cell))))),
  );
}

// -- files ------------------------------------------------------------------------------------------------------

function csv(rows) {
  const field = (x) => {
    if (x === null || x === undefined) return "";
    if (typeof x === "number") return String(x);
    const text = /^[=+\-@\t]/.test(String(x)) ? `'${x}` : String(x); // spreadsheets would compute it
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return rows.map((r) => r.map(field).join(",")).join("\r\n") + "\r\n";
}

function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: url, download: `${data.name}-${name}` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function saveList(name) {
  const rows = data.results[name];
  const keys = distinct(rows.flatMap(Object.keys));
  const plain = (x) => (x !== null && typeof x === "object" ? JSON.stringify(x) : x);
  save(`${name}.csv`, "text/csv", csv([keys, ...rows.map((r) => keys.map((k) => plain(r[k])))]));
}

// -- the chart library ------------------------------------------------------------------------------------------

async function loadLibrary() {
  const script = document.createElement("script");
  script.nonce = nonce;
  script.textContent = await unpack("library");
  document.head.append(script);
  if (!window.Plotly) throw new Error("the chart library did not start");
}
