// Base and source prompts with what the model said before and after the swap. Everything is set as text, never as HTML.

const PAGE = 10;
const filters = { right: "all", family: "all", variable: "all", shown: PAGE };

function wantedExamples() {
  const mine = (data.examples?.[String(picked.seed)] ?? []).filter((e) => e.method === picked.method);
  return mine.filter((e) => (filters.right === "all" || e.right === (filters.right === "right")) && (filters.family === "all" || String(e.family) === filters.family) && (filters.variable === "all" || e.variable === filters.variable));
}

// The prompt with the tokens at the edited positions marked; positions count characters, as Python does.
function promptText(prompt, spans) {
  const letters = Array.from(prompt);
  const pre = element("pre", { dir: "auto" });
  let from = 0;
  for (const [start, end] of [...spans].sort((a, b) => a[0] - b[0])) {
    if (!(start >= from && end > start)) continue;
    pre.append(letters.slice(from, start).join(""), element("mark", {}, letters.slice(start, end).join("")));
    from = end;
  }
  pre.append(letters.slice(from).join(""));
  return pre;
}

function exampleCard(e) {
  const positions = [e.position ?? []].flat().filter((p) => p && typeof p === "object");
  const spans = (side) => positions.map((p) => p[side]).filter((s) => Array.isArray(s) && s.length === 2);
  const labels = positions.map((p) => p.label).filter(Boolean).join(", ");
  const said = [["before the swap", e.before], ["after the swap", e.after], ["expected by the causal model", e.expected], ["to the source", e.source_answer]];
  const prompt = (title, value, side) => element("div", {}, element("div", { class: "muted" }, title), promptText(value, spans(side)));
  return element("article", { class: `example ${e.right ? "right" : "wrong"}` },
    element("div", { class: "head" }, element("b", {}, e.right ? "✓ right" : "✗ wrong"), element("span", {}, e.variable), e.family ? element("span", {}, String(e.family)) : null, labels ? element("span", {}, `swapped at: ${labels}`) : null),
    element("div", { class: "prompts" }, prompt("base prompt", e.base_prompt, "base"), prompt("source prompt", e.source_prompt, "source")),
    element("dl", {}, ...said.filter(([, x]) => x !== undefined && x !== null).map(([title, x]) => element("div", {}, element("dt", {}, title), element("dd", { dir: "auto" }, String(x))))));
}

function drawExamples() {
  const box = document.getElementById("example-list");
  if (!box) return;
  const wanted = wantedExamples();
  const shown = wanted.slice(0, filters.shown);
  document.getElementById("example-count").textContent = wanted.length ? `${shown.length} of ${wanted.length} examples of ${picked.method}, seed ${picked.seed}` : `No example of ${picked.method} in seed ${picked.seed} passes these filters.`;
  box.replaceChildren(...shown.map(exampleCard));
  if (shown.length < wanted.length) box.append(element("button", { type: "button", onclick: () => { filters.shown += PAGE; drawExamples(); } }, "Show more"));
}

function wireExamples() {
  for (const select of document.querySelectorAll("[data-filter]")) {
    select.addEventListener("change", () => { filters[select.dataset.filter] = select.value; filters.shown = PAGE; drawExamples(); });
  }
}
