// The rows of the index, and a look every now and then whether they changed.

const body = document.getElementById("runs");
const made = (name, text, attributes = {}) => {
  const e = document.createElement(name);
  e.textContent = text;
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  return e;
};

function row(r) {
  const line = document.createElement("tr");
  const link = made("a", r.name, { href: `run/${r.key}/` });
  const head = made("th", "", { scope: "row" });
  head.append(link);
  const state = made("td", r.state, { class: "left" });
  if (r.state !== "finished" && r.expected) {
    const share = `${Math.min(100, Math.round((100 * r.units) / r.expected))} %`;
    if (r.state === "running") state.append(" ", made("progress", "", { max: r.expected, value: r.units, title: `${r.units} of ${r.expected} units of work` }), ` ${share}`);
    else state.append(` at ${share}`);
  }
  const accuracy = r.accuracy === null ? "–" : r.accuracy.toFixed(3) + (r.sd === null ? "" : ` ± ${r.sd.toFixed(3)}`);
  line.append(head, made("td", r.task ?? "–", { class: "left" }), made("td", r.model || "–", { class: "left" }), made("td", r.started.slice(0, 16).replace("T", " ") || "–", { class: "left" }), state,
    made("td", r.best ?? "–", { class: "left" }), made("td", accuracy), made("td", String(r.seeds)), made("td", r.problem, { class: "left wrap muted" }));
  return line;
}

function show(rows) {
  body.replaceChildren(...rows.map(row));
  document.getElementById("none").hidden = rows.length > 0;
  return rows.some((r) => r.state === "running");
}

async function look() {
  let busy = false;
  try {
    const answer = await fetch("runs.json");
    busy = show(await answer.json());
    document.getElementById("lost").hidden = true;
  } catch {
    document.getElementById("lost").hidden = false;
  }
  setTimeout(look, busy ? 1500 : 6000);
}

show(JSON.parse(document.getElementById("rows").textContent));
setTimeout(look, 1500);
